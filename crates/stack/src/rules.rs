//! Unwind rules: how to get from a frame to its caller's, for each return address, in one word.
//!
//! The compiler's unwind tables (`.eh_frame`) say for every instruction where the caller's stack
//! pointer was and where the registers are saved. Reading them takes half a microsecond. The answer
//! for a given return address never changes while its library stays loaded. So it is read once a
//! process and kept, in a table from addresses to rule numbers. An entry is one atomic word:
//! threads share it without a lock, and a torn one can't exist.
//!
//! The table is large enough for all of a training job's call sites. Unwinding libraries keep a
//! cache of 509 entries for each thread. In a small transformer that missed 7 % of them, which is
//! more time than the hits took.
//!
//! A walk needs only the stack pointer, the frame pointer and the return address, and these rules
//! know only those. A table may ask for something else: another base register, an expression beyond
//! the one that compilers use to realign a stack, a signal handler's frame. That is
//! [`Rule::UNKNOWN`]. Then nothing is guessed, and the caller walks this stack by the tables
//! themselves ([`super::native`]). For code of a loaded object that is kept, too.
//!
//! Rules outlive a library that is unloaded, and another one may come to lie at its addresses: see
//! [`forget`].

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use gimli::{CfaRule, Operation, RegisterRule, X86_64};

use super::depot::mix;
use super::registers::Registers;
use super::room::Room;
use super::tables::{self, Row};
use memtrace_libraries::objects::object_at;
use memtrace_os::checked::{Process, Window};
use memtrace_os::errno;
use memtrace_os::sync::Word;

/// How to get to the caller's frame. Bits: 0–2 the base of the canonical frame
/// address (the caller's stack pointer, CFA), 3–4 where the frame pointer is
/// saved, 8–35 and 36–63 their offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule(u64);

/// What the CFA is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Base {
    Unknown = 1,
    End = 2,
    Sp = 3,
    Fp = 4,
    /// The word at frame pointer plus offset.
    AtFp = 5,
}

/// Where the caller's frame pointer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Saved {
    /// Still in the register.
    Same = 0,
    /// At CFA plus offset.
    AtCfa = 1,
    /// At frame pointer plus offset.
    AtFp = 2,
}

/// The caller of a frame, and what was read of the stack to find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its registers.
    pub registers: Registers,
    /// Where the return address was read; 0 if more than that and `fp_at`
    /// was read to find the frame.
    pub pc_at: u64,
    /// Where the frame pointer was read; 0 if it is still in the register.
    pub fp_at: u64,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At the caller's frame.
    Caller(Caller),
    /// This was the outermost frame; the tables say so, or else the return
    /// address at this place is 0.
    End(Option<u64>),
    /// The rules don't tell.
    Unknown,
}

const SP: u64 = Base::Sp as u64;
const FP: u64 = Base::Fp as u64;
const AT_FP: u64 = Base::AtFp as u64;

impl Rule {
    /// Nothing is known here.
    pub const UNKNOWN: Rule = Rule(Base::Unknown as u64);
    /// The outermost frame.
    pub const END: Rule = Rule(Base::End as u64);

    fn new(base: Base, base_offset: i64, saved: Saved, saved_offset: i64) -> Rule {
        const LIMIT: i64 = 1 << 27;
        if base_offset.abs() >= LIMIT || saved_offset.abs() >= LIMIT {
            return Rule::UNKNOWN;
        }
        let field = |offset: i64| offset as u64 & ((1 << 28) - 1);
        Rule(
            base as u64 | (saved as u64) << 3 | field(base_offset) << 8 | field(saved_offset) << 36,
        )
    }

    /// Does the step depend on the frame pointer, other than that it may hand it on?
    #[inline]
    pub fn needs_fp(self) -> bool {
        matches!(self.0 & 7, FP | AT_FP) || self.0 >> 3 & 3 == Saved::AtFp as u64
    }

    /// Steps to the caller. `read` reads a word of the stack, where that is allowed.
    #[inline]
    pub fn step(self, r: Registers, read: impl Fn(u64) -> Option<u64>) -> Outcome {
        match self.caller(r, read) {
            Some(caller) if caller.registers.pc == 0 => {
                Outcome::End(Some(caller.pc_at).filter(|at| *at != 0))
            }
            Some(caller) => Outcome::Caller(caller),
            None if self == Rule::END => Outcome::End(None),
            None => Outcome::Unknown,
        }
    }

    #[inline]
    fn caller(self, r: Registers, read: impl Fn(u64) -> Option<u64>) -> Option<Caller> {
        let base_offset = ((self.0 << 28) as i64 >> 36) as u64;
        let saved_offset = (self.0 as i64 >> 36) as u64;
        let (cfa, found_in_registers) = match self.0 & 7 {
            SP => (r.sp.wrapping_add(base_offset), true),
            FP => (r.fp.wrapping_add(base_offset), true),
            AT_FP => (read(r.fp.wrapping_add(base_offset))?, false),
            _ => return None,
        };
        // A caller's frame lies further out. So a walk can't run in a circle.
        if cfa <= r.sp {
            return None;
        }
        let fp_at = match self.0 >> 3 & 3 {
            0 => 0,
            1 => cfa.wrapping_add(saved_offset),
            _ => r.fp.wrapping_add(saved_offset),
        };
        let fp = if fp_at == 0 { r.fp } else { read(fp_at)? };
        let pc_at = cfa.wrapping_sub(8);
        let registers = Registers { pc: read(pc_at)?, sp: cfa, fp };
        Some(Caller { registers, pc_at: if found_in_registers { pc_at } else { 0 }, fp_at })
    }
}

/// Entries of the table: an address in the high 48 bits, a rule number in
/// the low 16. Few in a model.
const ENTRIES: usize = if cfg!(loom) { WAYS } else { 1 << 16 };
/// Entries that an address may be in: one cache line.
const WAYS: usize = if cfg!(loom) { 1 } else { 8 };
/// The different rules; a program has some hundreds. A rule's number is its place.
const MAX_RULES: usize = if cfg!(loom) { 2 } else { 1 << 12 };

/// The rules that are known.
struct Kept<W = AtomicU64> {
    addresses: [W; ENTRIES],
    rules: [W; MAX_RULES],
    /// Libraries are being unloaded just now, by so many calls.
    unloading: W,
    /// How often addresses were forgotten.
    forgotten: W,
}

static KEPT: Kept = Kept {
    addresses: [const { AtomicU64::new(0) }; ENTRIES],
    rules: [const { AtomicU64::new(0) }; MAX_RULES],
    unloading: AtomicU64::new(0),
    forgotten: AtomicU64::new(0),
};
thread_local! {
    /// How many of them are this thread's.
    static MINE: Cell<u64> = const { Cell::new(0) };
}

/// In a forked child, nobody else unloads any.
pub fn forget_others() {
    KEPT.unloading.store(MINE.get(), Ordering::Release);
}

/// The rule for a return address. Tables are read in this room of the calling thread's.
#[inline]
pub fn rule_for(pc: u64, room: &Room) -> Rule {
    KEPT.find(pc).unwrap_or_else(|| look_up(pc, room))
}

impl<W: Word<Value = u64>> Kept<W> {
    /// Where an address may be.
    #[inline]
    fn line(&self, pc: u64) -> &[W] {
        let line = mix(pc, 1) as usize % (ENTRIES / WAYS) * WAYS;
        &self.addresses[line..line + WAYS]
    }

    /// The rule that is kept for an address.
    #[inline]
    fn find(&self, pc: u64) -> Option<Rule> {
        // Asked first: who sees that the unloading is over sees an entry that has been forgotten.
        if self.unloading.load(Ordering::Acquire) != 0 {
            return None;
        }
        let seen = |entry: &W| Some(entry.load(Ordering::Acquire));
        let is_it = |seen: &u64| seen >> 16 == pc && *seen != 0;
        let found = self.line(pc).iter().find_map(|entry| seen(entry).filter(is_it))?;
        Some(Rule(self.rules[found as usize % MAX_RULES].load(Ordering::Relaxed)))
    }

    /// Keeps it, unless libraries are being unloaded: it may be about one that is on its way out.
    fn keep(&self, pc: u64, rule: Rule) {
        if self.unloading.load(Ordering::Acquire) == 0
            && let Some(number) = self.number_of(rule)
        {
            let line = self.line(pc);
            let free = line.iter().position(|entry| entry.load(Ordering::Relaxed) == 0);
            let way = free.unwrap_or(mix(pc, 2) as usize % WAYS);
            line[way].store(pc << 16 | number as u64, Ordering::Release);
        }
    }

    /// The place of a rule among the different ones; `None` if there are too many.
    fn number_of(&self, rule: Rule) -> Option<usize> {
        let start = mix(rule.0, 3) as usize;
        (0..64).map(|i| (start + i) % MAX_RULES).find(|i| {
            let cell = &self.rules[*i];
            let seen = cell.load(Ordering::Relaxed);
            let put = || cell.compare_exchange(0, rule.0, Ordering::Relaxed, Ordering::Relaxed);
            seen == rule.0 || seen == 0 && put().map_or_else(|other| other == rule.0, |_| true)
        })
    }

    /// See [`generation`].
    #[inline]
    fn generation(&self) -> Option<u64> {
        // In this order, as in `find`.
        let is_steady = self.unloading.load(Ordering::Acquire) == 0;
        is_steady.then(|| self.forgotten.load(Ordering::Acquire) + 1)
    }

    fn forget(&self) {
        self.forgotten.fetch_add(1, Ordering::AcqRel);
        self.addresses.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
    }

    fn while_unloading<T>(&self, unload: impl FnOnce() -> T) -> T {
        struct Over<'a, W: Word<Value = u64>>(&'a W);
        impl<W: Word<Value = u64>> Drop for Over<'_, W> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::AcqRel);
                MINE.set(MINE.get() - 1);
            }
        }
        MINE.set(MINE.get() + 1);
        self.unloading.fetch_add(1, Ordering::AcqRel);
        let _over = Over(&self.unloading);
        unload()
    }
}

#[cold]
fn look_up(pc: u64, room: &Room) -> Rule {
    // A return address may be the first of the next function: the call is before it.
    let call = pc.wrapping_sub(1);
    let _errno = errno::Kept::now();
    let rule = room.run(|| {
        let object = object_at(call)?;
        let process = Process::default();
        let rule = tables::loaded(&Window::new(&process), &object, call, translate);
        // That an object's tables say nothing which can be used is an answer, too.
        Some(rule.unwrap_or(Rule::UNKNOWN))
    });
    let Some(rule) = rule else { return Rule::UNKNOWN }; // a library may still come
    KEPT.keep(pc, rule);
    rule
}

/// A number, never 0, that stays the same as long as every address keeps its
/// rule; `None` if that can't be said.
#[inline]
pub fn generation() -> Option<u64> {
    KEPT.generation()
}

/// Forgets every address: libraries were unloaded, and others may come to lie where they were.
pub fn forget() {
    KEPT.forget();
}

/// Runs `unload`, which may unload libraries. Until it is over and what it took away is forgotten,
/// no rule is kept and none that was kept is used. So no thread can meet a stale one.
pub fn while_unloading<T>(unload: impl FnOnce() -> T) -> T {
    KEPT.while_unloading(unload)
}

/// The rule that a table's row is, if it is one.
pub fn translate(row: &Row<'_>) -> Rule {
    let Row { row, frames, signal } = *row;
    if signal {
        return Rule::UNKNOWN;
    }
    match row.register(X86_64::RA) {
        None | Some(RegisterRule::Undefined) => return Rule::END,
        Some(RegisterRule::Offset(-8)) => {}
        Some(_) => return Rule::UNKNOWN,
    }
    // The one expression that compilers use: the word at, or the address
    // of, frame pointer plus offset.
    let at_fp = |expression: gimli::UnwindExpression<usize>| -> Option<(i64, bool)> {
        let expression = expression.get(frames).ok()?;
        let mut operations = expression.operations(gimli::Encoding {
            address_size: 8,
            format: gimli::Format::Dwarf32,
            version: 4,
        });
        let Some(Operation::RegisterOffset { register: X86_64::RBP, offset, .. }) =
            operations.next().ok()?
        else {
            return None;
        };
        match operations.next().ok()? {
            None => Some((offset, false)),
            Some(Operation::Deref { size: 8, space: false, .. }) => {
                operations.next().ok()?.is_none().then_some((offset, true))
            }
            Some(_) => None,
        }
    };
    let base = match row.cfa() {
        CfaRule::RegisterAndOffset { register: X86_64::RSP, offset } => Some((Base::Sp, *offset)),
        CfaRule::RegisterAndOffset { register: X86_64::RBP, offset } => Some((Base::Fp, *offset)),
        CfaRule::RegisterAndOffset { .. } => None,
        CfaRule::Expression(e) => match at_fp(*e) {
            Some((offset, true)) => Some((Base::AtFp, offset)),
            Some((offset, false)) => Some((Base::Fp, offset)),
            None => None,
        },
    };
    let saved = match row.register(X86_64::RBP) {
        None | Some(RegisterRule::SameValue | RegisterRule::Undefined) => Some((Saved::Same, 0)),
        Some(RegisterRule::Offset(offset)) => Some((Saved::AtCfa, offset)),
        Some(RegisterRule::Expression(e)) => match at_fp(e) {
            Some((offset, false)) => Some((Saved::AtFp, offset)),
            _ => None,
        },
        Some(_) => None,
    };
    match (base, saved) {
        (Some((base, b)), Some((saved, s))) => Rule::new(base, b, saved, s),
        _ => Rule::UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::mine;
    use memtrace_os::testing::in_child;

    /// Seen red: where a rule or the generation is looked at before the question whether libraries
    /// are being unloaded.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::{AtomicBool, AtomicU64 as Modelled};
        use loom::thread;

        const PC: u64 = 0x1000;

        fn check(model: impl Fn(Arc<Kept<Modelled>>) + Sync + Send + 'static) {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(move || {
                let [unloading, forgotten] = [0; 2].map(Modelled::new);
                let addresses = [0; ENTRIES].map(Modelled::new);
                let rules = [0; MAX_RULES].map(Modelled::new);
                model(Arc::new(Kept { addresses, rules, unloading, forgotten }));
            });
        }

        #[test]
        fn an_address_that_is_found_has_its_rule() {
            check(|kept| {
                let threads = [PC, PC + 1].map(|pc| {
                    let kept = kept.clone();
                    thread::spawn(move || kept.keep(pc, Rule(5)))
                });
                for pc in [PC, PC + 1] {
                    assert!(kept.find(pc).is_none_or(|rule| rule == Rule(5)));
                }
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
        }

        /// A library has come in the place of one that is being unloaded, and its code calls.
        #[test]
        fn no_rule_is_used_for_what_has_come_in_its_place() {
            check(|kept| {
                kept.keep(PC, Rule(5));
                let all = (kept.clone(), Arc::new(AtomicBool::new(false)));
                let is_new = all.1.clone();
                let calls = thread::spawn(move || {
                    let (kept, is_new) = all;
                    if is_new.load(Ordering::Acquire) {
                        assert_ne!(kept.generation(), Some(1));
                        assert_eq!(kept.find(PC), None);
                    }
                });
                kept.while_unloading(|| {
                    is_new.store(true, Ordering::Release);
                    kept.forget();
                });
                calls.join().unwrap();
                assert_eq!((kept.find(PC), kept.generation()), (None, Some(2)));
            });
        }
    }

    #[test]
    fn in_a_forked_child_only_its_own_thread_unloads() {
        let _alone = crate::testing::alone();
        let may_keep = || generation().is_some();
        let (begun, begins) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            while_unloading(|| {
                begun.send(()).expect("heard");
                let _ = ends.recv();
            });
        });
        begins.recv().expect("begun");
        assert!(!may_keep() && in_child(forget_others, may_keep));
        // By a destructor of the library that is unloaded.
        let inside = while_unloading(|| in_child(forget_others, || !may_keep()));
        drop(end);
        other.join().expect("no panic");
        assert!(inside && may_keep());
    }

    /// Its caller's frame is where a register says that no rule knows.
    #[unsafe(naked)]
    unsafe extern "C" fn odd() {
        core::arch::naked_asm!(
            ".cfi_startproc",
            ".cfi_def_cfa r12, 8",
            "nop",
            "ret",
            ".cfi_endproc",
        )
    }

    fn rule(pc: u64) -> Rule {
        mine(|mine| rule_for(pc, mine.room().expect("memory")))
    }

    fn kept(pc: u64) -> bool {
        KEPT.line(pc).iter().any(|e| e.load(Ordering::Relaxed) >> 16 == pc)
    }

    #[test]
    fn that_nothing_is_known_of_a_librarys_code_is_kept() {
        let _steady = crate::testing::steady();
        let pc = odd as *const () as u64 + 1;
        assert_eq!(rule(pc), Rule::UNKNOWN);
        assert!(kept(pc), "its tables don't change");
        let nowhere = Box::new(0_u64);
        let pc = &raw const *nowhere as u64;
        assert_eq!(rule(pc), Rule::UNKNOWN);
        assert!(!kept(pc), "a library may come to lie there");
    }
}

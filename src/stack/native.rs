//! Native frames of the calling thread: return addresses, and how far out each frame reaches.
//!
//! The walk follows the rules of [`super::rules`] and reads nothing but the thread's own stack, between its
//! stack pointer and the stack's end: a wrong rule can give a wrong frame, but never a fault. Where a rule is
//! unknown, or the thread runs on a stack that isn't its own (fibers, signal stacks), the whole stack is
//! taken by the system's unwinder instead, which is slower but knows all there is to know: generated code that
//! was registered with it, signal frames, odd tables.
//!
//! **What didn't change is not walked again.** A step out of a frame is a function of three registers (instruction,
//! stack and frame pointer), of the rule for the first, and of at most two words of the stack, whose places follow
//! from the registers and the rule. The thread's [`Trail`] has the registers of every frame of its last walk, and beside
//! them these places and what the words were (`Proof`). When a new walk comes to a frame whose three registers are
//! those of a remembered one, the step out of it leads to the same caller if the two words are the same, and so on outwards:
//! comparing words that are known beforehand proves, frame by frame, that the walk would go as before. Nothing is
//! assumed about what happened in between: if the frames were left and entered again and all words are as before, the
//! walk is as before, too. Memtrace's own frames at the inner end are proven the same way before any other. Where a word
//! differs, the walk goes on by the rules from there. Rules change only when a library is unloaded, which changes
//! [`super::rules::generation`], and then nothing is remembered. A frame whose place depends on a third word is never
//! taken as proven.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::stacks::Reason;

use super::deep::Deep;
pub use super::rules::Registers;
use super::rules::{Outcome, Rule, Step, generation, object_at, rule_for};

/// Frames that are kept of each end of a deep stack.
pub const HALF: usize = 256;
/// Frames that are kept.
pub const MAX: usize = 2 * HALF;

/// A native frame.
#[derive(Clone, Copy, Default)]
pub struct Native {
    /// The address that its callee returns to.
    pub pc: u64,
    /// Its stack pointer; its callee's frame ends here.
    pub sp: u64,
    fp: u64,
    /// Where its word is in the stack that was last put together; see `splice.rs`.
    pub word_at: u32,
    /// How many Python frames stood further out.
    pub python_outside: u32,
}

/// What the step out of a frame rests on: two words of the stack, and what they were. Apart from the frames, and with
/// nothing to ask about it: to look at these words is most of what a stack costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(32))]
struct Proof {
    pc_at: u64,
    pc: u64,
    fp_at: u64,
    fp: u64,
}

/// Where a proof looks that needs no word of the stack.
static ZERO: u64 = 0;

impl Proof {
    /// The step needs no words: the rule says that it leads nowhere.
    fn always() -> Proof {
        Proof::that_holds(&raw const ZERO as u64, 0)
    }

    /// The step rests on other words, too.
    fn never() -> Proof {
        Proof::that_holds(&raw const ZERO as u64, 1)
    }

    /// The step rests on this word alone.
    fn that_holds(at: u64, value: u64) -> Proof {
        Proof { pc_at: at, pc: value, fp_at: at, fp: value }
    }

    fn of(step: &Step) -> Proof {
        if step.pc_at == 0 {
            return Proof::never();
        }
        let pc = Proof::that_holds(step.pc_at, step.caller.pc);
        if step.fp_at == 0 { pc } else { Proof { fp_at: step.fp_at, fp: step.caller.fp, ..pc } }
    }

    /// 0 if the step is certain to come to the remembered caller again.
    ///
    /// # Safety
    /// The thread's stack pointer is no further out than when the words were read, inside this thread's stack: so they
    /// lie in the part of it that is in use.
    #[inline(always)]
    unsafe fn differs(&self) -> u64 {
        // SAFETY: as promised; `ZERO` can always be read.
        unsafe { (word(self.pc_at) ^ self.pc) | (word(self.fp_at) ^ self.fp) }
    }
}

/// The innermost of these frames whose step outwards is no longer the same.
///
/// # Safety
/// As for [`Proof::differs`].
#[inline(always)]
unsafe fn changed(proofs: &[Proof]) -> Option<usize> {
    // SAFETY: as promised.
    let differs = |proof: &Proof| unsafe { proof.differs() };
    let mut same = 0;
    // One question for four frames.
    for four in proofs.rchunks_exact(4) {
        if four.iter().fold(0, |all, proof| all | differs(proof)) != 0 {
            break;
        }
        same += 4;
    }
    proofs[..proofs.len() - same].iter().rposition(|proof| differs(proof) != 0)
}

/// A frame that was found, and what the step out of it rests on.
#[derive(Clone, Copy)]
struct Stop {
    frame: Native,
    proof: Proof,
}

/// Frames while they are found, innermost first.
pub struct Found(Deep<Stop, HALF>);

/// Most of memtrace's own frames that are remembered; a hook has half as many.
const OWN: usize = 16;

/// The frames of the last walk, outermost first. All zeros is an empty one.
#[repr(C, align(64))]
pub struct Trail {
    len: usize,
    /// The index before which frames were left out; 0: none.
    gap: usize,
    /// Of the rules that it was walked by; 0: not by rules, or not all of it.
    generation: u64,
    /// How many of the frames, counted from the outermost, are those of the walk before.
    kept: usize,
    /// The last two walks are the same.
    same: bool,
    /// Memtrace's own frames further in, which are in no stack, innermost first. More than `OWN`: too many.
    own_len: usize,
    /// Where the walk begins in them.
    own_at: Registers,
    own: [Proof; OWN],
    /// Of each frame. Beside the words above: an unchanged stack touches nothing else.
    proofs: [Proof; MAX],
    frames: [Native; MAX],
}

impl Trail {
    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.len, self.gap, self.generation, self.kept, self.own_len) = (0, 0, 0, 0, 0);
        self.same = false;
    }

    /// The frames, outermost first.
    #[inline]
    pub fn frames_mut(&mut self) -> &mut [Native] {
        &mut self.frames[..self.len]
    }

    /// The same, to look at.
    #[inline]
    pub fn frames(&self) -> &[Native] {
        &self.frames[..self.len]
    }

    /// Frames were left out before this index.
    #[inline]
    pub fn gap(&self) -> Option<usize> {
        (self.gap > 0).then_some(self.gap)
    }

    /// How many frames, from the outermost, the last two walks have in common, for certain.
    #[inline]
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Are the last two walks the same, for certain?
    #[inline]
    pub fn is_same(&self) -> bool {
        self.same
    }

    /// Puts frames that were found at the inner end of the first `kept` ones.
    #[inline]
    fn extend(&mut self, kept: usize, found: &Found) {
        let n = found.0.len();
        self.same = (kept, n) == (self.len, 0);
        let places = self.frames[kept..].iter_mut().zip(&mut self.proofs[kept..]);
        for (i, (frame, proof)) in places.take(n).enumerate() {
            Stop { frame: *frame, proof: *proof } = found.0.get(n - 1 - i);
        }
        self.kept = kept;
        self.len = kept + n;
        self.gap = found.0.gap().map_or(0, |_| HALF);
    }

    /// Does a walk from `here` come to no other frames than the last one, and to all of them, for certain?
    #[inline(always)]
    pub fn is_unchanged(&self, here: Option<Registers>) -> bool {
        let Some(here) = here else { return false };
        generation() == Some(self.generation)
            && self.beyond_own(here).is_some_and(|inner| {
                // SAFETY: this is where the last walk was, too.
                self.frames().last().is_some_and(|last| last.is_at(inner))
                    && unsafe { changed(&self.proofs[..self.len]) }.is_none()
            })
    }

    /// Where a walk that begins `here` leaves memtrace's own code, if it is there that the last one, under the same
    /// generation of rules, left it.
    #[inline(always)]
    fn beyond_own(&self, here: Registers) -> Option<Registers> {
        let own = self.own.get(..self.own_len)?;
        if own.is_empty() {
            return Some(here);
        }
        // SAFETY: this is where the last walk began, too.
        let same = self.own_at == here && unsafe { changed(own) }.is_none();
        self.frames().last().filter(|_| same).map(Native::registers)
    }
}

impl Native {
    #[inline]
    fn is_at(&self, here: Registers) -> bool {
        self.registers() == here
    }

    #[inline]
    fn registers(&self) -> Registers {
        Registers { pc: self.pc, sp: self.sp, fp: self.fp }
    }
}

/// A word of the stack.
///
/// # Safety
/// The place is mapped.
#[inline]
unsafe fn word(at: u64) -> u64 {
    // SAFETY: as promised.
    unsafe { (at as *const u64).read_unaligned() }
}

/// The stack of a thread: from the lowest address to the one after the highest.
#[derive(Clone, Copy, Default)]
pub struct Bounds {
    low: u64,
    high: u64,
}

impl Bounds {
    /// The calling thread's stack. Slow (for the main thread, the C library reads a file): once a thread.
    pub fn of_thread() -> Bounds {
        // SAFETY: an all-zero attribute object is only written to; it is destroyed if it was filled in.
        unsafe {
            let mut attr: libc::pthread_attr_t = std::mem::zeroed();
            if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attr) != 0 {
                return Bounds::default();
            }
            let (mut at, mut size) = (std::ptr::null_mut::<c_void>(), 0);
            let known =
                libc::pthread_attr_getstack(&raw const attr, &raw mut at, &raw mut size) == 0;
            libc::pthread_attr_destroy(&raw mut attr);
            if known {
                Bounds { low: at as u64, high: at as u64 + size as u64 }
            } else {
                Bounds::default()
            }
        }
    }
}

/// More frames than this are never followed.
const MAX_FRAMES: usize = 1 << 14;

/// Walks the calling thread's frames into `trail`, without memtrace's own at the inner end; `found` is for the
/// walk's own use. It begins `here`, in a frame of memtrace's that is still active. Returns why it does not reach
/// the outermost.
#[inline(never)]
pub fn walk(
    bounds: Bounds,
    here: Option<Registers>,
    trail: &mut Trail,
    found: &mut Found,
) -> Option<Reason> {
    if let Some(here) = here {
        let generation = generation();
        if let Some(kept) = by_rules(bounds, here, trail, generation, found) {
            let too_many = found.0.gap().is_some() || kept + found.0.len() > MAX;
            if kept == 0 || !too_many {
                trail.extend(kept, found);
                trail.generation = if too_many { 0 } else { generation.unwrap_or(0) };
                return None;
            }
            // Which frames are left out must not depend on what is remembered.
            if by_rules(bounds, here, trail, None, found).is_some() {
                trail.extend(0, found);
                trail.generation = 0;
                return None;
            }
        }
    }
    let why = by_system(found);
    trail.extend(0, found);
    trail.generation = 0;
    why
}

/// The innermost return address of the calling thread that is neither memtrace's own nor one that `skipped` accepts, if the
/// rules lead there.
pub fn first_outside(skipped: impl Fn(u64) -> bool) -> Option<u64> {
    /// Frames that are looked at.
    const NEAR: usize = 64;
    thread_local! {
        static BOUNDS: std::cell::Cell<Option<Bounds>> = const { std::cell::Cell::new(None) };
    }
    let bounds = BOUNDS.get().unwrap_or_else(Bounds::of_thread);
    BOUNDS.set(Some(bounds));
    let mut here = registers()?;
    let low = here.sp;
    if low >= bounds.high {
        return None;
    }
    let read = |at: u64| {
        let inside = at >= low && at <= bounds.high - 8;
        // SAFETY: the bytes between the stack pointer and the end of the thread's stack are mapped and readable.
        inside.then(|| unsafe { (at as *const u64).read_unaligned() })
    };
    let own = own_code();
    for _ in 0..NEAR {
        if !(own.0..own.1).contains(&here.pc) && !skipped(here.pc) {
            return Some(here.pc);
        }
        let Outcome::Caller(step) = rule_for(here.pc).step(here, read) else { return None };
        here = step.caller;
    }
    None
}

/// The walk by rules from `here`, until it comes to what is remembered under this generation and unchanged. Returns how
/// many frames that are; `None` if the walk has to be done otherwise.
#[inline(never)]
fn by_rules(
    bounds: Bounds,
    mut here: Registers,
    trail: &mut Trail,
    generation: Option<u64>,
    found: &mut Found,
) -> Option<usize> {
    found.0.clear();
    // The main thread's stack grows, so its low end is where we are.
    if here.sp >= bounds.high || here.sp + (1 << 30) < bounds.low {
        return None;
    }
    let low = here.sp;
    let read = |at: u64| {
        let inside = at >= low && at <= bounds.high - 8;
        // SAFETY: the bytes between the stack pointer and the end of the thread's stack are mapped and readable.
        inside.then(|| unsafe { (at as *const u64).read_unaligned() })
    };
    let own = own_code();
    let known = generation == Some(trail.generation);
    if let Some(border) = trail.beyond_own(here).filter(|_| known) {
        here = border;
    } else {
        (trail.own_len, trail.own_at) = (0, here);
    }
    // Remembered frames below this index are further out than where the walk is.
    let mut candidates = if known { trail.len } else { 0 };
    for _ in 0..MAX_FRAMES {
        while let Some(last) = trail.frames[..candidates].last()
            && last.sp < here.sp
        {
            candidates -= 1;
        }
        // What is ours at the inner end may have stood in the middle of the last stack.
        let ours = found.0.is_empty() && (own.0..own.1).contains(&here.pc);
        if let Some(last) = trail.frames[..candidates].last()
            && last.is_at(here)
            && !ours
        {
            // SAFETY: here is where the walk is, as another was before.
            let Some(changed) = (unsafe { changed(&trail.proofs[..candidates]) }) else {
                return Some(candidates);
            };
            for i in (changed + 1..candidates).rev() {
                found.0.push(Stop { frame: trail.frames[i], proof: trail.proofs[i] });
            }
            here = trail.frames[changed].registers();
            candidates = changed;
        }
        let frame = Native { pc: here.pc, sp: here.sp, fp: here.fp, ..Native::default() };
        match rule_for(here.pc).step(here, read) {
            Outcome::Caller(step) => {
                let proof = Proof::of(&step);
                here = step.caller;
                if !ours {
                    found.0.push(Stop { frame, proof });
                } else if let Some(place) = trail.own.get_mut(trail.own_len) {
                    *place = proof;
                    trail.own_len += 1;
                } else {
                    trail.own_len = OWN + 1;
                }
            }
            Outcome::End(zero_at) => {
                let proof = zero_at.map_or_else(Proof::always, |at| Proof::that_holds(at, 0));
                found.0.push(Stop { frame, proof });
                return Some(0);
            }
            Outcome::Unknown => return None,
        }
    }
    None
}

/// The registers as they are in the calling function behind this call.
#[inline(always)]
#[cfg(target_arch = "x86_64")]
#[allow(clippy::unnecessary_wraps, reason = "other architectures have none")]
pub fn registers() -> Option<Registers> {
    let mut r = Registers { pc: 0, sp: 0, fp: 0 };
    // SAFETY: writes three words.
    unsafe { caller_registers(&raw mut r.pc, &raw mut r.sp, &raw mut r.fp) };
    Some(r)
}

/// On other architectures the system's unwinder takes every stack.
#[cfg(not(target_arch = "x86_64"))]
pub fn registers() -> Option<Registers> {
    None
}

/// Stores what the caller's instruction pointer, stack pointer and frame pointer are once this has returned: a
/// return address, where unwind tables are exact.
///
/// # Safety
/// The pointers must be writable.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn caller_registers(pc: *mut u64, sp: *mut u64, fp: *mut u64) {
    core::arch::naked_asm!(
        "mov rax, [rsp]",
        "mov [rdi], rax",
        "lea rax, [rsp + 8]",
        "mov [rsi], rax",
        "mov [rdx], rbp",
        "ret",
    )
}

/// The range of memtrace's own library; empty if it is part of the program, as in its tests.
fn own_code() -> (u64, u64) {
    static START: AtomicU64 = AtomicU64::new(0);
    static END: AtomicU64 = AtomicU64::new(0);
    let end = END.load(Ordering::Acquire);
    if end != 0 {
        return (START.load(Ordering::Relaxed), end);
    }
    let object = object_at(own_code as *const () as u64).filter(|o| !o.main);
    let (start, end) = object.map_or((1, 1), |o| (o.start, o.end));
    START.store(start, Ordering::Relaxed);
    END.store(end, Ordering::Release);
    (start, end)
}

/// The system's unwinder's context of a frame.
enum Context {}
type Visit = unsafe extern "C-unwind" fn(*mut Context, *mut c_void) -> c_int;

unsafe extern "C-unwind" {
    fn _Unwind_Backtrace(visit: Visit, arg: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut Context, before: *mut c_int) -> usize;
    fn _Unwind_GetCFA(context: *mut Context) -> usize;
}

const CONTINUE: c_int = 0;
const STOP: c_int = 4;

/// The walk by the system's unwinder.
#[inline(never)]
fn by_system(found: &mut Found) -> Option<Reason> {
    struct Walk<'a> {
        found: &'a mut Found,
        own: (u64, u64),
        seen: usize,
        outermost: u64,
    }
    unsafe extern "C-unwind" fn visit(context: *mut Context, walk: *mut c_void) -> c_int {
        let mut exact = 0;
        // SAFETY: the unwinder hands in its context and our own pointer. What it calls a frame's CFA while it is
        // at that frame is the stack pointer there.
        let (walk, pc, sp) = unsafe {
            (
                &mut *walk.cast::<Walk<'_>>(),
                _Unwind_GetIPInfo(context, &raw mut exact) as u64,
                _Unwind_GetCFA(context) as u64,
            )
        };
        // A frame that a signal interrupted is at an instruction, not behind a call.
        let pc = if exact == 0 || pc == 0 { pc } else { pc + 1 };
        walk.outermost = pc;
        let ours = walk.found.0.is_empty() && (walk.own.0..walk.own.1).contains(&pc);
        if pc != 0 && !ours {
            let frame = Native { pc, sp, ..Native::default() };
            walk.found.0.push(Stop { frame, proof: Proof::never() });
        }
        walk.seen += 1;
        if walk.seen < MAX_FRAMES { CONTINUE } else { STOP }
    }
    found.0.clear();
    let mut walk = Walk { found, own: own_code(), seen: 0, outermost: 0 };
    // SAFETY: `visit` gets the pointer to `walk`, which outlives the call, and doesn't unwind.
    unsafe { _Unwind_Backtrace(visit, (&raw mut walk).cast()) };
    let outermost = walk.outermost;
    // It also ends, without a word, where it finds no table.
    let whole = walk.seen < MAX_FRAMES && (outermost == 0 || rule_for(outermost) == Rule::END);
    (!whole).then_some(Reason::Truncated)
}

#[cfg(test)]
mod tests;

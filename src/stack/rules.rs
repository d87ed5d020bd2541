//! Unwind rules: how to get from a frame to its caller's, for each return address, in one word.
//!
//! The compiler's unwind tables (`.eh_frame`) say for every instruction where the caller's stack pointer was and
//! where the registers are saved. Reading them takes half a microsecond; the answer for a given return address
//! never changes while its library stays loaded. So it is read once a process and kept: a table from addresses
//! to rule numbers, one atomic word an entry, so that threads share it without a lock and a torn entry can't
//! exist. It is large enough for all of a training job's call sites (a cache of 509 entries, as unwinding
//! libraries keep one for each thread, missed 7 % of them in a small transformer, which is more time than the
//! hits took).
//!
//! A walk needs only the stack pointer, the frame pointer and the return address, and these rules know only
//! those. Whatever else a table asks for (another base register, an expression beyond the one that compilers
//! use to realign a stack, a signal handler's frame) is [`Rule::UNKNOWN`]: then nothing is guessed, and the
//! caller walks this stack with the system's unwinder.
//!
//! Rules outlive a library that is unloaded, and another one may come to lie at its addresses: see [`forget`].

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EndianSlice, NativeEndian, Operation, Pointer,
    Register, RegisterRule, UnwindContext, UnwindContextStorage, UnwindSection, UnwindTableRow,
    X86_64,
};

use super::depot::mix;

/// How to get to the caller's frame. Bits: 0–2 the base of the canonical frame address (the caller's stack
/// pointer, CFA), 3–4 where the frame pointer is saved, 8–35 and 36–63 their offsets.
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

/// Registers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Instruction pointer: a return address.
    pub pc: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer.
    pub fp: u64,
}

/// A step to the caller, and what it read of the stack to make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The caller's registers.
    pub caller: Registers,
    /// Where the return address was read; 0 if more than that and `fp_at` was read to find the frame.
    pub pc_at: u64,
    /// Where the frame pointer was read; 0 if it is still in the register.
    pub fp_at: u64,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// At the caller's frame.
    Caller(Step),
    /// This was the outermost frame; the tables say so, or else the return address at this place is 0.
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
            Some(step) if step.caller.pc == 0 => {
                Outcome::End(Some(step.pc_at).filter(|at| *at != 0))
            }
            Some(step) => Outcome::Caller(step),
            None if self == Rule::END => Outcome::End(None),
            None => Outcome::Unknown,
        }
    }

    #[inline]
    fn caller(self, r: Registers, read: impl Fn(u64) -> Option<u64>) -> Option<Step> {
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
        let caller = Registers { pc: read(pc_at)?, sp: cfa, fp };
        Some(Step { caller, pc_at: if found_in_registers { pc_at } else { 0 }, fp_at })
    }
}

/// Entries of the table: an address in the high 48 bits, a rule number in the low 16.
const ENTRIES: usize = 1 << 16;
/// Entries that an address may be in: one cache line.
const WAYS: usize = 8;
static ADDRESSES: [AtomicU64; ENTRIES] = [const { AtomicU64::new(0) }; ENTRIES];
/// The different rules; a program has some hundreds. A rule's number is its place.
const MAX_RULES: usize = 1 << 12;
static RULES: [AtomicU64; MAX_RULES] = [const { AtomicU64::new(0) }; MAX_RULES];
/// Libraries are being unloaded just now.
static UNLOADING: AtomicU32 = AtomicU32::new(0);

/// The rule for a return address.
#[inline]
pub fn rule_for(pc: u64) -> Rule {
    let line = mix(pc, 1) as usize % (ENTRIES / WAYS) * WAYS;
    for entry in &ADDRESSES[line..line + WAYS] {
        let seen = entry.load(Ordering::Acquire);
        if seen >> 16 == pc && seen != 0 {
            if UNLOADING.load(Ordering::Relaxed) != 0 {
                break;
            }
            return Rule(RULES[seen as usize % MAX_RULES].load(Ordering::Relaxed));
        }
    }
    look_up(pc, line)
}

#[cold]
fn look_up(pc: u64, line: usize) -> Rule {
    let rule = read_tables(pc).unwrap_or(Rule::UNKNOWN);
    if rule == Rule::UNKNOWN || UNLOADING.load(Ordering::Acquire) != 0 {
        return rule; // not kept: the library may still be on its way in, or out
    }
    let Some(number) = number_of(rule) else { return rule };
    let entry = pc << 16 | number as u64;
    let free = ADDRESSES[line..line + WAYS].iter().position(|e| e.load(Ordering::Relaxed) == 0);
    let way = free.unwrap_or(mix(pc, 2) as usize % WAYS);
    ADDRESSES[line + way].store(entry, Ordering::Release);
    rule
}

/// The place of a rule among the different ones; `None` if there are too many.
fn number_of(rule: Rule) -> Option<usize> {
    let start = mix(rule.0, 3) as usize;
    (0..64).map(|i| (start + i) % MAX_RULES).find(|i| {
        let cell = &RULES[*i];
        let seen = cell.load(Ordering::Relaxed);
        seen == rule.0
            || seen == 0
                && match cell.compare_exchange(0, rule.0, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => true,
                    Err(other) => other == rule.0,
                }
    })
}

/// How often addresses were forgotten.
static FORGOTTEN: AtomicU64 = AtomicU64::new(1);

/// A number, never 0, that stays the same as long as every address keeps its rule; `None` if that can't be said.
#[inline]
pub fn generation() -> Option<u64> {
    let generation = FORGOTTEN.load(Ordering::Acquire);
    (UNLOADING.load(Ordering::Acquire) == 0).then_some(generation)
}

/// Forgets every address: libraries were unloaded, and others may come to lie where they were.
pub fn forget() {
    FORGOTTEN.fetch_add(1, Ordering::AcqRel);
    for entry in &ADDRESSES {
        entry.store(0, Ordering::Relaxed);
    }
}

/// Runs `unload`, which may unload libraries. Until it is over and what it took away is forgotten, no rule is
/// kept and none that was kept is used, so no thread can meet a stale one.
pub fn while_unloading<T>(unload: impl FnOnce() -> T) -> T {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            UNLOADING.fetch_sub(1, Ordering::AcqRel);
        }
    }
    UNLOADING.fetch_add(1, Ordering::AcqRel);
    let _over = Over;
    unload()
}

/// Storage for reading a table without allocation: x86-64 has 17 registers that a table can name.
struct OnStack;
impl UnwindContextStorage<usize> for OnStack {
    type Rules = [(Register, RegisterRule<usize>); 24];
    type Stack = [UnwindTableRow<usize, Self>; 3];
}

type Slice = EndianSlice<'static, NativeEndian>;

/// Reads the unwind tables of the library that `pc` returns into.
fn read_tables(pc: u64) -> Option<Rule> {
    // A return address may be the first of the next function: the call is before it.
    let call = pc.checked_sub(1)?;
    let object = object_at(call)?;
    super::modules::met(object.start, object.end);
    let slice = |at: u64| -> Option<Slice> {
        let length = object.end.checked_sub(at).filter(|n| at >= object.start && *n > 0)?;
        // SAFETY: the tables lie in the mapped part of the object; what is read of them is theirs, as the
        // linker laid it out. The object stays loaded, because code of it is on the caller's stack.
        let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, length as usize) };
        Some(EndianSlice::new(bytes, NativeEndian))
    };
    let header_slice = slice(object.eh_frame_hdr)?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(object.eh_frame_hdr);
    let header = EhFrameHdr::from(header_slice).parse(&bases, 8).ok()?;
    let Pointer::Direct(eh_frame) = header.eh_frame_ptr() else { return None };
    let bases = bases.set_eh_frame(eh_frame);
    let frames = EhFrame::from(slice(eh_frame)?);
    let table = header.table()?;
    let fde = table.fde_for_address(&frames, &bases, call, EhFrame::cie_from_offset).ok()?;
    if fde.is_signal_trampoline() || fde.cie().return_address_register() != X86_64::RA {
        return None;
    }
    let mut context = UnwindContext::<usize, OnStack>::new_in();
    let row = fde.unwind_info_for_address(&frames, &bases, &mut context, call).ok()?;
    Some(translate(row, &frames))
}

fn translate(row: &UnwindTableRow<usize, OnStack>, frames: &EhFrame<Slice>) -> Rule {
    match row.register(X86_64::RA) {
        None | Some(RegisterRule::Undefined) => return Rule::END,
        Some(RegisterRule::Offset(-8)) => {}
        Some(_) => return Rule::UNKNOWN,
    }
    // The one expression that compilers use: the word at, or the address of, frame pointer plus offset.
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

/// A loaded object: where it is mapped and where the index of its unwind tables is.
#[derive(Clone, Copy, Debug)]
pub struct Object {
    /// First mapped address.
    pub start: u64,
    /// Address after the last mapped one.
    pub end: u64,
    eh_frame_hdr: u64,
    /// It is the program itself, not a library.
    pub main: bool,
}

/// The loaded object that has `address`, and unwind tables.
///
/// glibc answers this without a lock since 2.35. Before, there is only the loop over all objects, under the
/// loader's lock, which the system's own unwinder takes for every frame; we take it once for every new address.
pub fn object_at(address: u64) -> Option<Object> {
    match dl_find_object() {
        Some(find) => {
            let mut found = FoundObject {
                flags: 0,
                start: 0,
                end: 0,
                link_map: std::ptr::null(),
                eh_frame: 0,
                reserved: [0; 7],
            };
            // SAFETY: `found` is as large as the structure that glibc documents for x86-64.
            let missing = unsafe { find(address as *const c_void, &raw mut found) };
            if missing != 0 || found.eh_frame == 0 {
                return None;
            }
            // SAFETY: the link map of a loaded object and its name stay as long as the object.
            let main =
                unsafe { found.link_map.as_ref().is_none_or(|m| m.name.is_null() || *m.name == 0) };
            Some(Object { start: found.start, end: found.end, eh_frame_hdr: found.eh_frame, main })
        }
        None => search(address),
    }
}

/// glibc's `struct dl_find_object`, as its manual has it for this architecture.
#[repr(C)]
struct FoundObject {
    flags: u64,
    start: u64,
    end: u64,
    link_map: *const LinkMap,
    eh_frame: u64,
    reserved: [u64; 7],
}

/// The public part of the loader's `struct link_map`, as far as we read it.
#[repr(C)]
struct LinkMap {
    addr: u64,
    name: *const std::ffi::c_char,
}

type FindObject = unsafe extern "C" fn(*const c_void, *mut FoundObject) -> c_int;

/// glibc's function, if it has it.
fn dl_find_object() -> Option<FindObject> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let absent = std::ptr::dangling_mut::<c_void>();
    let mut at = FOUND.load(Ordering::Relaxed);
    if at.is_null() {
        // SAFETY: the name is a C string.
        at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
        if at.is_null() {
            at = absent;
        }
        FOUND.store(at, Ordering::Relaxed);
    }
    // SAFETY: the function has had this prototype since glibc 2.35, which brought it.
    (at != absent).then(|| unsafe { std::mem::transmute::<*mut c_void, FindObject>(at) })
}

/// The range of the library that an address lies in, without a lock; `None`: no library, or glibc has no such search.
pub fn library_at(address: u64) -> Option<std::ops::Range<u64>> {
    let find = dl_find_object()?;
    let mut found = std::mem::MaybeUninit::<FoundObject>::zeroed();
    // SAFETY: glibc's function, which fills the record if it returns 0; all zeros are a valid record.
    let found = unsafe {
        if find(address as *const c_void, found.as_mut_ptr()) != 0 {
            return None;
        }
        found.assume_init()
    };
    Some(found.start..found.end)
}

/// The same by looking at all loaded objects.
fn search(address: u64) -> Option<Object> {
    struct Search {
        address: u64,
        first: bool,
        found: Option<Object>,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader hands in a valid record and our own pointer.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
        let main = std::mem::take(&mut search.first);
        // SAFETY: the loader's record says how many headers there are.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let (mut start, mut end, mut table) = (u64::MAX, 0, 0);
        for h in headers {
            let at = info.dlpi_addr.wrapping_add(h.p_vaddr);
            match h.p_type {
                libc::PT_LOAD => {
                    start = start.min(at);
                    end = end.max(at.wrapping_add(h.p_memsz));
                }
                libc::PT_GNU_EH_FRAME => table = at,
                _ => {}
            }
        }
        if (start..end).contains(&search.address) {
            search.found = (table != 0).then_some(Object { start, end, eh_frame_hdr: table, main });
            return 1;
        }
        0
    }
    let mut search = Search { address, first: true, found: None };
    // SAFETY: `visit` gets the pointer to `search`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

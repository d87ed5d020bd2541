//! Operators seen as they begin, without PyTorch's own callbacks: for
//! [`crate::pytorch::operators`].
//!
//! A callback for operators costs a training step of pure dispatch 12 to 15 %, even one that does
//! nothing. PyTorch then takes a slower path, with a `RecordFunction` for each operator. But before
//! each operator its dispatcher calls `at::getStepCallbacksUnlessEmpty` to ask for callbacks. That
//! is a function of `libtorch_cpu`'s, called through its PLT, so a preloaded library can answer.
//! Ours jumps to the real one as long as nobody tracks. Otherwise it reads from the return address
//! which operator it is (`at::_ops::add_Tensor::call`), and answers that there are no callbacks.
//!
//! What remains is to know when an operator is done. Most have an autograd kernel, which excludes
//! autograd from the thread's dispatch keys while the work is done (`AutoDispatchBelowAutograd`).
//! So one word of the thread says it. An operator that libtorch begins while autograd is excluded
//! is inside another one, and is left out. What is allocated or freed then belongs to the operator
//! that began last. Its record is brought up to date ([`event`]), and it is named to whoever asks
//! what a block was for ([`current`]).
//!
//! PyTorch's Python functions exclude autograd, too, around operators that make tensors. So the
//! caller's caller decides, found once for each operator by a walk of the stack. Operators that are
//! made of others leave no record; those others do.
//!
//! All else goes PyTorch's way, with a `RecordFunction`, begin and end. That is so for operators
//! without such a kernel, for those that are called in other ways, and while the thread is in an
//! unusual state: under a dispatch mode, in inference mode, or under hooks on saved tensors. (A
//! checkpoint stops its recomputation by an exception from such a hook.)
//!
//! It rests on facts from the public headers of PyTorch 2.6, 2.11 and 2.15. [`begin`] tries them
//! on the running PyTorch before anything relies on them. They are the layout of
//! `at::StepCallbacks`; that `c10::impl::raw_local_dispatch_key_set` is two words, included and
//! excluded keys, zero in a thread's usual state; and that `SavedTensorDefaultHooks`' state
//! begins with a stack in a `std::deque`.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use memtrace_format::event::{LabelId, NO_LABEL};
use memtrace_format::labels::LabelKind;

use crate::hot::HOT;
use crate::labels::store;
use crate::libraries::loaded;
use crate::libraries::scopes;
use crate::naked::jumping;
use crate::os::address::Address;
use crate::os::locks::ForkLock;
use crate::pytorch::names;
use crate::pytorch::operators;
use crate::pytorch::record_functions::{self, End, Start};
use crate::record::activity::Begun;
use crate::record::guard::{self, Local};
use crate::stack;

/// Callbacks: one for the beginning, one for the end.
type Pair = [*mut c_void; 2];
const ROOM: usize = 4;

/// `std::optional<at::StepCallbacks>`.
#[repr(C)]
pub struct Answer {
    /// A vector with room of its own for a few.
    pairs: *mut Pair,
    count: u32,
    room: u32,
    own: [Pair; ROOM],
    thread: u64,
    scope: u8,
    needs: [u8; 3],
    there: u64,
}

const _: () = assert!(size_of::<Answer>() == 104 && std::mem::offset_of!(Answer, there) == 96);

/// What is called: the real function, or [`decide`] while operators are tracked.
static TARGET: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static REAL: Address = Address::new();
/// Has PyTorch called through it since [`begin`]?
static WAS_CALLED: AtomicBool = AtomicBool::new(false);
/// Keys that are excluded below autograd, one that may be, too, and those of autocast. Set, as is
/// [`PYTHON`], before [`TARGET`] leads to whom reads them.
static BELOW: AtomicU64 = AtomicU64::new(0);
static VIEWS: AtomicU64 = AtomicU64::new(0);
static AUTOCAST: AtomicU64 = AtomicU64::new(0);
/// Where the code of `libtorch_python` is.
static PYTHON: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static START: Address = Address::new();
static END: Address = Address::new();

type Ask = unsafe extern "C-unwind" fn(*mut Answer, u8, *const usize) -> *mut Answer;
type State = unsafe extern "C" fn() -> *const usize;

/// Bits of a kind.
const COMPOSITE: u64 = 1;
const GUARDED: u64 = 2;
const CASTS: u64 = 4;
/// Nothing is known of it.
const EXACT: u64 = 8;
/// Above a kind: how many words lie between the return addresses of its function's
/// call and of its caller's; 0: unknown.
const DISTANCE_AT: u32 = 4;

/// Operators by the name of their C++ structure: as Python names them, and their kind.
static OPERATORS: ForkLock<Option<Operators>> = ForkLock::new(None);
type Operators = HashMap<Box<[u8]>, (Box<[u8]>, u64)>;

/// `at::getStepCallbacksUnlessEmpty`: a jump, with the address of the
/// return address where no argument is.
///
/// # Safety
/// Called by PyTorch's dispatcher.
#[unsafe(naked)]
#[unsafe(export_name = names::step_callbacks!())]
pub unsafe extern "C-unwind" fn step_callbacks(result: *mut Answer, scope: u8) -> *mut Answer {
    core::arch::naked_asm!(
        "mov rdx, rsp",
        jumping!(),
        next = sym TARGET,
        find = sym find,
    )
}

extern "C" fn find() -> *mut c_void {
    match scopes::loaded_symbol(names::STEP_CALLBACKS.library, names::STEP_CALLBACKS.symbol) {
        Some(real) if real.as_ptr() != step_callbacks as *mut c_void => {
            REAL.set(real.as_ptr());
            let none = std::ptr::null_mut();
            let _ =
                TARGET.compare_exchange(none, real.as_ptr(), Ordering::AcqRel, Ordering::Relaxed);
            real.as_ptr()
        }
        _ => nobody as *mut c_void,
    }
}

/// Answers that there are no callbacks.
unsafe extern "C-unwind" fn nobody(result: *mut Answer, _: u8, _: *const usize) -> *mut Answer {
    // SAFETY: the hidden pointer of a C++ call leads to room for the result.
    unsafe { (&raw mut (*result).there).cast::<u8>().write(0) };
    result
}

/// What is to be known of operators: a line for each, the name of its structure, its
/// own, and its kind, with tabs between.
pub fn learn(text: &[u8]) {
    let mut known = HashMap::new();
    for line in text.split(|b| *b == b'\n') {
        let mut parts = line.split(|b| *b == b'\t');
        if let (Some(structure), Some(name), Some([kind])) =
            (parts.next(), parts.next(), parts.next())
        {
            known.insert(structure.into(), (name.into(), u64::from(kind - b'0')));
        }
    }
    *OPERATORS.lock() = Some(known);
    for caller in &CALLERS {
        caller[1].store(0, Ordering::Release); // to be found out again
    }
}

/// Takes PyTorch's calls on trial: [`end_of_trial`] says whether any came. `below` are the keys
/// that are excluded below autograd, `views` those that are beside it.
pub fn begin(below: u64, views: u64, autocast: u64, start: Start, end: End) {
    BELOW.store(below, Ordering::Relaxed);
    VIEWS.store(views, Ordering::Relaxed);
    if let Some(python) = loaded::loaded(names::TORCH_PYTHON) {
        PYTHON[0].store(python.text_start, Ordering::Relaxed);
        PYTHON[1].store(python.text_end, Ordering::Relaxed);
    }
    AUTOCAST.store(autocast, Ordering::Relaxed);
    START.set(start as *mut c_void);
    END.set(end as *mut c_void);
    WAS_CALLED.store(false, Ordering::Relaxed);
    let known = OPERATORS.lock().is_some();
    if below != 0 && known && find() != nobody as *mut c_void && trusted(start, end) {
        TARGET.store(trial as *mut c_void, Ordering::Release);
    }
}

/// Has PyTorch come? Then operators are seen from here on.
pub fn end_of_trial() -> bool {
    let came = WAS_CALLED.load(Ordering::Acquire);
    HOT.quick.store(came, Ordering::Release);
    let next = if came { decide as *mut c_void } else { REAL.get() };
    TARGET.store(next, Ordering::Release);
    came
}

/// Operators are no longer seen.
pub fn end() {
    HOT.quick.store(false, Ordering::Release);
    TARGET.store(REAL.get(), Ordering::Release);
}

unsafe extern "C-unwind" fn trial(result: *mut Answer, scope: u8, _: *const usize) -> *mut Answer {
    WAS_CALLED.store(true, Ordering::Release);
    // SAFETY: handed through.
    unsafe { real(result, scope) }
}

unsafe fn real(result: *mut Answer, scope: u8) -> *mut Answer {
    let real = REAL.get();
    // SAFETY: the function of this name has this signature but for the last
    // argument, which it doesn't look at.
    unsafe { std::mem::transmute::<*mut c_void, Ask>(real)(result, scope, std::ptr::null()) }
}

fn ours() -> Pair {
    [&START, &END].map(Address::get)
}

/// Does PyTorch write its answer as we would?
fn trusted(start: Start, end: End) -> bool {
    let Some(handle) = record_functions::add(names::OPERATOR, start, end) else { return false };
    let (mut theirs, mut own) = (Answer::empty(), Answer::empty());
    // SAFETY: both have room for an answer. Whoever else tracks makes
    // theirs longer, and it is not trusted.
    unsafe {
        real(&raw mut theirs, names::OPERATOR as u8);
        want(&raw mut own);
    }
    record_functions::remove(handle);
    let parts = |a: &Answer| (a.count, a.own[0], a.thread, a.scope, a.needs, a.there as u8);
    theirs.pairs == (&raw mut theirs.own).cast() && parts(&theirs) == parts(&own)
}

impl Answer {
    fn empty() -> Answer {
        let (pairs, own) = (std::ptr::null_mut(), [[std::ptr::null_mut(); 2]; ROOM]);
        Answer { pairs, count: 0, room: 0, own, thread: 0, scope: 0, needs: [0; 3], there: 0 }
    }
}

/// Writes the answer that our callbacks want to know, and nobody else.
unsafe fn want(result: *mut Answer) {
    // SAFETY: the caller has room for an answer.
    unsafe {
        result.write(Answer::empty());
        let answer = &mut *result;
        answer.pairs = (&raw mut answer.own).cast();
        (answer.count, answer.room, answer.own[0]) = (1, ROOM as u32, ours());
        (answer.thread, answer.scope, answer.there) =
            (record_functions::thread(), names::OPERATOR as u8, 1);
    }
}

/// Adds our callbacks to those of others, if there is room.
unsafe fn want_also(result: *mut Answer) {
    // SAFETY: the caller has an answer, whose vector has that much room.
    unsafe {
        let answer = &mut *result;
        if answer.count < answer.room {
            answer.pairs.add(answer.count as usize).write(ours());
            answer.count += 1;
        }
    }
}

unsafe extern "C-unwind" fn decide(
    result: *mut Answer,
    scope: u8,
    at: *const usize,
) -> *mut Answer {
    // SAFETY: handed through; then there is an answer.
    unsafe {
        real(result, scope);
        if usize::from(scope) != names::OPERATOR || !HOT.quick.load(Ordering::Relaxed) {
            return result;
        }
        if (&raw const (*result).there).cast::<u8>().read() != 0 {
            want_also(result);
        } else if !is_seen(at) {
            want(result);
        }
    }
    result
}

/// Sees to an operator that begins, if it is one of those that need no more.
///
/// # Safety
/// `at` is where the return address of the dispatcher's call lies.
unsafe fn is_seen(at: *const usize) -> bool {
    guard::local(|local| {
        let mine = &local.operators.begun;
        let Some((included, excluded)) = mine.keys() else { return false };
        if included != 0 {
            return false;
        }
        let below = BELOW.load(Ordering::Relaxed);
        // SAFETY: promised by the caller.
        let caller = unsafe { at.read() };
        let (kind, operator) = known(caller).unwrap_or_else(|| find_out(caller));
        if excluded & below == below {
            let words = (kind >> DISTANCE_AT) as usize;
            // SAFETY: the stack at this distance has the return address of the calling function.
            if words == 0 || !is_python(unsafe { at.add(words).read() }) {
                return true; // inside another one
            }
        }
        let casts = excluded & AUTOCAST.load(Ordering::Relaxed);
        let usual = below | VIEWS.load(Ordering::Relaxed) | casts;
        if excluded & !usual != 0 || mine.is_hooked() || kind & EXACT != 0 {
            return false;
        }
        // What is made of others, or calls itself again when it has cast its arguments.
        if kind & COMPOSITE == 0 && !(casts != 0 && kind & CASTS != 0) {
            mine.record.set(operators::seen(local, operator).unwrap_or(Begun::NONE));
        }
        true
    })
}

fn is_python(address: usize) -> bool {
    let [start, end] = [&PYTHON[0], &PYTHON[1]].map(|n| n.load(Ordering::Relaxed));
    (start..end).contains(&address)
}

/// Something was allocated or freed on the calling thread.
#[inline]
pub fn event(local: &Local) {
    if let Some(record) = current(local) {
        operators::update(record);
    }
}

/// The calling thread is out of memory.
pub fn failed(local: &Local) {
    if let Some(record) = current(local) {
        operators::fail(record);
    }
}

/// The record of the operator that the calling thread is in, if it was seen as it began.
#[inline]
pub fn current(local: &Local) -> Option<u64> {
    if HOT.quick.load(Ordering::Relaxed) { local.operators.begun.under_way() } else { None }
}

impl Begun {
    /// The thread begins an operator in PyTorch's way.
    pub fn exact(&self) {
        self.record.set(Begun::NONE);
    }

    fn under_way(&self) -> Option<u64> {
        let current = self.record.get();
        if current == Begun::NONE {
            return None;
        }
        let below = BELOW.load(Ordering::Relaxed);
        let (included, excluded) = self.keys()?;
        (included == 0 && excluded & below == below).then_some(current)
    }

    #[inline]
    fn keys(&self) -> Option<(u64, u64)> {
        if self.keys.get().is_null() {
            self.look();
        }
        // SAFETY: null, or the thread's two words, which are there as long as the thread is.
        unsafe { self.keys.get().as_ref().map(|included| (*included, *self.keys.get().add(1))) }
    }

    /// Are there hooks on saved tensors? The first and the last place of a deque differ.
    #[inline]
    fn is_hooked(&self) -> bool {
        let hooks = self.hooks.get();
        // SAFETY: null, or the thread's state, which begins with a deque: map,
        // size, and two iterators of four words.
        hooks.is_null() || unsafe { *hooks.add(2) != *hooks.add(6) }
    }

    #[cold]
    fn look(&self) {
        let (keys, hooks) = (names::DISPATCH_KEYS, names::SAVED_TENSOR_HOOKS);
        let (Some(keys), Some(hooks)) = (
            scopes::of_thread(keys.library, keys.symbol),
            scopes::loaded_symbol(hooks.library, hooks.symbol),
        ) else {
            return;
        };
        // SAFETY: the function takes nothing and returns a reference to the thread's own state.
        let state = unsafe { std::mem::transmute::<*mut c_void, State>(hooks.as_ptr())() };
        self.hooks.set(state);
        self.keys.set(keys.cast());
    }
}

// --- which operator a return address belongs to --------------------------------------------------

const SLOTS: usize = 1 << 14;
const PROBES: usize = 32;
/// Return address, which never goes; and kind, above the label that has the operator's name: a
/// word that says all by itself, and the same whoever writes it.
static CALLERS: [[AtomicU64; 2]; SLOTS] = [const { [const { AtomicU64::new(0) }; 2] }; SLOTS];

fn slots(caller: usize) -> impl Iterator<Item = &'static [AtomicU64; 2]> {
    let first = (caller as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..PROBES).map(move |i| &CALLERS[(first as usize + i) % SLOTS])
}

#[inline]
fn known(caller: usize) -> Option<(u64, LabelId)> {
    for slot in slots(caller) {
        match slot[0].load(Ordering::Acquire) {
            0 => return None,
            found if found == caller as u64 => {
                let known = slot[1].load(Ordering::Acquire);
                return (known != 0).then_some((known >> 32, known as LabelId));
            }
            _ => {}
        }
    }
    None
}

#[cold]
fn find_out(caller: usize) -> (u64, LabelId) {
    // Not at a moment in which they are learnt.
    let Some(operators) = OPERATORS.try_read() else { return (EXACT, NO_LABEL) };
    let named = || {
        let symbol = symbol_at(caller)?;
        let (name, kind) = operators.as_ref()?.get(structure(symbol.to_bytes())?)?;
        let label = store::store()?.intern(NO_LABEL, LabelKind::Operator, name)?;
        (kind & (COMPOSITE | GUARDED) != 0).then_some((*kind, label))
    };
    let (kind, label) = named().unwrap_or((EXACT, NO_LABEL));
    let kind = kind | distance(caller) << DISTANCE_AT;
    for slot in slots(caller) {
        let free = slot[0].compare_exchange(0, caller as u64, Ordering::AcqRel, Ordering::Acquire);
        if free.is_ok() || free == Err(caller as u64) {
            slot[1].store(kind << 32 | u64::from(label), Ordering::Release);
            break;
        }
    }
    (kind, label)
}

/// Words from the return address of the call that is under way there to that of the function which
/// made it. A frame's stack begins after the return address into it.
fn distance(caller: usize) -> u64 {
    let (mut at, mut bytes) = (0_u64, 0);
    stack::each_frame(&mut |frame| {
        match frame {
            None => (at, bytes) = (0, 0),
            Some((_, stack)) if at != 0 => bytes = stack.saturating_sub(at),
            Some((pc, stack)) if pc == caller as u64 => at = stack,
            Some(_) => {}
        }
        bytes != 0
    });
    if bytes < 1 << 20 { bytes / 8 } else { 0 }
}

fn symbol_at(address: usize) -> Option<&'static CStr> {
    loaded::name_at(address)
}

/// `add_Tensor` of `at::_ops::add_Tensor::call(…)`, mangled.
fn structure(symbol: &[u8]) -> Option<&[u8]> {
    let rest = symbol.strip_prefix(names::OPERATORS)?;
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    let length: usize = std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()?;
    let (name, rest) = rest[digits..].split_at_checked(length)?;
    rest.starts_with(names::CALL).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_is_found_in_its_functions_name() {
        let of = |s: &str| structure(s.as_bytes()).map(|n| String::from_utf8_lossy(n).into_owned());
        assert_eq!(of("_ZN2at4_ops10add_Tensor4callERKNS_6TensorE").as_deref(), Some("add_Tensor"));
        assert_eq!(of("_ZN2at4_ops10add_Tensor10redispatchEN3c1014DispatchKeySetE"), None);
        assert_eq!(of("_ZN2at4_ops99add_Tensor4callE"), None);
        assert_eq!(of("_ZN2at6native3addE"), None);
    }
}

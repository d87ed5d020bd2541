//! PyTorch's own names for what it does: `record_function` ranges, and which forward work a gradient belongs to.
//!
//! PyTorch offers callbacks around everything it calls a *record function* (`ATen/record_function.h`), kept per scope, so
//! that operators, which are most of them, cost nothing when only other scopes are asked for. We ask for two:
//! - *user scopes*: `torch.profiler.record_function`, and PyTorch's own (optimizer steps, DDP, FSDP) become ranges;
//! - *backward functions*: a node of autograd's graph runs. It carries the number that it got when the forward
//!   operator made it, counted per thread. Each thread keeps a log of the numbers at which its label changed, so the label
//!   of the forward operator is found, exactly, on the thread that computes the gradient: no hook in Python, and no
//!   change to the graph.
//!
//! Facts it rests on, from the public headers of PyTorch 2.6, 2.11 and 2.15: the callback is a 40-byte record passed by
//! value; a start callback returns a `unique_ptr` through a hidden pointer; the number and the forward thread of a
//! `RecordFunction` lie at known places ([`names`]). An accumulation of a gradient has no number; it belongs to the node before it.
//! Nodes run newest first, so what autograd itself allocates between two nodes (sums of gradients) is taken for the
//! last one's.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_format::event::{LabelId, NO_LABEL};

use crate::labels::{self, store};
use crate::libraries::scopes;
use crate::os::address::Address;
use crate::pytorch::names::{
    self, ACCUMULATE, AUTOGRAD_THREAD, BACKWARD, FORWARD_THREAD_AT, OLDER_STRING, OPERATOR, SCOPES,
    SEQUENCE_AT, STRING, USER,
};
use crate::pytorch::{changes, label_log};
use crate::record::activity::Work;
use crate::record::guard::{self, Local};

/// `at::RecordFunctionCallback`.
#[repr(C)]
struct Callback {
    start: Start,
    end: End,
    probability: f64,
    scopes: [bool; SCOPES],
    needs_inputs: bool,
    needs_outputs: bool,
    needs_ids: bool,
}

const _: () = assert!(size_of::<Callback>() == 40);

/// A callback at the beginning.
pub type Start = unsafe extern "C" fn(*mut *mut c_void, *const u8) -> *mut *mut c_void;
/// A callback at the end.
pub type End = unsafe extern "C" fn(*const u8, *mut c_void);
type Remove = unsafe extern "C" fn(u64);
type Add = unsafe extern "C" fn(Callback) -> u64;
type Name = unsafe extern "C" fn(*const u8) -> *const c_char;
type Number = unsafe extern "C" fn() -> u64;

/// The functions of PyTorch's that are asked; empty until it is there.
static NAME: Address = Address::new();
static PEEK: Address = Address::new();
static THREAD: Address = Address::new();
/// How long this PyTorch's strings are.
static STRINGS: AtomicUsize = AtomicUsize::new(STRING);
static ATTACHED: AtomicUsize = AtomicUsize::new(0);

fn find(name: names::Name) -> Option<*mut c_void> {
    scopes::loaded_symbol(name.library, name.symbol).map(NonNull::as_ptr)
}

impl Callback {
    fn new(scope: usize, start: Start, end: End) -> Self {
        Callback {
            start,
            end,
            probability: 1.0,
            scopes: std::array::from_fn(|i| i == scope),
            needs_inputs: false,
            needs_outputs: false,
            needs_ids: false,
        }
    }
}

/// Has PyTorch call us around every operator, too. Returns what [`remove`] takes; `None` if it is not there.
pub fn add_operators(start: Start, end: End) -> Option<u64> {
    attach();
    if PEEK.get().is_null() {
        return None;
    }
    let add = find(names::ADD_CALLBACK)?;
    find(names::REMOVE_CALLBACK)?;
    // SAFETY: see `attach`.
    Some(unsafe {
        std::mem::transmute::<*mut c_void, Add>(add)(Callback::new(OPERATOR, start, end))
    })
}

/// Ends what [`add_operators`] began.
pub fn remove(handle: u64) {
    if let Some(remove) = find(names::REMOVE_CALLBACK) {
        // SAFETY: libtorch_cpu exports this name with this signature; the handle is one of its own.
        unsafe { std::mem::transmute::<*mut c_void, Remove>(remove)(handle) }
    }
}

/// The name of what runs.
///
/// # Safety
/// `function` is a live `RecordFunction`, and the name is not kept for longer.
pub unsafe fn name<'a>(function: *const u8) -> &'a CStr {
    // SAFETY: promised by the caller; a name is a C string or null.
    unsafe {
        let name = std::mem::transmute::<*mut c_void, Name>(NAME.get())(function);
        if name.is_null() { c"" } else { CStr::from_ptr(name) }
    }
}

/// PyTorch's own number of the calling thread; 0 before [`attach`].
pub fn thread() -> u64 {
    let asked = THREAD.get();
    // SAFETY: libtorch_cpu exports this name with this signature.
    if asked.is_null() { 0 } else { unsafe { std::mem::transmute::<*mut c_void, Number>(asked)() } }
}

/// How long a string of the C++ library is in this PyTorch.
pub fn string_size() -> usize {
    STRINGS.load(Ordering::Relaxed)
}

/// Where a string of PyTorch's has its characters, and how many.
///
/// # Safety
/// There is a `std::string` at this address.
pub unsafe fn string(at: *const u8) -> (*const c_char, usize) {
    // SAFETY: promised by the caller. The older kind has its length three words before its characters.
    unsafe {
        let text = at.cast::<*const c_char>().read_unaligned();
        let length = if string_size() == STRING { at.add(8) } else { text.cast::<u8>().sub(24) };
        (text, length.cast::<usize>().read_unaligned())
    }
}

/// What the calling thread is at.
#[inline]
pub fn work(local: &Local) -> Work {
    match local.work.get() {
        Work::Unknown => look(local),
        known => known,
    }
}

/// Works it out, whenever something it depends on has changed.
#[inline(never)]
fn look(local: &Local) -> Work {
    let work = BACKWARD_OF.with(|backward| {
        if backward.depth.get() == 0 && !backward.is_worker() {
            Work::Forward
        } else if backward.accumulates.get() >> backward.depth.get() & 1 != 0 {
            Work::Accumulate
        } else if labels::opened() > backward.outside.get() {
            Work::Again
        } else {
            Work::Backward
        }
    });
    local.work.set(work);
    work
}

/// Does the calling thread run a node of autograd's?
pub fn in_backward() -> bool {
    BACKWARD_OF.with(|backward| backward.depth.get() > 0)
}

/// Asks PyTorch to call us, once it is loaded. Cheap when that is done.
pub fn attach() {
    if ATTACHED.load(Ordering::Relaxed) != 0 {
        return;
    }
    labels::listen(|local, label| {
        label_changed(label);
        changes::label(local);
    });
    let Some(add) = find(names::ADD_CALLBACK) else { return };
    let (Some(name), Some(peek), Some(thread)) =
        (find(names::FUNCTION_NAME), find(names::SEQUENCE_NUMBER), find(names::THREAD_ID))
    else {
        return;
    };
    if ATTACHED.swap(1, Ordering::AcqRel) != 0 {
        return;
    }
    let strings = if find(names::OLDER_STRINGS).is_some() { OLDER_STRING } else { STRING };
    STRINGS.store(strings, Ordering::Relaxed);
    NAME.set(name);
    THREAD.set(thread);
    PEEK.set(peek);
    // SAFETY: libtorch_cpu exports this name with this signature in 2.6 to 2.15; a trivially copyable class of 40 bytes
    // is passed on the stack, as a C record is.
    unsafe {
        let add = std::mem::transmute::<*mut c_void, Add>(add);
        add(Callback::new(USER, user_begins, user_ends));
        add(Callback::new(BACKWARD, backward_begins, backward_ends));
    }
    label_changed(labels::current()); // which it may have been for long
}

// --- record_function -------------------------------------------------------------------------------------

/// Answers with an empty `unique_ptr`.
unsafe fn nothing(result: *mut *mut c_void) -> *mut *mut c_void {
    // SAFETY: the hidden pointer of a C++ call leads to room for the result.
    unsafe { result.write(std::ptr::null_mut()) };
    result
}

unsafe extern "C" fn user_begins(
    result: *mut *mut c_void,
    function: *const u8,
) -> *mut *mut c_void {
    // SAFETY: PyTorch hands in a live `RecordFunction`; its name is a C string or null.
    unsafe {
        let name = name(function).to_bytes();
        match phase(name) {
            Some(phase) => labels::push_phase(phase),
            None => labels::push(name),
        };
        crate::pytorch::operators::range(true);
        nothing(result)
    }
}

/// PyTorch's optimizers name their work `Optimizer.step#AdamW.step`, its wrappers of models `….forward`, in every 2.x.
fn phase(name: &[u8]) -> Option<&'static [u8]> {
    match name {
        b"DistributedDataParallel.forward" | b"FullyShardedDataParallel.forward" => {
            Some(store::FORWARD)
        }
        name if name.starts_with(b"Optimizer.step#") => Some(store::OPTIMIZER_STEP),
        name if name.starts_with(b"Optimizer.zero_grad#") => Some(b"zero_grad"),
        _ => None,
    }
}

unsafe extern "C" fn user_ends(_: *const u8, _: *mut c_void) {
    crate::pytorch::operators::range(false);
    labels::pop();
}

// --- backward --------------------------------------------------------------------------------------------

/// Nodes of one thread that run inside each other (checkpoints run a whole backward pass inside one).
const NESTED: usize = 16;

struct Backward {
    /// The label before each node that is running.
    before: [Cell<LabelId>; NESTED],
    depth: Cell<u32>,
    /// A bit for each depth: is the node an `AccumulateGrad`?
    accumulates: Cell<u32>,
    /// Ranges that were open when the outermost node began.
    outside: Cell<u32>,
    /// That of the last node with a number.
    last: Cell<LabelId>,
    /// A thread of autograd's own: [`UNKNOWN`], [`NO`] or [`YES`].
    worker: Cell<u8>,
}

const UNKNOWN: u8 = 0;
const NO: u8 = 1;
const YES: u8 = 2;

thread_local! {
    static BACKWARD_OF: Backward = const {
        Backward {
            before: [const { Cell::new(NO_LABEL) }; NESTED],
            depth: Cell::new(0),
            accumulates: Cell::new(0),
            outside: Cell::new(0),
            last: Cell::new(NO_LABEL),
            worker: Cell::new(UNKNOWN),
        }
    };
}

impl Backward {
    /// Does this thread do nothing but run nodes? Then what comes between two of them belongs to the first.
    fn is_worker(&self) -> bool {
        if self.worker.get() == UNKNOWN {
            let mut name = [0_u8; 16];
            // SAFETY: the kernel writes at most 16 bytes.
            unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
            self.worker.set(if name.starts_with(AUTOGRAD_THREAD) { YES } else { NO });
        }
        self.worker.get() == YES
    }
}

unsafe extern "C" fn backward_begins(
    result: *mut *mut c_void,
    function: *const u8,
) -> *mut *mut c_void {
    // SAFETY: PyTorch hands in a live `RecordFunction`, which is longer than these offsets.
    let (number, thread) = unsafe {
        let function = function.sub(STRING - string_size());
        (
            function.add(SEQUENCE_AT).cast::<i64>().read_unaligned(),
            function.add(FORWARD_THREAD_AT).cast::<u64>().read_unaligned(),
        )
    };
    BACKWARD_OF.with(|backward| {
        let depth = backward.depth.get();
        backward.depth.set(depth.saturating_add(1));
        if depth == 0 {
            backward.outside.set(labels::opened());
        }
        if changes::asked() {
            // SAFETY: PyTorch hands in a live `RecordFunction`.
            let accumulates = number < 0 && unsafe { name(function) }.to_bytes() == ACCUMULATE;
            let bit = 1_u32.checked_shl(depth + 1).unwrap_or(0);
            let others = backward.accumulates.get() & !bit;
            backward.accumulates.set(if accumulates { others | bit } else { others });
        }
        guard::local(|local| {
            local.work.set(Work::Unknown);
            if let Some(place) = backward.before.get(depth as usize) {
                place.set(local.label.get());
            }
            if let Ok(number) = u64::try_from(number)
                && let Some(store) = store::store()
            {
                let forward = label_log::of(thread).map_or(NO_LABEL, |log| log.at(number));
                backward.last.set(store.backward_of(forward));
            }
            if backward.last.get() != NO_LABEL {
                labels::set(local, backward.last.get());
            }
        });
    });
    // SAFETY: as the caller promises.
    unsafe { nothing(result) }
}

unsafe extern "C" fn backward_ends(_: *const u8, _: *mut c_void) {
    BACKWARD_OF.with(|backward| {
        let Some(depth) = backward.depth.get().checked_sub(1) else { return };
        backward.depth.set(depth);
        let bit = 1_u32.checked_shl(depth + 1).unwrap_or(0);
        backward.accumulates.set(backward.accumulates.get() & !bit);
        guard::local(|local| local.work.set(Work::Unknown));
        if depth == 0 && backward.is_worker() {
            return;
        }
        if let Some(place) = backward.before.get(depth as usize) {
            guard::local(|local| labels::set(local, place.get()));
        }
        if depth == 0 {
            backward.last.set(NO_LABEL);
        }
    });
}

// --- the log of a thread -----------------------------------------------------------------------------------

/// The calling thread has another label now: nodes that are made from here on are made under it.
#[inline]
pub fn label_changed(label: LabelId) {
    let peek = PEEK.get();
    if peek.is_null() {
        return;
    }
    if let Some(log) = label_log::mine(thread) {
        // SAFETY: libtorch_cpu exports this name with this signature.
        log.note(unsafe { std::mem::transmute::<*mut c_void, Number>(peek)() }, label);
    }
}

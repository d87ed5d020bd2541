//! Which forward work a gradient belongs to: what a thread is at while a backward pass runs.
//!
//! A node of autograd's graph runs as a *backward function*, for which PyTorch calls us. It
//! carries the number that it got when the forward operator made it, counted per thread. Each
//! thread keeps a log of the numbers at which its label changed ([`label_log`]). So the label of
//! the forward operator is found, exactly, on the thread that computes the gradient. That takes no
//! hook in Python and no change to the graph.
//!
//! The number and the forward thread of a `RecordFunction` lie at known places
//! ([`super::names`]). An accumulation of a gradient has no number; it belongs to the node before
//! it. Nodes run newest first, so what autograd itself allocates between two nodes (sums of
//! gradients) is taken for the last one's.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::Ordering;

use memtrace_format::event::{LabelId, NO_LABEL};

use crate::hot::HOT;
use crate::labels::{self, store};
use crate::pytorch::names::{ACCUMULATE, AUTOGRAD_THREAD, FORWARD_THREAD_AT, SEQUENCE_AT, STRING};
use crate::pytorch::{label_log, record_functions};
use crate::record::activity::Work;
use crate::record::guard::{self, Local};

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

/// Nodes of one thread that run inside each other (checkpoints run a whole
/// backward pass inside one).
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
    /// Does this thread do nothing but run nodes? Then what comes between
    /// two of them belongs to the first.
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

/// A node begins: PyTorch's callback.
///
/// # Safety
/// Called by PyTorch.
pub unsafe extern "C" fn begins(result: *mut *mut c_void, function: *const u8) -> *mut *mut c_void {
    // SAFETY: PyTorch hands in a live `RecordFunction`, which is longer than these offsets.
    let (number, thread) = unsafe {
        let function = function.sub(STRING - record_functions::string_size());
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
        // Only a tracker asks which nodes accumulate ([`super::changes`]).
        if HOT.changes.load(Ordering::Relaxed) > 0 {
            // SAFETY: PyTorch hands in a live `RecordFunction`.
            let accumulates =
                number < 0 && unsafe { record_functions::name(function) }.to_bytes() == ACCUMULATE;
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
    unsafe { record_functions::nothing(result) }
}

/// A node ends.
///
/// # Safety
/// Called by PyTorch.
pub unsafe extern "C" fn ends(_: *const u8, _: *mut c_void) {
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

// --- the log of a thread -------------------------------------------------------------------------

/// The calling thread has another label now: nodes that are made from here on are made under it.
#[inline]
pub fn label_changed(label: LabelId) {
    let Some(counter) = record_functions::counter() else { return };
    if let Some(log) = label_log::mine(record_functions::thread) {
        // SAFETY: libtorch_cpu exports this name with this signature.
        log.note(unsafe { counter() }, label);
    }
}

//! What the program says it is doing: named ranges of each thread, carried by every event.
//!
//! A thread has one current label, a number; an event copies it, so a range costs nothing per
//! event. Ranges come from the C functions (and through them from the Python package), from NVTX
//! ([`nvtx`]), and from PyTorch's own `record_function`. All of them open and close on the same
//! stack. Other modules can register a function that is called when a thread has a new label
//! ([`listen`]). Names are kept in [`store`].
//!
//! It works before the first CUDA call, wakes nothing, takes no lock, and allocates only at a
//! name's first sight. A range may be closed on another thread than it was opened on. That changes
//! nothing there; on its own thread it ends with the range around it.

pub mod nvtx;
pub mod store;

use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use memtrace_format::event::{LabelId, MarkEvent, NO_LABEL, Point};
use memtrace_format::labels::LabelKind;

use crate::record::activity::Work;
use crate::record::guard;
use crate::record::guard::event;

/// Ranges of one thread that can be open at a time; those further inside
/// are counted and change nothing.
const DEPTH: usize = 48;

struct Open {
    /// What the label was before each range.
    before: [Cell<LabelId>; DEPTH],
    depth: Cell<u32>,
}

thread_local! {
    static OPEN: Open = const { Open { before: [const { Cell::new(NO_LABEL) }; DEPTH], depth: Cell::new(0) } };
}

/// The calling thread's label.
pub fn current() -> LabelId {
    guard::local(|local| local.label.get())
}

/// Makes this the calling thread's label and returns what it was before.
/// What is no label changes nothing.
#[inline]
pub fn enter(label: LabelId) -> LabelId {
    guard::local(|local| {
        if label != NO_LABEL && !store::existing().is_some_and(|s| s.has(label)) {
            return local.label.get();
        }
        set(local, label)
    })
}

#[inline]
pub(crate) fn set(local: &guard::Local, label: LabelId) -> LabelId {
    let before = local.label.replace(label);
    if before != label {
        notify(local, label);
    }
    before
}

/// Called when the calling thread has another label.
pub type Listener = fn(&guard::Local, LabelId);

/// The listener, or null.
static LISTENER: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// From here on `listener` is called at each change of a thread's label, for good.
pub fn listen(listener: Listener) {
    LISTENER.store(listener as *mut (), Ordering::Release);
}

#[inline]
fn notify(local: &guard::Local, label: LabelId) {
    let listener = LISTENER.load(Ordering::Acquire);
    if !listener.is_null() {
        // SAFETY: only `listen` stores there, what is such a function.
        unsafe { std::mem::transmute::<*mut (), Listener>(listener)(local, label) }
    }
}

/// A range of the calling thread was opened or closed, which makes a
/// difference inside a backward pass.
#[inline]
fn opened_or_closed(local: &guard::Local) {
    if local.work.get() != Work::Forward {
        local.work.set(Work::Unknown);
    }
}

/// The label of this name inside `parent`; `parent` itself if there is no room for more.
pub fn named(parent: LabelId, kind: LabelKind, name: &[u8]) -> LabelId {
    store::store().and_then(|s| s.intern(parent, kind, name)).unwrap_or(parent)
}

/// Opens a range inside the current one. Returns how many were open.
pub fn push(name: &[u8]) -> u32 {
    open(|current| named(current, LabelKind::Range, name))
}

/// Opens the range of a module that is called ([`store::Store::module`]).
pub fn push_module(name: &[u8]) -> u32 {
    open(|current| store::store().map_or(current, |s| s.module(current, name)))
}

/// The same, with a place that remembers the label and what it was in the last time.
pub fn push_module_again(name: &[u8], last: &AtomicU64) -> u32 {
    open(|current| {
        let (then, label) = unpair(last.load(Ordering::Relaxed));
        if then == current && label != NO_LABEL {
            return label;
        }
        let label = store::store().map_or(current, |s| s.module(current, name));
        last.store(u64::from(current) << 32 | u64::from(label), Ordering::Relaxed);
        label
    })
}

fn unpair(words: u64) -> (LabelId, LabelId) {
    ((words >> 32) as LabelId, words as LabelId)
}

/// Opens a phase, and writes its beginning down. What a backward pass computes again belongs to
/// that pass, and a phase inside itself is the same one. What an optimizer's step begins, by the
/// closure that it was given, is no part of the step.
pub fn push_phase(name: &[u8]) -> u32 {
    let inside = |phase| store::existing().is_some_and(|s| s.is_inside(current(), phase));
    let again = inside(store::BACKWARD) || inside(name);
    if !again {
        mark(name, Point::Begin, 0);
    }
    open(|current| {
        if again {
            return current;
        }
        let step = store::OPTIMIZER_STEP;
        let around = store::existing().map_or(current, |s| s.around(current, step));
        named(around, LabelKind::Phase, name)
    })
}

fn open(label: impl FnOnce(LabelId) -> LabelId) -> u32 {
    OPEN.with(|open| {
        let depth = open.depth.get();
        open.depth.set(depth.saturating_add(1));
        guard::local(|local| {
            opened_or_closed(local);
            if let Some(place) = open.before.get(depth as usize) {
                place.set(set(local, label(local.label.get())));
            }
        });
        depth
    })
}

/// Closes the innermost range of this thread. Returns how many are still
/// open, `None` if there was none.
pub fn pop() -> Option<u32> {
    OPEN.with(|open| {
        let depth = open.depth.get().checked_sub(1)?;
        open.depth.set(depth);
        guard::local(opened_or_closed);
        let Some(place) = open.before.get(depth as usize) else { return Some(depth) };
        let was = guard::local(|local| set(local, place.get()));
        if was != place.get()
            && let Some(store) = store::existing()
            && store.kind(was) == LabelKind::Phase
        {
            mark(&store.name(was), Point::End, 0);
        }
        Some(depth)
    })
}

/// How many ranges of this thread are open.
pub fn opened() -> u32 {
    OPEN.with(|open| open.depth.get())
}

/// Closes ranges until `depth` are open: those that an exception left behind.
pub fn unwind(depth: u32) {
    let excess = OPEN.with(|open| open.depth.get().saturating_sub(depth));
    for _ in 0..excess {
        pop();
    }
}

/// Writes down that the program passed a point. Nothing if nothing is recorded yet.
pub fn mark(name: &[u8], kind: Point, number: u64) {
    if crate::record::switch::recorder().is_none() {
        return;
    }
    let label = named(NO_LABEL, LabelKind::Range, name);
    guard::observe(|recorder, local| {
        let mark = MarkEvent { label: u64::from(label), number, kind: kind as u64 };
        recorder.write(&event(local, mark.event()));
    });
}

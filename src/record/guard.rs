//! What a thread knows of itself while it is in a hook, and the promise that a hook does no harm.
//!
//! The words below are thread-local without a destructor: they work in a thread that is being torn down,
//! and a library with no thread-local destructor can't crash a `dlclose`.
//!
//! [`observe`] is the only way into the recorder. It does nothing in a thread that is already inside (a
//! runtime call that calls the driver is one event, and what we call ourselves is none of our business), and a
//! panic inside it switches memtrace off, says so once, and leaves the program alone.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use memtrace_format::blackbox::at;
use memtrace_format::event::{LabelId, NO_LABEL, Pool};

use crate::labels::{operators, torch::Work};
use crate::record::{Recorder, clock, this_thread};
use crate::stack::Mine;

/// An allocation of PyTorch's that is under way in this thread: asked for, not yet reported.
#[derive(Clone, Copy)]
pub struct Request {
    /// Bytes asked for.
    pub size: u64,
    /// The stack at the request.
    pub stack: u32,
}

/// The most CUDA events one free can wait for that are told apart (one for each stream that used it).
pub const MAX_WAITS: usize = 64;

/// What the thread knows of itself; what every allocation needs, first.
#[repr(C, align(64))]
pub struct Local {
    inside: Cell<bool>,
    /// Visits to the recorder, of which some are timed.
    visits: Cell<u8>,
    tid: Cell<u32>,
    /// Device chosen by the thread's last `cudaSetDevice`.
    pub device: Cell<i8>,
    /// What the thread says it is doing ([`crate::labels`]).
    pub label: Cell<LabelId>,
    /// What it does for autograd ([`crate::labels::torch::work`]).
    pub work: Cell<Work>,
    /// The block that was handed out to the thread last, if a tracker asks and none was taken back since.
    pub taken: Cell<u64>,
    /// PyTorch's operators on this thread.
    pub operators: operators::Mine,
    /// How many of `recorded` hold one.
    pub recorded_len: Cell<usize>,
    /// PyTorch's request that is under way.
    pub request: Cell<Option<Request>>,
    /// From which pool it is served, as far as PyTorch's allocator has found out by now.
    pub pool: Cell<Pool>,
    /// What PyTorch's allocator was last answered when it asked whether this thread's stream captures a graph.
    pub capturing: Cell<bool>,
    /// What its stacks need.
    pub stacks: Mine,
    /// Handle of PyTorch's current stream and its device, if nobody has set another since that was asked.
    pub current_stream: Cell<Option<(u64, i8)>>,
    /// PyTorch's stream that was last asked for its handle: device word and id, and the handle.
    pub stream: Cell<(u64, u64, u64)>,
    /// What the last `cudaMemGetInfo` of PyTorch's allocator said is free.
    pub device_free: Cell<u64>,
    /// Pieces that PyTorch's allocator mapped since it last set access: bytes, and the largest piece.
    pub mapped: Cell<(u64, u64)>,
    /// Handles of CUDA events that PyTorch's allocator recorded since its last report, and the streams they are on.
    pub recorded: [Cell<(u64, u64)>; MAX_WAITS],
}

thread_local! {
    static LOCAL: Local = const {
        Local {
            inside: Cell::new(false),
            visits: Cell::new(0),
            tid: Cell::new(0),
            device: Cell::new(0),
            label: Cell::new(NO_LABEL),
            work: Cell::new(Work::Unknown),
            taken: Cell::new(0),
            operators: operators::Mine::new(),
            request: Cell::new(None),
            pool: Cell::new(Pool::DEFAULT),
            stream: Cell::new((0, 0, 0)),
            current_stream: Cell::new(None),
            capturing: Cell::new(false),
            device_free: Cell::new(0),
            stacks: Mine::new(),
            recorded: [const { Cell::new((0, 0)) }; MAX_WAITS],
            recorded_len: Cell::new(0),
            mapped: Cell::new((0, 0)),
        }
    };
}

impl Local {
    /// Kernel id of the thread.
    pub fn tid(&self) -> u32 {
        if self.tid.get() == 0 {
            // SAFETY: gettid has no preconditions.
            self.tid.set(unsafe { libc::gettid() } as u32);
        }
        self.tid.get()
    }

    /// Is this one of every `n` visits to the recorder? `n` divides 256.
    pub fn is_sampled(&self, n: u8) -> bool {
        self.visits.get().is_multiple_of(n)
    }

    /// Takes the events recorded since the last report.
    pub fn take_recorded(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let n = self.recorded_len.replace(0);
        self.recorded[..n.min(MAX_WAITS)].iter().map(Cell::get)
    }

    /// See [`observe`].
    #[inline]
    pub fn observe<R>(&self, f: impl FnOnce(&'static Recorder, &Local) -> R) -> Option<R> {
        let recorder = crate::recorder()?;
        if self.inside.replace(true) {
            return None;
        }
        let result = if self.stacks.has_room() {
            self.visit(recorder, f)
        } else {
            self.stacks.aside(|| self.visit(recorder, f))
        };
        self.inside.set(false);
        result
    }

    #[inline]
    fn visit<R>(
        &self,
        recorder: &'static Recorder,
        f: impl FnOnce(&'static Recorder, &Local) -> R,
    ) -> Option<R> {
        let visit = self.visits.get().wrapping_add(1);
        self.visits.set(visit);
        let began = if visit == 0 { clock::now_ns() } else { 0 };
        let result = catch_unwind(AssertUnwindSafe(|| f(recorder, self)));
        if visit == 0 {
            let header = recorder.blackbox.header();
            header[at::SAMPLED].fetch_add(1, Ordering::Relaxed);
            let took = clock::now_ns().saturating_sub(began);
            header[at::SAMPLED_NS].fetch_add(took, Ordering::Relaxed);
        }
        result.inspect_err(|_| crate::switch_off("an internal error")).ok()
    }

    /// A forked child is another thread with another id.
    pub fn forget_thread(&self) {
        self.tid.set(0);
        self.inside.set(false);
        self.request.set(None);
        self.recorded_len.set(0);
    }
}

/// The words of this thread.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "a frame between a hook and what it calls is one more to walk"
)]
pub fn local<R>(f: impl FnOnce(&Local) -> R) -> R {
    let mut local: *const Local = this_thread::get();
    if local.is_null() {
        local = LOCAL.with(std::ptr::from_ref);
        this_thread::set(local);
    }
    // SAFETY: a thread-local variable without a destructor is there until the thread is gone.
    f(unsafe { &*local })
}

/// Runs `f` with the recorder if it is on and this thread is not inside already.
#[inline]
pub fn observe<R>(f: impl FnOnce(&'static Recorder, &Local) -> R) -> Option<R> {
    crate::recorder()?;
    local(|local| local.observe(f))
}

/// Runs a real CUDA call so that what it calls in turn is not taken for the program's own calls.
pub fn nested<R>(f: impl FnOnce() -> R) -> R {
    let was = local(|l| l.inside.replace(true));
    let result = f();
    local(|l| l.inside.set(was));
    result
}

/// Runs `f` as if the thread were outside: for what CUDA does inside a call of the program's and what is worth an event
/// of its own. Never inside the recorder.
pub fn reopened<R>(f: impl FnOnce() -> R) -> R {
    let was = local(|l| l.inside.replace(false));
    let result = f();
    local(|l| l.inside.set(was));
    result
}

/// Runs something that may open, write or wait. A thread that is being cancelled (`pthread_cancel`) would end in there,
/// by unwinding through our frames, which ends the process.
pub fn uncancelled<R>(f: impl FnOnce() -> R) -> R {
    const DISABLE: c_int = 1;
    unsafe extern "C" {
        fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    }
    let mut before = 0;
    // SAFETY: POSIX's function; it changes a word of this thread's, and the place for the old value is ours.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = f();
    // SAFETY: as above; the old value comes from the same function.
    unsafe { pthread_setcancelstate(before, &raw mut before) };
    result
}

/// Is this thread inside the recorder or inside a call that is being recorded?
pub fn inside() -> bool {
    local(|l| l.inside.get())
}

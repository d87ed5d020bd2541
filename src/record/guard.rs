//! What a thread knows of itself while it is in a hook, and the promise that a hook does no harm.
//!
//! The state below is thread-local, without a destructor. So it works in a thread that is being
//! torn down, and a `dlclose` of this library can't crash.
//!
//! [`observe`] is the only way into the recorder. It does nothing in a thread that is already
//! inside: a runtime call that calls the driver is one event, and what we call ourselves is none. A
//! panic inside it switches memtrace off, with one message, and leaves the program alone.
//!
//! A program may leave a call in other ways than by its return. A C++ exception, `pthread_exit`
//! and a cancellation unwind the stack, which restores the thread's state on the way
//! ([`Step`]). `siglongjmp` out of a signal handler restores nothing. So the state is restored
//! before the jump happens ([`end_below`]).

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{Ordering, compiler_fence};

use memtrace_format::blackbox::at;
use memtrace_format::event::{Event, LabelId, NO_LABEL, Pool};

use crate::os::clock;
use crate::record::activity::{Operators, Work};
use crate::record::{Recorder, this_thread};
use crate::stack::Mine;

/// A thread is outside: what it calls is the program's doing.
const OUTSIDE: u8 = 0;
/// It is at work of ours.
const NESTED: u8 = 1;
/// It is writing something down.
const RECORDING: u8 = 2;
/// It is inside a real call that the program has made, by one of our
/// hooks. Nothing of ours is held.
const CALLING: u8 = 3;
/// It is inside one that is not recorded, because it has interrupted us.
const UNRECORDED: u8 = 4;

/// An allocation of PyTorch's that is under way in this thread: asked for, not yet reported.
#[derive(Clone, Copy)]
pub struct Request {
    /// Bytes asked for.
    pub size: u64,
    /// The stack at the request.
    pub stack: u32,
}

/// The most CUDA events that one free can wait for here (one for each stream that used the block).
pub const MAX_WAITS: usize = 64;

/// What the thread knows of itself; what every allocation needs, first.
#[repr(C, align(64))]
pub struct Local {
    inside: Cell<u8>,
    /// The last step that it took inside, on its stack; null outside.
    step: Cell<*const Step>,
    /// Visits to the recorder, of which some are timed.
    visits: Cell<u8>,
    tid: Cell<u32>,
    /// Device chosen by the thread's last `cudaSetDevice`.
    pub device: Cell<i8>,
    /// What the thread says it is doing ([`crate::labels`]).
    pub label: Cell<LabelId>,
    /// What it does for autograd ([`crate::pytorch::backward::work`]).
    pub work: Cell<Work>,
    /// The block that was handed out to the thread last, if a tracker asks
    /// and none was taken back since.
    pub taken: Cell<u64>,
    /// PyTorch's operators on this thread.
    pub operators: Operators,
    /// How many of `recorded` hold one.
    pub recorded_len: Cell<usize>,
    /// PyTorch's request that is under way.
    pub request: Cell<Option<Request>>,
    /// From which pool it is served, as far as PyTorch's allocator has found out by now.
    pub pool: Cell<Pool>,
    /// What PyTorch's allocator was last answered when it asked whether
    /// this thread's stream captures a graph.
    pub capturing: Cell<bool>,
    /// The real function that it is in.
    called: Cell<usize>,
    /// What its stacks need.
    pub stacks: Mine,
    /// Handle of PyTorch's current stream and its device, if nobody has
    /// set another since that was asked.
    pub current_stream: Cell<Option<(u64, i8)>>,
    /// PyTorch's stream that was last asked for its handle: device word and id, and the handle.
    pub stream: Cell<(u64, u64, u64)>,
    /// What the last `cudaMemGetInfo` of PyTorch's allocator said is free.
    pub device_free: Cell<u64>,
    /// Pieces that PyTorch's allocator mapped since it last set access:
    /// bytes, and the largest piece.
    pub mapped: Cell<(u64, u64)>,
    /// Pieces of physical memory that PyTorch's allocator has, or is about to give back, and
    /// that are in no segment of the ledger.
    pub pieces: Cell<u32>,
    /// Handles of CUDA events that PyTorch's allocator recorded since its last
    /// report, and the streams they are on.
    pub recorded: [Cell<(u64, u64)>; MAX_WAITS],
}

thread_local! {
    static LOCAL: Local = const {
        Local {
            inside: Cell::new(OUTSIDE),
            step: Cell::new(std::ptr::null()),
            visits: Cell::new(0),
            tid: Cell::new(0),
            device: Cell::new(0),
            label: Cell::new(NO_LABEL),
            work: Cell::new(Work::Unknown),
            taken: Cell::new(0),
            operators: Operators::new(),
            request: Cell::new(None),
            pool: Cell::new(Pool::DEFAULT),
            stream: Cell::new((0, 0, 0)),
            current_stream: Cell::new(None),
            capturing: Cell::new(false),
            device_free: Cell::new(0),
            called: Cell::new(0),
            stacks: Mine::new(),
            recorded: [const { Cell::new((0, 0)) }; MAX_WAITS],
            recorded_len: Cell::new(0),
            mapped: Cell::new((0, 0)),
            pieces: Cell::new(0),
        }
    };
}

/// What happens, on this thread, here and now.
#[inline]
pub fn event(local: &Local, said: Event) -> Event {
    Event {
        device: local.device.get(),
        time_ns: clock::now_ns(),
        thread: local.tid(),
        label: local.label.get(),
        ..said
    }
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
        let recorder = crate::record::switch::recorder()?;
        if self.inside.get() != OUTSIDE {
            self.count_if_missed(recorder, || false);
            return None;
        }
        let mut step = Step::new();
        let _until_done = self.begin(&mut step, RECORDING);
        if self.stacks.has_room() {
            self.visit(recorder, f)
        } else {
            self.stacks.aside(|| self.visit(recorder, f))
        }
    }

    /// From now on the thread is inside something, until what this returns is dropped.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "some stores, once for each event")]
    fn begin<'a>(&'a self, step: &'a mut Step, inside: u8) -> Inside<'a> {
        *step =
            Step { inside: self.inside.get(), called: self.called.get(), before: self.step.get() };
        // In this order, and back in the other one: a signal handler of
        // this thread's may look, or jump away.
        compiler_fence(Ordering::SeqCst);
        self.step.set(step);
        compiler_fence(Ordering::SeqCst);
        self.inside.set(inside);
        compiler_fence(Ordering::SeqCst);
        Inside { local: self, step }
    }

    /// Puts back what was before this step.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as above")]
    fn undo(&self, step: &Step) {
        compiler_fence(Ordering::SeqCst);
        self.inside.set(step.inside);
        self.called.set(step.called);
        compiler_fence(Ordering::SeqCst);
        self.step.set(step.before);
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
        result.inspect_err(|_| crate::record::switch::switch_off("an internal error")).ok()
    }

    /// Counts what can't be recorded. While a thread writes, only a signal handler can come in
    /// between. To record what that does, it would have to wait for what it has interrupted. The
    /// same is so during work of ours, if `is_programs` says that the call is the program's.
    #[cold]
    fn count_if_missed(&self, recorder: &Recorder, is_programs: impl FnOnce() -> bool) {
        let counts = match self.inside.get() {
            RECORDING => true,
            NESTED | UNRECORDED => is_programs(),
            _ => false,
        };
        if counts {
            recorder.blackbox.header()[at::INTERRUPTED].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A forked child is another thread with another id.
    pub fn forget_thread(&self) {
        self.tid.set(0);
        self.inside.set(OUTSIDE);
        self.request.set(None);
        self.recorded_len.set(0);
    }
}

/// What a thread was inside before it went inside something else. On its stack, where it does so.
struct Step {
    inside: u8,
    called: usize,
    before: *const Step,
}

impl Step {
    const fn new() -> Step {
        Step { inside: OUTSIDE, called: 0, before: std::ptr::null() }
    }
}

/// A thread is inside something. Over when dropped, also by what unwinds.
struct Inside<'a> {
    local: &'a Local,
    step: *const Step,
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: it outlives this, as `begin` says.
        self.local.undo(unsafe { &*self.step });
    }
}

/// The thread is about to leave everything on its own stack below this address, by `longjmp`. So
/// the steps that it took there end, and those on other stacks, which are signal handlers'. What it
/// was about to record is not recorded.
pub fn end_below(below: usize) {
    local(|local| {
        while let step = local.step.get()
            && !step.is_null()
            && local.stacks.is_left(step as usize, below)
        {
            if local.inside.get() == RECORDING
                && let Some(recorder) = crate::record::switch::recorder()
            {
                recorder.ring.leave();
            }
            // SAFETY: the steps that a thread is inside are on stacks that are still in use.
            local.undo(unsafe { &*step });
            local.stacks.leave();
        }
    });
}

/// Says where the words of this thread are.
#[cold]
fn init() -> *const Local {
    LOCAL.with(|local| {
        // SAFETY: a thread-local variable without a destructor is there until the thread is gone.
        unsafe { local.stacks.settle() };
        this_thread::set(local);
        std::ptr::from_ref(local)
    })
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
        local = init();
    }
    // SAFETY: a thread-local variable without a destructor is there until the thread is gone.
    f(unsafe { &*local })
}

/// Runs `f` with the recorder if it is on and this thread is not inside already.
#[inline]
pub fn observe<R>(f: impl FnOnce(&'static Recorder, &Local) -> R) -> Option<R> {
    crate::record::switch::recorder()?;
    local(|local| local.observe(f))
}

fn in_state<R>(state: u8, f: impl FnOnce() -> R) -> R {
    local(|local| {
        let mut step = Step::new();
        let _until_done = local.begin(&mut step, state);
        f()
    })
}

/// Runs work of ours so that what it calls is not taken for the program's own calls.
pub fn nested<R>(f: impl FnOnce() -> R) -> R {
    in_state(NESTED, f)
}

fn real<R>(state: u8, function: usize, call: impl FnOnce() -> R) -> R {
    local(|local| {
        let mut step = Step::new();
        let _until_done = local.begin(&mut step, state);
        local.called.set(function);
        call()
    })
}

/// Makes a real call of the program's, to this function. Not inside the recorder.
pub fn calling<R>(function: usize, call: impl FnOnce() -> R) -> R {
    real(CALLING, function, call)
}

/// Makes a real call that is not recorded.
pub fn unrecorded<R>(function: usize, call: impl FnOnce() -> R) -> R {
    real(UNRECORDED, function, call)
}

/// Runs `f` as if the thread were outside: for what is an event of its own although it happens
/// inside a real call. Never inside the recorder.
pub fn as_if_outside<R>(f: impl FnOnce() -> R) -> R {
    in_state(OUTSIDE, f)
}

/// Is there anything that a jump could leave? Also true in the moments
/// before a thread is inside, and after.
pub fn has_steps() -> bool {
    local(|l| !l.step.get().is_null())
}

/// Is this thread inside the recorder or inside a call that is being recorded?
pub fn inside() -> bool {
    local(|l| l.inside.get() != OUTSIDE)
}

/// Is it inside a real call that is being recorded?
#[inline]
pub fn is_calling() -> bool {
    local(|l| l.inside.get() == CALLING)
}

/// The real function that it is in.
pub fn called() -> usize {
    local(|l| l.called.get())
}

/// A call came while this thread is inside, and is not recorded. Counts it if it should have been.
/// `is_programs` decides where that depends on the caller.
pub fn count_if_missed(is_programs: impl FnOnce() -> bool) {
    if let Some(recorder) = crate::record::switch::recorder() {
        local(|local| local.count_if_missed(recorder, is_programs));
    }
}

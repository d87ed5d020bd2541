//! The background thread: keeps room in the ring, and writes a snapshot when memory has run out, at a new peak,
//! when the clock or a signal says so.
//!
//! It is one thread with a small stack and all signals blocked, made with `pthread_create` (the standard
//! library's own threads register thread-local destructors, which a library that may be unloaded must not
//! have). A hook talks to it through two words and a futex: storing a number, and at most one system call.
//!
//! Out of memory is noted as the ticket of the event, and the snapshot shows the state *at that ticket*,
//! however late the thread gets to it. A program that catches the error and goes on may fail thousands of
//! times: the first few failures get a file, then one every [`OOM_PAUSE_NS`].
//!
//! The C library ends a process whose main thread has left by `pthread_exit` when its last thread ends, and it counts this one,
//! too. So the thread ends when it is the only one left ([`crate::last`]): then it is the last one, and the C library calls `exit`.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use memtrace_naming::Moment;

use crate::dump;
use crate::last;
use crate::measure;
use crate::os::clock;
use crate::os::futex;
use crate::os::message;
use crate::os::threads;
use crate::record::Recorder;

/// Failures that get a snapshot each, however close together.
const OOM_FIRST: u64 = 3;
/// Later failures get a snapshot at most this often, nanoseconds.
const OOM_PAUSE_NS: u64 = 60_000_000_000;
/// See [`Emitter::farewell`].
const ASKED: u32 = 1;
/// See [`Emitter::farewell`].
const DONE: u32 = 2;

/// The thread's mailbox.
pub struct Emitter {
    /// Changes with every call for attention; the futex word.
    calls: AtomicU32,
    /// Ticket + 1 of the first out-of-memory event that nobody has looked at yet; 0 if none.
    oom: AtomicU64,
    /// Ticket + 1 of the last new peak that nobody has looked at yet; 0 if none.
    peak: AtomicU64,
    /// Bytes that the next new peak must reach; `u64::MAX` if nobody asked for peaks.
    next_peak: AtomicU64,
    /// A signal has come.
    signalled: AtomicU32,
    /// How full the devices are is worth asking.
    to_measure: AtomicU32,
    /// The last snapshot is being written, or is: no other comes after it.
    closed: AtomicU32,
    /// There is a thread that looks into all this.
    running: AtomicBool,
    /// The process ends by `_exit`: asked for ([`ASKED`]), and done ([`DONE`]). A futex word.
    farewell: AtomicU32,
    written: Mutex<OomFiles>,
}

#[derive(Default)]
struct OomFiles {
    count: u64,
    last_ns: u64,
    passed_over: u64,
}

impl Default for Emitter {
    fn default() -> Self {
        Emitter::new()
    }
}

impl Emitter {
    /// An empty mailbox; no thread yet.
    pub const fn new() -> Emitter {
        Emitter {
            calls: AtomicU32::new(0),
            oom: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            next_peak: AtomicU64::new(u64::MAX),
            signalled: AtomicU32::new(0),
            to_measure: AtomicU32::new(0),
            closed: AtomicU32::new(0),
            running: AtomicBool::new(false),
            farewell: AtomicU32::new(0),
            written: Mutex::new(OomFiles { count: 0, last_ns: 0, passed_over: 0 }),
        }
    }

    /// Wakes the thread. Callable from a hook.
    pub fn wake(&self) {
        self.calls.fetch_add(1, Ordering::Release);
        futex::wake_all(&self.calls);
    }

    /// Notes that the event with this ticket says out of memory. Callable from a hook.
    pub fn out_of_memory(&self, ticket: u64) {
        // One that is waiting already is nearer to the cause.
        let _ = self.oom.compare_exchange(0, ticket + 1, Ordering::AcqRel, Ordering::Relaxed);
        self.wake();
    }

    /// Notes that PyTorch has `allocated` bytes on one device after the event with this ticket. Callable from
    /// a hook.
    pub fn allocated(&self, recorder: &Recorder, allocated: u64, ticket: u64) {
        if allocated < self.next_peak.load(Ordering::Relaxed) {
            return;
        }
        let step = recorder.config.peak_step.unwrap_or(u64::MAX);
        self.next_peak.store(allocated.saturating_add(step), Ordering::Relaxed);
        self.peak.store(ticket + 1, Ordering::Release);
        self.wake();
    }

    /// Notes that the user's signal has come. Callable from a signal handler.
    pub fn signal(&self) {
        self.signalled.store(1, Ordering::Release);
        self.wake();
    }

    /// Notes that something without a size has come or gone. Callable from a hook.
    pub fn measure(&self) {
        self.to_measure.store(1, Ordering::Release);
        self.wake();
    }

    /// The same, when the thread looks again anyway.
    pub fn measure_later(&self) {
        self.to_measure.store(1, Ordering::Release);
    }

    /// Writes what the user asked for beside out of memory: peaks, signals, the clock.
    fn serve_wishes(&self, recorder: &Recorder, next: &mut u64) {
        if self.closed.load(Ordering::Acquire) != 0 {
            return;
        }
        let peak = self.peak.swap(0, Ordering::AcqRel);
        if peak != 0 {
            dump::to_folder(recorder, Moment::Ticket(peak), dump::Reason::Peak);
        }
        if self.signalled.swap(0, Ordering::AcqRel) != 0 {
            dump::to_folder(recorder, dump::NOW, dump::Reason::Signal);
        }
        if let Some(every) = recorder.config.every_ns {
            let now = clock::now_ns();
            if now >= *next {
                *next = now + every;
                dump::to_folder(recorder, dump::NOW, dump::Reason::Clock);
            }
        }
    }

    /// No more snapshots by the clock, at peaks or by signal: the last one comes now.
    pub fn close(&self) {
        self.closed.store(1, Ordering::Release);
    }

    /// Has the thread write the last snapshot, and waits for it. Allocates nothing and takes no lock: the
    /// caller may be in a signal handler.
    pub fn farewell(&self, patience_ns: u64) {
        if !self.running.load(Ordering::Acquire) {
            return; // what is in the black box stays there
        }
        let end = clock::now_ns() + patience_ns;
        if self.farewell.swap(ASKED, Ordering::AcqRel) == 0 {
            self.wake();
        }
        while self.farewell.load(Ordering::Acquire) == ASKED && clock::now_ns() < end {
            futex::sleep_on(&self.farewell, ASKED);
        }
    }

    /// The thread is gone: nobody waits for it.
    fn gone(&self) {
        self.running.store(false, Ordering::Release);
        self.farewell.store(DONE, Ordering::Release);
        futex::wake_all(&self.farewell);
    }

    fn serve_farewell(&self, recorder: &Recorder) {
        if self.farewell.load(Ordering::Acquire) == ASKED {
            crate::life::last_snapshot(recorder);
            self.farewell.store(DONE, Ordering::Release);
            futex::wake_all(&self.farewell);
        }
    }

    /// Writes the snapshot of an out-of-memory event that is waiting, if one is. Also called at exit, where
    /// the thread may not have come to it.
    pub fn serve_oom(&self, recorder: &Recorder) {
        let mut files = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = self.oom.swap(0, Ordering::AcqRel);
        if ticket == 0 {
            return;
        }
        let now = clock::now_ns();
        if files.count >= OOM_FIRST && now.saturating_sub(files.last_ns) < OOM_PAUSE_NS {
            files.passed_over += 1;
            if files.passed_over == 1 {
                message!(
                    "out of memory again; from now on a snapshot of that at most once a minute (the history has all of them)"
                );
            }
            return;
        }
        files.count += 1;
        files.last_ns = now;
        // The ticket is stored plus one, so this shows the state after the event.
        dump::to_folder(recorder, Moment::Ticket(ticket), dump::Reason::Oom);
    }
}

/// Starts the thread for this recorder. Without it, producers retire for themselves.
pub fn start(recorder: &'static Recorder) {
    let first = recorder.config.peak_step.unwrap_or(u64::MAX);
    recorder.emitter.next_peak.store(first, Ordering::Relaxed);
    if let Some(signal) = recorder.config.signal {
        listen(signal);
    }
    // SAFETY: asks for the calling thread's own mask.
    let mask = unsafe {
        let mut mask = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut mask);
        mask
    };
    let given = Box::into_raw(Box::new(Start { recorder, mask }));
    recorder.emitter.running.store(true, Ordering::Release);
    // SAFETY: the recorder lives for ever, and `run` alone gets the box; without a thread it is ours again.
    unsafe {
        if !threads::start(run, given.cast()) {
            drop(Box::from_raw(given));
            recorder.emitter.gone();
            message!("no background thread could be started; recording goes on without it");
        }
    }
}

/// What the thread is given.
struct Start {
    recorder: &'static Recorder,
    /// The signals that its maker blocks.
    mask: libc::sigset_t,
}

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passes what it has boxed, to this function alone.
    let Start { recorder, mask } = *unsafe { Box::from_raw(start.cast::<Start>()) };
    // What this thread does is none of the program's doing.
    crate::record::guard::nested(|| {
        let mut next = recorder.started_ns + recorder.config.every_ns.unwrap_or(0);
        while crate::is_on(recorder) {
            let seen = recorder.emitter.calls.load(Ordering::Acquire);
            let work = std::panic::AssertUnwindSafe(|| {
                if recorder.emitter.to_measure.swap(0, Ordering::AcqRel) != 0 {
                    measure::sample(recorder);
                }
                recorder.emitter.serve_oom(recorder);
                recorder.emitter.serve_wishes(recorder, &mut next);
                recorder.emitter.serve_farewell(recorder);
                recorder.retire_ahead();
                recorder.stacks.refresh();
                crate::hooks::routes::forget_if_unloaded();
            });
            if std::panic::catch_unwind(work).is_err() {
                crate::switch_off("an internal error in the background thread");
                break;
            }
            if last::is_this_thread() {
                break;
            }
            futex::sleep_on(&recorder.emitter.calls, seen);
        }
    });
    recorder.emitter.gone();
    // If it is the last one, the program's exit handlers run here.
    // SAFETY: a set of signals that came from the same function.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut()) };
    std::ptr::null_mut()
}

/// What the program did with the user's signal before.
static BEFORE: std::sync::OnceLock<libc::sigaction> = std::sync::OnceLock::new();

/// Catches the signal; a handler that the program had goes on being called.
fn listen(signal: i32) {
    // SAFETY: plain system calls on initialised records; the handler only stores numbers and wakes a futex.
    unsafe {
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_signal as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigemptyset(&raw mut ours.sa_mask);
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(signal, std::ptr::null(), &raw mut before) != 0 {
            return;
        }
        let _ = BEFORE.set(before);
        libc::sigaction(signal, &raw const ours, std::ptr::null_mut());
    }
}

extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    if let Some(recorder) = crate::recorder() {
        recorder.emitter.signal();
    }
    let Some(before) = BEFORE.get() else { return };
    if before.sa_sigaction == libc::SIG_DFL || before.sa_sigaction == libc::SIG_IGN {
        return;
    }
    // SAFETY: the program's own handler, called as it asked to be called.
    unsafe {
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            let f: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) =
                std::mem::transmute(before.sa_sigaction);
            f(signal, info, context);
        } else {
            let f: extern "C" fn(i32) = std::mem::transmute(before.sa_sigaction);
            f(signal);
        }
    }
}

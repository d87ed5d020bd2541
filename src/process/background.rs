//! The background thread keeps room in the ring and writes snapshots: when memory has run out, at a
//! new peak, by the clock, or at a signal.
//!
//! It is one thread with a small stack and all signals blocked. It is made with
//! `pthread_create`, because the standard library's own threads register thread-local
//! destructors. A library that may be unloaded must not have those. A hook talks to it through
//! its mailbox ([`crate::record::mailbox`]).
//!
//! A failure is noted as the ticket of its event. The snapshot shows the state *at that ticket*,
//! however late the thread gets to it. A program that catches the error and goes on may fail
//! thousands of times: the first few failures get a file, then one every [`OOM_PAUSE_NS`].
//!
//! The C library ends a process whose main thread has left by `pthread_exit` when its last thread
//! ends, and it counts this one, too. So the thread ends when it is the only one left
//! ([`crate::process::last`]): then it is the last one, and the C library calls `exit`.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_snapshot::Moment;

use crate::os::clock;
use crate::os::locks::SetOnce;
use crate::os::memory;
use crate::os::message;
use crate::os::threads;
use crate::process::Process;
use crate::process::dump;
use crate::process::last;
use crate::process::life;
use crate::process::measure;
use crate::record::Recorder;

/// Failures that get a snapshot each, however close together.
const OOM_FIRST: u64 = 3;
/// Later failures get a snapshot at most this often, nanoseconds.
const OOM_PAUSE_NS: u64 = 60_000_000_000;
/// Snapshots of failures so far.
#[derive(Default)]
pub struct OomFiles {
    count: u64,
    last_ns: u64,
    passed_over: u64,
}

/// Writes what the user asked for beside out of memory: peaks, signals, the clock.
fn serve_requests(process: &Process, next: &mut u64) {
    let Process { recorder, .. } = process;
    if recorder.mailbox.is_closed() {
        return;
    }
    if let Some(peak) = recorder.mailbox.take_peak() {
        dump::to_folder(process, Moment::Ticket(peak), dump::Reason::Peak);
    }
    if recorder.mailbox.take_signal() {
        dump::to_folder(process, dump::NOW, dump::Reason::Signal);
    }
    if let Some(every) = recorder.config.every_ns {
        let now = clock::now_ns();
        if now >= *next {
            *next = now + every;
            dump::to_folder(process, dump::NOW, dump::Reason::Clock);
        }
    }
}

/// Writes the snapshot of an out-of-memory event that is waiting, if one is. Also called at exit,
/// where the thread may not have come to it.
pub fn serve_oom(process: &Process) {
    let mut files = process.oom.lock();
    let Some(ticket) = process.recorder.mailbox.take_oom() else { return };
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
    dump::to_folder(process, Moment::Ticket(ticket), dump::Reason::Oom);
}

/// Says once why stacks have no Python frames where a user expects them; the children of forks
/// don't repeat it. Also at the end, where the thread may not have come to it.
pub fn say_what_stacks_lack(recorder: &Recorder) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Some(why) = recorder.stacks.python_refused()
        && !recorder.config.quiet
        && !WARNED.swap(true, Ordering::Relaxed)
    {
        message!("stacks have no Python frames: {}; memtrace doctor says what helps", why.text());
    }
}

/// Starts the thread for this recorder. Without it, producers retire for themselves.
pub fn start(process: &'static Process) {
    let recorder = &process.recorder;
    if let Some(signal) = recorder.config.signal {
        listen(signal);
    }
    // SAFETY: asks for the calling thread's own mask.
    let mask = unsafe {
        let mut mask = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut mask);
        mask
    };
    let given = Box::into_raw(Box::new(Start { process, mask }));
    recorder.mailbox.begun();
    // SAFETY: the recorder lives for ever, and `run` alone gets the box;
    // without a thread it is ours again.
    unsafe {
        if !threads::start(run, given.cast()) {
            drop(Box::from_raw(given));
            recorder.mailbox.gone();
            message!("no background thread could be started; recording goes on without it");
        }
    }
}

/// What the thread is given.
#[derive(Clone, Copy)]
struct Start {
    process: &'static Process,
    /// The signals that its maker blocks.
    mask: libc::sigset_t,
}

extern "C" fn run(start: *mut c_void) -> *mut c_void {
    memory::be_frugal();
    // It is left where it is: what is given back makes the C library set an arena aside.
    // SAFETY: `start` passes what it has boxed, and the box is nobody else's.
    let Start { process, mask } = *unsafe { &*start.cast::<Start>() };
    // What this thread does is none of the program's doing.
    let recorder = &process.recorder;
    crate::record::guard::nested(|| {
        let mut next = recorder.started_ns + recorder.config.every_ns.unwrap_or(0);
        while crate::record::switch::is_on(recorder) {
            let calls = recorder.mailbox.calls();
            let work = std::panic::AssertUnwindSafe(|| {
                say_what_stacks_lack(recorder);
                if recorder.mailbox.take_measure() {
                    measure::sample(process);
                }
                serve_oom(process);
                serve_requests(process, &mut next);
                if recorder.mailbox.is_last_snapshot_requested() {
                    life::last_snapshot(process);
                    recorder.mailbox.last_snapshot_done();
                }
                recorder.retire_ahead();
                recorder.stacks.refresh();
                crate::cuda::routes::forget_if_unloaded();
            });
            if std::panic::catch_unwind(work).is_err() {
                crate::record::switch::switch_off("an internal error in the background thread");
                break;
            }
            if last::is_this_thread() {
                break;
            }
            recorder.mailbox.wait(calls);
        }
    });
    memory::be_as_others();
    recorder.mailbox.gone();
    // If it is the last one, the program's exit handlers run here.
    // SAFETY: a set of signals that came from the same function.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut()) };
    std::ptr::null_mut()
}

/// What the program did with the user's signal before.
static BEFORE: SetOnce<libc::sigaction> = SetOnce::new();

/// Catches the signal; a handler that the program had goes on being called.
fn listen(signal: i32) {
    // SAFETY: plain system calls on initialised records; the handler only
    // stores numbers and wakes a futex.
    unsafe {
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_signal as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigemptyset(&raw mut ours.sa_mask);
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(signal, std::ptr::null(), &raw mut before) != 0 {
            return;
        }
        BEFORE.set(before);
        libc::sigaction(signal, &raw const ours, std::ptr::null_mut());
    }
}

extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
    if let Some(recorder) = crate::record::switch::recorder() {
        recorder.mailbox.signal();
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

//! The background thread: keeps room in the ring, and writes a snapshot when memory has run out.
//!
//! It is one thread with a small stack and all signals blocked, made with `pthread_create` (the standard
//! library's own threads register thread-local destructors, which a library that may be unloaded must not
//! have). A hook talks to it through two words and a futex: storing a number, and at most one system call.
//!
//! Out of memory is noted as the ticket of the event, and the snapshot shows the state *at that ticket*,
//! however late the thread gets to it. A program that catches the error and goes on may fail thousands of
//! times: the first few failures get a file, then one every [`OOM_PAUSE_NS`].

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::dump;
use crate::message;
use crate::record::{Recorder, clock};

/// Failures that get a snapshot each, however close together.
const OOM_FIRST: u64 = 3;
/// Later failures get a snapshot at most this often, nanoseconds.
const OOM_PAUSE_NS: u64 = 60_000_000_000;
/// The longest the thread sleeps, nanoseconds.
const NAP_NS: i64 = 50_000_000;

/// The thread's mailbox.
pub struct Emitter {
    /// Changes with every call for attention; the futex word.
    calls: AtomicU32,
    /// Ticket + 1 of the first out-of-memory event that nobody has looked at yet; 0 if none.
    oom: AtomicU64,
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
            written: Mutex::new(OomFiles { count: 0, last_ns: 0, passed_over: 0 }),
        }
    }

    /// Wakes the thread. Callable from a hook.
    pub fn wake(&self) {
        self.calls.fetch_add(1, Ordering::Release);
        // SAFETY: FUTEX_WAKE only uses the address as a key.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.calls.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                1,
            )
        };
    }

    /// Notes that the event with this ticket says out of memory. Callable from a hook.
    pub fn out_of_memory(&self, ticket: u64) {
        // One that is waiting already is nearer to the cause.
        let _ = self.oom.compare_exchange(0, ticket + 1, Ordering::AcqRel, Ordering::Relaxed);
        self.wake();
    }

    fn nap(&self, seen: u32) {
        let time = libc::timespec { tv_sec: 0, tv_nsec: NAP_NS };
        // SAFETY: the word and the timeout outlive the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.calls.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                seen,
                &raw const time,
            )
        };
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
        dump::to_folder(recorder, ticket, dump::Reason::Oom);
    }
}

/// Starts the thread for this recorder. Without it, producers retire for themselves.
pub fn start(recorder: &'static Recorder) {
    // SAFETY: plain pthread calls on local, initialised objects; the recorder lives for ever.
    unsafe {
        let mut attr = std::mem::MaybeUninit::uninit();
        if libc::pthread_attr_init(attr.as_mut_ptr()) != 0 {
            return;
        }
        libc::pthread_attr_setstacksize(attr.as_mut_ptr(), 2 << 20);
        libc::pthread_attr_setdetachstate(attr.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        // The new thread inherits the mask: no signal of the program's is ever delivered to it.
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let mut thread = 0;
        let argument = std::ptr::from_ref(recorder).cast_mut().cast();
        let failed = libc::pthread_create(&raw mut thread, attr.as_ptr(), run, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        libc::pthread_attr_destroy(attr.as_mut_ptr());
        if failed != 0 {
            message!("no background thread could be started; recording goes on without it");
        } else {
            libc::pthread_setname_np(thread, c"memtrace".as_ptr());
        }
    }
}

extern "C" fn run(recorder: *mut c_void) -> *mut c_void {
    // SAFETY: `start` passes a recorder that lives for ever.
    let recorder: &'static Recorder = unsafe { &*recorder.cast() };
    // What this thread does is none of the program's doing.
    crate::record::guard::nested(|| {
        while crate::is_on(recorder) {
            let seen = recorder.emitter.calls.load(Ordering::Acquire);
            let work = std::panic::AssertUnwindSafe(|| {
                recorder.emitter.serve_oom(recorder);
                recorder.retire_ahead();
                recorder.stacks.refresh();
            });
            if std::panic::catch_unwind(work).is_err() {
                crate::switch_off("an internal error in the background thread");
                break;
            }
            recorder.emitter.nap(seen);
        }
    });
    std::ptr::null_mut()
}

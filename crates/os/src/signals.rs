//! What may not disturb us while we work in somebody else's thread: cancellation, and signals.
//!
//! Both change only what is the calling thread's own, and put it back.

use std::ffi::c_int;

use crate::errno;

/// Runs something that may open, write or wait. A thread that is being cancelled (`pthread_cancel`)
/// would end in there, by unwinding through our frames, which ends the process. A write beyond the
/// limit on files (`RLIMIT_FSIZE`), or to a pipe that nobody reads, is a signal that ends it. For
/// us, either is just an error. `errno` stays as it is.
pub fn uncancelled<R>(f: impl FnOnce() -> R) -> R {
    let _undisturbed = Undisturbed::begin();
    f()
}

/// Signals that the kernel sends to a thread for what it writes.
const OF_WRITING: [c_int; 2] = [libc::SIGXFSZ, libc::SIGPIPE];

/// What is put back in the end.
struct Undisturbed {
    cancel: c_int,
    mask: libc::sigset_t,
    /// Signals that had come already.
    pending: libc::sigset_t,
    /// When all else has been: the last field.
    _errno: errno::Kept,
}

/// `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

impl Undisturbed {
    fn begin() -> Undisturbed {
        // SAFETY: POSIX's functions, which change what is this thread's own;
        // the places for old values are ours.
        unsafe {
            let mut before = Undisturbed {
                cancel: 0,
                mask: std::mem::zeroed(),
                pending: std::mem::zeroed(),
                _errno: errno::Kept::now(),
            };
            pthread_setcancelstate(DISABLE, &raw mut before.cancel);
            let mut held = std::mem::zeroed();
            libc::sigemptyset(&raw mut held);
            for signal in OF_WRITING {
                libc::sigaddset(&raw mut held, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before.mask);
            libc::sigpending(&raw mut before.pending);
            before
        }
    }

    /// Takes a signal away that has come meanwhile, unless somebody else has sent it.
    unsafe fn take(signal: c_int) {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: initialised records; sending a signal to one's own process.
        unsafe {
            let (mut one, mut info) = (std::mem::zeroed(), std::mem::zeroed::<libc::siginfo_t>());
            libc::sigemptyset(&raw mut one);
            libc::sigaddset(&raw mut one, signal);
            if libc::sigtimedwait(&raw const one, &raw mut info, &raw const now) == signal
                && info.si_code <= 0
                && info.si_pid() != libc::getpid()
            {
                libc::kill(libc::getpid(), signal);
            }
        }
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // SAFETY: as in `begin`; the old values come from the same functions.
        unsafe {
            for signal in OF_WRITING {
                let had = |set| libc::sigismember(set, signal) == 1;
                if !had(&raw const self.mask) && !had(&raw const self.pending) {
                    Undisturbed::take(signal);
                }
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut());
            pthread_setcancelstate(self.cancel, &raw mut self.cancel);
        }
    }
}

/// No signal comes to this thread, but for those that say what it has just
/// done wrong, until this is dropped.
pub struct Held(libc::sigset_t);

impl Held {
    /// Holds all of them.
    pub fn all() -> Held {
        const NOT_THESE: [c_int; 5] =
            [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];
        // SAFETY: system calls on initialised records, which change what is this thread's own.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            for signal in NOT_THESE {
                libc::sigdelset(&raw mut all, signal);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Held(before)
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut());
        }
    }
}

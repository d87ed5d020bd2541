//! Threads of our own.
//!
//! Made with `pthread_create`: the standard library's own threads register thread-local
//! destructors, which a library that may be unloaded must not have.

use std::ffi::c_void;

/// Starts a thread of ours. Says whether that could be done.
///
/// # Safety
/// `run` may be called with the argument, at any time.
pub unsafe fn start(run: extern "C" fn(*mut c_void) -> *mut c_void, argument: *mut c_void) -> bool {
    // SAFETY: plain pthread calls on local, initialised objects; the rest
    // is promised by the caller.
    unsafe {
        let mut attr = std::mem::MaybeUninit::uninit();
        if libc::pthread_attr_init(attr.as_mut_ptr()) != 0 {
            return false;
        }
        libc::pthread_attr_setstacksize(attr.as_mut_ptr(), 2 << 20);
        libc::pthread_attr_setdetachstate(attr.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        // The new thread inherits the mask: no signal of the program's is ever delivered to it. One
        // that blocks SIGBUS would not survive a fault (see `truncated`).
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigdelset(&raw mut all, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let mut thread = 0;
        let failed = libc::pthread_create(&raw mut thread, attr.as_ptr(), run, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        libc::pthread_attr_destroy(attr.as_mut_ptr());
        if failed == 0 {
            libc::pthread_setname_np(thread, c"memtrace".as_ptr());
        }
        failed == 0
    }
}

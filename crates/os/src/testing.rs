//! What tests need of a process, a lock and `errno`, here and in the crates above.

#![allow(clippy::missing_panics_doc, reason = "a test that panics has failed")]

use std::ffi::c_int;
use std::sync::Barrier;

use super::locks::ForkLock;

/// Is this so in a forked child, which first does what `forked` does?
pub fn in_child(forked: impl FnOnce(), f: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has one thread, in which neither of the two may allocate.
    unsafe {
        match libc::fork() {
            0 => {
                forked();
                libc::_exit(c_int::from(f()))
            }
            child => {
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1
            }
        }
    }
}

/// Holds a lock in another thread while `f` runs here.
pub fn held_elsewhere<T: Default + Send>(lock: &ForkLock<T>, f: impl FnOnce()) {
    let (begun, end) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _guard = lock.lock();
            begun.wait();
            end.wait();
        });
        begun.wait();
        f();
        end.wait();
    });
}

/// Does this leave `errno` alone?
pub fn stays(f: impl FnOnce()) -> bool {
    // SAFETY: the calling thread's own word.
    unsafe {
        *libc::__errno_location() = 77;
        f();
        *libc::__errno_location() == 77
    }
}

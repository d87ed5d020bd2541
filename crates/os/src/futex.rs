//! Sleeping on a word until somebody changes it, without a lock that a
//! killed or forked thread could keep.

use std::sync::atomic::AtomicU32;

use crate::errno;

/// The longest that anybody sleeps, nanoseconds: who is not woken looks by himself.
const NAP_NS: i64 = 50_000_000;

/// Sleeps until the word is no longer `seen`, or a nap has passed.
pub fn sleep_on(word: &AtomicU32, seen: u32) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: NAP_NS };
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let _errno = errno::Kept::now();
    // SAFETY: the word and the timeout outlive the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), wait, seen, &raw const time) };
}

/// Wakes all who sleep on the word.
pub fn wake_all(word: &AtomicU32) {
    wake(word, i32::MAX);
}

/// Wakes one of those who sleep on the word.
pub fn wake_one(word: &AtomicU32) {
    wake(word, 1);
}

fn wake(word: &AtomicU32, most: i32) {
    let wake = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    let _errno = errno::Kept::now(); // a sandbox may refuse
    // SAFETY: FUTEX_WAKE only uses the address as a key.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), wake, most) };
}

//! The time of an event: the wall clock, read without entering the kernel (vDSO, about 20 ns).
//!
//! The wall clock because PyTorch's own trace uses it, and so traces of ranks can be laid side by side.

/// Nanoseconds since 1970.
pub fn now_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for writing; CLOCK_REALTIME always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

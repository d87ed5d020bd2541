//! Atomics and locks, as the ring uses them: the real ones, or loom's, which try every interleaving.

#[cfg(loom)]
pub use loom::{
    hint,
    sync::atomic::{AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
};
#[cfg(not(loom))]
pub use std::{
    hint,
    sync::atomic::{AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
};

use memtrace_format::event::WORDS;

/// `n` slots of zeros that live for ever. Pages the program never reaches cost nothing.
#[cfg(not(loom))]
pub fn zeroed_slots(n: usize) -> &'static [[AtomicU64; WORDS]] {
    let bytes = n * size_of::<[AtomicU64; WORDS]>();
    // SAFETY: a fresh anonymous mapping of `bytes` bytes that is never unmapped.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        // Address space is out: a small ring on the heap still records.
        return Box::leak((0..n.min(4096)).map(|_| Default::default()).collect());
    }
    // SAFETY: the mapping is zeroed, page-aligned, `bytes` long, and all-zero words are valid atomics.
    unsafe { std::slice::from_raw_parts(at.cast(), n) }
}

/// Loom's atomics can't be made from zeroed memory.
#[cfg(loom)]
pub fn zeroed_slots(n: usize) -> &'static [[AtomicU64; WORDS]] {
    Box::leak((0..n).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect())
}

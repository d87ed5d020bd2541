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

/// `n` zeros that live for ever. Pages the program never reaches cost nothing. Fewer if the address space is
/// out.
#[cfg(not(loom))]
pub fn zeroed_words(n: usize) -> &'static [AtomicU64] {
    // SAFETY: a fresh anonymous mapping that is never unmapped; all-zero words are valid atomics.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            n * 8,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        );
        if at == libc::MAP_FAILED { &[] } else { std::slice::from_raw_parts(at.cast(), n) }
    }
}

/// Loom's atomics can't be made from zeroed memory.
#[cfg(loom)]
pub fn zeroed_words(n: usize) -> &'static [AtomicU64] {
    Box::leak((0..n).map(|_| AtomicU64::new(0)).collect())
}

//! Atomics and locks, as the ring, the live table and the depot of stacks use them: the real ones, or loom's, which try every interleaving.

use crate::os::errno;

#[cfg(loom)]
pub use loom::{
    hint,
    sync::atomic::{AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
};
#[cfg(not(loom))]
#[allow(clippy::disallowed_types, reason = "of a recorder, which a forked child has anew")]
pub use std::{
    hint,
    sync::atomic::{AtomicU64, Ordering, fence},
    sync::{Mutex, MutexGuard},
};

/// A word of a file, model or not.
pub use std::sync::atomic::AtomicU64 as Real;

/// The words of a black box, as those use them.
#[cfg(not(loom))]
pub fn of_file(words: &'static [AtomicU64]) -> &'static [AtomicU64] {
    words
}

/// A model has no file: it makes its words by [`zeroed_words`].
#[cfg(loom)]
pub fn of_file(_: &'static [Real]) -> &'static [AtomicU64] {
    unreachable!("loom's atomics are not words of a file")
}

/// Back again, for a reader of the file.
#[cfg(not(loom))]
pub fn to_file(words: &'static [AtomicU64]) -> &'static [Real] {
    words
}

/// A model has no file.
#[cfg(loom)]
pub fn to_file(_: &'static [AtomicU64]) -> &'static [Real] {
    unreachable!("loom's atomics are not words of a file")
}

/// Brings a word near that is written next: without that, the next instruction of anybody's that locks the bus waits
/// for it to come from memory.
#[inline]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing and faults nowhere.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// `n` zeros that live for ever. Pages the program never reaches cost nothing. Fewer if the address space is
/// out.
pub fn zeroed_memory(n: usize) -> &'static [Real] {
    let _errno = errno::Kept::now();
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

/// What all-zero bytes are a value of, and no pointer.
///
/// # Safety
/// They are.
pub unsafe trait Plain: Copy + 'static {}

/// `n` records of zeros that live for ever, or as many as there is address space for.
pub fn zeroed_records<T: Plain>(mut n: usize) -> &'static mut [T] {
    while n > 0 {
        let words = zeroed_memory((n * size_of::<T>()).div_ceil(8));
        if !words.is_empty() {
            // SAFETY: a fresh mapping that nobody else knows, large enough, aligned as a page; zeros are a value.
            return unsafe { std::slice::from_raw_parts_mut(words.as_ptr().cast_mut().cast(), n) };
        }
        n /= 2;
    }
    &mut []
}

/// `n` zeros that live for ever, for a ring without a file.
#[cfg(not(loom))]
pub fn zeroed_words(n: usize) -> &'static [AtomicU64] {
    zeroed_memory(n)
}

/// Loom's atomics can't be made from zeroed memory.
#[cfg(loom)]
pub fn zeroed_words(n: usize) -> &'static [AtomicU64] {
    Box::leak((0..n).map(|_| AtomicU64::new(0)).collect())
}

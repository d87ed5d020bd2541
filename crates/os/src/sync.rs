//! Atomics and locks, as all parts without a lock use them: the real ones, or loom's.
//!
//! Such a part takes its atomics from here and has a model (`tests::model`), which is a test that
//! is built with `--cfg loom`. Loom runs it with every interleaving of its threads, and with every
//! value that a load may see. Models come to the words of no file: they make their words by
//! [`zeroed_words`].
//!
//! Two sorts of words need no model. One says all by itself: a flag, a count, a bit for each of
//! several. Nobody reads another word because of it, so no order can be wrong. The other is set
//! before anybody can read it. Where that isn't plain to see, the declaration says so.

use std::num::NonZeroU32;

use crate::errno;

#[cfg(not(loom))]
pub use crate::futex::{sleep_on, wake_all};
#[cfg(loom)]
pub use loom::{
    hint,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Mutex, MutexGuard},
};
#[cfg(not(loom))]
#[allow(clippy::disallowed_types, reason = "of a recorder, which a forked child has anew")]
pub use std::{
    hint,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    sync::{Mutex, MutexGuard},
};

/// A word of a file, model or not.
pub use std::sync::atomic::AtomicU64 as Real;

/// A static of this process. A model has a new one each time it runs, because loom's atomics aren't
/// constants.
#[macro_export]
macro_rules! of_process {
    ($(#[$about:meta])* static $name:ident: $kind:ty = $value:expr;) => {
        #[cfg(not(loom))]
        $(#[$about])*
        static $name: $kind = $value;
        #[cfg(loom)]
        loom::lazy_static! {
            $(#[$about])*
            static ref $name: $kind = $value;
        }
    };
}
pub use crate::of_process;

/// A function whose value is a constant, but for loom's atomics.
#[macro_export]
macro_rules! constant {
    ($(#[$about:meta])* $seen:vis fn $name:ident() -> $kind:ty $body:block) => {
        #[cfg(not(loom))]
        $(#[$about])*
        $seen const fn $name() -> $kind $body
        #[cfg(loom)]
        $(#[$about])*
        $seen fn $name() -> $kind $body
    };
}
pub use crate::constant;

/// So many atomics of the same value.
#[macro_export]
macro_rules! atomics {
    ($value:expr; $count:expr) => {{
        #[cfg(not(loom))]
        let all = [const { $value }; $count];
        #[cfg(loom)]
        let all: [_; $count] = std::array::from_fn(|_| $value);
        all
    }};
}
pub use crate::atomics;

/// A word of the process, or a model's. What may be used before a model runs can't be made of a
/// model's words: it is made of any, and its model makes one of its own.
pub trait Word {
    /// What it holds.
    type Value;
    /// As an atomic has it.
    fn load(&self, order: Ordering) -> Self::Value;
    /// As an atomic has it.
    fn store(&self, value: Self::Value, order: Ordering);
    /// As an atomic has it.
    fn fetch_add(&self, value: Self::Value, order: Ordering) -> Self::Value;
    /// As an atomic has it.
    fn fetch_sub(&self, value: Self::Value, order: Ordering) -> Self::Value;
    /// As an atomic has it.
    ///
    /// # Errors
    /// It is another one: that one.
    fn compare_exchange(
        &self,
        from: Self::Value,
        to: Self::Value,
        order: Ordering,
        otherwise: Ordering,
    ) -> Result<Self::Value, Self::Value>;
    /// As an atomic has it.
    ///
    /// # Errors
    /// It has no next value: the one that it has.
    fn fetch_update(
        &self,
        order: Ordering,
        otherwise: Ordering,
        next: impl FnMut(Self::Value) -> Option<Self::Value>,
    ) -> Result<Self::Value, Self::Value>;
}

macro_rules! words {
    ($($atomic:ty = $value:ty, $load:expr, $store:expr;)*) => { $(
        impl Word for $atomic {
            type Value = $value;

            #[inline]
            fn load(&self, order: Ordering) -> $value {
                $load(self, order)
            }

            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                $store(self, value, order);
            }

            #[inline]
            fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.fetch_add(value, order)
            }

            #[inline]
            fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.fetch_sub(value, order)
            }

            #[inline]
            fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                order: Ordering,
                otherwise: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(from, to, order, otherwise)
            }

            #[inline]
            fn fetch_update(
                &self,
                order: Ordering,
                otherwise: Ordering,
                next: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                self.fetch_update(order, otherwise, next)
            }
        }
    )* };
}

mod reals {
    use super::{Ordering, Word};
    use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

    words! {
        AtomicU32 = u32, Self::load, Self::store;
        AtomicU64 = u64, Self::load, Self::store;
        AtomicUsize = usize, Self::load, Self::store;
    }
}

/// In a model only exchanges are of one order that all agree on.
#[cfg(loom)]
mod models {
    use super::{Ordering, Word};
    use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

    macro_rules! load {
        () => {
            |word: &Self, order| match order {
                Ordering::SeqCst => word.fetch_add(0, Ordering::AcqRel),
                order => word.load(order),
            }
        };
    }
    macro_rules! store {
        () => {
            |word: &Self, value, order| match order {
                Ordering::SeqCst => _ = word.swap(value, Ordering::AcqRel),
                order => word.store(value, order),
            }
        };
    }
    words! {
        AtomicU32 = u32, load!(), store!();
        AtomicU64 = u64, load!(), store!();
        AtomicUsize = usize, load!(), store!();
    }
}

/// The word's last value, of which the order to other words' last values is certain.
#[cfg(not(loom))]
#[inline]
pub fn last(word: &AtomicU64) -> u64 {
    word.load(Ordering::SeqCst)
}

/// In a model, only an exchange reads the last value.
#[cfg(loom)]
pub fn last(word: &AtomicU64) -> u64 {
    word.fetch_add(0, Ordering::AcqRel)
}

/// In a model, a thread sleeps until the word has changed: after a nap, it would see a
/// change by itself for which nobody has woken it. The kernel reads the word's last value,
/// as only an exchange does in a model.
#[cfg(loom)]
pub fn sleep_on(word: &AtomicU32, seen: u32) {
    while word.fetch_add(0, Ordering::AcqRel) == seen {
        loom::thread::yield_now();
    }
}

/// In a model, a word that changes wakes who sleeps on it.
#[cfg(loom)]
pub fn wake_all(_: &AtomicU32) {}

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

/// Brings a word near that is written next: without that, the next instruction of anybody's that
/// locks the bus waits for it to come from memory.
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

/// `n` zeros that live for ever. Pages the program never reaches cost
/// nothing. Fewer if the address space is out.
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

// SAFETY: 0 is none.
unsafe impl Plain for Option<NonZeroU32> {}

/// `n` records of zeros that live for ever, or as many as there is address space for.
pub fn zeroed_records<T: Plain>(mut n: usize) -> &'static mut [T] {
    while n > 0 {
        let words = zeroed_memory((n * size_of::<T>()).div_ceil(8));
        if !words.is_empty() {
            // SAFETY: a fresh mapping that nobody else knows, large enough,
            // aligned as a page; zeros are a value.
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

/// The same for what is touched from its first word to its last: in large pages, where the system
/// has them. A page that is met for the first time costs as much as dozens of records.
#[cfg(not(loom))]
pub fn zeroed_huge_words(n: usize) -> &'static [AtomicU64] {
    /// Bytes of a large page.
    const HUGE: usize = 1 << 21;
    let words = zeroed_memory(n + HUGE / 8);
    let skipped = words.as_ptr().align_offset(HUGE);
    let Some(words) = words.get(skipped..).and_then(|words| words.get(..n)) else { return &[] };
    // SAFETY: a part of our own mapping. Where it is refused, pages are small.
    unsafe { libc::madvise(words.as_ptr().cast_mut().cast(), n * 8, libc::MADV_HUGEPAGE) };
    words
}

/// A model has no pages.
#[cfg(loom)]
pub fn zeroed_huge_words(n: usize) -> &'static [AtomicU64] {
    zeroed_words(n)
}

/// Gives the memory of these words back to the system: they are zeros from here on.
///
/// # Safety
/// They are whole pages of [`zeroed_huge_words`].
#[cfg(not(loom))]
pub unsafe fn give_back(words: &'static [AtomicU64]) {
    // SAFETY: promised by the caller: a private mapping of our own, which stays one.
    unsafe {
        let at = words.as_ptr().cast_mut().cast();
        libc::madvise(at, size_of_val(words), libc::MADV_DONTNEED);
    }
}

/// A model has no pages.
#[cfg(loom)]
pub unsafe fn give_back(words: &'static [AtomicU64]) {
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

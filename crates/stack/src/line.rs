//! What every capture asks first, in one line of the processor's cache, and room in it for what the
//! caller asks then, too.
//!
//! Between two captures a program pushes what it doesn't use out of the cache, and its page out of
//! the table of pages. So the three words of ours that each capture needs lie together. A tracer
//! has such words, too, and asks them at the same moments (is it on?). The rest of the line is for
//! them, as one type of the caller's ([`beside`]).

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicPtr, AtomicU16, AtomicU64};

use super::python::offsets::Runtime;

/// Bytes of the line that are the caller's.
pub const ROOM: usize = 40;

/// See the module's documentation. Each word belongs to one module, which
/// alone changes it, and seldom.
#[repr(C, align(64))]
pub(super) struct Line {
    theirs: Theirs,
    /// Which libraries addresses mean now ([`super::modules`]).
    pub(super) epoch: AtomicU16,
    /// The interpreter, once there is one that can be walked ([`super::python::offsets`]).
    pub(super) python: AtomicPtr<Runtime>,
    /// How many code objects have died, plus 1 ([`super::python::deaths`]).
    pub(super) deaths: AtomicU64,
}

const _: () = assert!(size_of::<Line>() == 64);

#[repr(C, align(8))]
struct Theirs(UnsafeCell<[u8; ROOM]>);

// SAFETY: nobody gets at it but as a `Beside`, which is `Sync`.
unsafe impl Sync for Theirs {}

/// The only one.
pub(super) static LINE: Line = Line {
    theirs: Theirs(UnsafeCell::new([0; ROOM])),
    epoch: AtomicU16::new(0),
    python: AtomicPtr::new(std::ptr::null_mut()),
    deaths: AtomicU64::new(1),
};

/// What a caller keeps in this line.
///
/// # Safety
/// All-zero bytes are a value of it, and the program has no other type that is one.
pub unsafe trait Beside: Sync + 'static {}

/// The caller's words; all zeros at first.
#[inline(always)]
pub fn beside<T: Beside>() -> &'static T {
    const { assert!(size_of::<T>() <= ROOM && align_of::<T>() <= align_of::<Theirs>()) };
    // SAFETY: it has room and is aligned for one, zeros are one, and nobody
    // takes these bytes for anything else.
    unsafe { &*LINE.theirs.0.get().cast::<T>() }
}

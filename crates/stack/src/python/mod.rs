//! Python frames of the calling thread, without the GIL and without Python's API.
//!
//! While a thread is inside a hook it sits in a C call that its own top frame made. Whether it
//! holds the GIL or gave it away, its chain of frames can't change: only the thread itself pushes
//! and pops. Every frame holds a reference to its code object. What we read of that is fixed when
//! it is made: names, first line, line table, where its instructions begin.
//!
//! So the walk reads memory that is alive and constant, and reads nothing else. No reference count
//! is touched, and nothing is called that could allocate, raise or wait. Other threads' frames are
//! not read either: those run.
//!
//! * [`offsets`] says where things are in each version, and makes sure of it before the first read;
//! * [`walk`] follows the chain;
//! * [`code`] keeps what is known of code objects, so that a frame is an id and a position;
//! * [`deaths`] tells whether that may have become untrue;
//! * `memtrace_symbols` turns a position into a line, later and elsewhere.

pub mod code;
mod deaths;
pub mod offsets;
mod text;
pub mod walk;

/// Reads a value at an address.
///
/// # Safety
/// `at` must point to `size_of::<T>()` readable bytes, of which any content is a valid `T`.
#[inline(always)]
unsafe fn read<T: Copy>(at: usize) -> T {
    // SAFETY: as the caller promises. Volatile: some words (a string's cached hash) may be set by
    // another thread meanwhile; either value will do.
    unsafe { (at as *const T).read_volatile() }
}

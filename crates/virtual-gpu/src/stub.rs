//! What the functions made by `build.rs` have in common.
//!
//! Nothing here knows a library. An unsupported function reports its name once, so that a program's
//! failure (or its detour) can be traced to it. It never pretends to have worked.

use crate::gpu::boundary::Out;
use crate::gpu::{address, contents, log};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The answer of a function that the virtual GPU doesn't have.
#[cold]
pub fn unsupported(said: &AtomicBool, name: &str, code: i64) -> i64 {
    if !said.swap(true, Relaxed) {
        log::warn(&format!("{name} is not supported"));
    }
    code
}

/// Numbers that interfaces are made of.
pub trait Number {
    /// The nearest value that fits: a size that doesn't fit must not wrap to a small one.
    fn clamp_from(value: i64) -> Self;
}

impl Number for i32 {
    fn clamp_from(value: i64) -> Self {
        value.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32
    }
}

impl Number for i64 {
    fn clamp_from(value: i64) -> Self {
        value
    }
}

/// Writes a number where the caller wants it, if it does.
pub fn put<T: Number>(place: Out<T>, value: i64) {
    place.give(T::clamp_from(value));
}

/// The result of a computation that is not done, in device or host memory.
pub fn result(place: Out<u8>, bytes: usize) {
    if address::is_device(place.addr()) {
        contents::forget(place.addr(), bytes as u64);
    } else {
        // No place is no error: not every caller asks.
        let _ = place.clear(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_does_not_fit_stays_large() {
        assert_eq!(i32::clamp_from(1 << 33), i32::MAX);
        assert_eq!(i32::clamp_from(-5), -5);
        assert_eq!(i64::clamp_from(1 << 33), 1 << 33);
    }
}

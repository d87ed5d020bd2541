//! A call that has come to a hook: what the hook knows of it beside its arguments.

use std::ffi::c_int;

use crate::record::switch;

/// Which of NVIDIA's libraries, that stand on one another, an entry point is of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// The driver.
    Driver,
    /// The runtime, which calls the driver.
    Runtime,
    /// A library above both.
    Library,
}

/// See the module's documentation.
#[derive(Clone, Copy)]
pub struct HookCall {
    /// The number of the entry point, as events carry it.
    pub api: u16,
    /// Whose it is.
    pub tier: Tier,
    /// The address that the call will return to.
    pub caller: usize,
    /// The real function.
    pub real: usize,
}

/// The handle or address that a successful call has put there; 0 if none.
///
/// # Safety
/// `out` is null or the out-parameter of a call that has just returned `code`.
pub unsafe fn got<T: Copy>(code: c_int, out: *const T) -> u64 {
    const { assert!(size_of::<T>() == 8) };
    // SAFETY: promised by the caller; 8 bytes, whatever the caller calls them.
    if code == 0 && !out.is_null() { unsafe { out.cast::<u64>().read_unaligned() } } else { 0 }
}

impl HookCall {
    /// The call has been made, and returns: counts it.
    #[inline]
    pub fn used(self) {
        if let Some(recorder) = switch::recorder() {
            recorder.usage.count(usize::from(self.api), self.caller as u64);
        }
    }
}

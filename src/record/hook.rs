//! A call that has come to a hook: what the hook knows of it beside its arguments.

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

impl HookCall {
    /// The call has been made, and returns: counts it.
    #[inline]
    pub fn used(self) {
        if let Some(recorder) = switch::recorder() {
            recorder.usage.count(usize::from(self.api), self.caller as u64);
        }
    }
}

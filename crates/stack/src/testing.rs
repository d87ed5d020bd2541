//! Helpers of the tests.

#![allow(clippy::disallowed_types, reason = "no test forks while it has it")]

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Epochs are the process's, and tests run side by side.
static EPOCHS: RwLock<()> = RwLock::new(());

/// While this is held, no test begins an epoch.
pub fn steady() -> RwLockReadGuard<'static, ()> {
    EPOCHS.read().unwrap_or_else(PoisonError::into_inner)
}

/// For tests that begin epochs.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    EPOCHS.write().unwrap_or_else(PoisonError::into_inner)
}

/// A large value of zeros, which never lies on the stack.
#[allow(clippy::unnecessary_box_returns)]
pub fn zeroed<T>() -> Box<T>
where
    T: 'static,
{
    // SAFETY: used for types whose all-zero bytes are valid: plain numbers in arrays.
    unsafe { Box::<T>::new_zeroed().assume_init() }
}

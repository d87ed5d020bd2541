//! When CUDA is in use, and what a fork does to it.
//!
//! CUDA does not survive a fork: once a process has initialised it, its children get an
//! initialisation error from every call. A process that has not touched CUDA may fork as it likes
//! (data loaders do) and the child starts afresh. PyTorch relies on both.

use super::config::machine;
use super::error::{Error, Result};
use super::{log, program};
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

const ASLEEP: u8 = 0;
const AWAKE: u8 = 1;
/// The parent was awake when it forked.
const FORKED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(ASLEEP);

extern "C" fn in_child() {
    STATE.store(FORKED, Relaxed);
}

/// The first call that needs CUDA wakes it; a child of an awake process can't.
pub fn wake() -> Result {
    match STATE.load(Relaxed) {
        AWAKE => Ok(()),
        FORKED => Err(Error::NOT_INITIALIZED),
        _ if machine().count() == 0 => Err(Error::NO_DEVICE),
        _ => {
            // What a driver says to a program that is newer than it. Layouts would be guesses.
            program::checked_toolkit().map_err(|unknown| {
                log::warn_once(&unknown.to_string());
                Error::INSUFFICIENT_DRIVER
            })?;
            if STATE.compare_exchange(ASLEEP, AWAKE, Relaxed, Relaxed).is_ok() {
                // Without memory for the handler a child would find the parent's state, no worse.
                // SAFETY: the handler only stores to an atomic, which any forked child may do.
                unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            }
            Ok(())
        }
    }
}

/// The parent was awake when it forked. Its locks may have been held by threads that are not here.
/// So code that runs without waking CUDA, as a program starts or ends, must not wait for one.
pub fn is_forked_child() -> bool {
    STATE.load(Relaxed) == FORKED
}

/// For driver calls, which need `cuInit` (or any call of the runtime) before them.
pub fn awake() -> Result {
    if STATE.load(Relaxed) == AWAKE { Ok(()) } else { Err(Error::NOT_INITIALIZED) }
}

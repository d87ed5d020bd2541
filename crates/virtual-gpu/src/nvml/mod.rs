//! NVML, the management library: who is there, and how full.
//!
//! It is independent of CUDA. It numbers all GPUs whatever `CUDA_VISIBLE_DEVICES` hides, works
//! before CUDA is initialised and after a fork, and makes no context. So it only looks at counters
//! that need no lock. Sensors and links do not exist; the answer is that of a card without them.
#![allow(missing_docs, reason = "named and documented by NVIDIA")]
#![allow(non_snake_case, reason = "NVIDIA's names")]

pub mod absent;
pub mod device;
pub mod memory;
pub mod system;

use crate::constants as c;
use crate::gpu::config::{Gpu, machine};
use crate::gpu::log;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `nvmlReturn_t`.
pub type Code = i32;

/// What a function does not answer with success.
pub type Status<T = ()> = Result<T, Code>;

/// How often NVML was initialised, less how often it was shut down.
static OPEN: AtomicU32 = AtomicU32::new(0);

/// The body of a function that needs an initialised library.
fn answer(body: impl FnOnce() -> Status) -> Code {
    if OPEN.load(Relaxed) == 0 {
        return c::NVML_ERROR_UNINITIALIZED;
    }
    guarded(body)
}

/// No panic crosses into C: it becomes an unknown error, and is reported.
fn guarded(body: impl FnOnce() -> Status) -> Code {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => c::NVML_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            log::warn_once(
                "an internal error was answered as NVML_ERROR_UNKNOWN; please report it",
            );
            c::NVML_ERROR_UNKNOWN
        }
    }
}

/// A null or otherwise wrong argument.
fn invalid<T>(result: crate::gpu::Result<T>) -> Status<T> {
    result.map_err(|_| c::NVML_ERROR_INVALID_ARGUMENT)
}

/// A device's handle is the address of what is known of it.
fn handle(gpu: &'static Gpu) -> u64 {
    core::ptr::from_ref(gpu).addr() as u64
}

/// The device of a handle.
fn device(of: u64) -> Status<&'static Gpu> {
    let found = machine().gpus.iter().find(|gpu| handle(gpu) == of);
    found.ok_or(c::NVML_ERROR_INVALID_ARGUMENT)
}

#[cfg(test)]
mod tests;

//! The library as a whole.

use super::{Code, OPEN, answer, guarded, invalid};
use crate::constants as c;
use crate::gpu::boundary::Out;
use crate::gpu::config::machine;
use crate::runtime::device::driver_version;
use core::ffi::c_char;
use core::sync::atomic::Ordering::Relaxed;

/// What a driver of the newest known toolkit would call itself.
const DRIVER: &str = "595.00.00";

fn open() -> Code {
    guarded(|| {
        if machine().gpus.is_empty() {
            return Err(c::NVML_ERROR_DRIVER_NOT_LOADED);
        }
        OPEN.fetch_add(1, Relaxed);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Code {
    open()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> Code {
    open()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: u32) -> Code {
    open()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Code {
    let closed = OPEN.fetch_update(Relaxed, Relaxed, |open| open.checked_sub(1));
    if closed.is_ok() { c::NVML_SUCCESS } else { c::NVML_ERROR_UNINITIALIZED }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: Code) -> *const c_char {
    let text = match code {
        c::NVML_SUCCESS => c"Success",
        c::NVML_ERROR_UNINITIALIZED => c"Uninitialized",
        c::NVML_ERROR_INVALID_ARGUMENT => c"Invalid Argument",
        c::NVML_ERROR_NOT_SUPPORTED => c"Not Supported",
        c::NVML_ERROR_NOT_FOUND => c"Not Found",
        c::NVML_ERROR_INSUFFICIENT_SIZE => c"Insufficient Size",
        c::NVML_ERROR_DRIVER_NOT_LOADED => c"Driver Not Loaded",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(text: Out<c_char>, room: u32) -> Code {
    answer(|| version(text, room, DRIVER))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetNVMLVersion(text: Out<c_char>, room: u32) -> Code {
    answer(|| version(text, room, &format!("{}.{DRIVER}", driver_version() / 1000)))
}

fn version(text: Out<c_char>, room: u32, version: &str) -> super::Status {
    if (room as usize) <= version.len() {
        return Err(c::NVML_ERROR_INSUFFICIENT_SIZE);
    }
    invalid(text.text(version, room as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<i32>) -> Code {
    answer(|| invalid(version.set(driver_version())))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<i32>) -> Code {
    answer(|| invalid(version.set(driver_version())))
}

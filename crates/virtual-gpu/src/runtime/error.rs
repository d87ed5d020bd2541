//! The last error, and what numbers mean.

use super::Code;
use crate::gpu::{error, thread};
use core::ffi::c_char;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> Code {
    thread::with(|thread| thread.last_error.replace(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> Code {
    thread::with(|thread| thread.last_error.get())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: Code) -> *const c_char {
    error::runtime_name(code).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: Code) -> *const c_char {
    error::runtime_text(code).as_ptr()
}

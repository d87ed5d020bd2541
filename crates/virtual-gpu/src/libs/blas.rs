//! cuBLAS: the modes that programs set and read back, versions and names. The maths is in
//! `api/behaviour.tsv`, all of it launches.
//!
//! Workspace: PyTorch brings its own (`cublasSetWorkspace`), from its own allocator,
//! so that the memory is accounted where it belongs. What cuBLAS takes by itself
//! when nobody brings any is not modelled.

use super::versions;
use super::{Library, session};
use crate::constants::{self as c, status_name};
use crate::gpu::boundary::Out;
use core::ffi::{c_char, c_void};

const POINTER: usize = 0;
const MATH: usize = 1;

fn set_mode(handle: *mut c_void, which: usize, mode: i32) -> i32 {
    Library::Blas.answer(|| session(Library::Blas, handle, |s| s.modes[which] = mode))
}

fn get_mode(handle: *mut c_void, which: usize, out: Out<i32>) -> i32 {
    Library::Blas.answer(|| {
        let mode = session(Library::Blas, handle, |s| s.modes[which])?;
        Library::Blas.give(out, mode)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetPointerMode_v2(handle: *mut c_void, mode: i32) -> i32 {
    set_mode(handle, POINTER, mode)
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetPointerMode_v2(handle: *mut c_void, mode: Out<i32>) -> i32 {
    get_mode(handle, POINTER, mode)
}

#[unsafe(no_mangle)]
extern "C" fn cublasSetMathMode(handle: *mut c_void, mode: i32) -> i32 {
    set_mode(handle, MATH, mode)
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetMathMode(handle: *mut c_void, mode: Out<i32>) -> i32 {
    get_mode(handle, MATH, mode)
}

/// One number of a version, for the `…GetProperty` functions of several libraries.
pub(super) fn property(library: Library, which: i32, version: [u32; 3], out: Out<i32>) -> i32 {
    library.answer(|| {
        let part = match which {
            c::MAJOR_VERSION => version[0],
            c::MINOR_VERSION => version[1],
            c::PATCH_LEVEL => version[2],
            _ => return Err(library.bad_value()),
        };
        library.give(out, part as i32)
    })
}

/// As `cublasGetVersion` writes it.
pub(super) fn version_number() -> i32 {
    let [major, minor, patch] = versions::cublas();
    (major * 10_000 + minor * 100 + patch) as i32
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetVersion_v2(_handle: *mut c_void, version: Out<i32>) -> i32 {
    Library::Blas.answer(|| Library::Blas.give(version, version_number()))
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetProperty(which: i32, value: Out<i32>) -> i32 {
    property(Library::Blas, which, versions::cublas(), value)
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusName(status: i32) -> *const c_char {
    status_name("CUBLAS_STATUS_", status)
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetStatusString(status: i32) -> *const c_char {
    status_name("CUBLAS_STATUS_", status)
}

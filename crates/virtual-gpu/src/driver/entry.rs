//! Functions by name, and what numbers mean.

use super::Code;
use crate::constants as c;
use crate::gpu::boundary::{Out, Text, driver_query};
use crate::gpu::{Error, Result, error, log};
use crate::runtime::entry::{Missing, look_up};
use core::ffi::{c_char, c_void};

fn get(name: Text, out: Out<*const c_void>, version: i32, flags: u64, status: Out<i32>) -> Result {
    let version = u32::try_from(version).map_err(|_| Error::INVALID_VALUE)?;
    out.set(core::ptr::null())?;
    let (answer, outcome) = match look_up(name, version, flags)? {
        Ok(found) => (c::CU_GET_PROC_ADDRESS_SUCCESS, out.set(found)),
        Err(Missing::Name) => (c::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, Err(Error::NOT_FOUND)),
        Err(Missing::Version) => {
            (c::CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, Err(Error::NOT_FOUND))
        }
    };
    status.give(answer);
    outcome
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress(
    name: Text,
    out: Out<*const c_void>,
    version: i32,
    flags: u64,
) -> Code {
    driver_query(|| get(name, out, version, flags, Out::null()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetProcAddress_v2(
    name: Text,
    out: Out<*const c_void>,
    version: i32,
    flags: u64,
    status: Out<i32>,
) -> Code {
    driver_query(|| get(name, out, version, flags, status))
}

/// Undocumented tables are not offered. Who asks for one is nearly always CUDA's
/// own runtime, linked into a program.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetExportTable(out: Out<*const c_void>, _id: u64) -> Code {
    log::warn_once(
        "cuGetExportTable is not supported: its tables are not documented. CUDA's runtime asks for them where it is linked \
         statically into a program or library, which can't run on a virtual GPU: build it with the shared runtime (nvcc -cudart shared)",
    );
    out.give(core::ptr::null());
    Error::NOT_SUPPORTED.driver()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: Code, out: Out<*const c_char>) -> Code {
    driver_query(|| {
        out.set(core::ptr::null())?;
        out.set(error::driver_name(code).ok_or(Error::INVALID_VALUE)?.as_ptr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: Code, out: Out<*const c_char>) -> Code {
    driver_query(|| {
        out.set(core::ptr::null())?;
        out.set(error::driver_text(code).ok_or(Error::INVALID_VALUE)?.as_ptr())
    })
}

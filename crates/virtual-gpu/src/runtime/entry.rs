//! Driver functions through the runtime.

use super::Code;
use super::device::runtime_version;
use crate::constants as c;
use crate::gpu::boundary::{Out, Text, runtime_query};
use crate::gpu::{Error, Result, log};
use core::ffi::c_void;

/// Why a driver function was not found.
pub(crate) enum Missing {
    /// There is none of that name.
    Name,
    /// There is, but only in newer versions.
    Version,
}

/// Looks a driver function up for programs of this version of CUDA.
pub(crate) fn look_up(
    name: Text,
    version: u32,
    flags: u64,
) -> Result<core::result::Result<*const c_void, Missing>> {
    let name = name.string()?;
    let known =
        c::CU_GET_PROC_ADDRESS_LEGACY_STREAM | c::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if flags & !(known as u64) != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let per_thread = flags & c::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM as u64 != 0;
    Ok(crate::entry::lookup(&name, version, per_thread)
        .ok_or_else(|| if crate::entry::exists(&name) { Missing::Version } else { Missing::Name }))
}

/// The status says whether the function is there; the code says so only if
/// the caller wants no status.
fn entry_point(
    name: Text,
    out: Out<*const c_void>,
    version: u32,
    flags: u64,
    status: Out<i32>,
) -> Result {
    out.set(core::ptr::null())?;
    status.give(match look_up(name, version, flags)? {
        Ok(found) => {
            out.set(found)?;
            c::cudaDriverEntryPointSuccess
        }
        Err(_) if status.is_null() => return Err(Error::NOT_FOUND),
        Err(Missing::Name) => c::cudaDriverEntryPointSymbolNotFound,
        Err(Missing::Version) => c::cudaDriverEntryPointVersionNotSufficent,
    });
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDriverEntryPointByVersion(
    name: Text,
    out: Out<*const c_void>,
    version: u32,
    flags: u64,
    status: Out<i32>,
) -> Code {
    runtime_query(|| entry_point(name, out, version, flags, status))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDriverEntryPoint(
    name: Text,
    out: Out<*const c_void>,
    flags: u64,
    status: Out<i32>,
) -> Code {
    runtime_query(|| entry_point(name, out, runtime_version() as u32, flags, status))
}

/// Undocumented tables are not offered.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetExportTable(out: Out<*const c_void>, _id: u64) -> Code {
    log::warn_once("cudaGetExportTable is not supported: its tables are not documented");
    out.give(core::ptr::null());
    runtime_query(|| Err(Error::NOT_SUPPORTED))
}

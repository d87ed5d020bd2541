//! The driver's log of errors.
//!
//! It is always empty, as the virtual GPU writes to standard error. Whoever registers to be told is never
//! called.

use super::Code;
use crate::gpu::border::{Out, Text, driver_query};
use crate::gpu::handle::Registry;
use crate::gpu::{Error, Result, kinds};
use core::ffi::{c_char, c_void};

static LISTENERS: Registry<()> = Registry::new(kinds::LISTENER);

/// One more who listens.
pub(crate) fn listen(callback: u64, out: Out<*mut c_void>) -> Result {
    if callback == 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.give(LISTENERS.insert(()));
    Ok(())
}

/// One fewer.
pub(crate) fn stop(listener: *const c_void) -> Result {
    LISTENERS.remove(listener).ok_or(Error::INVALID_VALUE)
}

/// Where the log ends, which is where it begins.
pub(crate) fn current(place: Out<u32>, flags: u32) -> Result {
    if flags == 0 { place.set(0) } else { Err(Error::INVALID_VALUE) }
}

/// Writes nothing to a file.
pub(crate) fn dump_to_file(path: Text, flags: u32) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    std::fs::write(path.string()?, "").map_err(|_| Error::INVALID_VALUE)
}

/// Writes nothing to memory.
pub(crate) fn dump_to_memory(buffer: Out<c_char>, size: Out<usize>, flags: u32) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    buffer.text("", size.get()?)?;
    size.set(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLogsRegisterCallback(callback: u64, _data: u64, out: Out<*mut c_void>) -> Code {
    driver_query(|| listen(callback, out))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLogsUnregisterCallback(listener: *const c_void) -> Code {
    driver_query(|| stop(listener))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLogsCurrent(place: Out<u32>, flags: u32) -> Code {
    driver_query(|| current(place, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLogsDumpToFile(_from: Out<u32>, path: Text, flags: u32) -> Code {
    driver_query(|| dump_to_file(path, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLogsDumpToMemory(
    _from: Out<u32>,
    buffer: Out<c_char>,
    size: Out<usize>,
    flags: u32,
) -> Code {
    driver_query(|| dump_to_memory(buffer, size, flags))
}

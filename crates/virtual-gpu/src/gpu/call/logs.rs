//! The log of errors.
//!
//! It is always empty, as the virtual GPU writes to standard error. A
//! registered callback is never called.

use crate::gpu::boundary::{Out, Text};
use crate::gpu::handle::Registry;
use crate::gpu::{Error, Result, kinds};
use core::ffi::{c_char, c_void};

static LISTENERS: Registry<()> = Registry::new(kinds::LISTENER);

/// One more who listens.
pub fn listen(callback: u64, out: Out<*mut c_void>) -> Result {
    if callback == 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.give(LISTENERS.insert(()));
    Ok(())
}

/// One fewer.
pub fn stop(listener: *const c_void) -> Result {
    LISTENERS.remove(listener).ok_or(Error::INVALID_VALUE)
}

/// Where the log ends, which is where it begins.
pub fn current(place: Out<u32>, flags: u32) -> Result {
    if flags == 0 { place.set(0) } else { Err(Error::INVALID_VALUE) }
}

/// Writes nothing to a file.
pub fn dump_to_file(path: Text, flags: u32) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    std::fs::write(path.string()?, "").map_err(|_| Error::INVALID_VALUE)
}

/// Writes nothing to memory.
pub fn dump_to_memory(buffer: Out<c_char>, size: Out<usize>, flags: u32) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    buffer.text("", size.get()?)?;
    size.set(0)
}

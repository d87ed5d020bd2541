//! The log of errors, which is the driver's.

use super::Code;
use crate::driver::logs;
use crate::gpu::border::{Out, Text, runtime_query};
use core::ffi::{c_char, c_void};

#[unsafe(no_mangle)]
pub extern "C" fn cudaLogsRegisterCallback(
    callback: u64,
    _data: u64,
    out: Out<*mut c_void>,
) -> Code {
    runtime_query(|| logs::listen(callback, out))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLogsUnregisterCallback(listener: *const c_void) -> Code {
    runtime_query(|| logs::stop(listener))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLogsCurrent(place: Out<u32>, flags: u32) -> Code {
    runtime_query(|| logs::current(place, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLogsDumpToFile(_from: Out<u32>, path: Text, flags: u32) -> Code {
    runtime_query(|| logs::dump_to_file(path, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLogsDumpToMemory(
    _from: Out<u32>,
    buffer: Out<c_char>,
    size: Out<usize>,
    flags: u32,
) -> Code {
    runtime_query(|| logs::dump_to_memory(buffer, size, flags))
}

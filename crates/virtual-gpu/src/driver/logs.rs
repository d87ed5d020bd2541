//! The driver's log of errors.

use crate::gpu::boundary::{Out, Text};
use crate::gpu::call::logs;
use core::ffi::{c_char, c_void};

queries! {
    fn cuLogsRegisterCallback(callback: u64, _data: u64, out: Out<*mut c_void>) =>
        |_| logs::listen(callback, out);
    fn cuLogsUnregisterCallback(listener: *const c_void) => |_| logs::stop(listener);
    fn cuLogsCurrent(place: Out<u32>, flags: u32) => |_| logs::current(place, flags);
    fn cuLogsDumpToFile(_from: Out<u32>, path: Text, flags: u32) =>
        |_| logs::dump_to_file(path, flags);
    fn cuLogsDumpToMemory(
        _from: Out<u32>,
        buffer: Out<c_char>,
        size: Out<usize>,
        flags: u32,
    ) => |_| logs::dump_to_memory(buffer, size, flags);
}

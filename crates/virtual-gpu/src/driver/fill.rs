//! Fills with bytes, half words and words.

use crate::gpu::call::copy::Fill;

// A byte or half word is passed as an `int`, of which the runtime's callers fill every bit: only
// the low ones count.
entries! {
    fn cuMemsetD8_v2(addr: u64, value: u32, count: u64) =>
        |api| Fill::line(addr, value, 1, count).now(api);
    fn cuMemsetD8Async(addr: u64, value: u32, count: u64, stream: u64) =>
        |api| Fill::line(addr, value, 1, count).later(api, stream);
    fn cuMemsetD16_v2(addr: u64, value: u32, count: u64) =>
        |api| Fill::line(addr, value, 2, count).now(api);
    fn cuMemsetD16Async(addr: u64, value: u32, count: u64, stream: u64) =>
        |api| Fill::line(addr, value, 2, count).later(api, stream);
    fn cuMemsetD32_v2(addr: u64, value: u32, count: u64) =>
        |api| Fill::line(addr, value, 4, count).now(api);
    fn cuMemsetD32Async(addr: u64, value: u32, count: u64, stream: u64) =>
        |api| Fill::line(addr, value, 4, count).later(api, stream);
    fn cuMemsetD2D8_v2(addr: u64, pitch: u64, value: u32, width: u64, height: u64) =>
        |api| Fill::plane(addr, pitch, value, 1, (width, height)).now(api);
    fn cuMemsetD2D8Async(
        addr: u64,
        pitch: u64,
        value: u32,
        width: u64,
        height: u64,
        stream: u64,
    ) => |api| Fill::plane(addr, pitch, value, 1, (width, height)).later(api, stream);
    fn cuMemsetD2D16_v2(addr: u64, pitch: u64, value: u32, width: u64, height: u64) =>
        |api| Fill::plane(addr, pitch, value, 2, (width, height)).now(api);
    fn cuMemsetD2D16Async(
        addr: u64,
        pitch: u64,
        value: u32,
        width: u64,
        height: u64,
        stream: u64,
    ) => |api| Fill::plane(addr, pitch, value, 2, (width, height)).later(api, stream);
    fn cuMemsetD2D32_v2(addr: u64, pitch: u64, value: u32, width: u64, height: u64) =>
        |api| Fill::plane(addr, pitch, value, 4, (width, height)).now(api);
    fn cuMemsetD2D32Async(
        addr: u64,
        pitch: u64,
        value: u32,
        width: u64,
        height: u64,
        stream: u64,
    ) => |api| Fill::plane(addr, pitch, value, 4, (width, height)).later(api, stream);
}

//! Fills with bytes, half words and words.

use super::{Code, current};
use crate::gpu::Result;
use crate::gpu::border::driver;
use crate::gpu::work::{Action, Place, Shape};
use crate::runtime::copy::at_once;

/// A fill with a value of `unit` bytes.
#[derive(Clone, Copy)]
struct Fill {
    dst: Place,
    value: u32,
    unit: u8,
    width: u64,
    height: u64,
}

impl Fill {
    fn line(addr: u64, value: u32, unit: u8, count: u64) -> Self {
        Self { dst: Place::line(addr), value, unit, width: count, height: 1 }
    }

    fn action(self) -> Result<Action> {
        let width = crate::runtime::memory::product(&[self.width, self.unit.into()])?;
        Ok(Action::Fill {
            dst: self.dst,
            pattern: self.value.to_le_bytes(),
            unit: self.unit,
            shape: Shape::plane(width, self.height),
        })
    }

    fn now(self) -> Code {
        driver(|| {
            current()?;
            at_once(&self.action()?)
        })
    }

    fn later(self, stream: u64) -> Code {
        super::copy::later(stream, || self.action())
    }
}

fn plane(addr: u64, pitch: u64, value: u32, unit: u8, (width, height): (u64, u64)) -> Fill {
    Fill { dst: Place::plane(addr, pitch), value, unit, width, height }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(addr: u64, value: u8, count: u64) -> Code {
    Fill::line(addr, value.into(), 1, count).now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(addr: u64, value: u8, count: u64, stream: u64) -> Code {
    Fill::line(addr, value.into(), 1, count).later(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16_v2(addr: u64, value: u16, count: u64) -> Code {
    Fill::line(addr, value.into(), 2, count).now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(addr: u64, value: u16, count: u64, stream: u64) -> Code {
    Fill::line(addr, value.into(), 2, count).later(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(addr: u64, value: u32, count: u64) -> Code {
    Fill::line(addr, value, 4, count).now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(addr: u64, value: u32, count: u64, stream: u64) -> Code {
    Fill::line(addr, value, 4, count).later(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD2D8_v2(
    addr: u64,
    pitch: u64,
    value: u8,
    width: u64,
    height: u64,
) -> Code {
    plane(addr, pitch, value.into(), 1, (width, height)).now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD2D8Async(
    addr: u64,
    pitch: u64,
    value: u8,
    width: u64,
    height: u64,
    stream: u64,
) -> Code {
    plane(addr, pitch, value.into(), 1, (width, height)).later(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD2D16_v2(
    addr: u64,
    pitch: u64,
    value: u16,
    width: u64,
    height: u64,
) -> Code {
    plane(addr, pitch, value.into(), 2, (width, height)).now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD2D16Async(
    addr: u64,
    pitch: u64,
    value: u16,
    width: u64,
    height: u64,
    stream: u64,
) -> Code {
    plane(addr, pitch, value.into(), 2, (width, height)).later(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD2D32_v2(
    addr: u64,
    pitch: u64,
    value: u32,
    width: u64,
    height: u64,
) -> Code {
    plane(addr, pitch, value, 4, (width, height)).now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD2D32Async(
    addr: u64,
    pitch: u64,
    value: u32,
    width: u64,
    height: u64,
    stream: u64,
) -> Code {
    plane(addr, pitch, value, 4, (width, height)).later(stream)
}

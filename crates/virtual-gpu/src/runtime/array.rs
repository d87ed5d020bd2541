//! Arrays, as far as they are memory.

use super::Code;
use super::memory::Extent;
use crate::gpu::array;
use crate::gpu::boundary::{In, Out, runtime};
use crate::gpu::{Error, Result, context, work};

/// `cudaChannelFormatDesc`: bits of each of four channels, and their kind.
type Format = [i32; 5];

fn create(format: Format, extent: [u64; 3], flags: u32) -> Result<u64> {
    let device = context::bind()?;
    work::guard()?;
    let bits: i32 = format[..4].iter().sum();
    let element = u64::try_from(bits / 8).map_err(|_| Error::INVALID_VALUE)?;
    array::create(device, element, extent, format, flags)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocArray(
    out: Out<u64>,
    format: In<Format>,
    width: u64,
    height: u64,
    flags: u32,
) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(format.get()?, [width, height, 0], flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc3DArray(
    out: Out<u64>,
    format: In<Format>,
    extent: Extent,
    flags: u32,
) -> Code {
    runtime(|| {
        out.check()?;
        let extent = [extent.width, extent.height, extent.depth];
        out.set(create(format.get()?, extent, flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeArray(array: u64) -> Code {
    runtime(|| {
        context::bind()?;
        work::guard()?;
        if array == 0 { Ok(()) } else { array::destroy(array) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaArrayGetInfo(
    format: Out<Format>,
    extent: Out<Extent>,
    flags: Out<u32>,
    array: u64,
) -> Code {
    runtime(|| {
        let found = array::find(array)?;
        let [width, height, depth] = found.extent;
        format.give(found.format);
        extent.give(Extent { width, height, depth });
        flags.give(found.flags);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetChannelDesc(format: Out<Format>, array: u64) -> Code {
    runtime(|| format.set(array::find(array)?.format))
}

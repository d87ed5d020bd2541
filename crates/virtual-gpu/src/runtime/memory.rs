//! Allocation: device, managed and pinned memory; what an address is.
//!
//! Unlike the driver, the runtime takes a size of 0 (it gives null) and null where memory is given
//! back.

use super::Code;
use crate::constants as c;
use crate::gpu::boundary::{Out, runtime};
use crate::gpu::call::memory::{allocate_host, managed, pinned, pitched};
use crate::gpu::memory::{Allocation, Origin, ledger};
use crate::gpu::{Error, Result, address, context, work};
use crate::layout::cuda12::cudaPointerAttributes as pointer;

/// `cudaExtent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Extent {
    /// In bytes, or in elements if arrays are involved.
    pub width: u64,
    pub height: u64,
    pub depth: u64,
}

/// `cudaPitchedPtr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PitchedPointer {
    pub addr: u64,
    pub pitch: u64,
    pub width: u64,
    pub height: u64,
}

/// Device memory for a runtime call: nothing for a size of 0.
pub(crate) fn allocate(size: u64) -> Result<u64> {
    let device = context::bind()?;
    work::guard()?;
    if size == 0 { Ok(0) } else { ledger().allocate(device, size) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc(out: Out<u64>, size: u64) -> Code {
    runtime(|| {
        out.check()?;
        out.set(allocate(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocPitch(out: Out<u64>, pitch: Out<u64>, width: u64, height: u64) -> Code {
    runtime(|| {
        let (row, size) = pitched(width, height, 1)?;
        pitch.set(row)?;
        out.check()?;
        out.set(allocate(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc3D(out: Out<PitchedPointer>, extent: Extent) -> Code {
    runtime(|| {
        out.check()?;
        let (pitch, size) = pitched(extent.width, extent.height, extent.depth)?;
        let addr = allocate(size)?;
        out.set(PitchedPointer { addr, pitch, width: extent.width, height: extent.height })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocManaged(out: Out<u64>, size: u64, flags: u32) -> Code {
    /// `cudaMemAttachGlobal`, `cudaMemAttachHost`.
    const ATTACH: [u32; 2] = [1, 2];
    runtime(|| {
        let device = context::bind()?;
        if !ATTACH.contains(&flags) {
            return Err(Error::INVALID_VALUE);
        }
        work::guard()?;
        out.check()?;
        out.set(ledger().allocate_managed(device, size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostAlloc(out: Out<u64>, size: u64, flags: u32) -> Code {
    runtime(|| {
        out.check()?;
        out.set(allocate_host(size, flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocHost(out: Out<u64>, size: u64) -> Code {
    runtime(|| {
        out.check()?;
        out.set(allocate_host(size, 0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(addr: u64) -> Code {
    runtime(|| {
        context::bind()?;
        work::guard()?;
        if addr == 0 { Ok(()) } else { ledger().free_host(addr) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostGetFlags(flags: Out<u32>, addr: u64) -> Code {
    /// `cudaHostAllocMapped`.
    const MAPPED: u32 = 2;
    runtime(|| flags.set(pinned(addr)? | MAPPED))
}

/// `cudaMemoryType` of an allocation.
fn memory_type(found: &Allocation) -> i32 {
    match found.origin {
        Origin::Host(_) | Origin::Registered(_) => c::cudaMemoryTypeHost,
        Origin::Managed => c::cudaMemoryTypeManaged,
        _ => c::cudaMemoryTypeDevice,
    }
}

/// CUDA 13 has more fields behind these, all reserved; no program may rely on them.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPointerGetAttributes(record: Out<u8>, addr: u64) -> Code {
    /// What stands for "on no device".
    const NO_DEVICE: i32 = -2;
    runtime(|| {
        record.clear(pointer::SIZE)?;
        let ledger = ledger();
        let (kind, device) = match ledger.find(addr) {
            // A reservation is nothing but its mappings.
            Some(found) if found.origin == Origin::Reserved => {
                match ledger.device_mapped_at(addr) {
                    Some(device) => (c::cudaMemoryTypeDevice, device as i32),
                    None => (c::cudaMemoryTypeUnregistered, NO_DEVICE),
                }
            }
            Some(found) => (memory_type(found), found.device as i32),
            None => (c::cudaMemoryTypeUnregistered, NO_DEVICE),
        };
        record.at(pointer::r#type.offset).set(kind)?;
        record.at(pointer::device.offset).set(device)?;
        let on_device = if kind == c::cudaMemoryTypeUnregistered { 0 } else { addr };
        let on_host = if address::is_device(addr) { 0 } else { addr };
        record.at(pointer::devicePointer.offset).set(on_device)?;
        record.at(pointer::hostPointer.offset).set(on_host)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemRangeGetAttribute(
    data: Out<u8>,
    data_size: u64,
    attribute: i32,
    addr: u64,
    size: u64,
) -> Code {
    /// `cudaInvalidDeviceId`: no preference, never prefetched.
    const NOWHERE: i32 = -2;
    runtime(|| {
        managed(addr, size)?;
        let value = if attribute == c::cudaMemRangeAttributeReadMostly { 0 } else { NOWHERE };
        if data_size == 0 || !data_size.is_multiple_of(4) {
            return Err(Error::INVALID_VALUE);
        }
        (0..data_size as usize / 4).try_for_each(|i| data.at::<i32>(i * 4).set(value))
    })
}

#[cfg(test)]
mod layouts {
    use cudarc::runtime::sys;
    use memtrace_layouts::same_layout;

    use super::{Extent, PitchedPointer};

    same_layout!(Extent = sys::cudaExtent { width: width, height: height, depth: depth });
    same_layout!(
        PitchedPointer =
            sys::cudaPitchedPtr { addr: ptr, pitch: pitch, width: xsize, height: ysize }
    );
}

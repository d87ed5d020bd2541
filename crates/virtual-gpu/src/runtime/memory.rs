//! Allocation: device, managed and pinned memory; what an address is.

use super::Code;
use crate::constants as c;
use crate::gpu::border::{Out, runtime};
use crate::gpu::memory::{Allocation, Kind, book};
use crate::gpu::{Error, Result, address, config, context, work};
use crate::layout::cuda12::cudaPointerAttributes as pointer;

/// Rows of a pitched allocation begin at multiples of this.
const PITCH: u64 = 512;

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

/// A size as the product of lengths; what overflows can't be allocated either.
pub(crate) fn product(lengths: &[u64]) -> Result<u64> {
    let product = lengths.iter().try_fold(1u64, |product, length| product.checked_mul(*length));
    product.ok_or(Error::OUT_OF_MEMORY)
}

/// The pitch of rows of this width, and the size of the whole.
pub(crate) fn pitched(width: u64, height: u64, depth: u64) -> Result<(u64, u64)> {
    if width == 0 || height == 0 || depth == 0 {
        return Ok((0, 0));
    }
    let pitch = width.checked_next_multiple_of(PITCH).ok_or(Error::OUT_OF_MEMORY)?;
    Ok((pitch, product(&[pitch, height, depth])?))
}

/// Device memory for a runtime call: nothing for a size of 0.
pub(crate) fn allocate(size: u64) -> Result<u64> {
    let device = context::bind()?;
    work::guard()?;
    if size == 0 { Ok(0) } else { book().allocate(device, size) }
}

/// Gives memory back. All work is over, as a free that waits for the device requires.
pub(crate) fn free(addr: u64) -> Result {
    context::bind()?;
    if addr == 0 {
        return Ok(());
    }
    work::guard()?;
    book().free(addr)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc(out: Out<u64>, size: u64) -> Code {
    runtime(|| {
        out.check()?;
        out.set(allocate(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(addr: u64) -> Code {
    runtime(|| free(addr))
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
        out.set(book().allocate_managed(device, size)?)
    })
}

/// `cudaHostAllocPortable`, `…Mapped`, `…WriteCombined` together.
const HOST_FLAGS: u32 = 7;

pub(crate) fn allocate_host(size: u64, flags: u32) -> Result<u64> {
    let device = context::bind()?;
    if flags & !HOST_FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    work::guard()?;
    if size == 0 { Ok(0) } else { book().allocate_host(device, size, flags) }
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
        if addr == 0 { Ok(()) } else { book().free_host(addr) }
    })
}

/// `cudaHostRegisterPortable`, `…Mapped`, `…IoMemory`, `…ReadOnly` together.
pub(crate) const REGISTER_FLAGS: u32 = 15;

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(addr: u64, size: u64, flags: u32) -> Code {
    runtime(|| {
        let device = context::bind()?;
        if flags & !REGISTER_FLAGS != 0 {
            return Err(Error::INVALID_VALUE);
        }
        work::guard()?;
        book().register(device, addr, size, flags)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(addr: u64) -> Code {
    runtime(|| {
        context::bind()?;
        work::guard()?;
        book().unregister(addr)
    })
}

/// The flags of the pinned memory at an address: with unified addressing all of it is mapped, and the
/// device sees it at the host's address.
pub(crate) fn pinned(addr: u64) -> Result<u32> {
    match book().find(addr).map(|found| found.kind) {
        Some(Kind::Host(flags) | Kind::Registered(flags)) => Ok(flags),
        _ => Err(Error::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostGetDevicePointer(out: Out<u64>, addr: u64, flags: u32) -> Code {
    runtime(|| {
        context::bind()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        pinned(addr)?;
        out.set(addr)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaHostGetFlags(flags: Out<u32>, addr: u64) -> Code {
    /// `cudaHostAllocMapped`.
    const MAPPED: u32 = 2;
    runtime(|| flags.set(pinned(addr)? | MAPPED))
}

/// Free and total bytes of a device.
pub(crate) fn free_and_total(device: usize) -> Result<(u64, u64)> {
    let gpu = config::machine().device(device).ok_or(Error::INVALID_DEVICE)?;
    Ok((gpu.total() - gpu.in_use(), gpu.total()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetInfo(free: Out<u64>, total: Out<u64>) -> Code {
    runtime(|| {
        let (left, all) = free_and_total(context::bind()?)?;
        free.set(left)?;
        total.set(all)
    })
}

/// `cudaMemoryType` of an allocation.
fn memory_type(found: &Allocation) -> i32 {
    match found.kind {
        Kind::Host(_) | Kind::Registered(_) => c::cudaMemoryTypeHost,
        Kind::Managed => c::cudaMemoryTypeManaged,
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
        let book = book();
        let (kind, device) = match book.find(addr) {
            // A reservation is nothing but its mappings.
            Some(found) if found.kind == Kind::Reserved => match book.device_mapped_at(addr) {
                Some(device) => (c::cudaMemoryTypeDevice, device as i32),
                None => (c::cudaMemoryTypeUnregistered, NO_DEVICE),
            },
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

pub(crate) fn managed(addr: u64, size: u64) -> Result {
    let book = book();
    let found = book.find(addr).filter(|found| found.kind == Kind::Managed);
    let found = found.ok_or(Error::INVALID_VALUE)?;
    if addr - found.start + size > found.span { Err(Error::INVALID_VALUE) } else { Ok(()) }
}

/// Advice changes nothing: managed memory stays with the host. The parameters behind these differ
/// between CUDA 12 and 13.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemAdvise(addr: u64, size: u64) -> Code {
    runtime(|| managed(addr, size))
}

/// As [`cudaMemAdvise`].
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPrefetchAsync(addr: u64, size: u64) -> Code {
    runtime(|| managed(addr, size))
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

//! Memory that is given back, pinned or shared with other processes, and what all kinds have in
//! common.

use crate::gpu::boundary::{Api, Out};
use crate::gpu::memory::{EventTicket, MemoryTicket, Origin, ledger};
use crate::gpu::{self, Error, Result, config, context, work};

/// Rows of a pitched allocation begin at multiples of this.
const PITCH: u64 = 512;

/// A size as the product of lengths; what overflows can't be allocated either.
pub fn product(lengths: &[u64]) -> Result<u64> {
    let product = lengths.iter().try_fold(1u64, |product, length| product.checked_mul(*length));
    product.ok_or(Error::OUT_OF_MEMORY)
}

/// The pitch of rows of this width, and the size of the whole.
pub fn pitched(width: u64, height: u64, depth: u64) -> Result<(u64, u64)> {
    if width == 0 || height == 0 || depth == 0 {
        return Ok((0, 0));
    }
    let pitch = width.checked_next_multiple_of(PITCH).ok_or(Error::OUT_OF_MEMORY)?;
    Ok((pitch, product(&[pitch, height, depth])?))
}

/// Gives memory back. All work is over, as a free that waits for the device requires.
pub fn free(api: Api, addr: u64) -> Result {
    api.device()?;
    if addr == 0 {
        return Ok(());
    }
    work::guard()?;
    ledger().free(addr)
}

/// `CU_MEMHOSTALLOC_PORTABLE`, `…_DEVICEMAP`, `…_WRITECOMBINED` together.
const HOST_FLAGS: u32 = 7;

/// Pinned memory; none for a size of 0.
pub fn allocate_host(size: u64, flags: u32) -> Result<u64> {
    let device = context::bind()?;
    if flags & !HOST_FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    work::guard()?;
    if size == 0 { Ok(0) } else { ledger().allocate_host(device, size, flags) }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`, `…_DEVICEMAP`, `…_IOMEMORY`, `…_READ_ONLY` together.
const REGISTER_FLAGS: u32 = 15;

/// Pins memory of the program's own.
pub fn register(api: Api, addr: u64, size: u64, flags: u32) -> Result {
    let device = api.device()?;
    if flags & !REGISTER_FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    work::guard()?;
    ledger().register(device, addr, size, flags)
}

/// Ends that.
pub fn unregister(api: Api, addr: u64) -> Result {
    api.device()?;
    work::guard()?;
    ledger().unregister(addr)
}

/// The flags of the pinned memory at an address. With unified addressing all of it is mapped, and
/// the device sees it at the host's address.
pub fn pinned(addr: u64) -> Result<u32> {
    match ledger().find(addr).map(|found| found.origin) {
        Some(Origin::Host(flags) | Origin::Registered(flags)) => Ok(flags),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// Where the device sees pinned memory.
pub fn device_pointer(api: Api, out: Out<u64>, addr: u64, flags: u32) -> Result {
    api.device()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    pinned(addr)?;
    out.set(addr)
}

/// Free and total bytes of the device.
pub fn free_and_total(api: Api, free: Out<u64>, total: Out<u64>) -> Result {
    let gpu = config::machine().device(api.device()?).ok_or(Error::INVALID_DEVICE)?;
    free.set(gpu.total() - gpu.in_use())?;
    total.set(gpu.total())
}

/// Advice changes nothing, as managed memory stays with the host. It must be managed memory,
/// though.
pub fn managed(addr: u64, size: u64) -> Result {
    let ledger = ledger();
    let found = ledger.find(addr).filter(|found| found.origin == Origin::Managed);
    let found = found.ok_or(Error::INVALID_VALUE)?;
    if addr - found.start + size > found.span { Err(Error::INVALID_VALUE) } else { Ok(()) }
}

/// `CUipcMemHandle`, `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle([u8; 64]);

// The handles go by value, so the size is part of the interface.
const _: () = assert!(size_of::<Handle>() == crate::layout::all::CUipcMemHandle_st::SIZE);

/// A handle by which other processes find this memory.
pub fn export(handle: Out<Handle>, addr: u64) -> Result {
    handle.set(Handle(ledger().export(addr)?.to_bytes()))
}

/// Opens memory of another process.
pub fn open(api: Api, out: Out<u64>, handle: &Handle) -> Result {
    out.check()?;
    let device = api.device()?;
    let ticket = MemoryTicket::from_bytes(&handle.0).ok_or(Error::INVALID_VALUE)?;
    out.set(ledger().import(device, ticket)?)
}

/// A handle by which other processes find this event.
pub fn export_event(handle: Out<Handle>, event: u64) -> Result {
    let gpu = gpu::device(work::work().exportable_event(event)?)?.index;
    handle.set(Handle(EventTicket { pid: std::process::id(), gpu, id: event }.to_bytes()))
}

/// Opens an event of another process.
pub fn open_event(api: Api, out: Out<u64>, handle: &Handle) -> Result {
    out.check()?;
    let device = api.device()?;
    EventTicket::from_bytes(&handle.0).ok_or(Error::INVALID_VALUE)?;
    out.set(work::work().import_event(device))
}

#[cfg(test)]
mod layouts {
    use cudarc::{driver::sys as driver, runtime::sys as runtime};
    use memtrace_layouts::same_layout;

    use super::Handle;

    same_layout!(Handle = [driver::CUipcMemHandle, driver::CUipcEventHandle, runtime::cudaIpcMemHandle_t, runtime::cudaIpcEventHandle_t] { 0: reserved });
}

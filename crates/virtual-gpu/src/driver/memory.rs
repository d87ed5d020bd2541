//! Allocation, pinned and managed memory, and what other processes can open.

use super::{Code, current};
use crate::gpu::boundary::{Out, driver};
use crate::gpu::call::memory::{self, Handle};
use crate::gpu::memory::ledger;
use crate::gpu::{Error, Result, work};

entries! {
    fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) =>
        |api| memory::free_and_total(api, free, total);
    fn cuMemFree_v2(addr: u64) => |api| memory::free(api, addr);
    fn cuMemHostRegister_v2(addr: u64, size: u64, flags: u32) =>
        |api| memory::register(api, addr, size, flags);
    fn cuMemHostUnregister(addr: u64) => |api| memory::unregister(api, addr);
    fn cuMemHostGetDevicePointer_v2(out: Out<u64>, addr: u64, flags: u32) =>
        |api| memory::device_pointer(api, out, addr, flags);

    // Versions differ only in what comes behind.
    fn cuMemAdvise(addr: u64, size: u64) => |_| memory::managed(addr, size);
    fn cuMemAdvise_v2(addr: u64, size: u64) => |_| memory::managed(addr, size);
    fn cuMemPrefetchAsync(addr: u64, size: u64) => |_| memory::managed(addr, size);
    fn cuMemPrefetchAsync_v2(addr: u64, size: u64) => |_| memory::managed(addr, size);

    fn cuIpcGetMemHandle(handle: Out<Handle>, addr: u64) => |_| memory::export(handle, addr);
    fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: Handle, _flags: u32) =>
        |api| memory::open(api, out, &handle);
    fn cuIpcCloseMemHandle(addr: u64) => |_| ledger().close_import(addr);
    fn cuIpcGetEventHandle(handle: Out<Handle>, event: u64) =>
        |_| memory::export_event(handle, event);
    fn cuIpcOpenEventHandle(out: Out<u64>, handle: Handle) =>
        |api| memory::open_event(api, out, &handle);
}

/// Device memory for a driver call: a size of 0 is an error here.
fn allocate(size: u64) -> Result<u64> {
    let device = current()?;
    work::guard()?;
    ledger().allocate(device, size)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(out: Out<u64>, size: u64) -> Code {
    driver(|| {
        out.check()?;
        out.set(allocate(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocPitch_v2(
    out: Out<u64>,
    pitch: Out<u64>,
    width: u64,
    height: u64,
    element: u32,
) -> Code {
    driver(|| {
        out.check()?;
        if ![4, 8, 16].contains(&element) {
            return Err(Error::INVALID_VALUE);
        }
        let (row, size) = memory::pitched(width, height, 1)?;
        pitch.set(row)?;
        out.set(allocate(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocManaged(out: Out<u64>, size: u64, flags: u32) -> Code {
    /// `CU_MEM_ATTACH_GLOBAL`, `…_HOST`, `…_SINGLE`.
    const ATTACH: [u32; 3] = [1, 2, 4];
    driver(|| {
        let device = current()?;
        out.check()?;
        if !ATTACH.contains(&flags) {
            return Err(Error::INVALID_VALUE);
        }
        work::guard()?;
        out.set(ledger().allocate_managed(device, size)?)
    })
}

fn allocate_host(out: Out<u64>, size: u64, flags: u32) -> Result {
    current()?;
    out.check()?;
    if size == 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.set(memory::allocate_host(size, flags)?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(out: Out<u64>, size: u64) -> Code {
    driver(|| allocate_host(out, size, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(out: Out<u64>, size: u64, flags: u32) -> Code {
    driver(|| allocate_host(out, size, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(addr: u64) -> Code {
    driver(|| {
        current()?;
        work::guard()?;
        ledger().free_host(addr)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetFlags(flags: Out<u32>, addr: u64) -> Code {
    driver(|| flags.set(memory::pinned(addr)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<u64>, addr: u64) -> Code {
    driver(|| {
        let found = *ledger().find(addr).ok_or(Error::NOT_FOUND)?;
        base.give(found.start);
        size.give(found.size);
        Ok(())
    })
}

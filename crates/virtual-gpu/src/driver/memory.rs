//! Allocation, pinned and managed memory, and what other processes can open.

use super::{Code, current};
use crate::gpu::border::{Out, driver};
use crate::gpu::memory::book;
use crate::gpu::{Error, Result, work};
use crate::runtime::ipc::{self, Handle};
use crate::runtime::memory as runtime;

/// Device memory for a driver call: a size of 0 is an error here.
fn allocate(size: u64) -> Result<u64> {
    let device = current()?;
    work::guard()?;
    book().allocate(device, size)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) -> Code {
    driver(|| {
        let (left, all) = runtime::free_and_total(current()?)?;
        free.set(left)?;
        total.set(all)
    })
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
        let (row, size) = runtime::pitched(width, height, 1)?;
        pitch.set(row)?;
        out.set(allocate(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(addr: u64) -> Code {
    driver(|| {
        current()?;
        if addr == 0 {
            return Ok(());
        }
        work::guard()?;
        book().free(addr)
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
        out.set(book().allocate_managed(device, size)?)
    })
}

fn allocate_host(out: Out<u64>, size: u64, flags: u32) -> Result {
    current()?;
    out.check()?;
    if size == 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.set(runtime::allocate_host(size, flags)?)
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
        book().free_host(addr)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(addr: u64, size: u64, flags: u32) -> Code {
    driver(|| {
        let device = current()?;
        if flags & !runtime::REGISTER_FLAGS != 0 {
            return Err(Error::INVALID_VALUE);
        }
        work::guard()?;
        book().register(device, addr, size, flags)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(addr: u64) -> Code {
    driver(|| {
        current()?;
        work::guard()?;
        book().unregister(addr)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(out: Out<u64>, addr: u64, flags: u32) -> Code {
    driver(|| {
        current()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        runtime::pinned(addr)?;
        out.set(addr)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetFlags(flags: Out<u32>, addr: u64) -> Code {
    driver(|| flags.set(runtime::pinned(addr)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<u64>, addr: u64) -> Code {
    driver(|| {
        let found = *book().find(addr).ok_or(Error::NOT_FOUND)?;
        base.give(found.start);
        size.give(found.size);
        Ok(())
    })
}

/// Advice changes nothing: managed memory stays with the host. Versions differ only in what comes behind.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAdvise(addr: u64, size: u64) -> Code {
    driver(|| runtime::managed(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAdvise_v2(addr: u64, size: u64) -> Code {
    driver(|| runtime::managed(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPrefetchAsync(addr: u64, size: u64) -> Code {
    driver(|| runtime::managed(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPrefetchAsync_v2(addr: u64, size: u64) -> Code {
    driver(|| runtime::managed(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcGetMemHandle(handle: Out<Handle>, addr: u64) -> Code {
    driver(|| handle.set(ipc::export_memory(addr)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcOpenMemHandle_v2(out: Out<u64>, handle: Handle, _flags: u32) -> Code {
    driver(|| {
        out.check()?;
        out.set(ipc::open_memory(&handle, current()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(addr: u64) -> Code {
    driver(|| book().close_import(addr))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcGetEventHandle(handle: Out<Handle>, event: u64) -> Code {
    driver(|| handle.set(ipc::export_event(event)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcOpenEventHandle(out: Out<u64>, handle: Handle) -> Code {
    driver(|| {
        out.check()?;
        out.set(ipc::open_event(&handle, current()?)?)
    })
}

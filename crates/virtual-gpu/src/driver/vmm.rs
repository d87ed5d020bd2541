//! Virtual memory management.

use super::{Code, ordinal};
use crate::constants as c;
use crate::gpu::address::CHUNK;
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::call::pool::{Access, Location as Place};
use crate::gpu::memory::{Location, MemoryTicket, Physical, ledger};
use crate::gpu::{self, Error, Result, file};
use crate::layout::all::CUmemAllocationProp_st as layout;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    kind: i32,
    exports: u32,
    location: Place,
    windows: u64,
    flags: [u8; 8],
}

const _: () = assert!(size_of::<Properties>() == layout::SIZE);

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: i32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u64 = 3;

impl Properties {
    fn location(&self) -> Result<Location> {
        match self.location.kind {
            c::CU_MEM_LOCATION_TYPE_DEVICE => Ok(Location::Device(ordinal(self.location.id)?)),
            // What devices say they can't do is not offered: memory of the host in VMM.
            _ => Err(Error::NOT_SUPPORTED),
        }
    }

    fn check(&self) -> Result<Location> {
        let location = self.location()?;
        if self.kind != PINNED {
            return Err(Error::INVALID_VALUE);
        }
        if self.exports & !(c::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u32) != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        Ok(location)
    }

    fn of(physical: &Physical) -> Self {
        let location = match physical.location {
            Location::Device(device) => {
                Place { kind: c::CU_MEM_LOCATION_TYPE_DEVICE, id: device as i32 }
            }
            Location::Host => Place { kind: c::CU_MEM_LOCATION_TYPE_HOST, id: 0 },
        };
        Self { kind: PINNED, exports: physical.exports, location, windows: 0, flags: [0; 8] }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationGranularity(
    granularity: Out<u64>,
    properties: In<Properties>,
    option: i32,
) -> Code {
    driver(|| {
        properties.get()?.check()?;
        match option {
            c::CU_MEM_ALLOC_GRANULARITY_MINIMUM | c::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED => {
                granularity.set(CHUNK)
            }
            _ => Err(Error::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressReserve(
    out: Out<u64>,
    size: u64,
    align: u64,
    hint: u64,
    flags: u64,
) -> Code {
    driver(|| {
        out.check()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        out.set(ledger().reserve(size, align, hint, gpu::current_device())?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(addr: u64, size: u64) -> Code {
    driver(|| ledger().unreserve(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemCreate(
    out: Out<u64>,
    size: u64,
    properties: In<Properties>,
    flags: u64,
) -> Code {
    driver(|| {
        out.check()?;
        let properties = properties.get()?;
        let location = properties.check()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if let Location::Device(device) = location {
            gpu::touch(device)?;
        }
        let physical = Physical::new(size, location, properties.exports, false);
        out.set(ledger().create(physical)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> Code {
    driver(|| ledger().release(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(addr: u64, size: u64, offset: u64, handle: u64, flags: u64) -> Code {
    driver(|| {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        ledger().map(addr, size, offset, handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(addr: u64, size: u64) -> Code {
    driver(|| ledger().unmap(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(addr: u64, size: u64, accesses: In<Access>, count: usize) -> Code {
    driver(|| {
        accesses.list(count).into_iter().try_for_each(|access| {
            let device = access.location.device()?;
            ledger().set_access(addr, size, device, access.flags as u64 == READ_WRITE)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAccess(flags: Out<u64>, location: In<Place>, addr: u64) -> Code {
    driver(|| {
        let device = location.get()?.device()?;
        let allowed = ledger().access(addr, device)?;
        flags.set(if allowed { READ_WRITE } else { 0 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRetainAllocationHandle(out: Out<u64>, addr: u64) -> Code {
    driver(|| {
        out.check()?;
        out.set(ledger().retain_mapped(addr)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    out: Out<Properties>,
    handle: u64,
) -> Code {
    driver(|| out.set(Properties::of(ledger().physical(handle)?)))
}

/// A file descriptor, which the caller closes. Fabric handles need a fabric.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemExportToShareableHandle(
    out: Out<i32>,
    handle: u64,
    kind: i32,
    flags: u64,
) -> Code {
    driver(|| {
        out.check()?;
        let physical = *ledger().physical(handle)?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if kind != c::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(Error::NOT_SUPPORTED);
        }
        if physical.exports & kind as u32 == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let Location::Device(device) = physical.location else { return Err(Error::NOT_SUPPORTED) };
        let gpu = gpu::device(device)?.index;
        let ticket = MemoryTicket { pid: std::process::id(), gpu, id: handle, size: physical.size };
        out.set(file::export(&ticket.to_bytes()).ok_or(Error::OUT_OF_MEMORY)?)
    })
}

/// In the process that exported it, this is one more handle to the same memory; elsewhere
/// memory that the other process pays for.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemImportFromShareableHandle(
    out: Out<u64>,
    handle: *const core::ffi::c_void,
    kind: i32,
) -> Code {
    driver(|| {
        out.check()?;
        if kind != c::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            return Err(Error::NOT_SUPPORTED);
        }
        let bytes = file::import(handle.addr() as i32).ok_or(Error::INVALID_VALUE)?;
        let ticket = MemoryTicket::from_bytes(&bytes).ok_or(Error::INVALID_VALUE)?;
        let mut ledger = ledger();
        if ticket.pid == std::process::id() {
            ledger.retain(ticket.id)?;
            return out.set(ticket.id);
        }
        let machine = gpu::config::machine();
        let device = machine.devices().position(|gpu| gpu.index == ticket.gpu);
        let location = Location::Device(device.ok_or(Error::INVALID_DEVICE)?);
        out.set(ledger.create(Physical::new(ticket.size, location, kind as u32, true))?)
    })
}

#[cfg(test)]
mod layouts {
    use cudarc::driver::sys;
    use memtrace_layouts::same_layout;

    use super::Properties;

    same_layout!(
        Properties = sys::CUmemAllocationProp {
            kind: type_,
            exports: requestedHandleTypes,
            location: location,
            windows: win32HandleMetaData,
            flags: allocFlags,
        }
    );
}

//! Stream-ordered allocation and its pools.

use crate::constants as c;
use crate::gpu::boundary::{Api, In, Out};
use crate::gpu::memory::{Pool, ledger};
use crate::gpu::{Error, Result, context, ordinal, work};

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// `CU_MEM_LOCATION_TYPE_…`.
    pub kind: i32,
    /// The device's number.
    pub id: i32,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Who.
    pub location: Location,
    /// `CU_MEM_ACCESS_FLAGS_…`.
    pub flags: i32,
}

/// The beginning of `CUmemPoolProps`, and all that matters of it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProperties {
    /// `CU_MEM_ALLOCATION_TYPE_…`.
    pub allocation: i32,
    /// How memory can be exported.
    pub handles: i32,
    /// Where it lies.
    pub location: Location,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only kind that pools of a device have.
const PINNED: i32 = c::cudaMemAllocationTypePinned;

impl Location {
    /// Only memory of devices is pooled: attribute queries say so.
    pub fn device(self) -> Result<usize> {
        if self.kind == c::cudaMemLocationTypeDevice {
            ordinal(self.id)
        } else {
            Err(Error::NOT_SUPPORTED)
        }
    }
}

/// Memory in stream order, from a pool or the current one; part of the graph if the stream is
/// capturing.
fn take(size: u64, pool: Option<u64>, stream: u64) -> Result<u64> {
    let device = work::work().stream(stream)?.device;
    context::touch(device)?;
    if size == 0 {
        return Ok(0);
    }
    if work::work().capture_status(stream)? != work::Status::None {
        return work::work().capture_memory(stream, device, size);
    }
    let mut ledger = ledger();
    let pool = pool.map_or_else(|| ledger.current_pool(device), Ok)?;
    ledger.allocate_from_pool(pool, size)
}

/// The same, for a caller.
pub fn allocate(api: Api, out: Out<u64>, size: u64, pool: Option<u64>, stream: u64) -> Result {
    api.context_of(stream)?;
    out.check()?;
    if let Some(pool) = pool {
        ledger().pool(pool)?;
    }
    out.set(take(size, pool, stream)?)
}

/// Gives memory back in stream order.
pub fn free(api: Api, addr: u64, stream: u64) -> Result {
    api.context_of(stream)?;
    if addr == 0 {
        return Err(Error::INVALID_VALUE);
    }
    if work::work().capture_status(stream)? != work::Status::None {
        return work::submit(stream, work::Action::Free(addr));
    }
    work::work().stream(stream)?;
    ledger().free(addr)
}

/// The pool of a location: CUDA 13's way to ask for the default and the current one.
pub fn located(location: In<Location>, kind: i32) -> Result<usize> {
    if kind == PINNED { location.get()?.device() } else { Err(Error::NOT_SUPPORTED) }
}

/// A new pool.
pub fn create(out: Out<u64>, properties: In<PoolProperties>) -> Result {
    out.check()?;
    let properties = properties.get()?;
    if properties.allocation != PINNED {
        return Err(Error::INVALID_VALUE);
    }
    let device = properties.location.device()?;
    let mut ledger = ledger();
    let account = ledger.account(device)?;
    out.set(ledger.create_pool(Pool::on_device(device, account)))
}

/// Gives an attribute of a pool.
pub fn get_attribute(pool: u64, number: i32, out: Out<u8>) -> Result {
    let mut ledger = ledger();
    let pool = *ledger.pool(pool)?;
    drop(ledger);
    match number {
        c::cudaMemPoolReuseFollowEventDependencies
            ..=c::cudaMemPoolReuseAllowInternalDependencies => {
            out.cast().set(pool.reuse[number as usize - 1])
        }
        c::cudaMemPoolAttrReleaseThreshold => out.cast().set(pool.threshold),
        c::cudaMemPoolAttrReservedMemCurrent => out.cast().set(pool.reserved),
        c::cudaMemPoolAttrReservedMemHigh => out.cast().set(pool.reserved_high),
        c::cudaMemPoolAttrUsedMemCurrent => out.cast().set(pool.used),
        c::cudaMemPoolAttrUsedMemHigh => out.cast().set(pool.used_high),
        c::cudaMemPoolAttrAllocationType => out.cast().set(PINNED),
        c::cudaMemPoolAttrLocationId => out.cast().set(pool.device as i32),
        c::cudaMemPoolAttrLocationType => out.cast().set(c::cudaMemLocationTypeDevice),
        c::cudaMemPoolAttrMaxPoolSize => out.cast().set(0u64),
        c::cudaMemPoolAttrExportHandleTypes | c::cudaMemPoolAttrHwDecompressEnabled => {
            out.cast().set(0i32)
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

/// Sets one. Marks can only be set back, to 0, which means: to what is so now.
pub fn set_attribute(pool: u64, number: i32, value: In<u8>) -> Result {
    let mut ledger = ledger();
    let pool = ledger.pool(pool)?;
    let back = || if value.cast::<u64>().get()? == 0 { Ok(()) } else { Err(Error::INVALID_VALUE) };
    match number {
        c::cudaMemPoolReuseFollowEventDependencies
            ..=c::cudaMemPoolReuseAllowInternalDependencies => {
            pool.reuse[number as usize - 1] = value.cast().get()?;
        }
        c::cudaMemPoolAttrReleaseThreshold => pool.threshold = value.cast().get()?,
        c::cudaMemPoolAttrReservedMemHigh => {
            back()?;
            pool.reserved_high = pool.reserved;
        }
        c::cudaMemPoolAttrUsedMemHigh => {
            back()?;
            pool.used_high = pool.used;
        }
        _ => return Err(Error::INVALID_VALUE),
    }
    Ok(())
}

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`; the pool's own device always has it.
const READ_WRITE: i32 = 3;

/// Which devices may use it.
pub fn set_access(pool: u64, accesses: &[Access]) -> Result {
    for access in accesses {
        let device = access.location.device()?;
        let mut ledger = ledger();
        let pool = ledger.pool(pool)?;
        match access.flags {
            READ_WRITE => pool.peers |= 1 << device,
            0 if device != pool.device => pool.peers &= !(1 << device),
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(())
}

/// Whether a device may.
pub fn get_access(pool: u64, location: Location) -> Result<i32> {
    let device = location.device()?;
    let mut ledger = ledger();
    let pool = ledger.pool(pool)?;
    let allowed = device == pool.device || pool.peers & (1 << device) != 0;
    Ok(if allowed { READ_WRITE } else { 0 })
}

/// Memory that graphs use: what of it is in use, and what is held for them.
pub fn graph_memory(device: usize, number: i32, reset: bool) -> Result<u64> {
    let mut ledger = ledger();
    let pool = ledger.graph_pool(device)?;
    let (now, mark) = match number {
        c::cudaGraphMemAttrUsedMemCurrent => return Ok(pool.used),
        c::cudaGraphMemAttrReservedMemCurrent => return Ok(pool.reserved),
        c::cudaGraphMemAttrUsedMemHigh => (pool.used, &mut pool.used_high),
        c::cudaGraphMemAttrReservedMemHigh => (pool.reserved, &mut pool.reserved_high),
        _ => return Err(Error::INVALID_VALUE),
    };
    if reset {
        *mark = now;
    }
    Ok(*mark)
}

/// Marks can only be set back, to 0, which means: to what is so now.
pub fn reset_graph_memory(device: usize, number: i32, value: u64) -> Result {
    let marks = [c::cudaGraphMemAttrUsedMemHigh, c::cudaGraphMemAttrReservedMemHigh];
    if value != 0 || !marks.contains(&number) {
        return Err(Error::INVALID_VALUE);
    }
    graph_memory(device, number, true).map(|_| ())
}

#[cfg(test)]
mod layouts {
    use cudarc::{driver::sys as driver, runtime::sys as runtime};
    use memtrace_layouts::same_layout;

    use super::{Access, Location, PoolProperties};

    same_layout!(Location = [driver::CUmemLocation, runtime::cudaMemLocation] { kind: type_, id: id });
    same_layout!(Access = [driver::CUmemAccessDesc, runtime::cudaMemAccessDesc] { location: location, flags: flags });
    same_layout!(PoolProperties => [driver::CUmemPoolProps, runtime::cudaMemPoolProps] {
        allocation: allocType,
        handles: handleTypes,
        location: location,
    });
}

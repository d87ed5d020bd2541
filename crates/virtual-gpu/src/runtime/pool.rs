//! Stream-ordered allocation and its pools.

use super::{Code, ordinal};
use crate::constants as c;
use crate::gpu::border::{In, Out, runtime};
use crate::gpu::memory::{Pool, book};
use crate::gpu::{Error, Result, context, work};

/// `cudaMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

/// `cudaMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub location: Location,
    pub flags: i32,
}

/// The beginning of `cudaMemPoolProps`, and all that matters of it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProperties {
    pub allocation: i32,
    pub handles: i32,
    pub location: Location,
}

/// `cudaMemAllocationTypePinned`, the only kind that pools of a device have.
const PINNED: i32 = c::cudaMemAllocationTypePinned;

impl Location {
    /// Only memory of devices is pooled: attribute queries say so.
    pub(crate) fn device(self) -> Result<usize> {
        if self.kind == c::cudaMemLocationTypeDevice {
            ordinal(self.id)
        } else {
            Err(Error::NOT_SUPPORTED)
        }
    }
}

/// Memory in stream order, from a pool or the current one; part of the graph if the stream is capturing.
pub(crate) fn allocate(size: u64, pool: Option<u64>, stream: u64) -> Result<u64> {
    let device = work::work().stream(stream)?.device;
    context::touch(device)?;
    if size == 0 {
        return Ok(0);
    }
    if work::work().capture_status(stream)? != work::Status::None {
        return work::work().capture_memory(stream, device, size);
    }
    let mut book = book();
    let pool = pool.map_or_else(|| book.current_pool(device), Ok)?;
    book.allocate_from_pool(pool, size)
}

/// Gives memory back in stream order.
pub(crate) fn free(addr: u64, stream: u64) -> Result {
    if addr == 0 {
        return Err(Error::INVALID_VALUE);
    }
    if work::work().capture_status(stream)? != work::Status::None {
        return work::submit(stream, work::Action::Free(addr));
    }
    work::work().stream(stream)?;
    book().free(addr)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocAsync(out: Out<u64>, size: u64, stream: u64) -> Code {
    runtime(|| {
        context::bind()?;
        out.check()?;
        out.set(allocate(size, None, stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMallocFromPoolAsync(
    out: Out<u64>,
    size: u64,
    pool: u64,
    stream: u64,
) -> Code {
    runtime(|| {
        context::bind()?;
        out.check()?;
        book().pool(pool)?;
        out.set(allocate(size, Some(pool), stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync(addr: u64, stream: u64) -> Code {
    runtime(|| {
        context::bind()?;
        free(addr, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetDefaultMemPool(out: Out<u64>, device: i32) -> Code {
    runtime(|| out.set(book().default_pool(ordinal(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetMemPool(out: Out<u64>, device: i32) -> Code {
    runtime(|| out.set(book().current_pool(ordinal(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetMemPool(device: i32, pool: u64) -> Code {
    runtime(|| book().set_current_pool(ordinal(device)?, pool))
}

/// The pool of a location: CUDA 13's way to ask for the default and the current one.
pub(crate) fn located(location: In<Location>, kind: i32) -> Result<usize> {
    if kind == PINNED { location.get()?.device() } else { Err(Error::NOT_SUPPORTED) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetDefaultMemPool(
    out: Out<u64>,
    location: In<Location>,
    kind: i32,
) -> Code {
    runtime(|| out.set(book().default_pool(located(location, kind)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetMemPool(out: Out<u64>, location: In<Location>, kind: i32) -> Code {
    runtime(|| out.set(book().current_pool(located(location, kind)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemSetMemPool(location: In<Location>, kind: i32, pool: u64) -> Code {
    runtime(|| book().set_current_pool(located(location, kind)?, pool))
}

/// `cudaMemPoolCreate` for both APIs.
pub(crate) fn create(properties: PoolProperties) -> Result<u64> {
    if properties.allocation != PINNED {
        return Err(Error::INVALID_VALUE);
    }
    let device = properties.location.device()?;
    let mut book = book();
    let account = book.account(device)?;
    Ok(book.create_pool(Pool::on_device(device, account)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolCreate(out: Out<u64>, properties: In<PoolProperties>) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(properties.get()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolDestroy(pool: u64) -> Code {
    runtime(|| book().destroy_pool(pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolTrimTo(pool: u64, keep: u64) -> Code {
    runtime(|| book().trim_pool(pool, keep))
}

/// An attribute of a pool by its number, which is the same in both APIs.
pub(crate) fn get_attribute(pool: u64, number: i32, out: Out<u8>) -> Result {
    let mut book = book();
    let pool = *book.pool(pool)?;
    drop(book);
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
pub(crate) fn set_attribute(pool: u64, number: i32, value: In<u8>) -> Result {
    let mut book = book();
    let pool = book.pool(pool)?;
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

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolGetAttribute(pool: u64, number: i32, out: Out<u8>) -> Code {
    runtime(|| get_attribute(pool, number, out))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolSetAttribute(pool: u64, number: i32, value: In<u8>) -> Code {
    runtime(|| set_attribute(pool, number, value))
}

/// `cudaMemAccessFlagsProtReadWrite`; the pool's own device always has it.
const READ_WRITE: i32 = 3;

pub(crate) fn set_access(pool: u64, accesses: &[Access]) -> Result {
    for access in accesses {
        let device = access.location.device()?;
        let mut book = book();
        let pool = book.pool(pool)?;
        match access.flags {
            READ_WRITE => pool.peers |= 1 << device,
            0 if device != pool.device => pool.peers &= !(1 << device),
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(())
}

pub(crate) fn get_access(pool: u64, location: Location) -> Result<i32> {
    let device = location.device()?;
    let mut book = book();
    let pool = book.pool(pool)?;
    let allowed = device == pool.device || pool.peers & (1 << device) != 0;
    Ok(if allowed { READ_WRITE } else { 0 })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolSetAccess(pool: u64, accesses: In<Access>, count: usize) -> Code {
    runtime(|| set_access(pool, &accesses.list(count)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemPoolGetAccess(flags: Out<i32>, pool: u64, location: In<Location>) -> Code {
    runtime(|| flags.set(get_access(pool, location.get()?)?))
}

/// Memory that graphs use: what of it is in use, and what is held for them.
pub(crate) fn graph_memory(device: usize, number: i32, reset: bool) -> Result<u64> {
    let mut book = book();
    let pool = book.graph_pool(device)?;
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
pub(crate) fn reset_graph_memory(device: usize, number: i32, value: u64) -> Result {
    let marks = [c::cudaGraphMemAttrUsedMemHigh, c::cudaGraphMemAttrReservedMemHigh];
    if value != 0 || !marks.contains(&number) {
        return Err(Error::INVALID_VALUE);
    }
    graph_memory(device, number, true).map(|_| ())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetGraphMemAttribute(
    device: i32,
    number: i32,
    value: Out<u64>,
) -> Code {
    runtime(|| value.set(graph_memory(ordinal(device)?, number, false)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetGraphMemAttribute(device: i32, number: i32, value: In<u64>) -> Code {
    runtime(|| reset_graph_memory(ordinal(device)?, number, value.get()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGraphMemTrim(device: i32) -> Code {
    runtime(|| book().trim_graph_pool(ordinal(device)?))
}

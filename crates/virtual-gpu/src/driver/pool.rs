//! Stream-ordered allocation and its pools.

use super::{Code, current, ordinal};
use crate::gpu::Result;
use crate::gpu::border::{In, Out, driver};
use crate::gpu::memory::book;
use crate::runtime::pool::{self, Access, Location, PoolProperties};

/// A stream knows its context; only the default streams (0, `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`) are the current
/// context's (`cuda.h`: "default stream specified with no current context").
fn context_of(stream: u64) -> Result {
    const LAST_DEFAULT: u64 = 2;
    if stream <= LAST_DEFAULT { current().map(drop) } else { Ok(()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(out: Out<u64>, size: u64, stream: u64) -> Code {
    driver(|| {
        context_of(stream)?;
        out.check()?;
        out.set(pool::allocate(size, None, stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocFromPoolAsync(
    out: Out<u64>,
    size: u64,
    pool: u64,
    stream: u64,
) -> Code {
    driver(|| {
        context_of(stream)?;
        out.check()?;
        book().pool(pool)?;
        out.set(pool::allocate(size, Some(pool), stream)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(addr: u64, stream: u64) -> Code {
    driver(|| {
        context_of(stream)?;
        pool::free(addr, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetDefaultMemPool(out: Out<u64>, device: i32) -> Code {
    driver(|| out.set(book().default_pool(ordinal(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetMemPool(out: Out<u64>, device: i32) -> Code {
    driver(|| out.set(book().current_pool(ordinal(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceSetMemPool(device: i32, pool: u64) -> Code {
    driver(|| book().set_current_pool(ordinal(device)?, pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetDefaultMemPool(out: Out<u64>, location: In<Location>, kind: i32) -> Code {
    driver(|| out.set(book().default_pool(pool::located(location, kind)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetMemPool(out: Out<u64>, location: In<Location>, kind: i32) -> Code {
    driver(|| out.set(book().current_pool(pool::located(location, kind)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetMemPool(location: In<Location>, kind: i32, pool: u64) -> Code {
    driver(|| book().set_current_pool(pool::located(location, kind)?, pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolCreate(out: Out<u64>, properties: In<PoolProperties>) -> Code {
    driver(|| {
        out.check()?;
        out.set(pool::create(properties.get()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: u64) -> Code {
    driver(|| book().destroy_pool(pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(pool: u64, keep: u64) -> Code {
    driver(|| book().trim_pool(pool, keep))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolGetAttribute(pool: u64, number: i32, out: Out<u8>) -> Code {
    driver(|| pool::get_attribute(pool, number, out))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAttribute(pool: u64, number: i32, value: In<u8>) -> Code {
    driver(|| pool::set_attribute(pool, number, value))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAccess(pool: u64, accesses: In<Access>, count: usize) -> Code {
    driver(|| pool::set_access(pool, &accesses.list(count)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolGetAccess(flags: Out<i32>, pool: u64, location: In<Location>) -> Code {
    driver(|| flags.set(pool::get_access(pool, location.get()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetGraphMemAttribute(device: i32, number: i32, value: Out<u64>) -> Code {
    driver(|| value.set(pool::graph_memory(ordinal(device)?, number, false)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceSetGraphMemAttribute(device: i32, number: i32, value: In<u64>) -> Code {
    driver(|| pool::reset_graph_memory(ordinal(device)?, number, value.get()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGraphMemTrim(device: i32) -> Code {
    let trim = || -> Result { book().trim_graph_pool(ordinal(device)?) };
    driver(trim)
}

//! Stream-ordered allocation and its pools.

use super::ordinal;
use crate::gpu::boundary::{In, Out};
use crate::gpu::call::pool::{self, Access, Location, PoolProperties};
use crate::gpu::memory::ledger;

entries! {
    fn cuMemAllocAsync(out: Out<u64>, size: u64, stream: u64) =>
        |api| pool::allocate(api, out, size, None, stream);
    fn cuMemAllocFromPoolAsync(out: Out<u64>, size: u64, pool: u64, stream: u64) =>
        |api| pool::allocate(api, out, size, Some(pool), stream);
    fn cuMemFreeAsync(addr: u64, stream: u64) => |api| pool::free(api, addr, stream);

    fn cuDeviceGetDefaultMemPool(out: Out<u64>, device: i32) =>
        |_| out.set(ledger().default_pool(ordinal(device)?)?);
    fn cuDeviceGetMemPool(out: Out<u64>, device: i32) =>
        |_| out.set(ledger().current_pool(ordinal(device)?)?);
    fn cuDeviceSetMemPool(device: i32, pool: u64) =>
        |_| ledger().set_current_pool(ordinal(device)?, pool);
    fn cuMemGetDefaultMemPool(out: Out<u64>, location: In<Location>, kind: i32) =>
        |_| out.set(ledger().default_pool(pool::located(location, kind)?)?);
    fn cuMemGetMemPool(out: Out<u64>, location: In<Location>, kind: i32) =>
        |_| out.set(ledger().current_pool(pool::located(location, kind)?)?);
    fn cuMemSetMemPool(location: In<Location>, kind: i32, pool: u64) =>
        |_| ledger().set_current_pool(pool::located(location, kind)?, pool);

    fn cuMemPoolCreate(out: Out<u64>, properties: In<PoolProperties>) =>
        |_| pool::create(out, properties);
    fn cuMemPoolDestroy(pool: u64) => |_| ledger().destroy_pool(pool);
    fn cuMemPoolTrimTo(pool: u64, keep: u64) => |_| ledger().trim_pool(pool, keep);
    fn cuMemPoolGetAttribute(pool: u64, number: i32, out: Out<u8>) =>
        |_| pool::get_attribute(pool, number, out);
    fn cuMemPoolSetAttribute(pool: u64, number: i32, value: In<u8>) =>
        |_| pool::set_attribute(pool, number, value);
    fn cuMemPoolSetAccess(pool: u64, accesses: In<Access>, count: usize) =>
        |_| pool::set_access(pool, &accesses.list(count));
    fn cuMemPoolGetAccess(flags: Out<i32>, pool: u64, location: In<Location>) =>
        |_| flags.set(pool::get_access(pool, location.get()?)?);

    fn cuDeviceGetGraphMemAttribute(device: i32, number: i32, value: Out<u64>) =>
        |_| value.set(pool::graph_memory(ordinal(device)?, number, false)?);
    fn cuDeviceSetGraphMemAttribute(device: i32, number: i32, value: In<u64>) =>
        |_| pool::reset_graph_memory(ordinal(device)?, number, value.get()?);
    fn cuDeviceGraphMemTrim(device: i32) => |_| ledger().trim_graph_pool(ordinal(device)?);
}

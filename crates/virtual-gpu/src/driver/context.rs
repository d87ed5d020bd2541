//! Contexts.

use super::{Code, ordinal};
use crate::gpu::boundary::{Out, driver};
use crate::gpu::call::device;
use crate::gpu::limits::{self, Limit};
use crate::gpu::{Error, Result, context, work};

entries! {
    fn cuCtxGetDevice(device: Out<i32>) => |api| device::current(api, device);
    fn cuCtxSetFlags(flags: u32) => |api| device::set_flags(api, flags);
    fn cuCtxSynchronize() => device::synchronize;
    fn cuCtxGetLimit(value: Out<u64>, limit: i32) =>
        |api| value.set(limits::get(api.device()?, Limit::from_code(limit)?));
    fn cuCtxSetLimit(limit: i32, value: u64) =>
        |api| limits::set(api.device()?, Limit::from_code(limit)?, value);
    fn cuCtxGetCacheConfig(config: Out<i32>) => |_| config.set(0);
    fn cuCtxSetCacheConfig(config: i32) => |_| device::cache_config_is_known(config);
    fn cuCtxGetSharedMemConfig(config: Out<i32>) => |_| config.set(1);
    fn cuCtxSetSharedMemConfig(config: i32) => |_| device::bank_size_is_known(config);
    fn cuCtxResetPersistingL2Cache() => |api| api.device().map(|_| ());
    fn cuProfilerStart() => |api| api.device().map(|_| ());
    fn cuProfilerStop() => |api| api.device().map(|_| ());
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(out: Out<u64>, device: i32) -> Code {
    driver(|| {
        out.check()?;
        out.set(context::retain(ordinal(device)?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> Code {
    driver(|| context::release(ordinal(device)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(device: i32) -> Code {
    driver(|| context::reset(ordinal(device)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: i32, flags: u32) -> Code {
    driver(|| context::set_primary_flags(ordinal(device)?, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: i32,
    flags: Out<u32>,
    active: Out<i32>,
) -> Code {
    driver(|| {
        let (set, is_active) = context::primary_state(ordinal(device)?)?;
        flags.give(set);
        active.set(is_active.into())
    })
}

fn create(out: Out<u64>, flags: u32, device: i32) -> Result {
    out.check()?;
    out.set(context::create(ordinal(device)?, flags)?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v2(out: Out<u64>, flags: u32, device: i32) -> Code {
    driver(|| create(out, flags, device))
}

/// Affinity to a part of the multiprocessors is not supported.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v3(
    out: Out<u64>,
    _affinities: u64,
    affinity_count: i32,
    flags: u32,
    device: i32,
) -> Code {
    driver(|| {
        if affinity_count != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        create(out, flags, device)
    })
}

/// Parameters, which concern affinity and graphics, are not supported.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v4(out: Out<u64>, params: u64, flags: u32, device: i32) -> Code {
    driver(|| {
        if params != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        create(out, flags, device)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: u64) -> Code {
    driver(|| context::destroy(context))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: u64) -> Code {
    driver(|| {
        let found = context::find(context)?.ok_or(Error::INVALID_CONTEXT)?;
        context::push(Some(found))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(out: Out<u64>) -> Code {
    driver(|| {
        let popped = context::pop()?;
        out.give(popped.map_or(0, |popped| popped.context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: u64) -> Code {
    driver(|| {
        context::set_current(context::find(context)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(out: Out<u64>) -> Code {
    driver(|| out.set(context::current().map_or(0, |current| current.context)))
}

/// The context that a handle names, or the current one for none.
fn named(context: u64) -> Result<context::Current> {
    context::find(context)?.map_or_else(context::current, Ok)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice_v2(device: Out<i32>, context: u64) -> Code {
    driver(|| device.set(named(context)?.device as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetId(context: u64, id: Out<u64>) -> Code {
    driver(|| id.set(context::id(named(context)?.context)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetFlags(flags: Out<u32>) -> Code {
    driver(|| flags.set(context::flags(context::current()?.context)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetApiVersion(context: u64, version: Out<u32>) -> Code {
    /// The last version of contexts that the driver API has had.
    const VERSION: u32 = 3020;
    driver(|| {
        named(context)?;
        version.set(VERSION)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize_v2(context: u64) -> Code {
    driver(|| {
        named(context)?;
        work::synchronize_device()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(peer: u64, flags: u32) -> Code {
    driver(|| {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let peer = context::find(peer)?.ok_or(Error::INVALID_CONTEXT)?;
        context::enable_peer(super::current()?, peer.device)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDisablePeerAccess(peer: u64) -> Code {
    driver(|| {
        let peer = context::find(peer)?.ok_or(Error::INVALID_CONTEXT)?;
        context::disable_peer(super::current()?, peer.device)
    })
}

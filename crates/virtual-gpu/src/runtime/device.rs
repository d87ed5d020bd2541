//! Devices: which there are, which is current, what they can.

use super::{Code, ordinal};
use crate::constants as c;
use crate::gpu::attributes::attribute;
use crate::gpu::border::{In, Out, Text, runtime, runtime_query};
use crate::gpu::limits::{self, Limit};
use crate::gpu::{self, Error, Result, context, thread, work};
use crate::libs::versions;
use core::ffi::c_char;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceCount(count: Out<i32>) -> Code {
    runtime_query(|| count.set(gpu::count() as i32)).max(runtime(|| Ok(())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDevice(device: Out<i32>) -> Code {
    runtime(|| device.set(gpu::current_device() as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDevice(device: i32) -> Code {
    runtime(|| context::set_device(ordinal(device)?))
}

/// Makes the context and sets flags, but not the current device.
#[unsafe(no_mangle)]
pub extern "C" fn cudaInitDevice(device: i32, _device_flags: u32, flags: u32) -> Code {
    runtime(|| {
        let device = ordinal(device)?;
        if flags > 1 {
            return Err(Error::INVALID_VALUE);
        }
        context::touch(device)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaSetValidDevices(devices: In<i32>, count: i32) -> Code {
    runtime(|| {
        let devices = devices.list(usize::try_from(count).map_err(|_| Error::INVALID_VALUE)?);
        let first = devices.first().copied().map_or(Ok(0), ordinal)?;
        devices.into_iter().try_for_each(|device| ordinal(device).map(|_| ()))?;
        thread::with(|thread| thread.device.set(first));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceFlags(flags: Out<u32>) -> Code {
    runtime(|| flags.set(context::primary_state(gpu::current_device())?.0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaSetDeviceFlags(flags: u32) -> Code {
    runtime(|| context::set_primary_flags(gpu::current_device(), flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) -> Code {
    runtime(|| {
        let gpu = gpu::device(ordinal(device)?)?;
        value.set(attribute(gpu, number).ok_or(Error::INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetPCIBusId(text: Out<c_char>, room: i32, device: i32) -> Code {
    runtime(|| {
        let id = gpu::device(ordinal(device)?)?.pci_bus_id();
        let room = usize::try_from(room).map_err(|_| Error::INVALID_VALUE)?;
        if room <= id.len() {
            return Err(Error::INVALID_VALUE);
        }
        text.text(&id, room)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetByPCIBusId(device: Out<i32>, text: Text) -> Code {
    runtime(|| device.set(gpu::device_by_pci(&text.string()?)? as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceCanAccessPeer(answer: Out<i32>, device: i32, peer: i32) -> Code {
    runtime(|| answer.set((ordinal(device)? != ordinal(peer)?).into()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceEnablePeerAccess(peer: i32, flags: u32) -> Code {
    runtime(|| {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        context::enable_peer(context::bind()?, ordinal(peer)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceDisablePeerAccess(peer: i32) -> Code {
    runtime(|| context::disable_peer(context::bind()?, ordinal(peer)?))
}

/// All pairs are alike: they reach each other and have native atomics.
pub(crate) fn peer_attribute(number: i32, from: usize, to: usize) -> Result<i32> {
    if from == to {
        return Err(Error::INVALID_DEVICE);
    }
    match number {
        c::cudaDevP2PAttrPerformanceRank | c::cudaDevP2PAttrOnlyPartialNativeAtomicSupported => {
            Ok(0)
        }
        c::cudaDevP2PAttrAccessSupported
        | c::cudaDevP2PAttrNativeAtomicSupported
        | c::cudaDevP2PAttrCudaArrayAccessSupported => Ok(1),
        _ => Err(Error::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetP2PAttribute(
    value: Out<i32>,
    number: i32,
    from: i32,
    to: i32,
) -> Code {
    runtime(|| value.set(peer_attribute(number, ordinal(from)?, ordinal(to)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> Code {
    runtime(|| {
        least.give(work::PRIORITIES.0);
        greatest.give(work::PRIORITIES.1);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSynchronize() -> Code {
    runtime(|| {
        context::bind()?;
        work::synchronize_device()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceReset() -> Code {
    runtime(|| context::reset(gpu::current_device()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetLimit(value: Out<u64>, limit: i32) -> Code {
    runtime(|| value.set(limits::get(context::bind()?, Limit::from_code(limit)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetLimit(limit: i32, value: u64) -> Code {
    runtime(|| limits::set(context::bind()?, Limit::from_code(limit)?, value))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetCacheConfig(config: Out<i32>) -> Code {
    runtime(|| config.set(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetCacheConfig(config: i32) -> Code {
    runtime(|| if (0..4).contains(&config) { Ok(()) } else { Err(Error::INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceGetSharedMemConfig(config: Out<i32>) -> Code {
    runtime(|| config.set(1))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSetSharedMemConfig(config: i32) -> Code {
    runtime(|| if (0..3).contains(&config) { Ok(()) } else { Err(Error::INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaCtxResetPersistingL2Cache() -> Code {
    runtime(|| context::bind().map(|_| ()))
}

/// The newest toolkit whose headers this library was made from.
const NEWEST_TOOLKIT: i32 = 13_020;

/// The driver is as new as that toolkit, and never older than the runtime of the program.
pub(crate) fn driver_version() -> i32 {
    NEWEST_TOOLKIT.max(runtime_version())
}

pub(crate) fn runtime_version() -> i32 {
    let [major, minor, _] = versions::cuda();
    (major * 1000 + minor * 10) as i32
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDriverGetVersion(version: Out<i32>) -> Code {
    runtime_query(|| version.set(driver_version()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaRuntimeGetVersion(version: Out<i32>) -> Code {
    runtime_query(|| version.set(runtime_version()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStart() -> Code {
    runtime(|| context::bind().map(|_| ()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaProfilerStop() -> Code {
    runtime(|| context::bind().map(|_| ()))
}

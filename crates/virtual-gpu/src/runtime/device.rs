//! Devices: which there are, and which is current.

use super::{Code, ordinal};
use crate::gpu::boundary::{In, Out, runtime, runtime_query};
use crate::gpu::{self, Error, context, thread};
use crate::layout::NEWEST_TOOLKIT;
use crate::libs::versions;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceCount(count: Out<i32>) -> Code {
    runtime_query(|| count.set(gpu::count() as i32)).max(runtime(|| Ok(())))
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

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceReset() -> Code {
    runtime(|| context::reset(gpu::current_device()))
}

/// The driver is as new as the newest toolkit whose headers this library was made from, and never
/// older than the runtime of the program.
pub(crate) fn driver_version() -> i32 {
    NEWEST_TOOLKIT.max(runtime_version())
}

pub(crate) fn runtime_version() -> i32 {
    let [major, minor, _] = versions::cuda();
    (major * 1000 + minor * 10) as i32
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaRuntimeGetVersion(version: Out<i32>) -> Code {
    runtime_query(|| version.set(runtime_version()))
}

//! Devices: what they can, and what is set for all work on one.

use crate::constants as c;
use crate::gpu::boundary::{Api, Out};
use crate::gpu::{self, Error, Result, attributes, context, work};
use core::ffi::c_char;

/// The device that calls go to. The runtime makes no context for this question.
pub fn current(api: Api, device: Out<i32>) -> Result {
    api.needs_context()?;
    device.set(gpu::current_device() as i32)
}

/// Flags of the device's primary context. The runtime makes no context to set them.
pub fn set_flags(api: Api, flags: u32) -> Result {
    api.needs_context()?;
    context::set_primary_flags(gpu::current_device(), flags)
}

/// All work on the device is over.
pub fn synchronize(api: Api) -> Result {
    api.device()?;
    work::synchronize_device()
}

/// Gives an attribute.
pub fn attribute(value: Out<i32>, number: i32, device: usize) -> Result {
    let gpu = gpu::device(device)?;
    value.set(attributes::attribute(gpu, number).ok_or(Error::INVALID_VALUE)?)
}

/// Gives the PCI address as text.
pub fn pci_bus_id(text: Out<c_char>, room: i32, device: usize) -> Result {
    let id = gpu::device(device)?.pci_bus_id();
    let room = usize::try_from(room).map_err(|_| Error::INVALID_VALUE)?;
    if room <= id.len() {
        return Err(Error::INVALID_VALUE);
    }
    text.text(&id, room)
}

/// All pairs are alike: they reach each other and have native atomics.
pub fn peer_attribute(number: i32, from: usize, to: usize) -> Result<i32> {
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

/// How first-level cache and shared memory are to be parted, of no effect here.
pub fn cache_config_is_known(config: i32) -> Result {
    if (0..4).contains(&config) { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

/// How wide banks of shared memory are to be, of no effect here.
pub fn bank_size_is_known(config: i32) -> Result {
    if (0..3).contains(&config) { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

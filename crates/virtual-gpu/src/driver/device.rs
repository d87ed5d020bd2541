//! Devices.

use super::{Code, ordinal};
use crate::constants as c;
use crate::gpu::attributes::attribute;
use crate::gpu::boundary::{Out, Text, driver, driver_init};
use crate::gpu::call::device::{self, peer_attribute};
use crate::gpu::{self, Error};
use crate::layout::{Field, all::CUdevprop_st as properties};
use crate::runtime::device::driver_version;
use core::ffi::c_char;

queries! {
    fn cuDriverGetVersion(version: Out<i32>) => |_| version.set(driver_version());
}

entries! {
    fn cuDeviceGetAttribute(value: Out<i32>, number: i32, device: i32) =>
        |_| device::attribute(value, number, ordinal(device)?);
    fn cuDeviceGetPCIBusId(text: Out<c_char>, room: i32, device: i32) =>
        |_| device::pci_bus_id(text, room, ordinal(device)?);
    fn cuDeviceGetByPCIBusId(device: Out<i32>, text: Text) =>
        |_| device.set(gpu::device_by_pci(&text.string()?)? as i32);
    fn cuDeviceCanAccessPeer(answer: Out<i32>, device: i32, peer: i32) =>
        |_| answer.set((ordinal(device)? != ordinal(peer)?).into());
    fn cuDeviceGetP2PAttribute(value: Out<i32>, number: i32, from: i32, to: i32) =>
        |_| value.set(peer_attribute(number, ordinal(from)?, ordinal(to)?)?);
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> Code {
    if flags == 0 { driver_init() } else { Error::INVALID_VALUE.driver() }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<i32>) -> Code {
    driver(|| count.set(gpu::count() as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<i32>, number: i32) -> Code {
    driver(|| device.set(ordinal(number)? as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: Out<c_char>, room: i32, device: i32) -> Code {
    driver(|| {
        let gpu = gpu::device(ordinal(device)?)?;
        name.text(&gpu.profile.name, usize::try_from(room).map_err(|_| Error::INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) -> Code {
    driver(|| uuid.set(gpu::device(ordinal(device)?)?.uuid()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<u64>, device: i32) -> Code {
    driver(|| bytes.set(gpu::device(ordinal(device)?)?.total()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetProperties(record: Out<u8>, device: i32) -> Code {
    driver(|| {
        let gpu = gpu::device(ordinal(device)?)?;
        record.clear(properties::SIZE)?;
        let put = |field: Field, numbers: &[i32]| {
            numbers.iter().enumerate().try_for_each(|(i, number)| {
                let value = attribute(gpu, *number).ok_or(Error::INVALID_VALUE)?;
                record.at::<i32>(field.offset + 4 * i).set(value)
            })
        };
        put(properties::maxThreadsPerBlock, &[c::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])?;
        put(
            properties::maxThreadsDim,
            &[
                c::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
                c::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
                c::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
            ],
        )?;
        put(
            properties::maxGridSize,
            &[
                c::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
                c::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
                c::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
            ],
        )?;
        put(properties::sharedMemPerBlock, &[c::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK])?;
        put(properties::totalConstantMemory, &[c::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY])?;
        put(properties::SIMDWidth, &[c::CU_DEVICE_ATTRIBUTE_WARP_SIZE])?;
        put(properties::memPitch, &[c::CU_DEVICE_ATTRIBUTE_MAX_PITCH])?;
        put(properties::regsPerBlock, &[c::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK])?;
        put(properties::clockRate, &[c::CU_DEVICE_ATTRIBUTE_CLOCK_RATE])?;
        put(properties::textureAlign, &[c::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT])
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32) -> Code {
    driver(|| {
        let profile = &gpu::device(ordinal(device)?)?.profile;
        major.set(profile.major() as i32)?;
        minor.set(profile.minor() as i32)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetExecAffinitySupport(
    answer: Out<i32>,
    _kind: i32,
    device: i32,
) -> Code {
    driver(|| {
        ordinal(device)?;
        answer.set(0)
    })
}

//! What a kernel needs, how many fit, and what is said of a launch.

use super::device;
use crate::constants as c;
use crate::gpu::boundary::{Api, Out};
use crate::gpu::kernels::{self, Launch};
use crate::gpu::{self, Error, Result};

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Which.
    pub id: i32,
    pad: i32,
    /// As the attribute has it.
    pub value: [u32; 16],
}

/// What attributes say about a launch. The rest of them concern timing and caches only.
pub fn with_attributes(mut launch: Launch, attributes: &[Attribute]) -> Launch {
    for attribute in attributes {
        match attribute.id {
            c::cudaLaunchAttributeCooperative => launch.cooperative = attribute.value[0] != 0,
            c::cudaLaunchAttributeClusterDimension => {
                launch.cluster = [attribute.value[0], attribute.value[1], attribute.value[2]];
            }
            _ => {}
        }
    }
    launch
}

/// Sets an attribute of a kernel.
pub fn set_attribute(function: u64, number: i32, value: i32, device: usize) -> Result {
    match number {
        c::cudaFuncAttributeMaxDynamicSharedMemorySize => {
            kernels::set_max_dynamic_shared(function, value, device)
        }
        c::cudaFuncAttributePreferredSharedMemoryCarveout => {
            if !(-1..=100).contains(&value) {
                return Err(Error::INVALID_VALUE);
            }
            kernels::set(function, |settings| settings.carveout = value)
        }
        c::cudaFuncAttributeNonPortableClusterSizeAllowed => {
            kernels::set(function, |settings| settings.large_clusters = value != 0)
        }
        c::cudaFuncAttributeClusterDimMustBeSet
        | c::cudaFuncAttributeRequiredClusterWidth
        | c::cudaFuncAttributeRequiredClusterHeight
        | c::cudaFuncAttributeRequiredClusterDepth
        | c::cudaFuncAttributeClusterSchedulingPolicyPreference => kernels::check(function),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// How first-level cache and shared memory are to be parted for a kernel.
pub fn set_cache_config(function: u64, config: i32) -> Result {
    device::cache_config_is_known(config)?;
    kernels::check(function)
}

/// How wide banks of shared memory are to be for a kernel.
pub fn set_bank_size(function: u64, config: i32) -> Result {
    device::bank_size_is_known(config)?;
    kernels::check(function)
}

/// Blocks per multiprocessor.
pub fn occupancy(function: u64, threads: i32, shared: u64, device: usize) -> Result<i32> {
    kernels::check(function)?;
    let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0);
    let threads = threads.ok_or(Error::INVALID_VALUE)?;
    let profile = &gpu::device(device)?.profile;
    Ok(kernels::blocks_per_multiprocessor(profile, threads, shared) as i32)
}

/// The same with flags, which concern caches only.
pub fn occupancy_with(
    api: Api,
    blocks: Out<i32>,
    function: u64,
    (threads, shared): (i32, u64),
    flags: u32,
) -> Result {
    if flags > 1 {
        return Err(Error::INVALID_VALUE);
    }
    blocks.set(occupancy(function, threads, shared, api.device()?)?)
}

/// How much dynamic shared memory blocks may have so that as many fit on a multiprocessor.
pub fn shared_for_blocks(
    api: Api,
    size: Out<u64>,
    function: u64,
    blocks: i32,
    threads: i32,
) -> Result {
    let device = api.device()?;
    occupancy(function, threads, 0, device)?;
    let blocks = u32::try_from(blocks).map_err(|_| Error::INVALID_VALUE)?;
    size.set(kernels::shared_for_blocks(&gpu::device(device)?.profile, blocks))
}

/// The largest cluster.
pub fn largest_cluster(api: Api, size: Out<i32>, function: u64) -> Result {
    let profile = &gpu::device(api.device()?)?.profile;
    size.set(kernels::largest_cluster(function, profile)? as i32)
}

#[cfg(test)]
mod layouts {
    use cudarc::{driver::sys as driver, runtime::sys as runtime};
    use memtrace_layouts::same_layout;

    use super::Attribute;

    // Values are a union's; the size of the whole says that ours is as large.
    same_layout!(Attribute => driver::CUlaunchAttribute { id: id, pad: pad, value: value });
    same_layout!(Attribute => runtime::cudaLaunchAttribute { id: id, pad: pad, value: val });
    const _: () = assert!(size_of::<Attribute>() == size_of::<driver::CUlaunchAttribute>());
}

//! What a kernel needs, and how many fit.

use super::Code;
use super::launch::{Config, shape};
use crate::constants as c;
use crate::gpu::border::{In, Out, runtime};
use crate::gpu::{self, Error, Result, context, kernels};
use crate::layout::cuda12::cudaFuncAttributes as attributes;
use core::ffi::c_char;
use memtrace_devices::Limits;

/// Registers and the like are the same for every kernel (see [`kernels`]); the code is taken to be made
/// for just this GPU.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncGetAttributes(record: Out<u8>, function: u64) -> Code {
    runtime(|| {
        let gpu = gpu::device(context::bind()?)?;
        let settings = kernels::settings(function)?;
        record.clear(attributes::SIZE)?;
        let put = |field: crate::layout::Field, value: i32| record.at(field.offset).set(value);
        put(attributes::maxThreadsPerBlock, Limits::MAX_THREADS_PER_BLOCK as i32)?;
        put(attributes::numRegs, kernels::REGISTERS as i32)?;
        put(attributes::ptxVersion, gpu.profile.sm as i32)?;
        put(attributes::binaryVersion, gpu.profile.sm as i32)?;
        put(attributes::maxDynamicSharedSizeBytes, settings.max_dynamic_shared as i32)?;
        put(attributes::preferredShmemCarveout, settings.carveout)?;
        put(attributes::nonPortableClusterSizeAllowed, settings.large_clusters.into())
    })
}

/// Sets an attribute of a kernel. Numbers are the same in both APIs.
pub(crate) fn set_attribute(function: u64, number: i32, value: i32, device: usize) -> Result {
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

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncSetAttribute(function: u64, number: i32, value: i32) -> Code {
    runtime(|| set_attribute(function, number, value, context::bind()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaKernelSetAttributeForDevice(
    kernel: u64,
    number: i32,
    value: i32,
    device: i32,
) -> Code {
    runtime(|| set_attribute(kernel, number, value, super::ordinal(device)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncSetCacheConfig(function: u64, config: i32) -> Code {
    runtime(|| {
        if !(0..4).contains(&config) {
            return Err(Error::INVALID_VALUE);
        }
        kernels::check(function)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncSetSharedMemConfig(function: u64, config: i32) -> Code {
    runtime(|| {
        if !(0..3).contains(&config) {
            return Err(Error::INVALID_VALUE);
        }
        kernels::check(function)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaFuncGetName(name: Out<*const c_char>, function: u64) -> Code {
    runtime(|| name.set(kernels::name(function)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetFuncBySymbol(out: Out<u64>, symbol: u64) -> Code {
    runtime(|| out.set(kernels::handle(symbol)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetKernel(out: Out<u64>, symbol: u64) -> Code {
    runtime(|| out.set(kernels::handle(symbol)?))
}

/// Blocks per multiprocessor, for both APIs.
pub(crate) fn occupancy(function: u64, threads: i32, shared: u64, device: usize) -> Result<i32> {
    kernels::check(function)?;
    let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0);
    let threads = threads.ok_or(Error::INVALID_VALUE)?;
    let profile = &gpu::device(device)?.profile;
    Ok(kernels::blocks_per_multiprocessor(profile, threads, shared) as i32)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<i32>,
    function: u64,
    threads: i32,
    shared: u64,
) -> Code {
    runtime(|| blocks.set(occupancy(function, threads, shared, context::bind()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: Out<i32>,
    function: u64,
    threads: i32,
    shared: u64,
    flags: u32,
) -> Code {
    runtime(|| {
        if flags > 1 {
            return Err(Error::INVALID_VALUE);
        }
        blocks.set(occupancy(function, threads, shared, context::bind()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyAvailableDynamicSMemPerBlock(
    size: Out<u64>,
    function: u64,
    blocks: i32,
    threads: i32,
) -> Code {
    runtime(|| {
        let device = context::bind()?;
        occupancy(function, threads, 0, device)?;
        let blocks = u32::try_from(blocks).map_err(|_| Error::INVALID_VALUE)?;
        size.set(kernels::shared_for_blocks(&gpu::device(device)?.profile, blocks))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyMaxActiveClusters(
    clusters: Out<i32>,
    function: u64,
    config: In<Config>,
) -> Code {
    runtime(|| {
        kernels::check(function)?;
        let (threads, shared, blocks) = shape(&config.get()?);
        let profile = &gpu::device(context::bind()?)?.profile;
        clusters.set(kernels::clusters(profile, threads, shared, blocks) as i32)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaOccupancyMaxPotentialClusterSize(
    size: Out<i32>,
    function: u64,
    _config: u64,
) -> Code {
    runtime(|| {
        let profile = &gpu::device(context::bind()?)?.profile;
        size.set(kernels::largest_cluster(function, profile)? as i32)
    })
}

//! What a kernel needs, and how many fit.

use super::Code;
use super::launch::{Config, shape};
use crate::gpu::boundary::{In, Out, Text, runtime};
use crate::gpu::call::kernel::set_attribute;
use crate::gpu::{self, context, kernels};
use crate::layout::all::cudaFuncAttributes as attributes;
use memtrace_devices::Limits;

/// Registers and the like are the same for every kernel (see [`kernels`]); the code is taken to be
/// made for just this GPU.
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
pub extern "C" fn cudaGetFuncBySymbol(out: Out<u64>, symbol: u64) -> Code {
    runtime(|| out.set(kernels::handle(symbol)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetKernel(out: Out<u64>, symbol: u64) -> Code {
    runtime(|| out.set(kernels::handle(symbol)?))
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

/// The driver looks for the place of the answer first, the runtime last.
#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryGetKernel(out: Out<u64>, library: u64, name: Text) -> Code {
    runtime(|| out.set(kernels::function(library, &name.string()?)?))
}

//! Functions: what they need, launches, how many fit.

use super::{Code, current};
use crate::constants as c;
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::call::kernel::{self, Attribute, occupancy, with_attributes};
use crate::gpu::kernels::{self, Launch};
use crate::gpu::{self, Error, Result, work};
use core::ffi::c_char;
use memtrace_devices::Limits;

entries! {
    fn cuFuncSetAttribute(function: u64, number: i32, value: i32) =>
        |api| kernel::set_attribute(function, number, value, api.device()?);
    fn cuFuncSetCacheConfig(function: u64, config: i32) =>
        |_| kernel::set_cache_config(function, config);
    fn cuFuncSetSharedMemConfig(function: u64, config: i32) =>
        |_| kernel::set_bank_size(function, config);
    fn cuFuncGetName(out: Out<*const c_char>, function: u64) =>
        |_| out.set(kernels::name(function)?);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>,
        function: u64,
        threads: i32,
        shared: u64,
    ) => |api| blocks.set(occupancy(function, threads, shared, api.device()?)?);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>,
        function: u64,
        threads: i32,
        shared: u64,
        flags: u32,
    ) => |api| kernel::occupancy_with(api, blocks, function, (threads, shared), flags);
    fn cuOccupancyAvailableDynamicSMemPerBlock(
        size: Out<u64>,
        function: u64,
        blocks: i32,
        threads: i32,
    ) => |api| kernel::shared_for_blocks(api, size, function, blocks, threads);
    fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: u64, _config: u64) =>
        |api| kernel::largest_cluster(api, size, function);
}

/// An attribute of a kernel. What is only known from machine code is the
/// same for all (see [`kernels`]).
pub(crate) fn attribute(function: u64, number: i32, device: usize) -> Result<i32> {
    let settings = kernels::settings(function)?;
    let sm = gpu::device(device)?.profile.sm as i32;
    match number {
        c::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => Ok(Limits::MAX_THREADS_PER_BLOCK as i32),
        c::CU_FUNC_ATTRIBUTE_NUM_REGS => Ok(kernels::REGISTERS as i32),
        c::CU_FUNC_ATTRIBUTE_PTX_VERSION | c::CU_FUNC_ATTRIBUTE_BINARY_VERSION => Ok(sm),
        c::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
            Ok(settings.max_dynamic_shared as i32)
        }
        c::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => Ok(settings.carveout),
        c::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED => {
            Ok(settings.large_clusters.into())
        }
        _ if (0..c::CU_FUNC_ATTRIBUTE_MAX).contains(&number) => Ok(0),
        _ => Err(Error::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(value: Out<i32>, number: i32, function: u64) -> Code {
    driver(|| value.set(attribute(function, number, current()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetModule(out: Out<u64>, function: u64) -> Code {
    driver(|| out.set(kernels::module_of(function)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncIsLoaded(state: Out<i32>, function: u64) -> Code {
    /// `CU_FUNCTION_LOADING_STATE_LOADED`.
    const LOADED: i32 = 1;
    driver(|| {
        kernels::check(function)?;
        state.set(LOADED)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncLoad(function: u64) -> Code {
    driver(|| kernels::check(function))
}

fn launch(launch: &Launch, stream: u64) -> Result {
    launch.check(current()?)?;
    work::submit(stream, launch.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: u64,
    _arguments: u64,
    _extra: u64,
) -> Code {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    driver(|| launch(&Launch::new(function, grid, block, shared.into()), stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchCooperativeKernel(
    function: u64,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared: u32,
    stream: u64,
    _arguments: u64,
) -> Code {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    driver(|| {
        let mut cooperative = Launch::new(function, grid, block, shared.into());
        cooperative.cooperative = true;
        launch(&cooperative, stream)
    })
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    attributes: In<Attribute>,
    count: u32,
}

const _: () = assert!(size_of::<Config>() == crate::layout::all::CUlaunchConfig_st::SIZE);

impl Config {
    fn launch(&self, function: u64) -> Launch {
        let plain = Launch::new(function, self.grid, self.block, self.shared.into());
        with_attributes(plain, &self.attributes.list(self.count as usize))
    }

    fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernelEx(
    config: In<Config>,
    function: u64,
    _arguments: u64,
    _extra: u64,
) -> Code {
    driver(|| {
        let config = config.get()?;
        launch(&config.launch(function), config.stream)
    })
}

/// `CUoccupancyB2DSize`.
pub type SharedForBlock = unsafe extern "C" fn(i32) -> usize;

/// The block size that keeps most threads resident; among equals, the largest.
fn best_block(
    function: u64,
    shared_for: Option<SharedForBlock>,
    shared: u64,
    limit: i32,
) -> Result<(i32, i32)> {
    let device = current()?;
    let most = Limits::MAX_THREADS_PER_BLOCK as i32;
    let limit = if limit <= 0 { most } else { limit.min(most) };
    let (mut best, mut resident) = ((0, 0), -1);
    let warps = (limit as u32).div_ceil(Limits::WARP);
    for threads in (1..=warps).rev().map(|warps| limit.min((warps * Limits::WARP) as i32)) {
        // SAFETY: the program gave the function to be asked for exactly this.
        let shared = shared_for.map_or(shared, |ask| unsafe { ask(threads) } as u64);
        let blocks = occupancy(function, threads, shared, device)?;
        if blocks * threads > resident {
            resident = blocks * threads;
            best = (blocks * gpu::device(device)?.profile.sms as i32, threads);
        }
    }
    Ok(best)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxPotentialBlockSize(
    grid: Out<i32>,
    block: Out<i32>,
    function: u64,
    shared_for: Option<SharedForBlock>,
    shared: u64,
    limit: i32,
) -> Code {
    driver(|| {
        let (blocks, threads) = best_block(function, shared_for, shared, limit)?;
        grid.set(blocks)?;
        block.set(threads)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    grid: Out<i32>,
    block: Out<i32>,
    function: u64,
    shared_for: Option<SharedForBlock>,
    shared: u64,
    limit: i32,
    _flags: u32,
) -> Code {
    driver(|| {
        let (blocks, threads) = best_block(function, shared_for, shared, limit)?;
        grid.set(blocks)?;
        block.set(threads)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveClusters(
    clusters: Out<i32>,
    function: u64,
    config: In<Config>,
) -> Code {
    driver(|| {
        kernels::check(function)?;
        let config = config.get()?;
        let profile = &gpu::device(current()?)?.profile;
        let blocks = config.launch(function).cluster.iter().map(|n| u64::from(*n)).product();
        let count = kernels::clusters(profile, config.threads(), config.shared.into(), blocks);
        clusters.set(count as i32)
    })
}

#[cfg(test)]
mod layouts {
    use cudarc::driver::sys;
    use memtrace_layouts::same_layout;

    use super::Config;

    same_layout!(
        Config = sys::CUlaunchConfig {
            grid: gridDimX..gridDimZ,
            block: blockDimX..blockDimZ,
            shared: sharedMemBytes,
            stream: hStream,
            attributes: attrs,
            count: numAttrs,
        }
    );
}

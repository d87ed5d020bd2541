//! Kernel launches.

use super::Code;
use crate::gpu::boundary::{In, Out, runtime};
use crate::gpu::call::kernel::{Attribute, with_attributes};
use crate::gpu::kernels::Launch;
use crate::gpu::thread::{self, Configuration};
use crate::gpu::{Error, Result, context, work};

/// `dim3`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl From<Dim3> for [u32; 3] {
    fn from(dim: Dim3) -> Self {
        [dim.x, dim.y, dim.z]
    }
}

impl From<[u32; 3]> for Dim3 {
    fn from([x, y, z]: [u32; 3]) -> Self {
        Self { x, y, z }
    }
}

/// `cudaLaunchConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    grid: Dim3,
    block: Dim3,
    shared: u64,
    stream: u64,
    attributes: In<Attribute>,
    count: u32,
}

/// Checks a launch and puts it on its stream.
pub(crate) fn launch(launch: &Launch, stream: u64) -> Result {
    launch.check(context::bind()?)?;
    work::submit(stream, launch.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernel(
    function: u64,
    grid: Dim3,
    block: Dim3,
    _arguments: u64,
    shared: u64,
    stream: u64,
) -> Code {
    runtime(|| launch(&Launch::new(function, grid.into(), block.into(), shared), stream))
}

/// What the compiler of CUDA 13 generates: with the kernel's handle in place of the host function.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaLaunchKernel(
    kernel: u64,
    grid: Dim3,
    block: Dim3,
    _arguments: u64,
    shared: u64,
    stream: u64,
) -> Code {
    runtime(|| launch(&Launch::new(kernel, grid.into(), block.into(), shared), stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchCooperativeKernel(
    function: u64,
    grid: Dim3,
    block: Dim3,
    _arguments: u64,
    shared: u64,
    stream: u64,
) -> Code {
    runtime(|| {
        let mut cooperative = Launch::new(function, grid.into(), block.into(), shared);
        cooperative.cooperative = true;
        launch(&cooperative, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchKernelExC(config: In<Config>, function: u64, _arguments: u64) -> Code {
    runtime(|| {
        let config = config.get()?;
        let plain = Launch::new(function, config.grid.into(), config.block.into(), config.shared);
        let attributes = config.attributes.list(config.count as usize);
        launch(&with_attributes(plain, &attributes), config.stream)
    })
}

/// The first half of `<<<…>>>`: its configuration waits for the kernel's stub to fetch it.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPushCallConfiguration(
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: u64,
) -> Code {
    let configuration = Configuration { grid: grid.into(), block: block.into(), shared, stream };
    let pushed =
        thread::with(|thread| thread.configurations.borrow_mut().push(Some(configuration)));
    if pushed { 0 } else { Error::MISSING_CONFIGURATION.code() }
}

/// The second half.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaPopCallConfiguration(
    grid: Out<Dim3>,
    block: Out<Dim3>,
    shared: Out<usize>,
    stream: Out<u64>,
) -> Code {
    let popped = thread::with(|thread| thread.configurations.borrow_mut().pop()).flatten();
    let Some(configuration) = popped else { return Error::MISSING_CONFIGURATION.code() };
    grid.give(configuration.grid.into());
    block.give(configuration.block.into());
    shared.give(configuration.shared);
    stream.give(configuration.stream);
    0
}

/// The size of a launch configuration, for the queries that take one.
pub(crate) fn shape(config: &Config) -> (u32, u64, u64) {
    let attributes = config.attributes.list(config.count as usize);
    let plain = Launch::new(0, config.grid.into(), config.block.into(), config.shared);
    let cluster = with_attributes(plain, &attributes).cluster;
    let threads = [config.block.x, config.block.y, config.block.z].iter().product();
    (threads, config.shared, cluster.iter().map(|n| u64::from(*n)).product())
}

#[cfg(test)]
mod layouts {
    use cudarc::runtime::sys;
    use memtrace_layouts::same_layout;

    use super::{Config, Dim3};

    same_layout!(Dim3 = sys::dim3 { x: x, y: y, z: z });
    same_layout!(
        Config = sys::cudaLaunchConfig_t {
            grid: gridDim,
            block: blockDim,
            shared: dynamicSmemBytes,
            stream: stream,
            attributes: attrs,
            count: numAttrs,
        }
    );
}

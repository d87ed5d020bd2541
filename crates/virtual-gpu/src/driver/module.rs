//! Modules, libraries, and the kernels and variables in them.

use super::{Code, current, ordinal};
use crate::gpu::boundary::{In, Out, Text, driver};
use crate::gpu::call::library::{self, enumerate, global, load, load_file};
use crate::gpu::{Error, Result, kernels};
use core::ffi::c_char;

entries! {
    fn cuModuleEnumerateFunctions(out: Out<u64>, room: u32, module: u64) =>
        |_| enumerate(out, room, module);
    fn cuModuleGetGlobal_v2(addr: Out<u64>, size: Out<u64>, module: u64, name: Text) =>
        |api| global(api, addr, size, module, name);
    // What options there are comes behind these two.
    fn cuLibraryLoadData(out: Out<u64>, image: In<u8>) => |_| library::from_memory(out, image);
    fn cuLibraryLoadFromFile(out: Out<u64>, path: Text) => |_| library::from_file(out, path);
    fn cuLibraryUnload(library: u64) => |_| kernels::unload(library);
    fn cuLibraryGetKernelCount(count: Out<u32>, library: u64) =>
        |_| count.set(kernels::functions(library)?.len() as u32);
    fn cuLibraryEnumerateKernels(out: Out<u64>, room: u32, library: u64) =>
        |_| enumerate(out, room, library);
    fn cuLibraryGetGlobal(addr: Out<u64>, size: Out<u64>, library: u64, name: Text) =>
        |api| global(api, addr, size, library, name);
}

/// A module belongs to a context, so there must be one.
fn load_module(out: Out<u64>, image: In<u8>) -> Result {
    current()?;
    out.check()?;
    out.set(load(image)?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoad(out: Out<u64>, path: Text) -> Code {
    driver(|| {
        current()?;
        out.check()?;
        out.set(load_file(path)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(out: Out<u64>, image: In<u8>) -> Code {
    driver(|| load_module(out, image))
}

/// Options concern the compiler in the driver, which there is none of. Logs stay empty.
#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(out: Out<u64>, image: In<u8>) -> Code {
    driver(|| load_module(out, image))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadFatBinary(out: Out<u64>, image: In<u8>) -> Code {
    driver(|| load_module(out, image))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: u64) -> Code {
    driver(|| kernels::unload(module))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetLoadingMode(mode: Out<i32>) -> Code {
    /// `CU_MODULE_LAZY_LOADING`.
    const LAZY: i32 = 2;
    driver(|| mode.set(LAZY))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(out: Out<u64>, module: u64, name: Text) -> Code {
    driver(|| {
        out.check()?;
        out.set(kernels::function(module, &name.string()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunctionCount(count: Out<u32>, module: u64) -> Code {
    driver(|| count.set(kernels::functions(module)?.len() as u32))
}

/// A library is its own module in every context.
#[unsafe(no_mangle)]
pub extern "C" fn cuLibraryGetModule(out: Out<u64>, library: u64) -> Code {
    driver(|| {
        current()?;
        kernels::functions(library)?;
        out.set(library)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLibraryGetKernel(out: Out<u64>, library: u64, name: Text) -> Code {
    driver(|| {
        out.check()?;
        out.set(kernels::function(library, &name.string()?)?)
    })
}

/// A kernel is its own function in every context.
#[unsafe(no_mangle)]
pub extern "C" fn cuKernelGetFunction(out: Out<u64>, kernel: u64) -> Code {
    driver(|| {
        current()?;
        kernels::check(kernel)?;
        out.set(kernel)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuKernelGetLibrary(out: Out<u64>, kernel: u64) -> Code {
    driver(|| out.set(kernels::module_of(kernel)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuKernelGetName(out: Out<*const c_char>, kernel: u64) -> Code {
    driver(|| out.set(kernels::name(kernel)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuKernelGetAttribute(
    value: Out<i32>,
    number: i32,
    kernel: u64,
    device: i32,
) -> Code {
    driver(|| value.set(super::function::attribute(kernel, number, ordinal(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuKernelSetAttribute(number: i32, value: i32, kernel: u64, device: i32) -> Code {
    driver(|| crate::gpu::call::kernel::set_attribute(kernel, number, value, ordinal(device)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuKernelSetCacheConfig(kernel: u64, config: i32, device: i32) -> Code {
    driver(|| {
        ordinal(device)?;
        if !(0..4).contains(&config) {
            return Err(Error::INVALID_VALUE);
        }
        kernels::check(kernel)
    })
}

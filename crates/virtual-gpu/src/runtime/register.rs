//! What the code that the compiler generates calls when a program starts and ends: its
//! kernels and variables. Nothing of this wakes CUDA, and in a child of a process that
//! had woken it all of it is left undone.

use super::Code;
use crate::gpu::boundary::{Out, runtime, runtime_query};
use crate::gpu::work::{self, Action};
use crate::gpu::{Error, Result, context, kernels, life, memory};
use core::ffi::{c_char, c_int, c_void};

/// The binary itself is in a format of the compiler's own and not looked into.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinary(_binary: *const c_void) -> *mut c_void {
    if life::is_forked_child() {
        return core::ptr::dangling_mut();
    }
    // SAFETY: no image.
    let module = unsafe { kernels::load(core::ptr::null()) };
    core::ptr::without_provenance_mut(module as usize)
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_module: u64) {}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaUnregisterFatBinary(module: u64) {
    if !life::is_forked_child() {
        // Nobody is left to hear of a wrong handle: this runs when a program ends.
        let _ = kernels::unload(module);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaInitModule(_module: u64) -> c_char {
    1
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterFunction(
    module: u64,
    host: u64,
    _device: u64,
    name: *const c_char,
) {
    if !life::is_forked_child() {
        kernels::register(module, host, name.expose_provenance());
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar(
    module: u64,
    host: u64,
    _device: u64,
    _name: *const c_char,
    _external: c_int,
    size: u64,
) {
    if !life::is_forked_child() {
        kernels::register_variable(module, host, size);
    }
}

/// A managed variable is the program's own pointer, which this call fills
/// in. It lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterManagedVar(
    _module: u64,
    pointer: Out<u64>,
    _device: u64,
    _name: *const c_char,
    _external: c_int,
    size: u64,
) {
    if life::is_forked_child() {
        return;
    }
    if let Ok(addr) = memory::ledger().allocate_managed(0, size) {
        pointer.give(addr);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn __cudaGetKernel(out: Out<u64>, host: u64) -> Code {
    runtime_query(|| {
        if life::is_forked_child() {
            return Err(Error::NOT_INITIALIZED);
        }
        out.set(kernels::handle(host)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetSymbolAddress(out: Out<u64>, symbol: u64) -> Code {
    runtime(|| out.set(kernels::registered_variable(symbol, context::bind()?)?.0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetSymbolSize(out: Out<u64>, symbol: u64) -> Code {
    runtime(|| out.set(kernels::registered_variable(symbol, context::bind()?)?.1))
}

fn to_symbol(symbol: u64, src: u64, size: u64, offset: u64) -> Result<Action> {
    let dst = kernels::symbol_place(symbol, offset, size, context::bind()?)?;
    let action = Action::copy(dst, src, size);
    action.check()?;
    Ok(action)
}

fn from_symbol(dst: u64, symbol: u64, size: u64, offset: u64) -> Result<Action> {
    let src = kernels::symbol_place(symbol, offset, size, context::bind()?)?;
    let action = Action::copy(dst, src, size);
    action.check()?;
    Ok(action)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyToSymbol(
    symbol: u64,
    src: u64,
    size: u64,
    offset: u64,
    _kind: i32,
) -> Code {
    runtime(|| crate::gpu::call::copy::at_once(&to_symbol(symbol, src, size, offset)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyToSymbolAsync(
    symbol: u64,
    src: u64,
    size: u64,
    offset: u64,
    _kind: i32,
    stream: u64,
) -> Code {
    runtime(|| work::submit(stream, to_symbol(symbol, src, size, offset)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyFromSymbol(
    dst: u64,
    symbol: u64,
    size: u64,
    offset: u64,
    _kind: i32,
) -> Code {
    runtime(|| crate::gpu::call::copy::at_once(&from_symbol(dst, symbol, size, offset)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyFromSymbolAsync(
    dst: u64,
    symbol: u64,
    size: u64,
    offset: u64,
    _kind: i32,
    stream: u64,
) -> Code {
    runtime(|| work::submit(stream, from_symbol(dst, symbol, size, offset)?))
}

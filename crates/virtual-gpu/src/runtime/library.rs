//! Libraries: modules that belong to no context.

use super::Code;
use crate::gpu::border::{In, Out, Text, runtime};
use crate::gpu::{Error, Result, context, kernels};

/// A module from memory.
pub(crate) fn load(image: In<u8>) -> Result<u64> {
    image.get()?;
    // SAFETY: not null, so a module image, as the prototype says.
    Ok(unsafe { kernels::load(core::ptr::with_exposed_provenance(image.addr() as usize)) })
}

/// A module from a file.
pub(crate) fn load_file(path: Text) -> Result<u64> {
    let mut image = std::fs::read(path.string()?).map_err(|_| Error::FILE_NOT_FOUND)?;
    if image.is_empty() {
        return Err(Error::INVALID_IMAGE);
    }
    image.push(0);
    // SAFETY: a whole file.
    Ok(unsafe { kernels::load(image.as_ptr()) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryLoadData(out: Out<u64>, image: In<u8>) -> Code {
    runtime(|| {
        out.check()?;
        out.set(load(image)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryLoadFromFile(out: Out<u64>, path: Text) -> Code {
    runtime(|| {
        out.check()?;
        out.set(load_file(path)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryUnload(library: u64) -> Code {
    runtime(|| kernels::unload(library))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryGetKernel(out: Out<u64>, library: u64, name: Text) -> Code {
    runtime(|| out.set(kernels::function(library, &name.string()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryGetKernelCount(count: Out<u32>, library: u64) -> Code {
    runtime(|| count.set(kernels::functions(library)?.len() as u32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryEnumerateKernels(out: Out<u64>, room: u32, library: u64) -> Code {
    runtime(|| {
        let names = kernels::functions(library)?;
        let handles: Result<Vec<u64>> =
            names.iter().map(|name| kernels::function(library, name)).collect();
        out.fill(&handles?, room as usize);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaLibraryGetGlobal(
    addr: Out<u64>,
    size: Out<u64>,
    library: u64,
    name: Text,
) -> Code {
    runtime(|| {
        let found = kernels::variable(library, &name.string()?, context::bind()?)?;
        addr.give(found.0);
        size.give(found.1);
        Ok(())
    })
}

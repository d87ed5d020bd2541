//! Modules and libraries, which are modules that belong to no context.

use crate::gpu::boundary::{Api, In, Out, Text};
use crate::gpu::{Error, Result, kernels};

/// A module from memory.
pub fn load(image: In<u8>) -> Result<u64> {
    image.get()?;
    // SAFETY: not null, so a module image, as the prototype says.
    Ok(unsafe { kernels::load(core::ptr::with_exposed_provenance(image.addr() as usize)) })
}

/// A module from a file.
pub fn load_file(path: Text) -> Result<u64> {
    let mut image = std::fs::read(path.string()?).map_err(|_| Error::FILE_NOT_FOUND)?;
    if image.is_empty() {
        return Err(Error::INVALID_IMAGE);
    }
    image.push(0);
    // SAFETY: a whole file.
    Ok(unsafe { kernels::load(image.as_ptr()) })
}

/// A library from memory, for a caller.
pub fn from_memory(out: Out<u64>, image: In<u8>) -> Result {
    out.check()?;
    out.set(load(image)?)
}

/// A library from a file, for a caller.
pub fn from_file(out: Out<u64>, path: Text) -> Result {
    out.check()?;
    out.set(load_file(path)?)
}

/// Gives handles of as many of its kernels as there is room for.
pub fn enumerate(out: Out<u64>, room: u32, library: u64) -> Result {
    let names = kernels::functions(library)?;
    let handles: Result<Vec<u64>> =
        names.iter().map(|name| kernels::function(library, name)).collect();
    out.fill(&handles?, room as usize);
    Ok(())
}

/// Gives address and size of a variable.
pub fn global(api: Api, addr: Out<u64>, size: Out<u64>, library: u64, name: Text) -> Result {
    let found = kernels::variable(library, &name.string()?, api.device()?)?;
    addr.give(found.0);
    size.give(found.1);
    Ok(())
}

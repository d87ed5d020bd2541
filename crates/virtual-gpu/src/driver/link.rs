//! The linker in the driver.
//!
//! It takes anything and gives an image that a module can be loaded from, in which every
//! name is found: nothing here reads code.

use super::{Code, current};
use crate::gpu::boundary::{Out, driver};
use crate::gpu::handle::Registry;
use crate::gpu::{Error, kinds};

static LINKS: Registry<()> = Registry::new(kinds::LINK);

/// What a linker of the virtual GPU gives out. No format that tools would take for something else.
static IMAGE: [u8; 16] = *b"memtrace-virtual";

fn known(link: *const core::ffi::c_void) -> crate::gpu::Result {
    LINKS.with(link, |()| ()).ok_or(Error::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLinkCreate_v2(
    _count: u32,
    _options: u64,
    _values: u64,
    out: Out<*mut core::ffi::c_void>,
) -> Code {
    driver(|| {
        current()?;
        out.check()?;
        out.set(LINKS.insert(()))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLinkAddData_v2(link: *const core::ffi::c_void, _kind: i32, data: u64) -> Code {
    driver(|| if data == 0 { Err(Error::INVALID_VALUE) } else { known(link) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLinkAddFile_v2(
    link: *const core::ffi::c_void,
    _kind: i32,
    path: crate::gpu::boundary::Text,
) -> Code {
    driver(|| {
        known(link)?;
        let path = path.string()?;
        std::fs::metadata(path).map(|_| ()).map_err(|_| Error::FILE_NOT_FOUND)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLinkComplete(
    link: *const core::ffi::c_void,
    image: Out<*const u8>,
    size: Out<usize>,
) -> Code {
    driver(|| {
        known(link)?;
        image.set(IMAGE.as_ptr())?;
        size.give(IMAGE.len());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLinkDestroy(link: *const core::ffi::c_void) -> Code {
    driver(|| LINKS.remove(link).ok_or(Error::INVALID_HANDLE))
}

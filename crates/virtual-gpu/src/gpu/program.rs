//! The program that the GPU is for: where its PyTorch is, and for which CUDA it is built.
//!
//! PyTorch is found through the loader: the folder that `libc10_cuda.so` was mapped from. What was
//! found before that library came is not remembered.

use super::{file, log};
use core::ffi::{CStr, c_int, c_void};
use memtrace_devices::{Toolkit, UnknownToolkit};
use std::path::PathBuf;
use std::sync::OnceLock;

/// The toolkit that this process's PyTorch is linked with; the newest as long as there is no
/// PyTorch.
///
/// # Errors
/// If it is one that is not known. CUDA doesn't wake in such a process.
pub fn checked_toolkit() -> Result<Toolkit, UnknownToolkit> {
    static FOUND: OnceLock<Result<Toolkit, UnknownToolkit>> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return *found;
    }
    let Some(library) = torch() else { return Ok(Toolkit::NEWEST) };
    *FOUND.get_or_init(|| match linked_major(&file::read(&library).unwrap_or_default()) {
        Some(major) => Toolkit::from_major(major),
        None => Ok(Toolkit::NEWEST),
    })
}

/// The same where an answer must be had: of a PyTorch that came after CUDA woke, or that only asks
/// for versions.
pub fn toolkit() -> Toolkit {
    checked_toolkit().unwrap_or_else(|unknown| {
        log::warn_once(&unknown.to_string());
        Toolkit::NEWEST
    })
}

/// The number behind the CUDA runtime's name, which stands as it is in a file that needs the
/// runtime: `libcudart.so.12`. Some Python packages have `libcudart-d0da41ae.so.11.0`.
fn linked_major(file: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"libcudart";
    const LONGEST: usize = 64;
    let mut places = file.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    places.find_map(|(at, _)| {
        let name = &file[at + NAME.len()..];
        let end = name.iter().take(LONGEST).position(|byte| *byte == 0)?;
        let name = core::str::from_utf8(&name[..end]).ok()?;
        let (tag, version) = name.split_once(".so.")?;
        let packed =
            tag.strip_prefix('-').is_some_and(|t| t.bytes().all(|b| b.is_ascii_hexdigit()));
        (tag.is_empty() || packed).then(|| version.split('.').next()?.parse().ok()).flatten()
    })
}

/// The file of the PyTorch in this process that needs CUDA.
pub fn torch() -> Option<PathBuf> {
    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a record of its own, and what we gave it: an `Option<PathBuf>`.
        let (name, found) = unsafe { ((*info).dlpi_name, &mut *found.cast::<Option<PathBuf>>()) };
        if name.is_null() {
            return 0;
        }
        // SAFETY: the loader's names are C strings.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        if name.ends_with("/libc10_cuda.so") {
            *found = Some(PathBuf::from(name.as_ref()));
        }
        c_int::from(found.is_some())
    }
    let mut found: Option<PathBuf> = None;
    // SAFETY: the callback gets a pointer that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut found).cast()) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runtime_that_a_file_needs_says_the_toolkit() {
        for (file, major) in [
            (&b"..\0libc10.so\0libcudart.so.12\0libm.so.6\0"[..], Some(12)),
            (b"\0libcudart.so.13\0", Some(13)),
            (b"\0libcudart.so.14\0", Some(14)),
            (b"\0libcudart-d0da41ae.so.11.0\0", Some(11)),
            (b"see libcudart for more\0libcudart.so\0libcudart.so.12\0", Some(12)),
            (b"libcudart_static\0", None),
            (b"libcudart.so.1", None),
            (b"", None),
        ] {
            assert_eq!(linked_major(file), major, "{}", String::from_utf8_lossy(file));
        }
    }
}

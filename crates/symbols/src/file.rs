//! The file of a library, mapped: large libraries have gigabytes, of which
//! a few pages are looked at.

#![allow(unsafe_code, reason = "a mapping is the one thing here that the compiler can't check")]

use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a file.
pub fn map(path: &Path) -> io::Result<Mmap> {
    // The name may come from an untrusted file: a pipe must not be waited
    // for, a device not be touched.
    let is_file = |about: io::Result<Metadata>| match about {
        Ok(about) if !about.is_file() => Err(io::ErrorKind::InvalidInput.into()),
        other => other.map(drop),
    };
    is_file(fs::metadata(path))?;
    let file = memtrace_files::aside(File::open(path)?)?;
    is_file(file.metadata())?;
    // SAFETY: the mapping is read only. Somebody may write into the file or cut it short
    // meanwhile. But it is a library that a process runs or ran, mapped in the same way by its
    // loader, so nothing new can go wrong.
    unsafe { Mmap::map(&file) }
}

/// A build id as people write it.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

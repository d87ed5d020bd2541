//! The file of a library, mapped: large libraries have gigabytes, of which a few pages are looked at.

#![allow(unsafe_code, reason = "a mapping is the one thing here that the compiler can't check")]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a file.
pub fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the mapping is read only. Somebody may write into the file or cut it short meanwhile; that is a
    // library that a process runs or ran, mapped in the same way by its loader, so nothing new can go wrong.
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

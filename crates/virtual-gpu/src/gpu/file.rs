//! Tickets that travel as file descriptors.
//!
//! Shareable handles of virtual memory management are file descriptors: programs send them through
//! sockets or fetch them from another process. Ours lead to a small anonymous file that holds the
//! ticket.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::path::Path;

/// The size of a ticket.
const TICKET: usize = 64;

/// A new descriptor that leads to this ticket. The caller closes it.
pub fn export(ticket: &[u8; TICKET]) -> Option<i32> {
    // SAFETY: makes an anonymous file; the name is a C string and only shows in listings.
    let fd = unsafe { libc::memfd_create(c"memtrace-virtual-gpu".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    // SAFETY: a descriptor of our own, just made.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(ticket).ok()?;
    Some(file.into_raw_fd())
}

/// The same file by a descriptor that is not 0, 1 or 2, also where those are
/// closed: a program reads and writes there.
pub fn aside(file: File) -> io::Result<File> {
    if file.as_raw_fd() < 3 { file.try_clone() } else { Ok(file) }
}

/// The bytes of a file.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    aside(File::open(path)?)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The ticket that a descriptor leads to. The descriptor stays the
/// caller's, and so does its place in the file.
pub fn import(fd: i32) -> Option<[u8; TICKET]> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the caller's descriptor, borrowed for this call; a closed one fails the next line.
    let copy = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().ok()?;
    // A descriptor of ours may have been read before in this or another process.
    let mut file = aside(File::open(format!("/proc/self/fd/{}", copy.as_raw_fd())).ok()?).ok()?;
    file.seek(SeekFrom::Start(0)).ok()?;
    let mut ticket = [0; TICKET];
    file.read_exact(&mut ticket).ok()?;
    Some(ticket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    #[test]
    fn a_ticket_can_be_read_again_and_again() {
        let ticket = [7; TICKET];
        let fd = export(&ticket).unwrap();
        assert_eq!(import(fd), Some(ticket));
        assert_eq!(import(fd), Some(ticket));
        // SAFETY: made above and not used below.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        assert_eq!(import(-1), None);
    }
}

//! A black box as a file on this machine.
//!
//! The file is sparse and hundreds of megabytes long; only what is in use is read, and
//! the ring a batch at a time. It is never mapped: a mapping of a file that somebody
//! cuts short would kill this process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use memtrace_files::NewFile;
use memtrace_format::blackbox::{BlackBox, Bytes, OpenError};
use memtrace_format::json::Stacks;
use memtrace_naming::{Counts, Encoding};

use crate::args::Format;

/// How long a process may take to make its black box.
const PATIENCE: Duration = Duration::from_secs(20);

/// The file, read where it is asked for.
pub(crate) struct OnDisk<'a>(&'a File);

impl Bytes for OnDisk<'_> {
    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            match self.0.read_at(&mut into[done..], at.saturating_add(done as u64)) {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }
}

/// A black box, if its header is sound.
pub(crate) fn open(file: &File) -> Result<BlackBox<OnDisk<'_>>, OpenError> {
    BlackBox::open(OnDisk(file))
}

/// The black box of a process that is alive, and may be just making it.
pub(crate) fn open_alive(file: &File) -> Result<BlackBox<OnDisk<'_>>, OpenError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match open(file) {
            Err(OpenError::NotReady) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

/// Writes the snapshot that is in it. `alive`: its process goes on writing it.
pub(crate) fn snapshot(
    file: &BlackBox<OnDisk<'_>>,
    alive: bool,
    reason: &str,
    new: &NewFile,
    format: Format,
) -> io::Result<Counts> {
    let written_us = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |t| t.as_micros() as u64);
    let encoding = match format {
        Format::Pickle => Encoding::Pickle,
        Format::Json => Encoding::Json(Stacks::Shared),
        Format::JsonExpanded => Encoding::Json(Stacks::Expanded),
    };
    memtrace_naming::snapshot(file, alive, reason, written_us, (new, encoding))
}

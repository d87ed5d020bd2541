//! A black box as a file on this machine, and the snapshot that is made of it.
//!
//! The file is sparse and hundreds of megabytes long; only what is in use is read, and
//! the ring a batch at a time. It is never mapped: a mapping of a file that somebody
//! cuts short would kill this process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memtrace_files::{NewFile, Readers};
use memtrace_format::blackbox::{BlackBox, Bytes, OpenError, at};
use memtrace_format::json::Stacks;
use memtrace_format::key::Memtrace;
use memtrace_snapshot::{Counts, Encoding};

use crate::args::Format;
use crate::failure::Failure;
use crate::output::{self, Unnamed};
use crate::say::eprint_line;

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
fn snapshot(
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
    memtrace_snapshot::of_black_box(file, alive, reason, written_us, (new, encoding))
}

/// Why a black box is no snapshot.
pub(crate) enum BoxError {
    /// There is no room for one.
    NoRoom(String),
    Other(String),
}

impl From<BoxError> for Failure {
    fn from((BoxError::NoRoom(why) | BoxError::Other(why)): BoxError) -> Failure {
        Failure::new(why)
    }
}

impl From<String> for BoxError {
    fn from(why: String) -> BoxError {
        BoxError::Other(why)
    }
}

/// A snapshot that has no name yet.
pub(crate) struct Written {
    file: Unnamed,
    /// So many events were overwritten before they were read.
    overwritten: u64,
}

/// Writes the snapshot that is in a black box, as a file without a name.
pub(crate) fn write(
    file: &BlackBox<OnDisk<'_>>,
    alive: bool,
    reason: &str,
    folder: &Path,
    how: (Format, Readers),
) -> Result<Written, BoxError> {
    // Where the description is damaged, the header knows this much.
    let pid = Some(file.header(at::PID));
    let about =
        file.about().map_or(Memtrace { pid, ..Memtrace::default() }, |about| about.memtrace);
    let mut overwritten = 0;
    let written = output::write_unnamed(folder, Some(&about), how, |new| {
        overwritten = snapshot(file, alive, reason, new, how.0)?.overwritten;
        Ok(())
    });
    match written {
        Ok(file) => Ok(Written { file, overwritten }),
        Err(e) => Err(cannot_write(&e, folder)),
    }
}

impl Written {
    /// Gives the file its name in the folder.
    pub(crate) fn place(self, folder: &Path) -> Result<PathBuf, BoxError> {
        let path = self.file.place().map_err(|e| cannot_write(&e, folder))?;
        if self.overwritten > 0 {
            eprint_line(&format!(
                "{}: its program overwrote the {} oldest events before they were read",
                path.display(),
                self.overwritten
            ));
        }
        Ok(path)
    }
}

fn cannot_write(e: &io::Error, folder: &Path) -> BoxError {
    if let Some(bad) = e.get_ref().and_then(|e| e.downcast_ref::<OpenError>()) {
        return bad.to_string().into();
    }
    let why = format!(
        "cannot write a snapshot into {}: {e}; name another folder with --out DIR",
        folder.display()
    );
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => BoxError::NoRoom(why),
        _ => BoxError::Other(why),
    }
}

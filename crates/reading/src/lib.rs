//! Files from a disk, as every command takes them.
//!
//! A user names files, several files or a folder, gzipped or not, and now and then something that
//! is no snapshot. [`find`] works out which files are meant, and in which order. [`snapshots`]
//! reads what is in them. [`kind`] says what a file is if it is something else.
//!
//! A file comes from anywhere. So a [`Limit`] bounds what is read of it, what it unpacks
//! to and what is built of that. Only a file that was named is waited for, for some
//! seconds. A pipe in a folder is passed by.

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod contents;
mod find;
mod gzip;
mod kind;
mod left_out;
mod open;

use std::fmt;
use std::path::{Path, PathBuf};

use memtrace_format::snapshot::Snapshot;

pub use contents::{Contents, Packing, contents};
pub use find::{Found, find};
pub use kind::kind;

/// How much memory a file may take, and whether others wait for it.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    bytes: Option<u64>,
    several: bool,
    silent: fn(&Path),
}

impl Default for Limit {
    fn default() -> Self {
        Limit::new(None)
    }
}

impl Limit {
    /// What a file may take if nobody says anything else, bytes.
    pub const USUAL: u64 = 1 << 30;
    /// A plain file may always take so many times its length.
    const TIMES: u64 = 16;

    /// So many bytes; `None`: [`Limit::USUAL`], or sixteen times what the
    /// file has on the disk if that is more.
    pub fn new(bytes: Option<u64>) -> Limit {
        Limit { bytes, several: false, silent: |_| {} }
    }

    /// The file is one of several: a pipe to which nobody writes is passed by sooner.
    #[must_use]
    pub fn among(self, several: bool) -> Limit {
        Limit { several, ..self }
    }

    /// What to do once if the file is a pipe that somebody has open and
    /// writes nothing to: it is waited for.
    #[must_use]
    pub fn on_silent_pipe(self, silent: fn(&Path)) -> Limit {
        Limit { silent, ..self }
    }

    /// For a file of this length.
    fn of(self, on_disk: u64) -> u64 {
        self.bytes.unwrap_or_else(|| Limit::USUAL.max(on_disk.saturating_mul(Limit::TIMES)))
    }
}

/// Why a file gives no answer, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong, and what to do.
    pub what: String,
}

impl FileError {
    fn new(path: &Path, what: impl Into<String>) -> FileError {
        FileError { path: path.to_owned(), what: what.into() }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.what)
    }
}

impl std::error::Error for FileError {}

/// A snapshot, and which of those in its file it is.
#[derive(Debug)]
pub struct Named {
    /// The file's name, with the snapshot's number and key if there are several.
    pub name: String,
    /// What it says, or why it says nothing.
    pub snapshot: Result<Snapshot, FileError>,
}

/// Of so many things in a file that are no snapshots each is named.
const UNREAD: usize = 10;

/// All snapshots of a file, at least one, and what is among them.
///
/// # Errors
/// The file can't be read, or is something else.
pub fn snapshots(path: &Path, limit: Limit) -> Result<Vec<Named>, FileError> {
    let contents = contents(path, limit)?;
    let parts = contents.snapshots().map_err(|e| contents.trouble(&e))?;
    let (count, file) = (parts.len(), path.display());
    let (mut named, mut unread) = (Vec::new(), 0);
    for (i, part) in parts.into_iter().enumerate() {
        let key = part.key.map_or_else(String::new, |key| format!(", key {key}"));
        let which = format!("snapshot {} of {count}{key}", i + 1);
        let is_alone = count == 1 && key.is_empty();
        let name = if is_alone { file.to_string() } else { format!("{file}: {which}") };
        let snapshot = part
            .snapshot
            .map_err(|e| FileError::new(path, format!("{which}: {}", contents.why(&e))));
        unread += usize::from(snapshot.is_err());
        if snapshot.is_ok() || unread <= UNREAD {
            named.push(Named { name, snapshot });
        }
    }
    if unread > UNREAD {
        let more = format!("and {} more in it that are no snapshots", unread - UNREAD);
        named.push(Named { name: file.to_string(), snapshot: Err(FileError::new(path, more)) });
    }
    Ok(named)
}

fn too_large(memory: u64) -> String {
    let (memory, unit) =
        if memory < 1 << 20 { (memory.div_ceil(1 << 10), "KiB") } else { (memory >> 20, "MiB") };
    let twice = memory.saturating_mul(2);
    format!(
        "it takes more than {memory} {unit} of memory: --max-memory {twice}{unit} allows twice as much, if you trust the file"
    )
}

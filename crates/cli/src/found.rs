//! Black boxes in folders: which a path stands for, whose they are, whether their processes live.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memtrace_format::blackbox::{BlackBox, at};

use crate::blackbox::OnDisk;
use crate::failure::Failure;
use crate::{leftovers, process};

/// The black boxes that a path stands for, each once.
pub(crate) fn find(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let fail = |e| Failure::new(format!("cannot read {}: {e}", path.display()));
    if !fs::metadata(path).map_err(fail)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(fail)? {
        let name = entry.map_err(fail)?.path();
        if name.extension() == Some(OsStr::new(process::EXTENSION)) {
            found.push(name);
        }
    }
    found.sort();
    let mut seen = BTreeSet::new();
    found.retain(|name| seen.insert(name.canonicalize().unwrap_or_else(|_| name.clone())));
    Ok(found)
}

/// A black box that has been opened.
pub(crate) struct Found {
    /// As it was found, perhaps a link.
    pub(crate) name: PathBuf,
    /// Where it is.
    pub(crate) real: PathBuf,
    pub(crate) file: File,
    /// It is this user's own.
    pub(crate) ours: bool,
}

impl Found {
    /// One from a folder where anybody may have put it. It must be this user's. A link must be one
    /// that the recorder makes, which has the black box's own name.
    pub(crate) fn open(name: &Path) -> Result<Found, String> {
        let about = fs::symlink_metadata(name).map_err(|e| e.to_string())?;
        let user = memtrace_files::user().map_err(|e| e.to_string())?;
        let real = match fs::read_link(name) {
            Ok(to) => memtrace_files::folder_of(name).join(to),
            Err(_) => name.to_owned(),
        };
        if real.file_name() != name.file_name() {
            return Err(format!(
                "a link to {}, which is no black box of this name",
                real.display()
            ));
        }
        let found = Found::at(name, real)?;
        if about.uid() != user || !found.ours {
            return Err("belongs to another user: name it alone to recover it".to_owned());
        }
        Ok(found)
    }

    /// One that the user has named.
    pub(crate) fn open_named(name: &Path) -> Result<Found, String> {
        Found::at(name, name.canonicalize().unwrap_or_else(|_| name.to_owned()))
    }

    fn at(name: &Path, real: PathBuf) -> Result<Found, String> {
        let file = memtrace_files::open(&real).map_err(|e| match fs::read_link(name) {
            Ok(to) if e.kind() == io::ErrorKind::NotFound => format!(
                "the black box {} is gone; folders that are kept in memory are empty after a restart",
                to.display()
            ),
            _ => format!("cannot be read: {e}"),
        })?;
        let ours = memtrace_files::is_ours(&file).map_err(|e| e.to_string())?;
        Ok(Found { name: name.to_owned(), real, file, ours })
    }
}

/// What is known of a black box's process.
pub(crate) enum Writer {
    /// It lives, under this number.
    Alive(u64),
    /// It has ended.
    Dead,
    /// It can't be seen from here: for people, why.
    Unknown(String),
}

impl Found {
    /// Does its process live?
    pub(crate) fn writer(&self, open: &BlackBox<OnDisk<'_>>) -> Result<Writer, String> {
        let (pid, about) = (open.header(at::PID), open.about().unwrap_or_default().memtrace);
        let elsewhere = about.pid_namespace.is_some_and(|n| n != leftovers::namespace());
        if elsewhere {
            // Its number there may be another process's here.
            if let Ok(Some(pid)) = process::writer(&self.real, &self.file) {
                return Ok(Writer::Alive(pid));
            }
        } else if runs(pid, &self.real, &self.file)? {
            return Ok(Writer::Alive(pid));
        }
        Ok(match about.host {
            // A process of another machine can't be seen from here.
            Some(host) if host != leftovers::here() => {
                let host: String = host.chars().take(64).flat_map(char::escape_debug).collect();
                Writer::Unknown(format!("on {host}"))
            }
            _ if elsewhere => Writer::Unknown("in another container".to_owned()),
            _ => Writer::Dead,
        })
    }
}

/// Does this process write the black box?
pub(crate) fn runs(pid: u64, real: &Path, file: &File) -> Result<bool, String> {
    process::writes(pid, real, file)
        .map_err(|e| format!("cannot tell whether process {pid} lives: {e}; run this as its user"))
}

/// The process id in `memtrace-HOST-PID-START.blackbox`.
pub(crate) fn number(path: &Path) -> Option<u64> {
    path.file_stem()?.to_str()?.rsplit('-').nth(1)?.parse().ok()
}

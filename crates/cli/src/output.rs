//! Snapshot files that this command writes, named as the recorder names its own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use memtrace_format::json::{self, Stacks};
use memtrace_format::pickle;
use memtrace_format::snapshot::{Snapshot, Value};

use crate::args::Format;

/// Has a file written by `write` and gives it the first name that is free: `memtrace-HOST-PID[-rankR]-N.pickle`. `about`
/// is what the process said of itself. A reader never sees half a file, and no file is ever overwritten.
pub(crate) fn write_new(
    folder: &Path,
    about: &Value,
    format: Format,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let stem = stem(about);
    let beside = folder.join(format!(".{stem}.{}.part", std::process::id()));
    let result = write(&beside).and_then(|()| {
        for n in 0..u32::MAX {
            let path = folder.join(format!("{stem}-{n}.{}", format.extension()));
            match take_name(&beside, &path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => return other.map(|()| path),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    });
    if result.is_err() {
        let _ = fs::remove_file(&beside);
    }
    result
}

/// Writes a file, replacing what was there only when the new one is complete.
pub(crate) fn replace(path: &Path, snapshot: &Snapshot, format: Format) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let result = write(&beside, snapshot, format).and_then(|()| fs::rename(&beside, path));
    if result.is_err() {
        let _ = fs::remove_file(&beside);
    }
    result
}

fn stem(about: &Value) -> String {
    // It comes from a file that anybody may have written.
    let host: String = about["host"].as_str().unwrap_or("unknown").chars().take(64).collect();
    let host = host.replace(|c: char| !(c.is_alphanumeric() || "-_.".contains(c)), "_");
    let rank = about["rank"].as_u64().map_or_else(String::new, |r| format!("-rank{r}"));
    format!("memtrace-{host}-{}{rank}", about["pid"].as_u64().unwrap_or(0))
}

/// Writes a file under this very name.
pub(crate) fn write(path: &Path, snapshot: &Snapshot, format: Format) -> io::Result<()> {
    let file: File = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    match format {
        Format::Pickle => pickle::write(snapshot, &mut out)?,
        Format::Json => json::write(snapshot, Stacks::Shared, &mut out)?,
        Format::JsonExpanded => json::write(snapshot, Stacks::Expanded, &mut out)?,
    }
    out.flush()
}

/// Renames, but never over an existing file.
fn take_name(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
        // A file system without hard links.
        Err(_) if to.exists() => Err(io::ErrorKind::AlreadyExists.into()),
        Err(_) => fs::rename(from, to),
    }
}

//! Snapshot files that this command writes, named as the recorder names its own.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use memtrace_files::{NewFile, Readers};
use memtrace_format::json::{self, Stacks};
use memtrace_format::pickle;
use memtrace_format::snapshot::{Snapshot, Value};
use memtrace_options::{PERMISSIONS, Words};

use crate::args::{Format, Permissions};

/// Who may read what this command writes, as it was told or as the variable says. A value that nobody knows means the default,
/// as in the recorder.
pub(crate) fn readers(told: Option<Permissions>) -> Readers {
    let named = || Permissions::named(&std::env::var(PERMISSIONS.variable).ok()?);
    match told.or_else(named).unwrap_or_default() {
        Permissions::Private => Readers::Owner,
        Permissions::Umask => Readers::Umask,
    }
}

/// Has a file written by `write` and gives it the first name that is free: `memtrace-HOST-PID[-rankR]-N.pickle`. `about`
/// is what the process said of itself. A reader never sees half a file, and no file is ever overwritten.
pub(crate) fn write_new(
    folder: &Path,
    about: &Value,
    (format, readers): (Format, Readers),
    write: impl FnOnce(&NewFile) -> io::Result<()>,
) -> io::Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let new = NewFile::within(folder, readers)?;
    write(&new)?;
    let stem = stem(about);
    let names = (0..u32::MAX).map(|n| folder.join(format!("{stem}-{n}.{}", format.extension())));
    Ok(new.place(names)?.0)
}

/// Writes a file, replacing what was there only when the new one is complete.
pub(crate) fn replace(path: &Path, snapshot: &Snapshot, format: Format) -> io::Result<()> {
    let new = NewFile::within(memtrace_files::folder_of(path), readers(None))?;
    write(&new, snapshot, format)?;
    new.replace(path)
}

fn stem(about: &Value) -> String {
    // It comes from a file that anybody may have written.
    let host: String = about["host"].as_str().unwrap_or("unknown").chars().take(64).collect();
    let host = host.replace(|c: char| !(c.is_alphanumeric() || "-_.".contains(c)), "_");
    let rank = about["rank"].as_u64().map_or_else(String::new, |r| format!("-rank{r}"));
    format!("memtrace-{host}-{}{rank}", about["pid"].as_u64().unwrap_or(0))
}

/// Writes a snapshot into a new file.
pub(crate) fn write(new: &NewFile, snapshot: &Snapshot, format: Format) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, new.file());
    match format {
        Format::Pickle => pickle::write(snapshot, &mut out)?,
        Format::Json => json::write(snapshot, Stacks::Shared, &mut out)?,
        Format::JsonExpanded => json::write(snapshot, Stacks::Expanded, &mut out)?,
    }
    out.flush()
}

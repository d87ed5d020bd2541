//! Snapshot files that this command writes, named as the recorder names its own.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use memtrace_files::{NewFile, Readers};
use memtrace_format::json::{self, Stacks};
use memtrace_format::key::Memtrace;
use memtrace_format::pickle;
use memtrace_format::snapshot::Snapshot;
use memtrace_options::{Choices, PERMISSIONS};

use crate::args::{Format, Permissions};

/// Who may read what this command writes, as the option or the variable says. A value that
/// nobody knows means the default, as in the recorder.
pub(crate) fn readers(asked: Option<Permissions>) -> Readers {
    let named = || Permissions::named(&std::env::var(PERMISSIONS.variable).ok()?);
    match asked.or_else(named).unwrap_or_default() {
        Permissions::Private => Readers::Owner,
        Permissions::Umask => Readers::Umask,
    }
}

/// A file that is complete and has no name yet.
pub(crate) struct Unnamed {
    new: NewFile,
    /// Its name without the number at the end.
    stem: PathBuf,
    extension: &'static str,
}

/// Has a file written by `write`. `about` is what the process said of itself.
pub(crate) fn write_unnamed(
    folder: &Path,
    about: Option<&Memtrace>,
    (format, readers): (Format, Readers),
    write: impl FnOnce(&NewFile) -> io::Result<()>,
) -> io::Result<Unnamed> {
    fs::create_dir_all(folder)?;
    let new = NewFile::within(folder, readers)?;
    write(&new)?;
    Ok(Unnamed { new, stem: folder.join(stem(about)), extension: format.extension() })
}

impl Unnamed {
    /// Gives it the first name that is free: `memtrace-HOST-PID[-rankR]-N.pickle`. A reader never
    /// sees half a file, and no file is ever overwritten.
    pub(crate) fn place(self) -> io::Result<PathBuf> {
        let Unnamed { new, stem, extension } = self;
        let name = |n| {
            let mut name = stem.clone().into_os_string();
            name.push(format!("-{n}.{extension}"));
            PathBuf::from(name)
        };
        Ok(new.place((0..u32::MAX).map(name))?.0)
    }
}

/// Both in one.
pub(crate) fn write_new(
    folder: &Path,
    about: Option<&Memtrace>,
    how: (Format, Readers),
    write: impl FnOnce(&NewFile) -> io::Result<()>,
) -> io::Result<PathBuf> {
    write_unnamed(folder, about, how, write)?.place()
}

/// Writes a file, replacing what was there only when the new one is complete.
pub(crate) fn replace(path: &Path, snapshot: &Snapshot, format: Format) -> io::Result<()> {
    let new = NewFile::within(memtrace_files::folder_of(path), readers(None))?;
    write(&new, snapshot, format)?;
    new.replace(path)
}

fn stem(about: Option<&Memtrace>) -> String {
    // It comes from a file that anybody may have written.
    let host = about.and_then(|about| about.host.as_deref()).unwrap_or("unknown");
    let host: String = host.chars().take(64).collect();
    let host = host.replace(|c: char| !(c.is_alphanumeric() || "-_.".contains(c)), "_");
    let rank = about.and_then(|about| about.rank);
    let rank = rank.map_or_else(String::new, |r| format!("-rank{r}"));
    format!("memtrace-{host}-{}{rank}", about.and_then(|about| about.pid).unwrap_or(0))
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

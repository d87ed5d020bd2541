//! `memtrace recover` and `memtrace snapshot`: snapshots from black boxes, of dead and of living processes.
//!
//! Exit codes of `recover`: 0, each black box of a dead process is a snapshot now; 1, nothing was there to
//! recover, or some could be read and others not; 2, nothing could be read or written.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memtrace_files::Readers;
use memtrace_format::blackbox::{BlackBox, OpenError, at};
use memtrace_format::screen::Page;

use crate::args::{Format, Recover, Snapshot};
use crate::blackbox::{self, OnDisk};
use crate::failure::Failure;
use crate::say::{Answer, tell};
use crate::{leftovers, orphans, output, process};

/// What became of a black box.
enum Fate {
    /// It is a snapshot now.
    Written(PathBuf),
    /// There was nothing in it.
    Empty,
    /// It is none of our business: its process lives.
    Alive(u64),
}

pub(crate) fn recover(args: &Recover) -> Result<Answer, Failure> {
    if args.paths.is_empty() {
        return orphans::list(args.json);
    }
    let mut page = Page::default();
    let (mut written, mut bad) = (0, 0);
    for path in &args.paths {
        match all_of(path, args, &mut page) {
            Ok(counts) => (written, bad) = (written + counts.0, bad + counts.1),
            Err(failure) => {
                bad += 1;
                tell(&failure.to_string());
            }
        }
    }
    if bad > 0 && written == 0 {
        return Err(Failure::told());
    }
    Ok(Answer::page(page, written > 0 && bad == 0))
}

/// The black boxes that a path stands for. Returns how many are snapshots now, and how many could not be read.
fn all_of(path: &Path, args: &Recover, page: &mut Page) -> Result<(u32, u32), Failure> {
    let found = find(path)?;
    let folder = match &args.out {
        Some(out) => out.clone(),
        None if path.is_dir() => path.to_owned(),
        None => memtrace_files::folder_of(path).to_owned(),
    };
    leftovers::clear(&folder);
    let (mut written, mut bad) = (0, 0);
    for name in &found {
        let opened = if path.is_dir() { Found::open(name) } else { Found::open_named(name) };
        match opened.and_then(|found| one(&found, &folder, args)) {
            Ok(Fate::Written(path)) => {
                written += 1;
                let _ = writeln!(page, "{}", path.display());
            }
            Ok(Fate::Empty) => {
                tell(&format!("{}: the process recorded nothing", name.display()));
            }
            Ok(Fate::Alive(pid)) => tell(&format!(
                "{}: process {pid} is alive and writes it; use `memtrace snapshot {pid}`",
                name.display()
            )),
            Err(why) => {
                bad += 1;
                tell(&format!("{}: {why}", name.display()));
            }
        }
    }
    if found.is_empty() {
        tell(&format!("no black box (*.{}) is in {}", process::EXTENSION, path.display()));
    }
    Ok((written, bad))
}

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
    name: PathBuf,
    /// Where it is.
    pub(crate) real: PathBuf,
    pub(crate) file: File,
    /// It is this user's own.
    ours: bool,
}

impl Found {
    /// One that lies about in a folder, where anybody may have put it: it must be this user's, and a link one that the
    /// recorder makes, which has the black box's own name.
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
    fn open_named(name: &Path) -> Result<Found, String> {
        Found::at(name, name.canonicalize().unwrap_or_else(|_| name.to_owned()))
    }

    fn at(name: &Path, real: PathBuf) -> Result<Found, String> {
        let file = memtrace_files::open(&real).map_err(|e| match fs::read_link(name) {
            Ok(to) if e.kind() == std::io::ErrorKind::NotFound => format!(
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
        let (pid, about) = (open.header(at::PID), open.about());
        let elsewhere =
            about["pid_namespace"].as_str().is_some_and(|n| n != leftovers::namespace());
        if elsewhere {
            // Its number there may be another process's here.
            if let Ok(Some(pid)) = process::writer(&self.real, &self.file) {
                return Ok(Writer::Alive(pid));
            }
        } else if runs(pid, &self.real, &self.file)? {
            return Ok(Writer::Alive(pid));
        }
        Ok(match about["host"].as_str() {
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

fn one(found: &Found, folder: &Path, args: &Recover) -> Result<Fate, String> {
    let Found { name, real, file, ours } = found;
    let open = match blackbox::open(file) {
        Ok(open) => open,
        // No number is in it yet, but in its name there is.
        Err(OpenError::NotReady) if let Some(pid) = number(real) => {
            if runs(pid, real, file)? {
                return Ok(Fate::Alive(pid));
            }
            if !args.keep && *ours {
                remove(found, None);
            }
            return Ok(Fate::Empty);
        }
        Err(e) => return Err(e.to_string()),
    };
    let writer = found.writer(&open)?;
    if let Writer::Alive(pid) = writer {
        return Ok(Fate::Alive(pid));
    }
    let fate = if open.header(at::HEAD) == 0 {
        Fate::Empty
    } else {
        let how = (args.format.expanded(args.expand), output::readers(args.permissions));
        Fate::Written(write(&open, false, "recovered", folder, how)?)
    };
    if args.keep {
        return Ok(fate);
    }
    match writer {
        Writer::Unknown(place) => tell(&format!(
            "{}: kept, since it was written {place} and nobody here knows whether its process has ended",
            name.display()
        )),
        _ if !ours => tell(&format!("{}: kept, since it belongs to another user", name.display())),
        _ => remove(found, open.about()["out"].as_str().map(Path::new)),
    }
    Ok(fate)
}

fn runs(pid: u64, real: &Path, file: &File) -> Result<bool, String> {
    process::writes(pid, real, file)
        .map_err(|e| format!("cannot tell whether process {pid} lives: {e}; run this as its user"))
}

/// The process id in `memtrace-HOST-PID-START.blackbox`.
fn number(path: &Path) -> Option<u64> {
    path.file_stem()?.to_str()?.rsplit('-').nth(1)?.parse().ok()
}

fn write(
    file: &BlackBox<OnDisk<'_>>,
    alive: bool,
    reason: &str,
    folder: &Path,
    (format, readers): (Format, Readers),
) -> Result<PathBuf, String> {
    let mut about = file.about();
    if !about.is_object() {
        // The description is damaged; the header knows this much.
        about = serde_json::json!({ "pid": file.header(at::PID) });
    }
    let mut overwritten = 0;
    let written = output::write_new(folder, &about, (format, readers), |new| {
        overwritten = blackbox::snapshot(file, alive, reason, new, format)?.overwritten;
        Ok(())
    });
    let path = written.map_err(|e| match e.get_ref().and_then(|e| e.downcast_ref()) {
        Some(bad) => OpenError::to_string(bad),
        None => format!(
            "cannot write a snapshot into {}: {e}; name another folder with --out DIR",
            folder.display()
        ),
    })?;
    if overwritten > 0 {
        tell(&format!(
            "{}: its program overwrote the {overwritten} oldest events before they were read",
            path.display()
        ));
    }
    Ok(path)
}

/// Removes the file and the links to it: the one that led here, and the one in the process's output folder.
fn remove(found: &Found, out: Option<&Path>) {
    let real = &found.real;
    let link = out.and_then(|out| Some(out.join(real.file_name()?)));
    for path in [Some(&*found.name), link.as_deref()].into_iter().flatten() {
        if path.is_symlink() && fs::canonicalize(path).is_ok_and(|to| to == *real) {
            let _ = fs::remove_file(path); // one that leads nowhere does no harm
        }
    }
    if let Err(e) = memtrace_files::remove(real, &found.file) {
        tell(&format!("{} is recovered, but cannot be removed: {e}", real.display()));
    }
}

pub(crate) fn snapshot(args: &Snapshot) -> Result<Answer, Failure> {
    let file = process::black_box(args.pid).map_err(Failure::new)?;
    let open = blackbox::open_alive(&file)
        .map_err(|e| Failure::new(format!("process {}: {e}", args.pid)))?;
    let folder = args.out.as_deref().unwrap_or(Path::new("."));
    let how = (args.format.expanded(args.expand), output::readers(args.permissions));
    let path = write(&open, true, "snapshot", folder, how).map_err(Failure::new)?;
    let mut page = Page::default();
    let _ = writeln!(page, "{}", path.display());
    Ok(Answer::page(page, true))
}

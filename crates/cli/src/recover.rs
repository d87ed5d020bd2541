//! `memtrace recover` and `memtrace snapshot`: snapshots from black boxes, of dead and of living processes.
//!
//! Exit codes of `recover`: 0, each black box of a dead process is a snapshot now; 1, nothing was there to
//! recover, or some could be read and others not; 2, nothing could be read or written.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memtrace_format::blackbox::{BlackBox, OpenError, at};
use memtrace_format::screen::Page;

use crate::args::{Format, Recover, Snapshot};
use crate::blackbox::{self, OnDisk};
use crate::failure::Failure;
use crate::say::{Answer, tell};
use crate::{output, process, run};

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
        None => beside(path),
    };
    run::forget_killed_runs(&folder);
    let (mut written, mut bad) = (0, 0);
    for name in &found {
        match one(name, &folder, args) {
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

fn beside(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
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
    let mut seen = Vec::new();
    found.retain(|name| {
        let real = name.canonicalize().unwrap_or_else(|_| name.clone());
        let new = !seen.contains(&real);
        seen.push(real);
        new
    });
    Ok(found)
}

fn one(name: &Path, folder: &Path, args: &Recover) -> Result<Fate, String> {
    let real = name.canonicalize().map_err(|e| match fs::read_link(name) {
        Ok(to) => format!(
            "the black box {} is gone; folders that are kept in memory are empty after a restart",
            to.display()
        ),
        Err(_) => e.to_string(),
    })?;
    let file = File::open(&real).map_err(|e| format!("cannot be read: {e}"))?;
    let open = match blackbox::open(&file) {
        Ok(open) => open,
        // No number is in it yet, but in its name there is.
        Err(OpenError::NotReady) => {
            if let Some(pid) = number(&real)
                && runs(pid, &real, &file)?
            {
                return Ok(Fate::Alive(pid));
            }
            if !args.keep {
                remove(name, &real, None);
            }
            return Ok(Fate::Empty);
        }
        Err(e) => return Err(e.to_string()),
    };
    let (pid, about) = (open.header(at::PID), open.about());
    let elsewhere = about["pid_namespace"].as_str().is_some_and(|n| n != namespace());
    if elsewhere {
        // Its number there may be another process's here.
        if let Ok(Some(pid)) = process::writer(&real, &file) {
            return Ok(Fate::Alive(pid));
        }
    } else if runs(pid, &real, &file)? {
        return Ok(Fate::Alive(pid));
    }
    let fate = if open.header(at::HEAD) == 0 {
        Fate::Empty
    } else {
        Fate::Written(write(&open, false, "recovered", folder, args.format.expanded(args.expand))?)
    };
    if args.keep {
        return Ok(fate);
    }
    match about["host"].as_str() {
        // A process of another machine can't be seen from here.
        Some(host) if host != here() => tell(&format!(
            "{}: kept, since it was written on {host} and nobody here knows whether its process has ended",
            name.display()
        )),
        _ if elsewhere => tell(&format!(
            "{}: kept, since it was written in another container and nobody here knows whether its process has ended",
            name.display()
        )),
        _ => remove(name, &real, about["out"].as_str().map(Path::new)),
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

/// The namespace of this process's number as the recorder writes it.
fn namespace() -> String {
    fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned()
}

/// The machine's name as the recorder writes it.
fn here() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim_end().replace(['/', ' '], "_")
}

fn write(
    file: &BlackBox<OnDisk<'_>>,
    alive: bool,
    reason: &str,
    folder: &Path,
    format: Format,
) -> Result<PathBuf, String> {
    let mut about = file.about();
    if !about.is_object() {
        // The description is damaged; the header knows this much.
        about = serde_json::json!({ "pid": file.header(at::PID) });
    }
    let mut overwritten = 0;
    let written = output::write_new(folder, &about, format, |path| {
        overwritten = blackbox::snapshot(file, alive, reason, path, format)?.overwritten;
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
fn remove(name: &Path, real: &Path, out: Option<&Path>) {
    let link = out.and_then(|out| Some(out.join(real.file_name()?)));
    for path in [Some(name), link.as_deref()].into_iter().flatten() {
        if path.is_symlink() && fs::canonicalize(path).is_ok_and(|to| to == real) {
            let _ = fs::remove_file(path); // one that leads nowhere does no harm
        }
    }
    if let Err(e) = fs::remove_file(real) {
        tell(&format!("{} is recovered, but cannot be removed: {e}", real.display()));
    }
}

pub(crate) fn snapshot(args: &Snapshot) -> Result<Answer, Failure> {
    let file = process::black_box(args.pid).map_err(Failure::new)?;
    let open = blackbox::open_alive(&file)
        .map_err(|e| Failure::new(format!("process {}: {e}", args.pid)))?;
    let folder = args.out.as_deref().unwrap_or(Path::new("."));
    let format = args.format.expanded(args.expand);
    let path = write(&open, true, "snapshot", folder, format).map_err(Failure::new)?;
    let mut page = Page::default();
    let _ = writeln!(page, "{}", path.display());
    Ok(Answer::page(page, true))
}

//! `memtrace recover` and `memtrace snapshot`: snapshots from black boxes,
//! of dead and of living processes.
//!
//! Exit codes of `recover`: 0, each black box of a dead process is a snapshot now; 1, nothing was
//! there to recover, or some could be read and others not; 2, nothing could be read or written.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memtrace_files::Readers;
use memtrace_format::blackbox::{BlackBox, OpenError, at};
use memtrace_format::key::Memtrace;
use memtrace_format::screen::Page;

use crate::args::{Format, Recover, Snapshot};
use crate::blackbox::{self, OnDisk};
use crate::failure::Failure;
use crate::output::Unnamed;
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
    let mut all = Recovery { args, page: Page::default(), written: 0, bad: 0 };
    let mut paths = &args.paths[..];
    while !paths.is_empty() {
        let (batch, others) = paths.split_at(at_once(paths));
        all.of(batch);
        paths = others;
    }
    if all.bad > 0 && all.written == 0 {
        return Err(Failure::told());
    }
    Ok(Answer::page(all.page, all.written > 0 && all.bad == 0))
}

/// How many of the paths may be seen to together: a folder alone, since what is in it may be named,
/// too, or files that are not the same.
fn at_once(paths: &[PathBuf]) -> usize {
    let mut seen = BTreeSet::new();
    let is_new =
        |path: &&PathBuf| !path.is_dir() && path.canonicalize().is_ok_and(|path| seen.insert(path));
    paths.iter().take_while(is_new).count().max(1)
}

/// What has become of all black boxes so far.
struct Recovery<'a> {
    args: &'a Recover,
    page: Page,
    written: u32,
    bad: u32,
}

/// A black box to see to.
struct Job {
    name: PathBuf,
    /// Where its snapshot goes.
    folder: PathBuf,
    /// The user has named it.
    named: bool,
}

impl Recovery<'_> {
    /// Sees to the black boxes that these paths stand for. They are read on all processors; what
    /// became of each is said, and its snapshot named, in their order.
    fn of(&mut self, batch: &[PathBuf]) {
        let mut jobs = Vec::new();
        for path in batch {
            match self.jobs(path) {
                Ok(more) => jobs.extend(more),
                Err(failure) => {
                    self.bad += 1;
                    tell(&failure.to_string());
                }
            }
        }
        let args = self.args;
        let mut order = jobs.iter();
        let mut later = Vec::new();
        let work = |job: &Job| read(job, args);
        memtrace_workers::each(&jobs, work, |done| {
            let Some(job) = order.next() else { return ControlFlow::Break(()) };
            match done {
                // Those that come before it, and those that are read beside
                // it, have made room when they are gone.
                Ok(Err(Trouble::NoRoom(_))) if jobs.len() > 1 => later.push(job),
                Ok(done) => self.settle(job, done),
                Err(panic) => self.settle(job, Err(Trouble::Other(panic.to_string()))),
            }
            ControlFlow::Continue(())
        });
        for job in later {
            self.settle(job, read(job, args));
        }
    }

    fn jobs(&self, path: &Path) -> Result<Vec<Job>, Failure> {
        let found = find(path)?;
        let named = !path.is_dir();
        let folder = match &self.args.out {
            Some(out) => out.clone(),
            None if named => memtrace_files::folder_of(path).to_owned(),
            None => path.to_owned(),
        };
        leftovers::clear(&folder);
        if found.is_empty() {
            tell(&format!("no black box (*.{}) is in {}", process::EXTENSION, path.display()));
        }
        Ok(found.into_iter().map(|name| Job { name, folder: folder.clone(), named }).collect())
    }

    /// Names the snapshot, removes the black box if it is to go, and says what became of it.
    fn settle(&mut self, job: &Job, done: Result<Read, Trouble>) {
        let name = job.name.display();
        match done.and_then(|read| read.settle(&job.folder)) {
            Ok(Fate::Written(path)) => {
                self.written += 1;
                let _ = writeln!(self.page, "{}", path.display());
            }
            Ok(Fate::Empty) => tell(&format!("{name}: the process recorded nothing")),
            Ok(Fate::Alive(pid)) => tell(&format!(
                "{name}: process {pid} is alive and writes it; use `memtrace snapshot {pid}`"
            )),
            Err(Trouble::NoRoom(why) | Trouble::Other(why)) => {
                self.bad += 1;
                tell(&format!("{name}: {why}"));
            }
        }
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
    /// One that lies about in a folder, where anybody may have put it: it must be this user's, and
    /// a link one that the recorder makes, which has the black box's own name.
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

/// Why a black box is no snapshot.
enum Trouble {
    /// There is no room for one.
    NoRoom(String),
    Other(String),
}

impl From<Trouble> for Failure {
    fn from((Trouble::NoRoom(why) | Trouble::Other(why)): Trouble) -> Failure {
        Failure::new(why)
    }
}

impl From<String> for Trouble {
    fn from(why: String) -> Trouble {
        Trouble::Other(why)
    }
}

/// A black box that has been read.
struct Read {
    found: Found,
    content: Content,
    end: End,
}

enum Content {
    /// Its process lives.
    Alive(u64),
    /// Nothing.
    Empty,
    /// A snapshot, written.
    Snapshot(Written),
}

/// What is done with the black box.
enum End {
    Keep,
    /// It is kept, and somebody may ask why.
    KeepBecause(String),
    /// It is removed, with the links to it; with the output folder of its process.
    Remove(Option<PathBuf>),
}

/// All that takes long, and nothing that others see.
fn read(job: &Job, args: &Recover) -> Result<Read, Trouble> {
    let found = if job.named { Found::open_named(&job.name) } else { Found::open(&job.name) }?;
    let (content, end) = read_found(&found, &job.folder, args)?;
    Ok(Read { found, content, end })
}

fn read_found(found: &Found, folder: &Path, args: &Recover) -> Result<(Content, End), Trouble> {
    let Found { real, file, ours, .. } = found;
    let open = match blackbox::open(file) {
        Ok(open) => open,
        // No number is in it yet, but in its name there is.
        Err(OpenError::NotReady) if let Some(pid) = number(real) => {
            if runs(pid, real, file)? {
                return Ok((Content::Alive(pid), End::Keep));
            }
            let end = if !args.keep && *ours { End::Remove(None) } else { End::Keep };
            return Ok((Content::Empty, end));
        }
        Err(e) => return Err(e.to_string().into()),
    };
    let writer = found.writer(&open)?;
    if let Writer::Alive(pid) = writer {
        return Ok((Content::Alive(pid), End::Keep));
    }
    let content = if open.header(at::HEAD) == 0 {
        Content::Empty
    } else {
        let how = (args.format.expanded(args.expand), output::readers(args.permissions));
        Content::Snapshot(write(&open, false, "recovered", folder, how)?)
    };
    let end = match writer {
        _ if args.keep => End::Keep,
        Writer::Unknown(place) => End::KeepBecause(format!(
            "it was written {place} and nobody here knows whether its process has ended"
        )),
        _ if !ours => End::KeepBecause("it belongs to another user".to_owned()),
        _ => End::Remove(open.about().and_then(|about| about.out).map(PathBuf::from)),
    };
    Ok((content, end))
}

impl Read {
    /// Names the snapshot and does with the black box what is to be done.
    fn settle(self, folder: &Path) -> Result<Fate, Trouble> {
        let fate = match self.content {
            Content::Alive(pid) => Fate::Alive(pid),
            Content::Empty => Fate::Empty,
            Content::Snapshot(written) => Fate::Written(written.place(folder)?),
        };
        match self.end {
            End::Keep => {}
            End::KeepBecause(why) => {
                tell(&format!("{}: kept, since {why}", self.found.name.display()));
            }
            End::Remove(out) => remove(&self.found, out.as_deref()),
        }
        Ok(fate)
    }
}

fn runs(pid: u64, real: &Path, file: &File) -> Result<bool, String> {
    process::writes(pid, real, file)
        .map_err(|e| format!("cannot tell whether process {pid} lives: {e}; run this as its user"))
}

/// The process id in `memtrace-HOST-PID-START.blackbox`.
fn number(path: &Path) -> Option<u64> {
    path.file_stem()?.to_str()?.rsplit('-').nth(1)?.parse().ok()
}

/// A snapshot that has no name yet.
struct Written {
    file: Unnamed,
    /// So many events were overwritten before they were read.
    overwritten: u64,
}

fn write(
    file: &BlackBox<OnDisk<'_>>,
    alive: bool,
    reason: &str,
    folder: &Path,
    how: (Format, Readers),
) -> Result<Written, Trouble> {
    // Where the description is damaged, the header knows this much.
    let pid = Some(file.header(at::PID));
    let about =
        file.about().map_or(Memtrace { pid, ..Memtrace::default() }, |about| about.memtrace);
    let mut overwritten = 0;
    let written = output::write_unnamed(folder, Some(&about), how, |new| {
        overwritten = blackbox::snapshot(file, alive, reason, new, how.0)?.overwritten;
        Ok(())
    });
    match written {
        Ok(file) => Ok(Written { file, overwritten }),
        Err(e) => Err(cannot_write(&e, folder)),
    }
}

impl Written {
    fn place(self, folder: &Path) -> Result<PathBuf, Trouble> {
        let path = self.file.place().map_err(|e| cannot_write(&e, folder))?;
        if self.overwritten > 0 {
            tell(&format!(
                "{}: its program overwrote the {} oldest events before they were read",
                path.display(),
                self.overwritten
            ));
        }
        Ok(path)
    }
}

fn cannot_write(e: &io::Error, folder: &Path) -> Trouble {
    if let Some(bad) = e.get_ref().and_then(|e| e.downcast_ref::<OpenError>()) {
        return bad.to_string().into();
    }
    let why = format!(
        "cannot write a snapshot into {}: {e}; name another folder with --out DIR",
        folder.display()
    );
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Trouble::NoRoom(why),
        _ => Trouble::Other(why),
    }
}

/// Removes the file and the links to it: the one that led here, and the
/// one in the process's output folder.
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
    let written = write(&open, true, "snapshot", folder, how);
    let path = written.and_then(|written| written.place(folder))?;
    let mut page = Page::default();
    let _ = writeln!(page, "{}", path.display());
    Ok(Answer::page(page, true))
}

//! `memtrace recover`: snapshots from the black boxes of dead processes.
//!
//! Exit codes: 0 if each black box of a dead process is a snapshot now. 1 if nothing was there to
//! recover, or some could be read and others not. 2 if nothing could be read or written.

use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use memtrace_format::blackbox::{OpenError, at};
use memtrace_terminal::Page;

use crate::args::Recover;
use crate::blackbox::{self, BoxError, Written};
use crate::failure::Failure;
use crate::found::{Found, Writer, find, number, runs};
use crate::say::{Answer, eprint_line};
use crate::{boxes, leftovers, output, process};

/// What became of a black box.
enum Recovered {
    /// It is a snapshot now.
    Written(PathBuf),
    /// There was nothing in it.
    Empty,
    /// It is none of our business: its process lives.
    Alive(u64),
}

pub(crate) fn recover(args: &Recover) -> Result<Answer, Failure> {
    if args.paths.is_empty() {
        return boxes::list(args.json);
    }
    let mut all = Recovery { args, page: Page::default(), written: 0, bad: 0 };
    let mut paths = &args.paths[..];
    while !paths.is_empty() {
        let (batch, others) = paths.split_at(at_once(paths));
        all.of(batch);
        paths = others;
    }
    if all.bad > 0 && all.written == 0 {
        return Err(Failure::reported());
    }
    Ok(Answer::page(all.page, all.written > 0 && all.bad == 0))
}

/// How many of the paths may be handled together: files that are not the same. A folder is handled
/// alone, since what is in it may be named, too.
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
                    eprint_line(&failure.to_string());
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
                Ok(Err(BoxError::NoRoom(_))) if jobs.len() > 1 => later.push(job),
                Ok(done) => self.settle(job, done),
                Err(panic) => self.settle(job, Err(BoxError::Other(panic.to_string()))),
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
            eprint_line(&format!(
                "no black box (*.{}) is in {}",
                process::EXTENSION,
                path.display()
            ));
        }
        Ok(found.into_iter().map(|name| Job { name, folder: folder.clone(), named }).collect())
    }

    /// Names the snapshot, removes the black box if it is to go, and says what became of it.
    fn settle(&mut self, job: &Job, done: Result<Read, BoxError>) {
        let name = job.name.display();
        match done.and_then(|read| read.settle(&job.folder)) {
            Ok(Recovered::Written(path)) => {
                self.written += 1;
                let _ = writeln!(self.page, "{}", path.display());
            }
            Ok(Recovered::Empty) => eprint_line(&format!("{name}: the process recorded nothing")),
            Ok(Recovered::Alive(pid)) => eprint_line(&format!(
                "{name}: process {pid} is alive and writes it; use `memtrace snapshot {pid}`"
            )),
            Err(BoxError::NoRoom(why) | BoxError::Other(why)) => {
                self.bad += 1;
                eprint_line(&format!("{name}: {why}"));
            }
        }
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
fn read(job: &Job, args: &Recover) -> Result<Read, BoxError> {
    let found = if job.named { Found::open_named(&job.name) } else { Found::open(&job.name) }?;
    let (content, end) = read_found(&found, &job.folder, args)?;
    Ok(Read { found, content, end })
}

fn read_found(found: &Found, folder: &Path, args: &Recover) -> Result<(Content, End), BoxError> {
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
        Content::Snapshot(blackbox::write(&open, false, "recovered", folder, how)?)
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
    fn settle(self, folder: &Path) -> Result<Recovered, BoxError> {
        let fate = match self.content {
            Content::Alive(pid) => Recovered::Alive(pid),
            Content::Empty => Recovered::Empty,
            Content::Snapshot(written) => Recovered::Written(written.place(folder)?),
        };
        match self.end {
            End::Keep => {}
            End::KeepBecause(why) => {
                eprint_line(&format!("{}: kept, since {why}", self.found.name.display()));
            }
            End::Remove(out) => remove(&self.found, out.as_deref()),
        }
        Ok(fate)
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
        eprint_line(&format!("{} is recovered, but cannot be removed: {e}", real.display()));
    }
}

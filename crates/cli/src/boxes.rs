//! The black boxes that there are: `memtrace recover` without a name lists them, and `memtrace run`
//! mentions those of dead processes when they hold much memory.
//!
//! They are looked for where the recorder puts them. Only this user's are opened; of what is in
//! them, names are shown with whatever a terminal would obey made visible.

use std::collections::BTreeSet;
use std::env;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memtrace_format::blackbox::{OpenError, at};
use memtrace_format::key::Memtrace;
use memtrace_options::{BLACKBOX, NO_BLACKBOX, OUT};
use memtrace_terminal::Page;
use memtrace_terminal::shell::quoted;
use serde_json::{Value, json};

use crate::blackbox;
use crate::failure::Failure;
use crate::found::{Found, Writer, find};
use crate::say::{Answer, eprint_line};
use crate::units::{many, size, span};

/// More than this is worth a line at the next run.
const MUCH: u64 = 256 << 20;
/// Or this part of the file system that they are in: one in so many.
const PART: u64 = 20;

/// A black box as the list shows it.
struct Listed {
    path: PathBuf,
    /// What it takes of its file system.
    bytes: u64,
    pid: Option<u64>,
    started_us: Option<u64>,
    about: Memtrace,
    state: &'static str,
    /// For people: what more there is to say of its state.
    why: String,
}

/// Where the recorder puts black boxes that are kept in memory, as far as this environment says.
pub(crate) fn memory_folders() -> Vec<PathBuf> {
    let var = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let chosen = var(BLACKBOX.variable).filter(|path| path != Path::new(NO_BLACKBOX));
    let mut folders: Vec<PathBuf> = chosen.into_iter().chain(var("XDG_RUNTIME_DIR")).collect();
    folders.push("/dev/shm".into());
    folders
}

/// The folders, each file once, also where a link leads to it.
fn look(folders: &[PathBuf]) -> Vec<Found> {
    let mut seen = BTreeSet::new();
    let names = folders.iter().flat_map(|folder| find(folder).unwrap_or_default());
    let found = names.filter_map(|name| Found::open(&name).ok());
    found.filter(|f| f.file.metadata().is_ok_and(|m| seen.insert((m.dev(), m.ino())))).collect()
}

fn taken(found: &Found) -> u64 {
    found.file.metadata().map_or(0, |m| m.blocks().saturating_mul(512))
}

impl Listed {
    fn of(found: &Found) -> Option<Listed> {
        let (path, bytes) = (found.real.clone(), taken(found));
        let bad = |why: String| Listed {
            path: path.clone(),
            bytes,
            pid: None,
            started_us: None,
            about: Memtrace::default(),
            state: "damaged",
            why,
        };
        let open = match blackbox::open(&found.file) {
            Ok(open) => open,
            // Something else that ends in .blackbox.
            Err(OpenError::NotABlackBox | OpenError::NotReady) => return None,
            Err(e) => return Some(bad(e.to_string())),
        };
        let (state, why) = match found.writer(&open) {
            Ok(Writer::Alive(_)) => ("alive", String::new()),
            Ok(Writer::Dead) => ("dead", String::new()),
            Ok(Writer::Unknown(place)) => ("unknown", format!("written {place}")),
            Err(why) => ("unknown", why),
        };
        let (pid, started_us) = (open.header(at::PID), open.header(at::STARTED_NS) / 1000);
        let about = open.about().unwrap_or_default().memtrace;
        Some(Listed {
            pid: Some(pid),
            started_us: Some(started_us),
            about,
            state,
            why,
            ..bad(String::new())
        })
    }

    fn command(&self) -> String {
        let words = self.about.command.as_deref().unwrap_or_default();
        words.join(" ").chars().take(100).collect()
    }

    fn to_json(&self) -> Value {
        json!({
            "path": self.path.to_string_lossy(),
            "bytes": self.bytes,
            "state": self.state,
            "why": Some(&self.why).filter(|why| !why.is_empty()),
            "pid": self.pid,
            "root": self.about.root,
            "rank": self.about.rank,
            "host": self.about.host,
            "command": self.about.command,
            "started_us": self.started_us,
        })
    }

    fn print(&self, now_us: u64, page: &mut Page) {
        let pid = self.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        let ago = self.started_us.map_or(0, |us| now_us.saturating_sub(us));
        let root = self.about.root.and_then(|root| u64::try_from(root).ok());
        let run = root.filter(|root| Some(*root) != self.pid);
        let run = run.map_or_else(String::new, |root| format!(", of the run of process {root}"));
        let rank = self.about.rank.map_or_else(String::new, |r| format!(", rank {r}"));
        let why = if self.why.is_empty() { String::new() } else { format!(" ({})", self.why) };
        let _ = writeln!(
            page,
            "{:8} process {pid:>7} {:>10}  began {} ago{run}{rank}{why}",
            self.state,
            size(self.bytes),
            span(i64::try_from(ago).unwrap_or(i64::MAX)),
        );
        let _ = writeln!(page, "         {}", self.command());
        let _ = writeln!(page, "         {}", self.path.display());
    }
}

pub(crate) fn list(as_json: bool) -> Result<Answer, Failure> {
    let mut folders = memory_folders();
    let out = env::var_os(OUT.variable).filter(|v| !v.is_empty());
    folders.push(out.map_or(".".into(), PathBuf::from));
    let all: Vec<Listed> = look(&folders).iter().filter_map(Listed::of).collect();
    if as_json {
        let list: Vec<Value> = all.iter().map(Listed::to_json).collect();
        return Answer::json(&list, true);
    }
    let mut page = Page::default();
    if all.is_empty() {
        let folders: Vec<String> = folders.iter().map(|f| f.display().to_string()).collect();
        let _ = writeln!(page, "no black box of this user's is in {}", folders.join(", "));
        return Ok(Answer::page(page, true));
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now_us = now.map_or(0, |t| t.as_micros() as u64);
    for one in &all {
        one.print(now_us, &mut page);
    }
    page.push_str("\n");
    let bytes: u64 = all.iter().map(|o| o.bytes).sum();
    let _ = writeln!(page, "{}, {}", boxes(all.len()), size(bytes));
    let mut dead = all.iter().filter(|o| o.state == "dead");
    if let Some(first) = dead.next() {
        let are = match dead.count() + 1 {
            1 => "1 of them is of a process that has died".to_owned(),
            n => format!("{n} of them are of processes that have died"),
        };
        let path = quoted(&first.path);
        let _ = writeln!(page, "{are}: make a snapshot of one, and remove it, with");
        let _ = writeln!(page, "  memtrace recover --out . {path}");
        page.push_str("or remove it without:\n");
        let _ = writeln!(page, "  rm {path}");
    }
    Ok(Answer::page(page, true))
}

fn boxes(n: usize) -> String {
    many(n as u64, "black box").replace("boxs", "boxes")
}

/// One line on standard error, if black boxes of dead processes hold much memory.
pub(crate) fn mention() {
    for folder in memory_folders() {
        let found = look(std::slice::from_ref(&folder));
        let room =
            rustix::fs::statvfs(&folder).map_or(0, |s| s.f_blocks.saturating_mul(s.f_frsize));
        let limit = MUCH.min(room / PART);
        // Whose they are is worth looking up only then.
        if found.iter().map(taken).sum::<u64>() <= limit {
            continue;
        }
        let dead: Vec<Listed> =
            found.iter().filter_map(Listed::of).filter(|o| o.state == "dead").collect();
        let bytes: u64 = dead.iter().map(|o| o.bytes).sum();
        if bytes > limit {
            eprint_line(&format!(
                "{} of processes that have died hold{} {} of {}: `memtrace recover` lists them",
                boxes(dead.len()),
                if dead.len() == 1 { "s" } else { "" },
                size(bytes),
                folder.display()
            ));
        }
    }
}

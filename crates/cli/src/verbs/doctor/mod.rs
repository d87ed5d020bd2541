//! `memtrace doctor`: does recording work here, and what did it see of a program?
//!
//! Nothing is guessed. Each check does what a recorded program would do: load the library, make a
//! file of a black box's size, read Python's objects. Or it reads what the recorder wrote down of
//! itself. It says what it saw. A finding is something that makes a record wrong or impossible,
//! with what to do about it; a note is worth knowing and no more. The program runs under
//! `memtrace run` as ever, and nothing is attached to it.

mod installation;
mod machine;
mod recorded;
mod settings;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::{env, io};

use memtrace_options::{QUIET, Quiet};
use memtrace_terminal::Page;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::args::{Doctor, Format, Recover};
use crate::cards::{self, CardsHere};
use crate::failure::Failure;
use crate::say::Answer;
use crate::verbs::recover;
use crate::{found, leftovers};

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Ok,
    Note,
    Wrong,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Wrong => "wrong",
        }
    }
}

/// A line of the answer.
#[derive(Debug)]
struct Check {
    level: Level,
    about: &'static str,
    text: String,
}

impl Check {
    fn new(level: Level, about: &'static str, text: impl Into<String>) -> Check {
        Check { level, about, text: text.into() }
    }
}

/// A folder of this user's alone that goes when nobody needs it any more.
fn scratch() -> Result<TempDir, Failure> {
    tempfile::Builder::new().prefix("memtrace-doctor-").tempdir().map_err(|e| {
        Failure::new(format!(
            "cannot make a folder in {}: {e}; set TMPDIR",
            env::temp_dir().display()
        ))
    })
}

pub(crate) fn doctor(args: &Doctor) -> Result<Answer, Failure> {
    let here = cards::here();
    let mut checks = installation::checks(args.out.as_deref(), &here)?;
    let mut processes = Vec::new();
    let mut exit = Value::Null;
    if !args.command.is_empty() {
        let scratch = if args.out.is_none() { Some(scratch()?) } else { None };
        let out = args.out.as_deref().or(scratch.as_ref().map(TempDir::path));
        let out = out.unwrap_or(Path::new("."));
        checks.extend(args.command.first().and_then(|c| installation::program(c)));
        let before = snapshots(out);
        let boxes_before = found::find(out).unwrap_or_default();
        let list = leftovers::list_of_run(out);
        let status = run(args, out, &list)?;
        checks.extend(recorded::started_without(&list));
        for path in
            found::find(out).unwrap_or_default().into_iter().filter(|p| !boxes_before.contains(p))
        {
            let killed = Recover {
                paths: vec![path],
                out: Some(out.to_owned()),
                format: Format::Pickle,
                permissions: None,
                keep: false,
                expand: false,
                json: false,
            };
            // What can't be read has been said; a process that lives goes on.
            let _ = recover::recover(&killed);
        }
        exit = status.code().map_or_else(|| json!(status.to_string()), Value::from);
        for path in snapshots(out).iter().filter(|p| !before.contains(p)) {
            match recorded::Process::of(path) {
                Ok(about) => processes.push(about),
                Err(failure) => {
                    checks.push(Check::new(Level::Wrong, "snapshot", failure.to_string()));
                }
            }
        }
        checks.push(recorded::found_any(&processes));
        checks.extend(processes.iter().flat_map(recorded::checks));
    }
    let yes = checks.iter().all(|c| c.level != Level::Wrong);
    if args.json {
        let list: Vec<Value> = checks
            .iter()
            .map(|c| json!({"level": c.level.name(), "about": c.about, "text": c.text}))
            .collect();
        let cards = match &here {
            CardsHere::Cards(here) => cards::to_json(here),
            CardsHere::Nothing | CardsHere::Failed(_) => json!([]),
        };
        let processes: Vec<Value> = processes.iter().map(recorded::Process::to_json).collect();
        let answer = json!({"ok": yes, "checks": list, "cards": cards, "exit": exit, "processes": processes});
        return Answer::json(&answer, yes);
    }
    Ok(Answer::page(page(&checks, &processes, yes), yes))
}

fn page(checks: &[Check], processes: &[recorded::Process], yes: bool) -> Page {
    let mut text = Page::default();
    for check in checks {
        let _ = writeln!(text, "{:5} {:12} {}", check.level.name(), check.about, check.text);
    }
    for about in processes {
        let _ = writeln!(text);
        recorded::print(about, &mut text);
    }
    let wrong = checks.iter().filter(|c| c.level == Level::Wrong).count();
    let end = match (yes, wrong) {
        (true, _) => "nothing is wrong".to_owned(),
        (_, 1) => "1 thing is wrong".to_owned(),
        (_, n) => format!("{n} things are wrong"),
    };
    let _ = writeln!(text);
    let _ = writeln!(text, "{end}");
    text
}

/// Runs the program as `memtrace run` does, to its end.
fn run(args: &Doctor, out: &Path, list: &Path) -> Result<ExitStatus, Failure> {
    let mut command = this_program()?;
    command.arg("run").arg("--out").arg(out).args(["--format", "pickle"]);
    command.arg("--list").arg(list);
    if let Some(spec) = &args.virtual_gpu {
        command.arg("--virtual").arg(spec);
    }
    if let Some(stacks) = args.stacks {
        command.args(["--stacks", stacks.name()]);
    }
    command.arg("--").args(&args.command);
    // What it says of its files is said here.
    command.env(QUIET.variable, Quiet::Yes.name());
    if args.json {
        command.stdout(Stdio::from(io::stderr()));
    }
    let status = command.status().map_err(|e| Failure::new(format!("cannot run memtrace: {e}")))?;
    // `run` has said why; a program of its own may end with 2 as well, but
    // not without a trace of itself.
    if status.code() == Some(2) && snapshots(out).is_empty() {
        return Err(Failure::reported());
    }
    Ok(status)
}

fn this_program() -> Result<Command, Failure> {
    let me = env::current_exe()
        .map_err(|e| Failure::new(format!("cannot tell where memtrace is installed: {e}")))?;
    Ok(Command::new(me))
}

fn snapshots(folder: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let is_one = |p: &PathBuf| {
        let name = p.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("memtrace-") && name.ends_with(".pickle")
    };
    let mut found: Vec<PathBuf> = names.filter(is_one).collect();
    found.sort();
    found
}

//! `memtrace check`: what the check found, for people and for scripts.

use memtrace_analysis::check::{self, Level, Problem};
use memtrace_format::ReadError;
use memtrace_reading::{FileError, contents, find};
use memtrace_terminal::Page;
use serde_json::{Value, json};

use crate::args::Check;
use crate::failure::Failure;
use crate::say::{Answer, eprint_line};

pub(crate) fn check(args: &Check) -> Result<Answer, Failure> {
    let (mut page, mut list) = (Page::default(), Vec::new());
    let found = find(&args.files.files)?;
    let (mut yes, mut unread) = (true, found.troubles);
    if args.json {
        list.extend(unread.iter().map(not_read));
    }
    found.notes.iter().for_each(|note| eprint_line(note));
    for path in &found.files {
        let problems = contents(path, args.files.limit()).and_then(|contents| {
            match contents.snapshots() {
                // It may be sound.
                Err(e @ ReadError::TooLarge) => Err(contents.trouble(&e)),
                Ok(parts) if parts.iter().any(|p| p.snapshot == Err(ReadError::TooLarge)) => {
                    Err(contents.trouble(&ReadError::TooLarge))
                }
                parts => Ok(check::parts(contents.bytes.len(), &parts)),
            }
        });
        let problems = match problems {
            Ok(problems) => problems,
            Err(trouble) => {
                if args.json {
                    list.push(not_read(&trouble));
                }
                unread.push(trouble);
                continue;
            }
        };
        let sound = problems.iter().all(|p| p.level != Level::Error);
        yes &= sound;
        let name = path.display().to_string();
        if args.json {
            let problems: Vec<Value> = problems.iter().map(as_json).collect();
            list.push(json!({"file": name, "ok": sound, "problems": problems}));
        } else {
            page_of(&mut page, &name, sound, &problems);
        }
    }
    let answer = if args.json { Answer::json(&list, yes)? } else { Answer::page(page, yes) };
    if unread.is_empty() {
        return Ok(answer);
    }
    // The files that could be read have their answer; then comes the error.
    answer.print()?;
    for trouble in &unread {
        eprint_line(&trouble.to_string());
    }
    Err(Failure::reported())
}

fn page_of(page: &mut Page, name: &str, sound: bool, problems: &[Problem]) {
    let _ = writeln!(page, "{name}: {}", if sound { "ok" } else { "not ok" });
    for problem in problems {
        let _ = writeln!(page, "  {problem}");
    }
}

fn not_read(trouble: &FileError) -> Value {
    json!({"file": trouble.path.display().to_string(), "error": trouble.to_string()})
}

fn as_json(problem: &Problem) -> Value {
    json!({"level": problem.level.name(), "place": problem.place, "what": problem.what})
}

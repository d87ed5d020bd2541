//! `memtrace check`: what the check found, for people and for scripts.

use std::fmt::Write;

use memtrace_analysis::check::{self, Level, Problem};
use serde_json::{Value, json};

use crate::Answer;
use crate::args::Check;
use crate::failure::Failure;
use crate::files;

pub(crate) fn check(args: &Check) -> Result<Answer, Failure> {
    let mut answer = Answer::yes(String::new());
    let mut list = Vec::new();
    let mut unread = Vec::new();
    for path in &args.files {
        let bytes = match files::read(path) {
            Ok(bytes) => bytes,
            Err(failure) => {
                unread.push(failure.to_string());
                continue;
            }
        };
        let problems = check::file(&bytes);
        let sound = problems.iter().all(|p| p.level != Level::Error);
        answer.yes &= sound;
        let name = path.display().to_string();
        if args.json {
            let problems: Vec<Value> = problems.iter().map(as_json).collect();
            list.push(json!({"file": name, "ok": sound, "problems": problems}));
        } else {
            tell(&mut answer.text, &name, sound, &problems);
        }
    }
    if args.json {
        answer.text = format!("{:#}\n", Value::Array(list));
    }
    if unread.is_empty() {
        return Ok(answer);
    }
    // The files that could be read have their answer; then comes the error.
    crate::print(&answer.text)?;
    Err(Failure::new(unread.join("\nmemtrace: ")))
}

fn tell(text: &mut String, name: &str, sound: bool, problems: &[Problem]) {
    // Writing to a string can't fail.
    let _ = writeln!(text, "{name}: {}", if sound { "ok" } else { "not ok" });
    for problem in problems {
        let _ = writeln!(text, "  {problem}");
    }
}

fn as_json(problem: &Problem) -> Value {
    json!({"level": problem.level.name(), "place": problem.place, "what": problem.what})
}

//! One question, asked of each snapshot of each file.
//!
//! A question is a function from a snapshot to an [`Answer`]. Files, folders, order, headings,
//! lists and exit codes are here, so that every command treats them alike. A single file is
//! answered as it is. Of several files, each answer is printed as soon as it is known, under the
//! name of its file. Or all of them are one JSON list. The exit code is the worst.

use std::path::Path;

use memtrace_format::snapshot::Snapshot;
use memtrace_reading::{FileError, Limit, find, snapshots};
use memtrace_terminal::Page;
use serde_json::{Value, json};

use crate::args::Files;
use crate::failure::Failure;
use crate::say::{Answer, eprint_line};

/// A snapshot that is asked about.
pub(crate) struct Asked<'a> {
    pub(crate) name: &'a str,
    pub(crate) snapshot: &'a Snapshot,
    /// Its name is not printed above the answer.
    alone: bool,
}

impl Asked<'_> {
    /// Writes the name, if it is to be written.
    pub(crate) fn title(&self, page: &mut Page) {
        if self.alone {
            let _ = writeln!(page, "{}", self.name);
        }
    }
}

/// Asks a question of each snapshot.
pub(crate) fn each(
    files: &Files,
    json: bool,
    ask: impl Fn(&Asked<'_>) -> Result<Answer, Failure>,
) -> Result<Answer, Failure> {
    let answers = Answers::new(json);
    let limit = files.limit();
    answers.of_files(files, |path, answers| {
        let all = snapshots(path, limit)?;
        answers.several |= all.len() > 1;
        for one in &all {
            let (name, alone) = (&one.name, !answers.several);
            let answer = match &one.snapshot {
                Ok(snapshot) => ask(&Asked { name, snapshot, alone }),
                Err(trouble) => Err(trouble.clone().into()),
            };
            answers.add(name, answer)?;
        }
        Ok(())
    })
}

/// Asks a question of each file.
pub(crate) fn each_file(
    files: &Files,
    json: bool,
    ask: impl Fn(&Path) -> Result<Answer, Failure>,
) -> Result<Answer, Failure> {
    let answers = Answers::new(json);
    answers.of_files(files, |path, answers| answers.add(&path.display().to_string(), ask(path)))
}

struct Answers {
    /// There may be more than one.
    several: bool,
    /// Answers for scripts, if these are wanted.
    list: Option<Vec<Value>>,
    /// How many were printed.
    printed: usize,
    yes: bool,
    failed: bool,
}

impl Answers {
    fn new(json: bool) -> Answers {
        let list = json.then(Vec::new);
        Answers { several: false, list, printed: 0, yes: true, failed: false }
    }

    fn of_files(
        mut self,
        files: &Files,
        mut ask: impl FnMut(&Path, &mut Answers) -> Result<(), Failure>,
    ) -> Result<Answer, Failure> {
        let found = find(&files.files)?;
        found.notes.iter().for_each(|note| eprint_line(note));
        self.several = found.several;
        for trouble in found.troubles {
            self.fail(&trouble.path.display().to_string(), trouble.clone().into())?;
        }
        for path in &found.files {
            if let Err(failure) = ask(path, &mut self) {
                self.fail(&path.display().to_string(), failure)?;
            }
        }
        self.end()
    }

    fn add(&mut self, name: &str, answer: Result<Answer, Failure>) -> Result<(), Failure> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => return self.fail(name, failure),
        };
        self.yes &= answer.yes;
        if !self.several {
            self.printed += 1;
            return answer.print();
        }
        if let (Some(list), Some(value)) = (&mut self.list, answer.value()) {
            list.push(named(name, value));
            return Ok(());
        }
        let mut heading = Page::default();
        if self.printed > 0 {
            let _ = writeln!(heading);
        }
        let _ = writeln!(heading, "==> {name} <==");
        self.printed += 1;
        Answer::page(heading, true).print()?;
        answer.print()
    }

    /// Of several files the others have their answers all the same.
    fn fail(&mut self, name: &str, failure: Failure) -> Result<(), Failure> {
        if !self.several {
            return Err(failure);
        }
        self.failed = true;
        if let Some(line) = failure.line() {
            eprint_line(line);
            if let Some(list) = &mut self.list {
                list.push(json!({"file": name, "error": line}));
            }
        }
        Ok(())
    }

    fn end(self) -> Result<Answer, Failure> {
        if let Some(list) = self.list.filter(|_| self.several) {
            Answer::json(&list, self.yes)?.print()?;
        }
        if self.failed { Err(Failure::reported()) } else { Ok(Answer::printed(self.yes)) }
    }
}

/// The answer, with the name of the file in front.
fn named(name: &str, value: &Value) -> Value {
    let mut object = json!({"file": name});
    match (&mut object, value) {
        (Value::Object(object), Value::Object(more)) => object.extend(more.clone()),
        (object, other) => object["answer"] = other.clone(),
    }
    object
}

impl From<FileError> for Failure {
    fn from(trouble: FileError) -> Failure {
        Failure::new(trouble.to_string())
    }
}

/// A pipe is waited for.
pub(crate) fn report_silent_pipe(path: &Path) {
    eprint_line(&format!(
        "{}: still waiting for a writer of this pipe (FIFO): whoever has it open writes nothing (Ctrl-C ends)",
        path.display()
    ));
}

impl Files {
    /// How much each file may take.
    pub(crate) fn limit(&self) -> Limit {
        Limit::new(self.max_memory).among(self.files.len() > 1).on_silent_pipe(report_silent_pipe)
    }
}

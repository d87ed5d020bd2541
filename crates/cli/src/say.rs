//! What goes to the user: answers on standard output, trouble on standard error. Nothing of the
//! command is printed past this module. All that it prints is a [`Page`], a text made one line,
//! JSON, or the command's own words; see [`memtrace_terminal`].

use std::io::{self, Write};

use memtrace_terminal::{Page, shown, shown_json};
use serde::Serialize;
use serde_json::Value;

use crate::failure::Failure;

/// An answer: what to print, and whether it is yes.
pub(crate) struct Answer {
    text: Text,
    pub(crate) yes: bool,
}

enum Text {
    Page(Page),
    Json(Value),
    Own(String),
}

impl Answer {
    /// For people.
    pub(crate) fn page(page: Page, yes: bool) -> Answer {
        Answer { text: Text::Page(page), yes }
    }

    /// For scripts.
    pub(crate) fn json(value: &impl Serialize, yes: bool) -> Result<Answer, Failure> {
        let value = serde_json::to_value(value)
            .map_err(|e| Failure::new(format!("cannot write JSON: {e}")))?;
        Ok(Answer { text: Text::Json(value), yes })
    }

    /// What this command has written of itself, for another program; nothing
    /// in it comes from a file or a process.
    pub(crate) fn written(text: String) -> Answer {
        Answer { text: Text::Own(text), yes: true }
    }

    /// Everything has been printed.
    pub(crate) fn printed(yes: bool) -> Answer {
        Answer::page(Page::default(), yes)
    }

    pub(crate) fn print(&self) -> Result<(), Failure> {
        match &self.text {
            Text::Page(page) => print(page),
            Text::Own(text) => print(text),
            Text::Json(value) => print(&shown_json(&format!("{value:#}\n"))),
        }
    }

    /// What is for scripts.
    pub(crate) fn value(&self) -> Option<&Value> {
        match &self.text {
            Text::Page(_) | Text::Own(_) => None,
            Text::Json(value) => Some(value),
        }
    }
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Whoever reads has read enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Failure::new(format!("cannot write to standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// One line on standard error, now: what follows may take a while.
pub(crate) fn eprint_line(line: &str) {
    // Nobody may be listening; there is nobody else to tell.
    let _ = writeln!(io::stderr(), "memtrace: {}", shown(line));
}

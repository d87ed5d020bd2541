//! An error of ours: one line, exit code 2.

use std::fmt;

/// What is wrong and what to do, in one line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure(Option<String>);

impl Failure {
    pub(crate) fn new(line: impl Into<String>) -> Failure {
        Failure(Some(line.into()))
    }

    /// Everything has been said already.
    pub(crate) fn reported() -> Failure {
        Failure(None)
    }

    /// The line, if it is still to be said.
    pub(crate) fn line(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.line().unwrap_or_default())
    }
}

//! An error of ours: one line, exit code 2.

use std::fmt;

/// What is wrong and what to do, in one line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(line: impl Into<String>) -> Failure {
        Failure(line.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

//! The command line: arguments, files, terminal. What a snapshot means is worked out in
//! `memtrace-analysis`, what a virtual GPU is in `memtrace-devices`; here it is read and printed.
//!
//! Rules that every command keeps: the answer goes to standard output. Trouble goes to
//! standard error, in one line that says what is wrong and what to do. Exit 0 is yes or
//! done, 1 is no, 2 is an error of ours. A closed pipe is no error. `run` is different in
//! one way: it becomes the command that it starts. From then on the process, its signals and
//! its exit code are that command's own.

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod args;
mod blackbox;
mod boxes;
mod cards;
mod each;
mod failure;
mod found;
mod leftovers;
mod output;
mod preloadable;
mod process;
mod say;
mod settings;
pub mod stand_ins;
mod units;
mod verbs;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::args::Args;

/// Makes a program that this process becomes inherit what this process did.
pub type Inherit = fn(&mut std::process::Command);

/// Runs the command line of this process.
pub fn main(inherit: Inherit) -> ExitCode {
    let answer = verbs::answer(&Args::parse().command, inherit);
    let answer = answer.and_then(|answer| answer.print().map(|()| answer.yes));
    match answer {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            if let Some(line) = failure.line() {
                say::eprint_line(line);
            }
            ExitCode::from(2)
        }
    }
}

/// The whole command line as clap knows it; the reference of its help is tested as text.
pub fn command() -> clap::Command {
    Args::command()
}

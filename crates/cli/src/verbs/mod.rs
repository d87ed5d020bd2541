//! What the command can do: a file for each verb, called as the verb is.

mod check;
mod completions;
mod devices;
mod doctor;
mod man;
mod recover;
mod replay;
mod report;
pub(crate) mod run;
mod snapshot;
mod summary;
mod symbolize;
mod tune;

use crate::Inherit;
use crate::args::Command;
use crate::failure::Failure;
use crate::say::Answer;

/// Does what the command line asks for.
pub(crate) fn answer(command: &Command, inherit: Inherit) -> Result<Answer, Failure> {
    match command {
        Command::Run(args) => run::run(args, inherit).map(|never| match never {}),
        Command::Summary(args) => summary::summary(args),
        Command::Report(args) => report::report(args),
        Command::Check(args) => check::check(args),
        Command::Recover(args) => recover::recover(args),
        Command::Snapshot(args) => snapshot::snapshot(args),
        Command::Symbolize(args) => symbolize::symbolize(args),
        Command::Replay(args) => replay::replay(args),
        Command::Tune(args) => tune::tune(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Devices(args) => devices::devices(args),
        Command::Completions(args) => Ok(completions::completions(args)),
        Command::Man(args) => man::man(args),
    }
}

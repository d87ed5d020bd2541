//! What the command can do: a file for each verb, called as the verb is.

pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod devices;
pub(crate) mod doctor;
pub(crate) mod man;
pub(crate) mod recover;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod snapshot;
pub(crate) mod summary;
pub(crate) mod symbolize;
pub(crate) mod tune;

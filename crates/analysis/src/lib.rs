//! Questions about a snapshot, as pure functions. What was the peak, and who held it
//! ([`summary()`])? Can PyTorch's viewers show the file ([`check`])? Would the program have fitted
//! on another card, or with other settings ([`replay`])?
//!
//! No file, no terminal, no clock: a snapshot goes in, plain data comes out, and the same snapshot
//! always gives the same answer. All are built on the walk in [`history`].

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

pub mod check;
pub mod conf;
pub mod ends;
pub mod history;
pub mod oom;
pub mod replay;
pub mod report;
pub mod sites;
pub mod summary;

pub use check::check;
pub use summary::summary;

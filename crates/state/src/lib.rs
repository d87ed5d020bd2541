//! From recorded events to the state of memory, and to the history that PyTorch would have written.
//!
//! An event says what a hook saw. What it means for memory follows from one set of rules:
//! [`framework`] has those of PyTorch's allocator, [`ledger`] those of the driver. Whoever keeps
//! what is alive implements their traits, so the recorder's live table and the [`State`] of a
//! reader can't disagree. [`recording`] is where events come from: a ring and a live table, of this
//! process or in a file.
//!
//! Everything here is plain data and pure functions, and never panics on any sequence of events.

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod black_box;
pub mod framework;
pub mod ledger;
pub mod past;
pub mod recording;
mod state;

pub use framework::PAGE;
pub use state::{ApiName, DeviceState, LiveBlock, LiveSegment, MappedPage, Sink, State, assemble};

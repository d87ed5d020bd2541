//! Snapshots as JSON.

mod read;
mod write;

pub use read::read;
pub(crate) use read::read_within;
pub use write::{Stream, write};

//! Snapshots as JSON.

mod read;
mod write;

pub use read::read;
pub use write::{Stream, write};

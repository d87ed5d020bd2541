//! Snapshots as JSON.
//!
//! JSON has no references. So a stack is written once, and an entry's `frames` is its number.
//! `stacks` is the table of stacks, each a list of numbers of frames. `frames` beside it is the
//! table of frames. With every stack spelled out ([`Stacks::Expanded`]) the file is what PyTorch's
//! viewer takes, and eighty times the size of the pickle where stacks are deep. Both are read.

mod read;
mod write;

pub use read::read;
pub(crate) use read::read_within;
pub use write::{Stacks, Stream, write};

//! Snapshots as JSON.
//!
//! JSON has no references. So a stack is written once, and where it is meant `frames` is
//! its number: `stacks` is the table of them, each a list of numbers of frames, and
//! `frames` beside it the table of frames. With every stack spelled out
//! ([`Stacks::Expanded`]) the file is what PyTorch's viewer takes, and eighty times the
//! size of the pickle where stacks are deep. Both are read.

mod read;
mod write;

pub use read::read;
pub(crate) use read::read_within;
pub use write::{Stacks, Stream, write};

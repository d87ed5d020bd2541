//! The pickle format, as far as plain data needs it. It is our own on purpose. No
//! crate writes the memo. And the reader must take any bytes without a panic, a
//! deep recursion or a large allocation.

mod op;
mod read;
mod write;

/// How a pickle of protocol 2 or later begins.
pub(crate) const BEGIN: u8 = op::PROTO;

pub(crate) use read::read_within;
pub use read::{Facts, Pickle, read};
pub use write::{Stream, write};

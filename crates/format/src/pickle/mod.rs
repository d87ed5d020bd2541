//! The pickle format, as far as plain data needs it. Ours on purpose: no crate writes the memo, and the
//! reader must take any bytes whatever without a panic, a deep recursion or a large allocation.

mod op;
mod read;
mod write;

pub use read::{Facts, Pickle, read};
pub use write::{Stream, write};

//! A recording as a snapshot file: who holds what, and writing it.
//!
//! [`write()`] is the one way from a recording to a file, for a process's own record and for a
//! black box ([`of_black_box`]). On the way each allocation gets its owner, sums are kept by owner
//! and by label, and what looks wrong becomes a warning. All of that goes under the key `memtrace`
//! of the snapshot. What a library, a function or a line is called is [`memtrace_symbols`]'s.

#![forbid(unsafe_code)]

mod accounts;
mod black_box;
mod end;
mod labels;
mod owner;
mod usage;
mod write;

pub use black_box::of_black_box;
pub use usage::{cost, entry_point_calls};
pub use write::{Counts, Encoding, Moment, write};

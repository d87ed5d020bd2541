//! From recorded stacks to names, files and lines.
//!
//! A hook writes down numbers: return addresses, code objects and positions in them. What they are called is
//! worked out here, from the recorded regions and the files of the libraries alone, so that the process itself
//! and a command that reads the black box of a dead one say the same. Never in a hook: this reads files and
//! allocates. Everything that is read may be damaged, and must not be believed.
//!
//! And from there into a snapshot file: [`write()`] is the one way, for a process's own record and for a black box.

#![deny(unsafe_code)]

mod accounts;
mod doors;
mod end;
mod file;
mod labels;
mod lines;
#[cfg(any(test, feature = "made"))]
pub mod made;
mod names;
mod owner;
mod release;
mod snapshot;
#[cfg(feature = "dwarf")]
pub mod source;
pub mod symbols;
#[cfg(test)]
mod testing;

mod write;

pub use doors::{cost, doors};
pub use lines::line;
pub use names::{Namer, Splice};
pub use snapshot::snapshot;
pub use symbols::{demangle, names_at};
pub use write::{Counts, Encoding, Moment, write};

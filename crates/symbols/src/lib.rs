//! From recorded stacks to names, files and lines.
//!
//! A hook writes down numbers: return addresses, code objects and positions in them. What
//! they are called is worked out here, from the recorded regions and the files of the
//! libraries alone. So the process itself and a command that reads the black box of a dead
//! one say the same. Never in a hook: this reads files and allocates. Everything that is read
//! may be damaged, and must not be believed.
//!
//! [`Namer`] names whole stacks. Beneath it are [`names_at`] for the symbols of a library,
//! [`line()`] for the line tables of Python, and `source` for debug information.

#![deny(unsafe_code)]

mod elf;
mod file;
mod lines;
mod namer;
mod release;
#[cfg(feature = "dwarf")]
pub mod source;
#[cfg(test)]
mod testing;

pub use elf::{demangle, names_at};
pub use lines::line;
pub use namer::{Namer, Splice};

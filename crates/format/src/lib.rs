//! What memtrace writes down, and the files it writes it into.
//!
//! Two forms and nothing between them: the [`event`] that a hook leaves in the ring (64
//! bytes, eight words), and the [`snapshot`] that PyTorch's memory viewers open. Everything
//! here is plain data and pure functions; no file is opened (some are handed in) and
//! nothing of the traced process is known.

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

pub mod blackbox;
mod decode;
mod error;
pub mod event;
pub mod json;
pub mod key;
pub mod labels;
mod literals;
#[cfg(feature = "made")]
pub mod made;
mod numbered;
mod out;
pub mod pickle;
mod shape;
pub mod snapshot;
pub mod stacks;
pub mod stream;
pub mod tree;
pub mod world;

pub use decode::{BYTE_ORDER_MARK, Part, looks_like_json};
pub use error::ReadError;

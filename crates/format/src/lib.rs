//! What memtrace writes down, and the files it writes it into.
//!
//! Two shapes and nothing between them: the [`event`] that a hook leaves in the ring (64 bytes, eight
//! words), and the [`snapshot`] that PyTorch's memory viewers open. Everything here is plain data and
//! pure functions; no file is opened and nothing of the traced process is known.

#![forbid(unsafe_code)]

pub mod event;
pub mod replay;
pub mod settings;
pub mod snapshot;

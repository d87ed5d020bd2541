//! Why a file could not be read as a snapshot.

use std::fmt;

use crate::tree::TOO_LARGE;

/// Says what is wrong and where; each is one line that a user can act on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// Neither a pickle nor JSON, or data of another kind.
    NotASnapshot(String),
    /// The pickle is damaged, or builds what a snapshot never holds.
    Pickle {
        /// Byte at which it was noticed.
        offset: usize,
        /// What is wrong there.
        what: String,
    },
    /// The JSON text is damaged.
    Json(String),
    /// Reading it takes more memory than the caller allows.
    TooLarge,
    /// The layout of PyTorch 2.0, which says other things about a block.
    PyTorch20,
    /// A part of the snapshot is missing or of the wrong type.
    Shape {
        /// Which, such as `segments[3].blocks[0].state`.
        place: String,
        /// What is wrong with it.
        what: String,
    },
}

impl ReadError {
    /// The same error in a pickle that begins at this byte of the file.
    pub(crate) fn behind(self, at: usize) -> ReadError {
        match self {
            ReadError::Pickle { offset, what } => ReadError::Pickle { offset: offset + at, what },
            other => other,
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::NotASnapshot(what) => write!(f, "not a memory snapshot: {what}"),
            ReadError::Pickle { offset, what } => write!(f, "byte {offset} of the pickle: {what}"),
            ReadError::Json(what) => write!(f, "the JSON text is damaged: {what}"),
            ReadError::TooLarge => f.write_str(TOO_LARGE),
            ReadError::PyTorch20 => f.write_str(
                "PyTorch 2.0 format (blocks carry a `history`): record again with PyTorch 2.1 or newer",
            ),
            ReadError::Shape { place, what } => write!(f, "{place}: {what}"),
        }
    }
}

impl std::error::Error for ReadError {}

//! A snapshot on its way into a file, entry by entry, so that nobody needs
//! the memory for a whole history.

use std::fs::File;
use std::io::{self, Write};

use crate::snapshot::{Snapshot, Tables, Trace, TraceEntry};
use crate::{json, pickle};

/// In one encoding or the other. First the entries of all traces, each
/// trace in its order; then the rest.
pub enum Stream<W> {
    /// See [`pickle::Stream`].
    Pickle(pickle::Stream<W>),
    /// See [`json::Stream`].
    Json(json::Stream<W>),
}

impl<W: Write> Stream<W> {
    /// A pickle.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn pickle(out: W) -> io::Result<Stream<W>> {
        Ok(Stream::Pickle(pickle::Stream::new(out)?))
    }

    /// JSON, with stacks as asked. `scratch` opens an empty file for reading
    /// and writing, which nobody else has.
    pub fn json(
        out: W,
        stacks: json::Stacks,
        scratch: Box<dyn FnMut() -> io::Result<File>>,
    ) -> Stream<W> {
        Stream::Json(json::Stream::new(out, stacks, scratch))
    }

    /// The next entry of a trace; its stack is one of `tables`.
    ///
    /// # Errors
    /// Those of the output, and [`io::ErrorKind::InvalidData`] for what no viewer could read.
    pub fn entry(&mut self, of: Trace, entry: TraceEntry, tables: Tables<'_>) -> io::Result<()> {
        match self {
            Stream::Pickle(stream) => stream.entry(of, entry, tables),
            Stream::Json(stream) => stream.entry(of, &entry, tables),
        }
    }

    /// Everything else: `rest` without its frames, stacks and traces. Of devices
    /// without an entry it holds empty traces.
    ///
    /// # Errors
    /// As [`Stream::entry`].
    pub fn finish(self, rest: &Snapshot, tables: Tables<'_>) -> io::Result<()> {
        match self {
            Stream::Pickle(stream) => stream.finish(rest, tables),
            Stream::Json(stream) => stream.finish(rest, tables),
        }
    }
}

//! A snapshot as JSON, the shape of the pickle. It is for people and
//! scripts, the pickle is for recording.

use std::fs::File;
use std::io::{self, Seek, Write};

use crate::literals::Literal;
use crate::out::Out;
use crate::shape::{self, Encoder};
use crate::snapshot::{FrameIx, PoolId, Snapshot, StackIx, Tables, Trace, TraceEntry};

/// How stacks are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stacks {
    /// Once, in tables; elsewhere by number.
    Shared,
    /// Wherever they are meant, as PyTorch's viewer wants them.
    Expanded,
}

/// Writes a snapshot as one JSON object.
///
/// # Errors
/// Those of `out`, and [`io::ErrorKind::InvalidData`] for what no viewer could read. That is an
/// integer of 2^63 or more, or an index that names no frame or stack.
pub fn write(snapshot: &Snapshot, stacks: Stacks, out: impl Write) -> io::Result<()> {
    let mut json = Json::new(out, stacks);
    json.finish_with(snapshot, snapshot.tables())?;
    json.out.finish()
}

/// A JSON text that is written as its history comes. The entries are known before the segments,
/// though these come first in the file. Entries of several devices come in turn. So each trace
/// has a file of its own until the end.
pub struct Stream<W> {
    json: Json<W>,
    scratch: Box<dyn FnMut() -> io::Result<File>>,
    traces: Vec<(Trace, Json<File>)>,
}

impl<W: Write> Stream<W> {
    /// An empty one. `scratch` opens an empty file for reading and writing, which nobody else has.
    pub fn new(out: W, stacks: Stacks, scratch: Box<dyn FnMut() -> io::Result<File>>) -> Stream<W> {
        Stream { json: Json::new(out, stacks), scratch, traces: Vec::new() }
    }

    /// The next entry of a trace; its stack is one of `tables`.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn entry(&mut self, of: Trace, entry: &TraceEntry, tables: Tables<'_>) -> io::Result<()> {
        let known = self.traces.iter().position(|(place, _)| *place == of);
        let i = known.unwrap_or(self.traces.len());
        if known.is_none() {
            let mut list = Json::new((self.scratch)()?, self.json.stacks);
            list.first.push(true);
            self.traces.push((of, list));
        }
        shape::write_entry(entry, tables, &mut self.traces[i].1)
    }

    /// Everything else: `rest` without its frames, stacks and traces. Of devices
    /// without an entry it holds empty traces.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn finish(mut self, rest: &Snapshot, tables: Tables<'_>) -> io::Result<()> {
        for (place, list) in self.traces {
            self.json.traces.push((place, list.out.into_inner()?));
        }
        self.json.finish_with(rest, tables)?;
        self.json.out.finish()
    }
}

struct Json<W> {
    out: Out<W>,
    stacks: Stacks,
    /// Of each list and dictionary that is open: nothing has been written into it yet.
    first: Vec<bool>,
    /// The elements of traces that were written before.
    traces: Vec<(Trace, File)>,
}

impl<W: Write> Json<W> {
    fn new(out: W, stacks: Stacks) -> Json<W> {
        Json { out: Out::new(out), stacks, first: Vec::new(), traces: Vec::new() }
    }

    fn finish_with(&mut self, snapshot: &Snapshot, tables: Tables<'_>) -> io::Result<()> {
        self.open(b'{');
        shape::write(snapshot, tables, self)?;
        self.out.byte(b'\n');
        Ok(())
    }

    fn element(&mut self) -> io::Result<()> {
        if let Some(first) = self.first.last_mut()
            && !std::mem::take(first)
        {
            self.out.byte(b',');
        }
        self.out.breathe()
    }

    fn open(&mut self, bracket: u8) {
        self.out.byte(bracket);
        self.first.push(true);
    }

    fn close(&mut self, bracket: u8) {
        self.first.pop();
        self.out.byte(bracket);
    }
}

impl<W: Write> Encoder for Json<W> {
    fn begin_dict(&mut self) -> io::Result<()> {
        self.open(b'{');
        Ok(())
    }

    fn end_dict(&mut self) -> io::Result<()> {
        self.close(b'}');
        Ok(())
    }

    fn begin_list(&mut self) -> io::Result<()> {
        self.open(b'[');
        Ok(())
    }

    fn end_list(&mut self) -> io::Result<()> {
        self.close(b']');
        Ok(())
    }

    fn item(&mut self) -> io::Result<()> {
        self.element()
    }

    fn key(&mut self, key: Literal) -> io::Result<()> {
        self.element()?;
        self.literal(key)?;
        self.out.byte(b':');
        Ok(())
    }

    fn other_key(&mut self, key: &str) -> io::Result<()> {
        self.element()?;
        self.text(key)?;
        self.out.byte(b':');
        Ok(())
    }

    fn literal(&mut self, literal: Literal) -> io::Result<()> {
        // No literal holds a character that JSON would escape.
        self.out.byte(b'"');
        self.out.put(literal.text().as_bytes());
        self.out.byte(b'"');
        Ok(())
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        Ok(serde_json::to_writer(&mut self.out, text)?)
    }

    fn int(&mut self, n: i64) -> io::Result<()> {
        write!(self.out, "{n}")
    }

    fn float(&mut self, x: f64) -> io::Result<()> {
        Ok(serde_json::to_writer(&mut self.out, &x)?)
    }

    fn bool(&mut self, b: bool) -> io::Result<()> {
        self.out.put(if b { b"true" } else { b"false" });
        Ok(())
    }

    fn null(&mut self) -> io::Result<()> {
        self.out.put(b"null");
        Ok(())
    }

    fn pool(&mut self, id: PoolId) -> io::Result<()> {
        write!(self.out, "[{},{}]", id.0, id.1)
    }

    fn has_tables(&self) -> bool {
        self.stacks == Stacks::Shared
    }

    fn stack_again(&mut self, stack: StackIx) -> bool {
        let shared = self.has_tables();
        if shared {
            self.out.put(stack.to_string().as_bytes());
        }
        shared
    }

    fn stack_begins(&mut self, _: StackIx) {}

    fn frame_again(&mut self, _: FrameIx) -> bool {
        false
    }

    fn frame_begins(&mut self, _: FrameIx) {}

    fn trace_again(&mut self, of: Trace) -> io::Result<bool> {
        let Some(i) = self.traces.iter().position(|(place, _)| *place == of) else {
            return Ok(false);
        };
        let (_, mut file) = self.traces.swap_remove(i);
        file.rewind()?;
        self.open(b'[');
        self.out.put_all(&mut file)?;
        self.close(b']');
        Ok(true)
    }

    fn devices(&self) -> usize {
        let devices = self.traces.iter().map(|(place, _)| match place {
            Trace::Device(d) => d + 1,
            Trace::Host => 0,
        });
        devices.max().unwrap_or(0)
    }
}

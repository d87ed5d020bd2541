//! A snapshot as JSON, the same shape as the pickle. PyTorch's viewer takes it too.
//!
//! JSON has no references, so every entry spells out its stack: with deep stacks the file is ten times the
//! pickle. It is for people and scripts, the pickle is for recording.

use std::io::{self, Write};

use crate::out::Out;
use crate::shape::{self, Encoder};
use crate::snapshot::{FrameIx, PoolId, Snapshot, StackIx};
use crate::words::Word;

/// Writes a snapshot as one JSON object.
///
/// # Errors
/// Those of `out`, and [`io::ErrorKind::InvalidData`] for what no viewer could read: an integer of 2^63 or
/// more, an index that names no frame or stack.
pub fn write(snapshot: &Snapshot, out: impl Write) -> io::Result<()> {
    let mut json = Json { out: Out::new(out), first: Vec::new() };
    shape::write(snapshot, &mut json)?;
    json.out.byte(b'\n');
    json.out.finish()
}

struct Json<W> {
    out: Out<W>,
    /// Of each list and dictionary that is open: nothing has been written into it yet.
    first: Vec<bool>,
}

impl<W: Write> Json<W> {
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

impl<'a, W: Write> Encoder<'a> for Json<W> {
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

    fn key(&mut self, key: Word) -> io::Result<()> {
        self.element()?;
        self.word(key)?;
        self.out.byte(b':');
        Ok(())
    }

    fn other_key(&mut self, key: &'a str) -> io::Result<()> {
        self.element()?;
        self.text(key)?;
        self.out.byte(b':');
        Ok(())
    }

    fn word(&mut self, word: Word) -> io::Result<()> {
        // No word holds a character that JSON would escape.
        self.out.byte(b'"');
        self.out.put(word.text().as_bytes());
        self.out.byte(b'"');
        Ok(())
    }

    fn text(&mut self, text: &'a str) -> io::Result<()> {
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

    fn stack_again(&mut self, _: StackIx) -> bool {
        false
    }

    fn stack_begins(&mut self, _: StackIx) {}

    fn frame_again(&mut self, _: FrameIx) -> bool {
        false
    }

    fn frame_begins(&mut self, _: FrameIx) {}
}

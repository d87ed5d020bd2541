//! The bytes on their way out: one small buffer, so that the memory of a
//! dump doesn't grow with its length.

use std::io::{self, Read, Write};

/// Bytes gathered before one `write`.
const FULL: usize = 64 << 10;

pub(crate) struct Out<W> {
    buffer: Vec<u8>,
    to: W,
}

impl<W: Write> Out<W> {
    pub(crate) fn new(to: W) -> Self {
        Out { buffer: Vec::with_capacity(2 * FULL), to }
    }

    /// Adds a few bytes. The buffer empties at [`Out::breathe`], not here:
    /// this is called for every field.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    pub(crate) fn byte(&mut self, byte: u8) {
        self.buffer.push(byte);
    }

    /// Adds bytes whose number the data decides.
    pub(crate) fn put_long(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() < FULL {
            self.put(bytes);
            return Ok(());
        }
        self.drain()?;
        self.to.write_all(bytes)
    }

    /// Writes the buffer if it is full. To be called once for every element of a list.
    pub(crate) fn breathe(&mut self) -> io::Result<()> {
        if self.buffer.len() >= FULL { self.drain() } else { Ok(()) }
    }

    /// Adds all that `from` has.
    pub(crate) fn put_all(&mut self, from: &mut impl Read) -> io::Result<()> {
        self.drain()?;
        io::copy(from, &mut self.to)?;
        Ok(())
    }

    /// Writes what has been gathered and gives back where it went.
    pub(crate) fn into_inner(mut self) -> io::Result<W> {
        self.drain()?;
        Ok(self.to)
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.drain()?;
        self.to.flush()
    }

    fn drain(&mut self) -> io::Result<()> {
        self.to.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

impl<W: Write> Write for Out<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.put_long(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

//! Memory that may not be there, piece by piece: what unwind tables are read from.

use std::borrow::Cow;
use std::fmt;

use gimli::{Error, NativeEndian, Reader, ReaderOffsetId, Result};
use memtrace_os::checked::Window;

/// Bytes behind a window, as unwind tables are read.
#[derive(Clone, Copy)]
pub struct Bytes<'w> {
    window: &'w Window<'w>,
    at: u64,
    left: usize,
}

impl<'w> Bytes<'w> {
    /// So many bytes from there on. Beyond the end of memory there are none.
    pub fn new(window: &'w Window<'w>, at: u64, length: u64) -> Bytes<'w> {
        Bytes { window, at, left: length.min(u64::MAX - at) as usize }
    }

    fn end<T>(&self) -> Result<T> {
        Err(Error::UnexpectedEof(self.offset_id()))
    }
}

impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.left, self.at)
    }
}

impl Reader for Bytes<'_> {
    type Endian = NativeEndian;
    type Offset = usize;

    fn endian(&self) -> NativeEndian {
        NativeEndian
    }

    fn len(&self) -> usize {
        self.left
    }

    fn empty(&mut self) {
        self.left = 0;
    }

    fn truncate(&mut self, length: usize) -> Result<()> {
        if length > self.left {
            return self.end();
        }
        self.left = length;
        Ok(())
    }

    fn offset_from(&self, base: &Self) -> usize {
        self.at.wrapping_sub(base.at) as usize
    }

    fn offset_id(&self) -> ReaderOffsetId {
        ReaderOffsetId(self.at)
    }

    fn lookup_offset_id(&self, id: ReaderOffsetId) -> Option<usize> {
        let offset = id.0.checked_sub(self.at)? as usize;
        (offset <= self.left).then_some(offset)
    }

    fn find(&self, byte: u8) -> Result<usize> {
        for i in 0..self.left {
            match self.window.byte(self.at + i as u64) {
                Some(seen) if seen == byte => return Ok(i),
                Some(_) => {}
                None => break,
            }
        }
        self.end()
    }

    fn skip(&mut self, length: usize) -> Result<()> {
        if length > self.left {
            return self.end();
        }
        self.at += length as u64;
        self.left -= length;
        Ok(())
    }

    fn split(&mut self, length: usize) -> Result<Self> {
        let mut first = *self;
        self.skip(length)?;
        first.left = length;
        Ok(first)
    }

    // Names in debug information, which unwind tables don't have.

    fn to_slice(&self) -> Result<Cow<'_, [u8]>> {
        self.end()
    }

    fn to_string(&self) -> Result<Cow<'_, str>> {
        self.end()
    }

    fn to_string_lossy(&self) -> Result<Cow<'_, str>> {
        self.end()
    }

    fn read_slice(&mut self, to: &mut [u8]) -> Result<()> {
        let at = self.at;
        self.skip(to.len())?;
        match self.window.bytes(at, to) {
            Some(()) => Ok(()),
            None => self.end(),
        }
    }
}

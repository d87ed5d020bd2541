//! Records that only ever grow, in a region of words: what is known of code objects and of
//! libraries.
//!
//! A record is reserved by moving the region's end, filled in, and made ready by the last store to
//! its first word. Until then it reads as absent, and for ever if the process dies first. Strings
//! lie behind the fixed words, eight bytes a word, lowest first. Nothing is ever moved or freed, so
//! a record's position is a name for it that can't come to mean something else.

use memtrace_format::stacks::{HEAD_CAPACITY, HEAD_NEXT, HEAD_REFUSED, HEADER, RECORD_READY};

use memtrace_os::space::{Room, Space};
use memtrace_os::sync::{AtomicU64, Ordering, Real, to_file};

/// A region of records.
pub struct Arena {
    words: &'static [AtomicU64],
    room: Room,
}

impl Arena {
    /// An empty region in `words`, all of which must be 0, with records from word `first` on.
    /// `None` if they are not 0, or too few.
    pub fn new(
        words: &'static [AtomicU64],
        magic: u64,
        first: usize,
        space: Space,
    ) -> Option<Arena> {
        let room = Room::new(words, space);
        if first < HEADER
            || words.len() < first + 64
            || !room.reaches(first + 64)
            || words[0].load(Ordering::Acquire) != 0
        {
            return None;
        }
        words[HEAD_CAPACITY].store(first as u64, Ordering::Relaxed);
        words[HEAD_NEXT].store(first as u64, Ordering::Relaxed);
        words[0].store(magic, Ordering::Release);
        Some(Arena { words, room })
    }

    /// The words, for a reader.
    pub fn words(&self) -> &'static [Real] {
        to_file(self.words)
    }

    /// The first words of the record that is here.
    pub fn record(&self, at: u32) -> Option<&'static [AtomicU64; 3]> {
        self.words.get(at as usize..)?.first_chunk()
    }

    /// How often a record found no room.
    pub fn refused(&self) -> u64 {
        self.words[HEAD_REFUSED].load(Ordering::Relaxed)
    }

    /// Words in use, and how many there are.
    pub fn usage(&self) -> (u64, u64) {
        (self.words[HEAD_NEXT].load(Ordering::Relaxed), self.words.len() as u64)
    }

    /// Room for a record with `fixed` words and `bytes` bytes behind them; `None` if there is none.
    pub fn reserve(&self, fixed: usize, bytes: usize) -> Option<Record<'_>> {
        let words = fixed + bytes.div_ceil(8);
        let end = self.words.len() as u64;
        let moved =
            self.words[HEAD_NEXT].fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| {
                let next = at.checked_add(words as u64).filter(|next| *next <= end)?;
                self.room.reaches(next as usize).then_some(next)
            });
        let Ok(at) = moved else {
            self.words[HEAD_REFUSED].fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let at = at as usize;
        let slice = &self.words[at..at + words];
        // From here on a reader of the whole region can step over this record.
        slice[0].store(words as u64, Ordering::Relaxed);
        Some(Record { at, words: slice, next: fixed, pending: 0, filled: 0 })
    }
}

/// A record while it is written.
pub struct Record<'a> {
    at: usize,
    words: &'a [AtomicU64],
    next: usize,
    pending: u64,
    filled: u32,
}

impl Record<'_> {
    /// Where it is in its region.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Sets one of the fixed words. Word 0 belongs to [`Record::finish`].
    pub fn set(&self, i: usize, value: u64) {
        if i != 0
            && let Some(word) = self.words.get(i)
        {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Appends one byte. Bytes beyond what was reserved are dropped.
    pub fn byte(&mut self, byte: u8) {
        self.pending |= u64::from(byte) << self.filled;
        self.filled += 8;
        if self.filled == 64 {
            self.flush();
        }
    }

    /// Appends bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.byte(*b);
        }
    }

    fn flush(&mut self) {
        if let Some(word) = self.words.get(self.next) {
            word.store(self.pending, Ordering::Relaxed);
        }
        self.next += 1;
        self.pending = 0;
        self.filled = 0;
    }

    /// Makes the record readable. `flags` are the high half of its first word.
    pub fn finish(mut self, flags: u64) -> usize {
        if self.filled > 0 {
            self.flush();
        }
        let head = self.words.len() as u64 | flags & !u64::from(u32::MAX) | RECORD_READY;
        self.words[0].store(head, Ordering::Release);
        self.at
    }
}

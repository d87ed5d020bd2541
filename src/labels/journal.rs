//! Records of a fixed number of words, written by all threads side by side, read from Python: what trackers ask for.
//!
//! They fill pieces of memory that are mapped as they are needed; a piece is never moved or given back, so nobody takes a
//! lock. What finds no room is counted and not kept. A record's first word is written last and is never zero.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::sync::zeroed_memory;

/// Records of a piece, and pieces.
const PIECE: usize = 1 << 16;
const PIECES: usize = 1 << 10;

/// See the module's essay.
pub struct Journal<const WORDS: usize> {
    pieces: [AtomicPtr<AtomicU64>; PIECES],
    taken: AtomicU64,
    lost: AtomicU64,
}

impl<const WORDS: usize> Journal<WORDS> {
    /// An empty one.
    pub const fn empty() -> Self {
        Journal {
            pieces: [const { AtomicPtr::new(std::ptr::null_mut()) }; PIECES],
            taken: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    /// Forgets all records.
    pub fn clear(&self) {
        for number in 0..self.count()[0] {
            if let Some(record) = self.place(number, false) {
                record[0].store(0, Ordering::Relaxed);
            }
        }
        self.taken.store(0, Ordering::Release);
        self.lost.store(0, Ordering::Relaxed);
    }

    /// How many records there are, and how many found no room.
    pub fn count(&self) -> [u64; 2] {
        let taken = self.taken.load(Ordering::Acquire).min((PIECES * PIECE) as u64);
        [taken, self.lost.load(Ordering::Relaxed)]
    }

    /// One more.
    pub fn write(&self, words: [u64; WORDS]) {
        let number = self.taken.fetch_add(1, Ordering::AcqRel);
        let Some(record) = self.place(number, true) else {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        };
        for (to, word) in record.iter().zip(words).skip(1) {
            to.store(word, Ordering::Relaxed);
        }
        record[0].store(words[0], Ordering::Release);
    }

    /// Copies records, from the one of this number on; returns how many words were there. A record that is just being
    /// written is all zeros.
    pub fn read(&self, from: u64, into: &mut [u64]) -> usize {
        let mut words = 0;
        for (number, record) in (from..self.count()[0]).zip(into.chunks_exact_mut(WORDS)) {
            if let Some(at) = self.place(number, false)
                && at[0].load(Ordering::Acquire) != 0
            {
                for (to, word) in record.iter_mut().zip(at) {
                    *to = word.load(Ordering::Relaxed);
                }
            } else {
                record.fill(0);
            }
            words += WORDS;
        }
        words
    }

    /// The words of a record; its piece is mapped if need be.
    fn place(&self, number: u64, make: bool) -> Option<&'static [AtomicU64]> {
        let piece = self.pieces.get(number as usize / PIECE)?;
        let mut at = piece.load(Ordering::Acquire);
        if at.is_null() {
            let words = if make { zeroed_memory(PIECE * WORDS) } else { &[] };
            if words.len() < PIECE * WORDS {
                return None;
            }
            let new = words.as_ptr().cast_mut();
            let none = std::ptr::null_mut();
            // Who comes second leaves addresses behind that were never touched.
            at = match piece.compare_exchange(none, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => new,
                Err(other) => other,
            };
        }
        // SAFETY: a piece has `PIECE * WORDS` words and is never unmapped.
        Some(unsafe { std::slice::from_raw_parts(at.add(number as usize % PIECE * WORDS), WORDS) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_threads_write_is_read_once_each() {
        static JOURNAL: Journal<2> = Journal::empty();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for i in 0..10_000 {
                        JOURNAL.write([1, thread * 10_000 + i]);
                    }
                });
            }
        });
        let mut words = vec![0; 2 * 50_000];
        assert_eq!(JOURNAL.read(0, &mut words), 2 * 40_000);
        let mut seen: Vec<u64> = words.chunks(2).take(40_000).map(|r| r[1]).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..40_000));
        JOURNAL.clear();
        assert_eq!(JOURNAL.count(), [0, 0]);
        assert_eq!(JOURNAL.read(0, &mut words), 0);
    }
}

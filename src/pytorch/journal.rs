//! Records of a fixed number of words, written by all threads side by side, read
//! from Python: what trackers ask for.
//!
//! They fill pieces of memory that are mapped as they are needed, in a circle, so nobody takes
//! a lock. A reader gives pieces back when it has read them, and their memory goes back to the
//! system. What finds no room, because nobody has read for four million records, is counted and
//! not kept. Records have numbers that go on for the life of the process. A reader begins at
//! the number that is next, and stops at a record that is just being written. A record's first
//! word is written last and is never zero.
//!
//! Nobody has read what is still being written when the last reader goes. So the pieces that this
//! one leaves behind are emptied at once, for the system's sake, and once more when the next
//! reader comes: only then are they written into again.

use crate::os::sync::{
    AtomicPtr, AtomicU64, Ordering, atomics, constant, give_back, prefetch, zeroed_huge_words,
};

/// Records of a piece, and pieces; few in a model.
const PIECE: usize = if cfg!(loom) { 2 } else { 1 << 16 };
const PIECES: usize = if cfg!(loom) { 2 } else { 1 << 6 };

/// See the module's documentation.
pub struct Journal<const WORDS: usize> {
    pieces: [AtomicPtr<AtomicU64>; PIECES],
    taken: AtomicU64,
    /// Pieces before this one were given back.
    first: AtomicU64,
    /// Records before this number were left behind by the last reader.
    left: AtomicU64,
    lost: AtomicU64,
}

impl<const WORDS: usize> Journal<WORDS> {
    constant! {
        /// An empty one.
        pub fn empty() -> Self {
            Journal {
                pieces: atomics![AtomicPtr::new(std::ptr::null_mut()); PIECES],
                taken: AtomicU64::new(0),
                first: AtomicU64::new(0),
                left: AtomicU64::new(0),
                lost: AtomicU64::new(0),
            }
        }
    }

    /// The number that the next record gets, and how many found no room.
    pub fn count(&self) -> [u64; 2] {
        [self.taken.load(Ordering::Acquire), self.lost.load(Ordering::Relaxed)]
    }

    /// Records before this number were read: their pieces are used again.
    pub fn release(&self, upto: u64) {
        let upto = self.give_back(upto);
        self.first.fetch_max(upto, Ordering::AcqRel);
    }

    /// Nobody reads the records before this number, some of which may still be written.
    pub fn leave(&self, upto: u64) {
        self.left.fetch_max(upto, Ordering::AcqRel);
        self.give_back(upto);
    }

    /// A reader comes, and there is none: what was left behind is written by now.
    pub fn begin(&self) {
        self.release(self.left.load(Ordering::Acquire));
    }

    /// Gives back the memory of all pieces before the one that has this record; says which that
    /// is.
    fn give_back(&self, upto: u64) -> u64 {
        let upto = upto / PIECE as u64;
        let first = self.first.load(Ordering::Acquire);
        for number in first..upto.min(first + PIECES as u64) {
            let at = self.pieces[number as usize % PIECES].load(Ordering::Acquire);
            if !at.is_null() {
                // SAFETY: a piece is that many words of its own, and its readers are done.
                unsafe { give_back(std::slice::from_raw_parts(at, PIECE * WORDS)) };
            }
        }
        upto
    }

    /// One more. Returns its number, if it found room.
    #[inline]
    pub fn write(&self, words: [u64; WORDS]) -> Option<u64> {
        let number = self.taken.fetch_add(1, Ordering::AcqRel);
        let Some(record) = self.place(number, true) else {
            self.lost.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        for i in 1..WORDS {
            record[i].store(words[i], Ordering::Relaxed);
        }
        record[0].store(words[0], Ordering::Release);
        prefetch(record.as_ptr().wrapping_add(2 * WORDS - 1)); // the end of the next one
        Some(number)
    }

    /// The words of a record that its writer changes later.
    #[inline]
    pub fn record(&self, number: u64) -> Option<&'static [AtomicU64; WORDS]> {
        self.place(number, false)
    }

    /// Copies records, from the one of this number on, up to the first that isn't
    /// there; returns how many words they are.
    pub fn read(&self, from: u64, into: &mut [u64]) -> usize {
        let mut words = 0;
        let upto = self.taken.load(Ordering::Acquire);
        for (number, record) in (from..upto).zip(into.chunks_exact_mut(WORDS)) {
            let Some(at) = self.place(number, false) else { break };
            if at[0].load(Ordering::Acquire) == 0 {
                break;
            }
            for (to, word) in record.iter_mut().zip(at) {
                *to = word.load(Ordering::Relaxed);
            }
            words += WORDS;
        }
        words
    }

    /// The words of a record; its piece is mapped if need be.
    #[inline]
    fn place(&self, number: u64, make: bool) -> Option<&'static [AtomicU64; WORDS]> {
        let piece = number / PIECE as u64;
        if piece.wrapping_sub(self.first.load(Ordering::Acquire)) >= PIECES as u64 {
            return None;
        }
        let slot = &self.pieces[piece as usize % PIECES];
        let mut at = slot.load(Ordering::Acquire);
        if at.is_null() {
            at = if make { Self::map(slot)? } else { return None };
        }
        // SAFETY: a piece has `PIECE` arrays of `WORDS` words and is never unmapped.
        Some(unsafe { &*at.add(number as usize % PIECE * WORDS).cast() })
    }

    #[cold]
    fn map(slot: &AtomicPtr<AtomicU64>) -> Option<*mut AtomicU64> {
        let words = zeroed_huge_words(PIECE * WORDS);
        if words.is_empty() {
            return None;
        }
        let new = words.as_ptr().cast_mut();
        let none = std::ptr::null_mut();
        // Who comes second leaves addresses behind that were never touched.
        Some(match slot.compare_exchange(none, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(other) => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::sync::of_process;

    /// Each was seen red. With `Relaxed` for a record's first word, or with that word before the
    /// others, a record is torn. Where the second thread that maps a piece uses its own, or where a
    /// piece may be used before it has been emptied, a record is lost. Where what the last reader
    /// left behind isn't emptied again, an old record is read as a new one.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        fn check(bound: usize, model: impl Fn(Arc<Journal<2>>) + Sync + Send + 'static) {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(bound);
            builder.check(move || model(Arc::new(Journal::empty())));
        }

        /// The records from this number on, whole, up to the first that isn't there.
        fn read(journal: &Journal<2>, from: u64) -> Vec<u64> {
            let mut words = [0; 2 * 8];
            let length = journal.read(from, &mut words);
            let whole = |record: &[u64]| {
                assert_eq!(record[0], record[1], "a torn record");
                record[0]
            };
            words[..length].chunks(2).map(whole).collect()
        }

        #[test]
        fn records_are_whole_and_in_order() {
            check(3, |journal| {
                let other = journal.clone();
                let other = thread::spawn(move || [1, 2].map(|n| other.write([n, n]).unwrap()));
                let reader = journal.clone();
                let reader = thread::spawn(move || read(&reader, 0));
                let at = journal.write([9, 9]).unwrap();
                let [first, second] = other.join().unwrap();
                let (read_then, all) = (reader.join().unwrap(), read(&journal, 0));
                assert!(first < second && all.starts_with(&read_then));
                assert_eq!([first, second, at].map(|n| all[n as usize]), [1, 2, 9]);
            });
        }

        /// What is written into a piece that was given back is no older record.
        #[test]
        fn a_circle_goes_round_while_it_is_read() {
            check(3, |journal| {
                (1..=4).for_each(|n| _ = journal.write([n, n]));
                let writer = journal.clone();
                let writer = thread::spawn(move || writer.write([5, 5]));
                assert_eq!(read(&journal, 0)[..4], [1, 2, 3, 4]);
                journal.release(2);
                let then = read(&journal, 4);
                assert!(then.is_empty() || then == [5]);
                match writer.join().unwrap() {
                    Some(number) => assert_eq!((number, read(&journal, 4)), (4, vec![5])),
                    None => assert_eq!(journal.count(), [5, 1]),
                }
            });
        }

        /// A thread is stalled in a write as the last reader goes, and done when the next one
        /// comes.
        #[test]
        fn what_is_left_behind_is_not_read_a_circle_later() {
            check(3, |journal| {
                journal.write([1, 1]);
                let stalled = journal.clone();
                let stalled = thread::spawn(move || stalled.write([7, 7]));
                let [upto, _] = journal.count();
                journal.leave(upto);
                stalled.join().unwrap();
                journal.begin();
                if upto == 2 {
                    for n in [2, 3, 4] {
                        journal.write([n, n]).expect("room");
                    }
                    journal.taken.fetch_add(1, Ordering::AcqRel); // somebody begins to write
                    assert!(read(&journal, 5).is_empty());
                }
            });
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn what_was_written_as_the_last_reader_went_is_not_read_by_the_next() {
        of_process! {
            static JOURNAL: Journal<1> = Journal::empty();
        }
        let (circle, stalled) = ((PIECE * PIECES) as u64, 1);
        JOURNAL.write([1]);
        let number = JOURNAL.taken.fetch_add(1, Ordering::AcqRel);
        let at = JOURNAL.place(number, true).expect("room");
        (2..circle).for_each(|n| _ = JOURNAL.write([n]));
        JOURNAL.leave(circle);
        at[0].store(7, Ordering::Release);
        JOURNAL.begin();
        JOURNAL.taken.fetch_add(2, Ordering::AcqRel); // two that are just being written
        assert_eq!((number, JOURNAL.read(circle + stalled, &mut [0])), (stalled, 0));
    }

    #[test]
    fn what_threads_write_is_read_once_each() {
        of_process! {
            static JOURNAL: Journal<2> = Journal::empty();
        }
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
    }

    #[test]
    fn a_circle_has_room_again_for_what_was_read_and_counts_what_has_none() {
        of_process! {
            static JOURNAL: Journal<1> = Journal::empty();
        }
        let all = (PIECE * PIECES) as u64;
        assert!((0..all).all(|i| JOURNAL.write([i + 1]).is_some()));
        assert_eq!(JOURNAL.write([7]), None);
        assert_eq!(JOURNAL.count(), [all + 1, 1]);
        JOURNAL.release(PIECE as u64 - 1);
        assert_eq!(JOURNAL.write([7]), None, "no piece is read to its end");
        JOURNAL.release(2 * PIECE as u64);
        assert_eq!(JOURNAL.write([8]), Some(all + 2));
        let mut words = [0; 4];
        assert_eq!(JOURNAL.read(0, &mut words), 0, "given back");
        assert_eq!(JOURNAL.read(2 * PIECE as u64, &mut words), 4);
        assert_eq!(words[0], 2 * PIECE as u64 + 1);
        assert_eq!(JOURNAL.read(all, &mut words), 0, "lost, so never written");
        assert_eq!((JOURNAL.read(all + 2, &mut words), words[0]), (1, 8));
    }
}

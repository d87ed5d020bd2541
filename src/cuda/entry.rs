//! Some words that are written by one thread at a time and read by all at any time, whole or not
//! at all.

use crate::os::sync::{AtomicUsize, Ordering, atomics, constant, fence};

/// See the module's documentation. A number that is odd while the words are written, and the words.
pub struct Entry<const WORDS: usize> {
    number: AtomicUsize,
    words: [AtomicUsize; WORDS],
}

impl<const WORDS: usize> Entry<WORDS> {
    constant! {
        /// Zeros.
        #[allow(clippy::new_without_default, reason = "made in statics alone")]
        pub fn new() -> Self {
            Entry { number: AtomicUsize::new(0), words: atomics![AtomicUsize::new(0); WORDS] }
        }
    }

    /// The words, unless somebody is writing them.
    #[inline]
    pub fn read(&self) -> Option<[usize; WORDS]> {
        let before = self.number.load(Ordering::Acquire);
        let words = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = before & 1 == 0 && self.number.load(Ordering::Relaxed) == before;
        is_whole.then_some(words)
    }

    /// Writes them. For one thread at a time.
    pub fn write(&self, words: [usize; WORDS]) {
        // Odd it is already where a thread of this process's parent was at it when that forked.
        let odd = self.number.load(Ordering::Relaxed) | 1;
        self.number.store(odd, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.number.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// One of the words at this moment, for who writes them.
    pub fn word(&self, which: usize) -> usize {
        self.words[which].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: without either fence, and where an odd number is no reason to look away.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        #[test]
        fn words_of_two_writings_are_never_put_together() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let entry = Arc::new(Entry::<3>::new());
                let writer = entry.clone();
                let writer = thread::spawn(move || [7, 8].map(|n| writer.write([n; 3])));
                for _ in 0..2 {
                    let read = entry.read();
                    assert!(read.is_none_or(|words| words == [words[0]; 3]), "{read:?}");
                }
                writer.join().unwrap();
                assert_eq!(entry.read(), Some([8; 3]));
            });
        }
    }

    #[test]
    fn what_is_half_written_is_not_read_and_can_be_written_again() {
        let entry = Entry::<2>::new();
        entry.write([7, 1]);
        assert_eq!(entry.read(), Some([7, 1]));
        // As a forked child may find it.
        entry.number.fetch_add(1, Ordering::Relaxed);
        assert_eq!(entry.read(), None);
        entry.write([7, 2]);
        assert_eq!((entry.read(), entry.word(1)), (Some([7, 2]), 2));
    }
}

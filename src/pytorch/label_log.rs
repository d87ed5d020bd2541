//! Under which label each node of autograd's graph was made.
//!
//! PyTorch counts the nodes that each thread makes. A thread notes at which of these numbers its
//! label changed, so the label of a node is found on whatever thread runs it.
//!
//! A thread writes its own log, and all read it. Numbers only grow, so a change
//! that is written while a reader looks for a node is a later one. A reader that
//! finds it knows that the right one is gone.

use std::cell::Cell;

use memtrace_format::event::{LabelId, NO_LABEL};

use crate::os::sync::{
    AtomicPtr, AtomicU64, Ordering, atomics, constant, of_process, zeroed_words,
};

/// Changes that are remembered, few in a model; a graph that is older than that has the label of
/// its pass alone.
const CHANGES: usize = if cfg!(loom) { 2 } else { 1 << 16 };
/// Threads that have a log.
const LOGS: usize = 64;
/// A change: the number that the next node will get, above the label.
const NUMBER_AT: u32 = 20;

/// See the module's documentation.
pub struct Log {
    /// PyTorch's number of the thread, plus 1; 0 if nobody has this log.
    thread: AtomicU64,
    next: AtomicU64,
    changes: AtomicPtr<AtomicU64>,
}

of_process! {
    static LOG: [Log; LOGS] = atomics![Log::new(); LOGS];
}

/// A thread that has found no log.
const NONE: u32 = u32::MAX;

std::thread_local! {
    /// Which log is this thread's, plus 1.
    static MINE: Cell<u32> = const { Cell::new(0) };
}

/// That of the calling thread, whose number PyTorch says.
pub fn mine(thread: impl FnOnce() -> u64) -> Option<&'static Log> {
    let mine = match MINE.get() {
        0 => take(thread()),
        mine => mine,
    };
    LOG.get(mine.wrapping_sub(1) as usize)
}

/// Finds one for the calling thread.
#[cold]
fn take(thread: u64) -> u32 {
    let mine = LOG.iter().zip(1..).find(|(log, _)| log.take(thread));
    MINE.set(mine.map_or(NONE, |(_, number)| number));
    MINE.get()
}

/// That of the thread of this number.
pub fn of(thread: u64) -> Option<&'static Log> {
    // An older PyTorch says that it knows none by the highest number.
    let thread = thread.checked_add(1)?;
    LOG.iter().find(|log| log.thread.load(Ordering::Acquire) == thread)
}

impl Log {
    constant! {
        fn new() -> Log {
            Log {
                thread: AtomicU64::new(0),
                next: AtomicU64::new(0),
                changes: AtomicPtr::new(std::ptr::null_mut()),
            }
        }
    }

    /// It is this thread's from here on, if it is nobody's.
    fn take(&self, thread: u64) -> bool {
        let (free, relaxed) = (0, Ordering::Relaxed);
        if self.thread.compare_exchange(free, thread + 1, Ordering::AcqRel, relaxed).is_err() {
            return false;
        }
        let words = zeroed_words(CHANGES);
        if words.len() == CHANGES {
            self.changes.store(words.as_ptr().cast_mut(), Ordering::Release);
        }
        true
    }

    fn change(&self, i: u64) -> Option<&AtomicU64> {
        let changes = self.changes.load(Ordering::Acquire);
        // SAFETY: null or `CHANGES` words that are never unmapped.
        unsafe { changes.add(if changes.is_null() { 0 } else { i as usize % CHANGES }).as_ref() }
    }

    /// Nodes from this number on are made under this label. For the log's own thread.
    pub fn note(&self, number: u64, label: LabelId) {
        let next = self.next.load(Ordering::Relaxed);
        // No node was made under the last one: it is as if it had never been.
        let again = next > 0
            && self
                .change(next - 1)
                .is_some_and(|c| c.load(Ordering::Relaxed) >> NUMBER_AT == number);
        let i = if again { next - 1 } else { next };
        if let Some(change) = self.change(i) {
            change.store(number << NUMBER_AT | u64::from(label), Ordering::Release);
            self.next.store(i + 1, Ordering::Release);
        }
    }

    /// The label under which the node of this number was made.
    pub fn at(&self, number: u64) -> LabelId {
        let next = self.next.load(Ordering::Acquire);
        let oldest = next.saturating_sub(CHANGES as u64);
        let change = |i| self.change(i).map_or(0, |c| c.load(Ordering::Acquire));
        let (mut low, mut high) = (oldest, next);
        while low < high {
            let middle = low + (high - low) / 2;
            if change(middle) >> NUMBER_AT <= number { low = middle + 1 } else { high = middle }
        }
        if low == oldest {
            return NO_LABEL;
        }
        let found = change(low - 1);
        // Its thread may have gone round meanwhile.
        let overtaken = self.next.load(Ordering::Acquire) >= low + CHANGES as u64;
        if overtaken || found >> NUMBER_AT > number {
            NO_LABEL
        } else {
            found as LabelId & ((1 << NUMBER_AT) - 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Log {
        let log = Log::new();
        assert!(log.take(0) && !log.take(1));
        log
    }

    /// Seen red: with a change that is written or read `Relaxed`, and without the look whether
    /// what was found is a later one.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        #[test]
        fn a_log_that_goes_round_tells_the_right_label_or_none() {
            loom::model(|| {
                let log = Arc::new(empty());
                let all = |log: &Log, changes: [(u64, LabelId); 2]| {
                    changes.into_iter().for_each(|(number, label)| log.note(number, label));
                };
                all(&log, [(1, 10), (3, 11)]);
                let writer = log.clone();
                let writer = thread::spawn(move || all(&writer, [(5, 12), (7, 13)]));
                let said = [2, 4].map(|node| log.at(node));
                assert!([NO_LABEL, 10].contains(&said[0]) && [NO_LABEL, 11].contains(&said[1]));
                writer.join().unwrap();
                assert_eq!([4, 6, 8].map(|node| log.at(node)), [NO_LABEL, 12, 13]);
            });
        }
    }

    #[test]
    fn a_node_has_the_label_of_the_moment_when_it_was_made() {
        let log = empty();
        assert_eq!(log.at(3), NO_LABEL);
        for (number, label) in [(5, 10), (5, 11), (8, 12), (20, NO_LABEL)] {
            log.note(number, label);
        }
        assert_eq!([4, 5, 7, 8, 19, 20, 99].map(|n| log.at(n)), [0, 11, 11, 12, 12, 0, 0]);
        for i in 0..2 * CHANGES as u64 {
            log.note(100 + i, 1 + (i % 1000) as u32);
        }
        assert_eq!(log.at(8), NO_LABEL, "forgotten");
        let last = 2 * CHANGES as u64 - 1;
        assert_eq!(log.at(100 + last), 1 + (last % 1000) as u32);
    }
}

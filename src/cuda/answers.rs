//! What look-ups by name were answered, so that the next one of its kind
//! costs no search through libraries.
//!
//! An answer follows from the libraries that are loaded and how they were opened. It holds while no
//! library has come or gone and none was opened in a new way, which the loader's own counts say at
//! each look-up. What was not found is not remembered: the loader has to say so, each time.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

use crate::cuda::table::Api;
use crate::libraries::objects;
use crate::libraries::scopes::{DEEP, GLOBAL};
use crate::os::locks::Turn;

/// How many more look-ups shall look for new libraries ([`super::deepbind`]).
pub static PENDING: AtomicU32 = AtomicU32::new(0);

/// What was asked.
#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Question {
    /// For the first in scope, by code at an address.
    First,
    /// For the next one, likewise.
    Next,
    /// What is shown instead of a function.
    Instead,
}

const ENTRIES: usize = 512;

/// A number that is odd while the entry is written; an address, the question and row, the
/// state of the loader, and the answer.
struct Entry([AtomicUsize; 5]);

static KNOWN: [Entry; ENTRIES] = [const { Entry([const { AtomicUsize::new(0) }; 5]) }; ENTRIES];
static WRITING: Turn = Turn::new(());

impl Entry {
    fn read(&self, key: [usize; 3]) -> Option<usize> {
        let [number, words @ ..] = &self.0;
        let before = number.load(Ordering::Acquire);
        let [address, what, state, answer] = words.each_ref().map(|w| w.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole = before & 1 == 0 && number.load(Ordering::Relaxed) == before;
        (is_whole && [address, what, state] == key).then_some(answer)
    }

    fn write(&self, [address, what, state]: [usize; 3], answer: usize) {
        let [number, words @ ..] = &self.0;
        // It is odd already where another thread was writing the entry
        // when this process was forked.
        let odd = number.load(Ordering::Relaxed) | 1;
        number.store(odd, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in words.iter().zip([address, what, state, answer]) {
            word.store(value, Ordering::Relaxed);
        }
        number.store(odd.wrapping_add(1), Ordering::Release);
    }
}

/// A number that changes whenever a library comes, goes, or is opened in a way that is new for it.
fn state() -> usize {
    let [loaded, unloaded] = objects::counts();
    (loaded + unloaded) as usize | (GLOBAL.count() + DEEP.count()) << 48
}

/// The answer, found again or for the first time. None is one, too.
pub fn known(
    question: Question,
    api: Api,
    address: usize,
    find: impl FnOnce() -> Option<usize>,
) -> Option<usize> {
    const NONE: usize = usize::MAX;
    let what = 1 + question as usize + ((api as usize) << 2);
    let key = [address, what, state()];
    let mixed = (address ^ what << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let entry = &KNOWN[mixed >> (usize::BITS - ENTRIES.trailing_zeros())];
    if let Some(answer) = entry.read(key) {
        return (answer != NONE).then_some(answer);
    }
    let found = find();
    // Somebody may be opening a library, of which the loader has counted
    // no more than the beginning.
    let is_steady = PENDING.load(Ordering::Acquire) == 0 && state() == key[2];
    if found != Some(0)
        && is_steady
        && let Some(_turn) = WRITING.try_lock()
    {
        entry.write(key, found.unwrap_or(NONE));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_until_the_loader_counts_again() {
        let entry = Entry([const { AtomicUsize::new(0) }; 5]);
        assert_eq!(entry.read([7, 1, 3]), None);
        entry.write([7, 1, 3], 99);
        assert_eq!(entry.read([7, 1, 3]), Some(99));
        assert_eq!(
            (entry.read([7, 1, 4]), entry.read([8, 1, 3]), entry.read([7, 2, 3])),
            (None, None, None)
        );
        entry.0[0].fetch_add(1, Ordering::Relaxed);
        assert_eq!(entry.read([7, 1, 3]), None, "half written");
        // As a forked child may find it.
        entry.write([7, 1, 3], 98);
        assert_eq!(entry.read([7, 1, 3]), Some(98), "and written again");
    }
}

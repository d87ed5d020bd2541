//! What look-ups by name were answered, so that the next one of its kind
//! costs no search through libraries.
//!
//! An answer follows from the libraries that are loaded and how they were opened. It holds while no
//! library has come or gone and none was opened in a new way, which the loader's own counts say at
//! each look-up. What was not found is not remembered: the loader has to say so, each time.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::cuda::entry::Entry;
use crate::cuda::table::Api;
use crate::libraries::objects;
use crate::libraries::scopes::{DEEP, GLOBAL};
use crate::os::locks::Turn;
use crate::os::sync::{atomics, of_process};

/// How many more look-ups shall look for new libraries ([`super::deepbind`]): a count that stands
/// for nothing but itself.
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

of_process! {
    /// An address, the question and row, the state of the loader; and the answer.
    static KNOWN: [Entry<4>; ENTRIES] = atomics![Entry::new(); ENTRIES];
}
static WRITING: Turn = Turn::new(());

/// The answer that is there for this question.
fn found(entry: &Entry<4>, question: [usize; 3]) -> Option<usize> {
    let [address, what, state, answer] = entry.read()?;
    ([address, what, state] == question).then_some(answer)
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
    if let Some(answer) = found(entry, key) {
        return (answer != NONE).then_some(answer);
    }
    let answer = find();
    // Somebody may be opening a library, of which the loader has counted
    // no more than the beginning.
    let is_steady = PENDING.load(Ordering::Acquire) == 0 && state() == key[2];
    if answer != Some(0)
        && is_steady
        && let Some(_turn) = WRITING.try_lock()
    {
        let [address, what, state] = key;
        entry.write([address, what, state, answer.unwrap_or(NONE)]);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_until_the_loader_counts_again() {
        let entry = Entry::new();
        assert_eq!(found(&entry, [7, 1, 3]), None);
        entry.write([7, 1, 3, 99]);
        assert_eq!(found(&entry, [7, 1, 3]), Some(99));
        for other in [[7, 1, 4], [8, 1, 3], [7, 2, 3]] {
            assert_eq!(found(&entry, other), None);
        }
    }
}

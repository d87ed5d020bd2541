//! On which stream a block was allocated, for the few whose free depends on it.
//!
//! A block that is used on its own stream waits for nobody. Almost all blocks are the default
//! stream's, of which nothing is kept. The others are in a table of fixed size, where each
//! address has four places, in one line of the cache. A block that was pushed out of them by
//! newer ones is taken for the default stream's.
//!
//! An entry is good until its address is handed out again, so that a free
//! costs nothing. Allocations of one device come one at a time; those of two
//! devices that meet in a place give way.

use std::sync::atomic::Ordering;

use crate::hot::HOT;
use crate::os::sync::{atomics, constant, of_process};
use crate::pair::{FREE, Pair};

/// Sets, and the places of each; few in a model.
const SETS: usize = if cfg!(loom) { 2 } else { 1 << 14 };
const PLACES: usize = if cfg!(loom) { 1 } else { 4 };

/// Addresses and their streams, in a line of the cache.
#[repr(align(64))]
struct Set([Pair; PLACES]);

/// Blocks of other streams than the default one.
struct Table {
    sets: [Set; SETS],
}

of_process! {
    static TABLE: Table = Table::new();
}

/// A block was handed out on this stream.
#[inline]
pub fn note(addr: u64, stream: u64) {
    if stream != 0 || HOT.other_streams.load(Ordering::Relaxed) {
        note_other(addr, stream);
    }
}

fn note_other(addr: u64, stream: u64) {
    if stream != 0 {
        HOT.other_streams.store(true, Ordering::Relaxed);
    }
    TABLE.note(addr, stream);
}

/// The stream that a block was handed out on.
pub fn stream(addr: u64) -> u64 {
    TABLE.stream(addr)
}

impl Table {
    constant! {
        #[allow(clippy::large_stack_arrays, reason = "only ever made by the compiler")]
        fn new() -> Table {
            Table { sets: atomics![Set(atomics![Pair::new(); PLACES]); SETS] }
        }
    }

    fn set(&self, addr: u64) -> &[Pair; PLACES] {
        // Fibonacci hashing: neighbouring blocks in distant sets.
        let hash = (addr >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.sets[(hash >> (64 - SETS.ilog2())) as usize].0
    }

    fn note(&self, addr: u64, stream: u64) {
        let set = self.set(addr);
        let known = set.iter().find(|pair| pair.key() == addr);
        if stream == 0 {
            if let Some(pair) = known {
                pair.remove(addr);
            }
            return;
        }
        let free = || set.iter().find(|pair| pair.key() == FREE);
        // The one that is pushed out is any: the address's own bits say which.
        let pair = known.or_else(free).unwrap_or(&set[(addr >> 9) as usize % PLACES]);
        pair.put(pair.key(), addr, stream);
    }

    fn stream(&self, addr: u64) -> u64 {
        self.set(addr).iter().find_map(|pair| pair.get(addr)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: where a block of the default stream frees the place whoever has it by then, what
    /// another device's block left there is gone.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        #[test]
        fn devices_that_meet_in_a_place_give_way_and_mix_nothing_up() {
            loom::model(|| {
                let table = Arc::new(Table::new());
                let set = |addr: u64| std::ptr::from_ref(table.set(addr));
                let other = (2..).map(|n| n * 512).find(|addr| set(*addr) == set(512));
                let (a, b) = (512, other.expect("one in two"));
                table.note(a, 11);
                let pushes = table.clone();
                let pushes = thread::spawn(move || {
                    pushes.note(b, 12);
                    pushes.stream(b)
                });
                assert!([0, 11].contains(&table.stream(a)));
                table.note(a, 0);
                assert_eq!(table.stream(a), 0);
                let said = pushes.join().unwrap();
                assert!([0, 12].contains(&said) && table.stream(b) == said);
            });
        }
    }

    #[test]
    fn a_block_has_the_stream_that_it_was_last_handed_out_on() {
        of_process! {
            static TABLE: Table = Table::new();
        }
        let (a, b) = (0x7d00_0000_0200, 0x7d00_0000_0400);
        let streams = || (TABLE.stream(a), TABLE.stream(b));
        TABLE.note(a, 0);
        assert_eq!(streams(), (0, 0));
        TABLE.note(a, 11);
        TABLE.note(b, 12);
        assert_eq!(streams(), (11, 12));
        TABLE.note(a, 13);
        assert_eq!(streams(), (13, 12));
        TABLE.note(a, 0);
        assert_eq!(streams(), (0, 12));
    }

    #[test]
    fn more_blocks_than_places_push_others_out_and_none_has_anothers_stream() {
        of_process! {
            static TABLE: Table = Table::new();
        }
        let all: Vec<u64> = (0..200_000).map(|i| 0x6d00_0000_0000 + i * 512).collect();
        for addr in &all {
            TABLE.note(*addr, addr ^ 7);
        }
        let known: Vec<&u64> = all.iter().filter(|a| TABLE.stream(**a) != 0).collect();
        assert!(known.len() > SETS * PLACES / 2);
        assert!(known.into_iter().all(|a| TABLE.stream(*a) == a ^ 7));
        for addr in &all {
            TABLE.note(*addr, 0);
        }
        assert!(all.iter().all(|addr| TABLE.stream(*addr) == 0));
    }
}

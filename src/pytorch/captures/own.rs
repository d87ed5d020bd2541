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

use std::sync::atomic::{AtomicU64, Ordering};

use crate::hot::HOT;

/// An entry that somebody is about to fill: no block's address.
const TAKEN: u64 = 1;
const SETS: usize = 1 << 14;
const PLACES: usize = 4;

/// Address and stream.
type Entry = [AtomicU64; 2];

/// A line of the cache.
#[repr(align(64))]
struct Set([Entry; PLACES]);

/// Blocks of other streams than the default one.
struct Table {
    sets: [Set; SETS],
}

static TABLE: Table = Table::new();

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
    #[expect(clippy::large_stack_arrays, reason = "only ever made by the compiler")]
    const fn new() -> Table {
        let sets = [const { Set([const { [const { AtomicU64::new(0) }; 2] }; PLACES]) }; SETS];
        Table { sets }
    }

    fn set(&self, addr: u64) -> &[Entry; PLACES] {
        // Fibonacci hashing: neighbouring blocks in distant sets.
        let hash = (addr >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.sets[(hash >> (64 - SETS.ilog2())) as usize].0
    }

    fn note(&self, addr: u64, stream: u64) {
        let set = self.set(addr);
        let known = set.iter().position(|e| e[0].load(Ordering::Relaxed) == addr);
        if stream == 0 {
            if let Some(i) = known {
                set[i][0].store(0, Ordering::Relaxed);
            }
            return;
        }
        let free = || set.iter().position(|e| e[0].load(Ordering::Relaxed) == 0);
        // The one that is pushed out is any: the address's own bits say which.
        let i = known.or_else(free).unwrap_or((addr >> 9) as usize % PLACES);
        let [key, place] = &set[i];
        let was = key.load(Ordering::Relaxed);
        let take = |was| key.compare_exchange(was, TAKEN, Ordering::AcqRel, Ordering::Relaxed);
        if was != TAKEN && take(was).is_ok() {
            place.store(stream, Ordering::Relaxed);
            key.store(addr, Ordering::Release);
        }
    }

    fn stream(&self, addr: u64) -> u64 {
        let is_it = |e: &&Entry| e[0].load(Ordering::Acquire) == addr;
        self.set(addr).iter().find(is_it).map_or(0, |e| e[1].load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_stream_that_it_was_last_handed_out_on() {
        static TABLE: Table = Table::new();
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
        static TABLE: Table = Table::new();
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

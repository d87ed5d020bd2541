//! Which other streams use a block that is handed out: a table without locks.
//!
//! `record_stream` is called by any thread, under no lock that we could rely on. But it is called
//! only for a block that the program holds, so a block's entries come one by one, and go when it is
//! given back. A block has its entries in one bucket. In a full bucket there is no place for more:
//! then the free of such a block counts as one that nothing waits for.

use std::sync::atomic::{AtomicU64, Ordering};

use super::own;
use crate::hot::HOT;

/// How a stream has to do with a block; the low bits of an entry's key, as
/// blocks begin at multiples of 512.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It was used on the stream outside of a capture.
    Outside = 1,
    /// It was used on it during a capture.
    Captured = 2,
}

const LOW: u64 = 511;
/// An entry that somebody is about to fill.
const TAKEN: u64 = 4;
const BUCKETS: usize = 4096;
/// Entries of a bucket.
const PLACES: usize = 8;

/// Key (address and use) and stream.
type Entry = [AtomicU64; 2];
static TABLE: [[Entry; PLACES]; BUCKETS] =
    [const { [const { [const { AtomicU64::new(0) }; 2] }; PLACES] }; BUCKETS];

fn bucket(addr: u64) -> &'static [Entry; PLACES] {
    // Fibonacci hashing: neighbouring blocks in distant buckets.
    let hash = (addr >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    &TABLE[(hash >> (64 - BUCKETS.ilog2())) as usize]
}

/// Notes a use.
pub fn note(addr: u64, how: Use, stream: u64) {
    let key = addr & !LOW | how as u64;
    let places = bucket(addr);
    let is_it =
        |e: &Entry| e[0].load(Ordering::Acquire) == key && e[1].load(Ordering::Relaxed) == stream;
    if places.iter().any(is_it) {
        return;
    }
    let free =
        |e: &&Entry| e[0].compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if let Some(entry) = places.iter().find(free) {
        entry[1].store(stream, Ordering::Relaxed);
        entry[0].store(key, Ordering::Release);
        HOT.uses.fetch_add(1, Ordering::Relaxed);
    }
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    known: [Option<(u64, bool)>; PLACES],
    own: u64,
}

impl Uses {
    /// Does a stream that isn't its own use the block?
    pub fn any(&self) -> bool {
        self.streams().next().is_some()
    }

    /// Streams, and whether it was used on them during a capture.
    fn streams(&self) -> impl Iterator<Item = (u64, bool)> + '_ {
        self.known.iter().flatten().copied().filter(|(stream, _)| *stream != self.own)
    }

    /// The streams on which it was used outside of captures only.
    pub fn outside(&self) -> Vec<u64> {
        let captured = |stream| self.streams().any(|s| s == (stream, true));
        self.streams().map(|(stream, _)| stream).filter(|s| !captured(*s)).collect()
    }
}

/// Is anything known of any block?
#[inline]
pub fn any() -> bool {
    HOT.uses.load(Ordering::Relaxed) > 0
}

/// What was noted of a block that is given back, which is forgotten.
#[inline]
pub fn take(addr: u64) -> Uses {
    if any() { take_out(addr) } else { Uses::default() }
}

fn take_out(addr: u64) -> Uses {
    let mut uses = Uses { own: own::stream(addr), ..Uses::default() };
    for (entry, known) in bucket(addr).iter().zip(&mut uses.known) {
        let key = entry[0].load(Ordering::Acquire);
        if key == 0 || key & !LOW != addr & !LOW {
            continue;
        }
        let stream = entry[1].load(Ordering::Relaxed);
        *known = Some((stream, key & LOW == Use::Captured as u64));
        entry[0].store(0, Ordering::Release);
        HOT.uses.fetch_sub(1, Ordering::Relaxed);
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_of_a_block_is_taken_with_it() {
        let (a, b) = (0x7f00_0000_0200, 0x7f00_0000_0400);
        note(a, Use::Outside, 11);
        note(a, Use::Outside, 12);
        note(a, Use::Outside, 11);
        own::note(b, 21);
        note(b, Use::Captured, 21);
        note(a, Use::Captured, 12);
        let uses = take(a);
        assert!(uses.any());
        assert_eq!(uses.outside(), [11], "a use during a capture has been waited for by its end");
        assert_eq!(take(a), Uses::default());
        assert!(!take(b).any(), "its own stream is no other");
        note(b, Use::Outside, 0);
        assert_eq!(take(b).outside(), [0], "the default stream is another one");
        own::note(b, 0);
        note(b, Use::Outside, 0);
        assert!(!take(b).any());
    }

    #[test]
    fn a_full_bucket_takes_no_more_and_is_free_again() {
        let addr = 0x7e00_0000_0000;
        for stream in 1..=20 {
            note(addr, Use::Outside, stream);
        }
        assert_eq!(take(addr).outside(), (1..=PLACES as u64).collect::<Vec<_>>());
        note(addr, Use::Outside, 9);
        assert_eq!(take(addr).outside(), [9]);
    }
}

//! Which other streams use a block that is handed out: a table without locks.
//!
//! `record_stream` is called by any thread, under no lock that we could rely on. But it is called
//! only for a block that the program holds, so a block's entries come one by one, and go when it is
//! given back. A block has its entries in one bucket. In a full bucket there is no place for more:
//! then the free of such a block counts as one that nothing waits for.

use std::sync::atomic::Ordering;

use super::own;
use crate::hot::HOT;
use crate::os::sync::{atomics, of_process};
use crate::pair::{FREE, Pair};

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
/// Buckets, and the entries of each; few in a model.
const BUCKETS: usize = if cfg!(loom) { 2 } else { 4096 };
const PLACES: usize = if cfg!(loom) { 2 } else { 8 };

of_process! {
    /// Keys (address and use) and streams.
    static TABLE: [[Pair; PLACES]; BUCKETS] = atomics![atomics![Pair::new(); PLACES]; BUCKETS];
}

fn bucket(addr: u64) -> &'static [Pair; PLACES] {
    // Fibonacci hashing: neighbouring blocks in distant buckets.
    let hash = (addr >> 9).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    &TABLE[(hash >> (64 - BUCKETS.ilog2())) as usize]
}

/// Notes a use.
pub fn note(addr: u64, how: Use, stream: u64) {
    let key = addr & !LOW | how as u64;
    let places = bucket(addr);
    if places.iter().any(|pair| pair.get(key) == Some(stream)) {
        return;
    }
    if places.iter().any(|pair| pair.put(FREE, key, stream)) {
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
    for (pair, known) in bucket(addr).iter().zip(&mut uses.known) {
        if let Some((key, stream)) = pair.both().filter(|(key, _)| key & !LOW == addr & !LOW)
            && pair.remove(key)
        {
            *known = Some((stream, key & LOW == Use::Captured as u64));
            HOT.uses.fetch_sub(1, Ordering::Relaxed);
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: where two blocks may take one place.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::thread;

        #[test]
        fn two_blocks_in_a_bucket_have_their_own_streams() {
            let life = |addr: u64, stream: u64| {
                note(addr, Use::Outside, stream);
                assert_eq!(take_out(addr).outside(), [stream]);
            };
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(2);
            builder.check(move || {
                let place = |addr: u64| std::ptr::from_ref(bucket(addr));
                let other = (2..).map(|n| n * 512).find(|addr| place(*addr) == place(512));
                let other = other.expect("one in two");
                let other = thread::spawn(move || life(other, 12));
                life(512, 11);
                other.join().unwrap();
                assert!(bucket(512).iter().all(|pair| pair.key() == FREE));
            });
        }
    }

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

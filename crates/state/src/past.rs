//! What each device has seen up to the live table: how much was taken of it in
//! all, and how much was held at most.
//!
//! The live table knows what is there and the ring what happened lately. Whether a device
//! was *ever* used, and what its highest point was, can be before both. So the header of
//! the black box keeps four words for each device, which whoever retires events changes
//! with the table ([`Past::note`]). A process that is killed between the table and these
//! words leaves them wrong by one event.

use std::collections::BTreeMap;

pub use memtrace_format::blackbox::{PAST_DEVICES as DEVICES, PAST_WORDS as WORDS};

use crate::ledger::Move;

/// What a device has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// What is held of it, bytes.
    pub held: u64,
    /// The most that was held at a time, bytes.
    pub peak: u64,
    /// Bytes of all that was ever taken.
    pub taken: u64,
    /// How many times.
    pub count: u64,
}

impl Past {
    /// The place of a device among the others.
    pub fn place(device: i8) -> usize {
        usize::try_from(device).map_or(DEVICES - 1, |d| d.min(DEVICES - 1))
    }

    /// Takes something into account that came or went.
    pub fn note(&mut self, one: &Move) {
        if !one.kind.is_held() {
            return;
        }
        if one.came {
            self.held = self.held.saturating_add(one.bytes);
            self.peak = self.peak.max(self.held);
            self.taken = self.taken.saturating_add(one.bytes);
            self.count = self.count.saturating_add(1);
        } else {
            self.held = self.held.saturating_sub(one.bytes);
        }
    }

    /// As words.
    pub fn pack(&self) -> [u64; WORDS] {
        [self.held, self.peak, self.taken, self.count]
    }

    /// From words.
    pub fn unpack([held, peak, taken, count]: [u64; WORDS]) -> Past {
        Past { held, peak, taken, count }
    }

    /// All devices that have been used, from the words of all places. A file may be damaged: no
    /// number is so large that it can't be counted on from.
    pub fn of_all(words: &[u64]) -> BTreeMap<i8, Past> {
        const MOST: u64 = 1 << 62;
        let places = words.as_chunks().0.iter().take(DEVICES).enumerate();
        let device = |place| if place == DEVICES - 1 { -1 } else { place as i8 };
        let all =
            places.map(|(place, words)| (device(place), Past::unpack(words.map(|n| n.min(MOST)))));
        all.filter(|(_, past)| past.count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::MemoryKind;

    #[test]
    fn the_highest_point_and_the_sum_stay_when_everything_goes() {
        let mut past = Past::default();
        let device = Some(0);
        let one =
            |bytes, came, kind| Move { device, kind, stack: 0, label: 0, bytes, came, part: 0 };
        for came in [true, false, true, false] {
            past.note(&one(100, came, MemoryKind::Plain));
        }
        past.note(&one(1 << 40, true, MemoryKind::Managed));
        assert_eq!(past, Past { held: 0, peak: 100, taken: 200, count: 2 });
        let mut words = vec![0; WORDS * DEVICES];
        words[3 * WORDS..4 * WORDS].copy_from_slice(&past.pack());
        words[Past::place(-1) * WORDS..].copy_from_slice(&past.pack());
        assert_eq!(Past::of_all(&words), BTreeMap::from([(3, past), (-1, past)]));
        assert_eq!((Past::place(62), Past::place(63), Past::place(127)), (62, 63, 63));
    }
}

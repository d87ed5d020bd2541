//! Which addresses of a range are free, and the lowest place where a request fits.
//!
//! The one rule here is that a request gets the lowest address that takes it. So two runs of a
//! program give the same addresses. `heap` makes a driver's rules of it. Free ranges are kept by
//! address and, beside that, in classes of like size (powers of two of the grain), each ordered by
//! address. Every range of a class well above the request fits, so only the first of each such
//! class is a candidate. The one or two classes around the request are searched in address order,
//! and only below the best candidate so far.

use std::collections::{BTreeMap, BTreeSet};

/// Smallest unit that is ever handed out.
pub const GRAIN: u64 = 512;

const CLASSES: usize = 40;

/// The free part of an address range.
pub struct Space {
    /// Start to end of each free range; neighbours are merged.
    free: BTreeMap<u64, u64>,
    classes: [BTreeSet<u64>; CLASSES],
    /// Free ranges never merge across a multiple of this.
    page: u64,
}

fn class(length: u64) -> usize {
    ((length / GRAIN).max(1).ilog2() as usize).min(CLASSES - 1)
}

impl Space {
    /// Nothing is free yet. Free ranges on both sides of a multiple of `page` stay apart.
    pub fn paged(page: u64) -> Self {
        Self { free: BTreeMap::new(), classes: [const { BTreeSet::new() }; CLASSES], page }
    }

    /// All of `start..end` is free.
    pub fn new(start: u64, end: u64) -> Self {
        let mut space = Self::paged(u64::MAX);
        space.link(start, end);
        space
    }

    fn link(&mut self, start: u64, end: u64) {
        self.free.insert(start, end);
        self.classes[class(end - start)].insert(start);
    }

    fn unlink(&mut self, start: u64) -> u64 {
        let end = self.free.remove(&start).expect("a range of a class is in the ledger");
        self.classes[class(end - start)].remove(&start);
        end
    }

    /// Where `size` bytes fit lowest at this alignment, without taking them.
    fn lowest(&self, size: u64, align: u64) -> Option<(u64, u64)> {
        if self.free.is_empty() {
            return None;
        }
        let mut best: Option<(u64, u64)> = None;
        for starts in &self.classes[class(size)..] {
            for &start in starts {
                let place = start.next_multiple_of(align);
                if best.is_some_and(|(_, so_far)| start >= so_far) {
                    break;
                }
                if place.checked_add(size).is_some_and(|end| end <= self.free[&start]) {
                    best = Some((start, place));
                    break;
                }
            }
        }
        best
    }

    /// Takes the lowest `size` bytes at a multiple of `align`. Both are multiples of the grain.
    pub fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        let (start, place) = self.lowest(size, align)?;
        self.cut(start, place, place + size);
        Some(place)
    }

    /// Takes exactly these bytes, if all of them are free.
    pub fn take_at(&mut self, place: u64, size: u64) -> bool {
        let fits = self.free.range(..=place).next_back().map(|(start, end)| (*start, *end));
        match fits {
            Some((start, end)) if place.checked_add(size).is_some_and(|last| last <= end) => {
                self.cut(start, place, place + size);
                true
            }
            _ => false,
        }
    }

    fn cut(&mut self, start: u64, from: u64, to: u64) {
        let end = self.unlink(start);
        if start < from {
            self.link(start, from);
        }
        if to < end {
            self.link(to, end);
        }
    }

    /// Gives `size` bytes back and says which free range they are now part of.
    pub fn put(&mut self, place: u64, size: u64) -> (u64, u64) {
        let (mut start, mut end) = (place, place + size);
        if let Some((&before, &before_end)) = self.free.range(..place).next_back()
            && before_end == place
            && !place.is_multiple_of(self.page)
        {
            self.unlink(before);
            start = before;
        }
        if self.free.contains_key(&end) && !end.is_multiple_of(self.page) {
            end = self.unlink(end);
        }
        self.link(start, end);
        (start, end)
    }

    /// Takes a free range out of the space altogether. `start` must be where one starts.
    pub fn remove(&mut self, start: u64) {
        self.unlink(start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lowest_address_first_and_merged_back() {
        let mut space = Space::new(0x1000, 0x9000);
        assert_eq!(space.take(0x1000, GRAIN), Some(0x1000));
        assert_eq!(space.take(0x2000, 0x2000), Some(0x2000));
        assert_eq!(space.take(0x1000, 0x4000), Some(0x4000));
        assert_eq!(space.put(0x2000, 0x2000), (0x2000, 0x4000));
        assert_eq!(space.take(0x800, GRAIN), Some(0x2000));
        assert_eq!(space.take(0x5000, GRAIN), None);
        space.put(0x2000, 0x800);
        space.put(0x1000, 0x1000);
        assert_eq!(space.put(0x4000, 0x1000), (0x1000, 0x9000));
    }

    #[test]
    fn pages_stay_apart() {
        let mut space = Space::paged(0x1000);
        space.put(0x1000, 0x1000);
        assert_eq!(space.put(0x2000, 0x1000), (0x2000, 0x3000));
        assert_eq!(space.take(0x1200, GRAIN), None, "no request straddles two pages");
    }

    proptest! {
        /// The space against a row of units, searched from the left.
        #[test]
        fn equals_a_row_of_units(steps in prop::collection::vec((any::<bool>(), 1u64..40, 0u32..4), 1..200)) {
            const UNITS: usize = 256;
            let mut space = Space::new(0, UNITS as u64 * GRAIN);
            let mut row = [false; UNITS];
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (give_back, n, align) in steps {
                if give_back && !live.is_empty() {
                    let (place, size) = live.swap_remove(n as usize % live.len());
                    space.put(place, size);
                    row[(place / GRAIN) as usize..((place + size) / GRAIN) as usize].fill(false);
                } else {
                    let align = 1usize << align;
                    let expected = (0..UNITS)
                        .step_by(align)
                        .find(|&at| at + n as usize <= UNITS && !row[at..at + n as usize].contains(&true));
                    let got = space.take(n * GRAIN, align as u64 * GRAIN);
                    prop_assert_eq!(got, expected.map(|at| at as u64 * GRAIN));
                    if let Some(place) = got {
                        row[(place / GRAIN) as usize..][..n as usize].fill(true);
                        live.push((place, n * GRAIN));
                    }
                }
            }
        }
    }
}

//! What a recorder leaves, made by hand: regions of stacks, and a whole black box. For tests, and
//! for the fuzz targets, which have it by the feature `made`.

use std::ops::Range;

use crate::blackbox::{HEADER_WORDS, LIVE, MAGIC, REGIONS, VERSION, at};
use crate::event::{Event, WORDS};
use crate::stacks::{
    CODE_FIXED, CODE_MAGIC, DEPOT_FULL, DEPOT_MAGIC, DepotShape, HEAD_CAPACITY, HEAD_NEXT, HEADER,
    MODULE_FIXED, MODULE_MAGIC, RECORD_READY, RawFrame, StackId,
};

/// Slots of the ring that [`black_box`] makes.
pub const SLOTS: usize = 16;
/// Entries of its live table, the first of which are free.
pub const ENTRIES: usize = 16;
/// The first entry that isn't.
pub const FIRST_ENTRY: usize = 9;
/// The ticket of the first event in its ring: all before are in the live table.
pub const FIRST_TICKET: usize = 20;

/// The words of a black box: what is alive, a history, stacks, and a description in JSON.
///
/// # Panics
/// There is no room.
pub fn black_box(live: &[Event], history: &[Event], stacks: &Made, about: &str) -> Vec<u64> {
    let put = |words: &mut [u64], slot: usize, first: u64, event: &Event| {
        words[slot * WORDS] = first;
        words[slot * WORDS + 1..][..WORDS - 1].copy_from_slice(&event.pack());
    };
    let mut table = vec![0; ENTRIES * WORDS];
    for (entry, event) in (FIRST_ENTRY..).zip(live) {
        put(&mut table, entry, LIVE, event);
    }
    let mut ring = vec![0; SLOTS * WORDS];
    for (ticket, event) in (FIRST_TICKET..).zip(history) {
        put(&mut ring, ticket % SLOTS, ticket as u64 + 1, event);
    }
    let about_bytes = about.len() as u64;
    let mut about = about.as_bytes().to_vec();
    about.resize(about.len().next_multiple_of(8), 0);
    let about: Vec<u64> = about.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    // The first entry point was called three times, from one library.
    let entry_points = vec![0, 0x1010, 0x2000, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let labels = vec![0; 64];

    let mut words = vec![0; HEADER_WORDS];
    let Made { depot, codes, modules } = stacks;
    let regions: [&Vec<u64>; REGIONS] =
        [&ring, &table, depot, codes, modules, &about, &entry_points, &labels];
    for (i, region) in regions.into_iter().enumerate() {
        words[at::REGIONS + 2 * i] = words.len() as u64 * 8;
        words[at::REGIONS + 2 * i + 1] = region.len() as u64 * 8;
        words.extend(region);
    }
    for (i, value) in [
        (at::MAGIC, MAGIC),
        (at::VERSION, VERSION),
        (at::PID, 7),
        (at::ABOUT_BYTES, about_bytes),
        (at::RING_CAPACITY, SLOTS as u64),
        (at::HEAD, (FIRST_TICKET + history.len()) as u64),
        (at::RETIRED, FIRST_TICKET as u64),
        (at::LIVE_SEQUENCE, 2 * FIRST_TICKET as u64),
        (at::LIVE_ROOM, ENTRIES as u64),
    ] {
        words[i] = value;
    }
    words
}

/// Three regions, filled by hand.
pub struct Made {
    /// Stacks.
    pub depot: Vec<u64>,
    /// Python code.
    pub codes: Vec<u64>,
    /// Libraries.
    pub modules: Vec<u64>,
}

impl Made {
    /// Empty ones with so many words each.
    pub fn of_words(words: usize) -> Made {
        let region = |magic, next| {
            let mut words = vec![0; words];
            words[0] = magic;
            words[HEAD_CAPACITY] = HEADER as u64;
            words[HEAD_NEXT] = next;
            words
        };
        Made {
            depot: region(DEPOT_MAGIC, u64::from(DEPOT_FULL) + 1),
            codes: region(CODE_MAGIC, HEADER as u64),
            modules: region(MODULE_MAGIC, HEADER as u64),
        }
    }

    /// A Python function whose second unit is on the line after its first.
    pub fn function(&mut self, name: &str, file: &str, line: u64) -> u32 {
        let sizes = [name.len() as u64, file.len() as u64 | 4 << 32];
        let fixed = [0, 0, line, sizes[0], sizes[1]];
        record(
            &mut self.codes,
            10 << 32,
            fixed,
            CODE_FIXED,
            &[name.as_bytes(), file.as_bytes(), &[2, 0, 2, 1]],
        )
    }

    /// A library of one page, or of `size` bytes.
    pub fn library(&mut self, path: &str, range: Range<u64>, from: u64, until: Option<u64>) {
        let epochs = from | until.map_or(0, |u| u + 1) << 32;
        let fixed = [range.start, range.start, range.end, epochs, (path.len() as u64) << 32, 0];
        record(&mut self.modules, 0, fixed, MODULE_FIXED, &[path.as_bytes()]);
    }

    /// A stack of these frames; every one gets nodes of its own.
    ///
    /// # Panics
    /// There is no room.
    pub fn stack(&mut self, innermost_first: &[RawFrame]) -> StackId {
        let shape = DepotShape::of(self.depot.len()).expect("large enough");
        let mut id = 0;
        for (depth, frame) in (1_u64..).zip(innermost_first.iter().rev()) {
            let new = self.depot[HEAD_NEXT] as u32;
            let at = shape.node(new).expect("room");
            self.depot[at] = frame.pack();
            self.depot[at + 1] = u64::from(id) | depth << 32;
            self.depot[HEAD_NEXT] += 1;
            id = new;
        }
        id
    }
}

fn record<const N: usize>(
    region: &mut [u64],
    head: u64,
    fixed: [u64; N],
    words: usize,
    strings: &[&[u8]],
) -> u32 {
    assert_eq!(N + 1, words);
    let at = region[HEAD_NEXT] as usize;
    region[at + 1..at + words].copy_from_slice(&fixed);
    let bytes = strings.concat();
    for (cell, bytes) in region[at + words..].iter_mut().zip(bytes.chunks(8)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        *cell = u64::from_le_bytes(word);
    }
    let length = words + bytes.len().div_ceil(8);
    region[at] = RECORD_READY | head | length as u64;
    region[HEAD_NEXT] += length as u64;
    at as u32
}

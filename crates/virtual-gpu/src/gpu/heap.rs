//! At which address a card's driver puts an allocation.
//!
//! No manual says it, and a program can see it. Of free blocks of one size PyTorch up to 2.5 takes
//! the one at the lowest address. So another order of addresses means other fragmentation. The
//! rules here were read off the addresses that real drivers gave PyTorch's segments
//! (`tests/data/placement`); `tests/e2e/test_placement.py` compares.
//!
//! **Linux.** The driver takes addresses from the system in *chunks*: as long as the request,
//! rounded up to 32 MiB. A chunk lies at the top of the highest gap that is longer than it by
//! another 32 MiB or more, as if the system was asked for that much to align it. It goes back when
//! nothing is left in it. A request is first tried in the chunks that have room, the newest first,
//! at the lowest address that takes it. So large segments descend, and what shares a chunk ascends.
//!
//! *What a process begins with*: the driver has taken addresses for itself before the program's
//! first request. What it left free of them is used first. How much that is differs from run to
//! run; five records come out right, or nearly, with what [`CONTEXT`] and [`EARLY`] say. A segment
//! of 2 MiB was never seen in one of the early chunks.
//!
//! **Ascending**, as on Windows and under WSL: the lowest address that takes the request.
//!
//! Both are functions of the requests alone: two equal runs give equal addresses.

use super::address::{CHUNK, Range};
use super::space::Space;
use memtrace_devices::Placement;
use std::collections::BTreeMap;

/// The unit in which the driver takes addresses on Linux.
const UNIT: u64 = 32 << 20;
/// What the context takes of the chunk that it begins.
const CONTEXT: u64 = 12 << 20;
/// Chunks from before the context that have room, the oldest and highest first.
const EARLY: [u64; 5] = [UNIT, UNIT, UNIT, UNIT, 10 * UNIT];

/// The addresses of a device's memory.
pub enum Heap {
    /// The lowest address first.
    Ascending(Space),
    /// As a Linux driver.
    Linux(Linux),
}

impl Heap {
    /// All of a range is free.
    pub fn new(range: Range, placement: Placement) -> Self {
        match placement {
            Placement::Ascending => Self::Ascending(Space::new(range.start, range.end)),
            Placement::Linux => Self::Linux(Linux::new(range)),
        }
    }

    /// Addresses for `size` bytes, whole [`CHUNK`]s of physical memory.
    pub fn take(&mut self, size: u64) -> Option<u64> {
        match self {
            Self::Ascending(space) => space.take(size, CHUNK),
            Self::Linux(chunks) => chunks.take(size),
        }
    }

    /// Gives them back.
    pub fn put(&mut self, place: u64, size: u64) {
        match self {
            Self::Ascending(space) => drop(space.put(place, size)),
            Self::Linux(chunks) => chunks.put(place, size),
        }
    }
}

/// Addresses that the driver took from the system at once.
struct Chunk {
    size: u64,
    room: Space,
    /// It is older than the context, and stays.
    early: bool,
}

/// What a driver on Linux has taken from the system.
pub struct Linux {
    /// Where no chunk lies, counted down from `top`, so that the highest
    /// address is the lowest number.
    gaps: Space,
    top: u64,
    /// All chunks, the oldest first.
    chunks: BTreeMap<u64, Chunk>,
    /// The number of each chunk, by its address.
    numbers: BTreeMap<u64, u64>,
    issued: u64,
}

impl Linux {
    fn new(range: Range) -> Self {
        let mut new = Self {
            gaps: Space::new(0, range.end - range.start),
            top: range.end,
            chunks: BTreeMap::new(),
            numbers: BTreeMap::new(),
            issued: 0,
        };
        for size in EARLY {
            new.begin(size, 0, true);
        }
        new.begin(UNIT, CONTEXT, false);
        new
    }

    /// A new chunk of so many whole units, of which the first bytes are taken. Answers its address.
    fn begin(&mut self, size: u64, taken: u64, early: bool) -> Option<u64> {
        let depth = self.gaps.take(size.checked_add(UNIT)?, UNIT)?;
        self.gaps.put(depth + size, UNIT);
        let start = self.top - depth - size;
        let room = if taken < size {
            Space::new(start + taken, start + size)
        } else {
            Space::paged(u64::MAX)
        };
        self.issued += 1;
        self.chunks.insert(self.issued, Chunk { size, room, early });
        self.numbers.insert(start, self.issued);
        Some(start)
    }

    fn take(&mut self, size: u64) -> Option<u64> {
        let fits = |chunk: &&mut Chunk| size > CHUNK || !chunk.early;
        let mut newest_first = self.chunks.values_mut().rev().filter(fits);
        let shared = newest_first.find_map(|chunk| chunk.room.take(size, CHUNK));
        shared.or_else(|| self.begin(size.checked_next_multiple_of(UNIT)?, size, false))
    }

    fn put(&mut self, place: u64, size: u64) {
        let number = self.numbers.range(..=place).next_back().map(|(_, number)| *number);
        let number = number.expect("what is given back lies in a chunk");
        let chunk = self.chunks.get_mut(&number).expect("every number has its chunk");
        let (start, end) = chunk.room.put(place, size);
        if end - start == chunk.size && !chunk.early {
            self.numbers.remove(&start);
            self.chunks.remove(&number);
            self.gaps.put(self.top - end, end - start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const TOP: u64 = 1 << 40;

    /// The addresses of a driver that has nothing early, in MiB below the top.
    struct Driver(Linux);

    impl Driver {
        fn new() -> Self {
            let gaps = Space::new(0, TOP);
            let (chunks, numbers) = (BTreeMap::new(), BTreeMap::new());
            Self(Linux { gaps, top: TOP, chunks, numbers, issued: 0 })
        }

        fn take(&mut self, mib: u64) -> u64 {
            (TOP - self.0.take(mib * MIB).expect("room")) / MIB
        }

        fn put(&mut self, below: u64, mib: u64) {
            self.0.put(TOP - below * MIB, mib * MIB);
        }
    }

    #[test]
    fn large_requests_descend_and_what_shares_a_chunk_ascends() {
        let mut driver = Driver::new();
        assert_eq!([44, 44, 22].map(|mib| driver.take(mib)), [64, 128, 160]);
        assert_eq!(driver.take(20), 84, "the newest chunk has room for 10, the one before for 20");
        assert_eq!([2, 16, 8].map(|mib| driver.take(mib)), [138, 20, 136]);
        assert_eq!(driver.take(2), 4, "the only room left");
        assert_eq!(driver.take(4), 192);
    }

    #[test]
    fn an_empty_chunk_goes_back_and_leaves_a_gap_for_a_shorter_one() {
        let mut driver = Driver::new();
        assert_eq!([256, 100, 32].map(|mib| driver.take(mib)), [256, 384, 416]);
        driver.put(256, 256);
        assert_eq!(driver.take(256), 672, "a gap must be longer than the chunk");
        assert_eq!(driver.take(128), 128, "at the top of the highest gap");
        driver.put(384, 100);
        assert_eq!(driver.take(224), 352, "neighbouring gaps are one");
    }

    #[test]
    fn a_freed_segment_whose_chunk_holds_another_is_used_before_any_gap() {
        let mut driver = Driver::new();
        assert_eq!([172, 2, 64].map(|mib| driver.take(mib)), [192, 20, 256]);
        driver.put(192, 172);
        driver.put(256, 64);
        assert_eq!([172, 64].map(|mib| driver.take(mib)), [192, 256]);
    }

    #[test]
    fn a_process_begins_with_some_room_and_small_segments_stay_out_of_the_early_chunks() {
        let mut chunks = Linux::new(Range { start: 0, end: TOP });
        let context = chunks.take(20 * MIB).expect("room");
        assert_eq!(context % UNIT, CONTEXT, "the rest of the context's chunk");
        let early = chunks.take(20 * MIB).expect("room");
        assert_eq!(early, context - CONTEXT + UNIT, "above it");
        assert_eq!(chunks.take(300 * MIB), Some(early + 20 * MIB));
        assert_eq!(chunks.take(2 * MIB), Some(context - CONTEXT - UNIT), "below both");
        for _ in 0..4 {
            assert!(chunks.take(UNIT).expect("room") > early);
        }
        assert!(chunks.take(UNIT).expect("room") < context);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_takes_nothing() {
        let mut chunks = Linux::new(Range { start: 0, end: 1 << 30 });
        assert_eq!(chunks.take(1 << 30), None);
        assert_eq!(chunks.take(u64::MAX), None);
        assert!(chunks.take(256 * MIB).is_some());
    }
}

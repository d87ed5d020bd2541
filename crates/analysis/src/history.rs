//! A device's history, run backwards and forwards.
//!
//! A trace says what changed, and the segments say how it ended. Only the two together say what
//! there was when the trace began. Memory that the program took before recording was switched on,
//! or whose entries a bounded ring has dropped, shows in no `alloc`. So [`rewind`] starts from
//! the segments and takes the entries back, last to first, as PyTorch's viewer does for its
//! *Allocator State History*. What is left at the front is the [`Beginning`]: without it every
//! total would be too low by exactly that much.
//!
//! The same walk shows whether segments and trace belong together. Where they contradict each other
//! it says so and goes on with the most plausible state; it never panics, whatever the numbers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use memtrace_format::snapshot::{Action, BlockState, Snapshot, StackIx, TraceEntry};

/// `user_metadata` of an entry that no framework's allocator made begins
/// with this; the API call follows.
pub const DRIVER_PREFIX: &str = "driver: ";

/// The API call behind an entry of the device layer; `None` for a framework's.
pub fn driver_call(entry: &TraceEntry) -> Option<&str> {
    let call = entry.user_metadata.as_deref()?.strip_prefix(DRIVER_PREFIX)?;
    // Who called follows: `cudaMalloc by NCCL`.
    Some(call.split_once(" by ").map_or(call, |(api, _)| api))
}

/// A block that is in use, or waits for its free to complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Bytes the program asked for.
    pub requested: u64,
    /// Size of the block, known only if it is alive at the end.
    pub rounded: Option<u64>,
    /// The stack that allocated it, if that is known.
    pub stack: Option<StackIx>,
    /// Its free has been requested and not completed.
    pub pending: bool,
    /// The device layer's, not a framework's.
    pub driver: bool,
}

/// A range got from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Bytes.
    pub size: u64,
    /// Raw stream handle.
    pub stream: u64,
    /// The device layer's, not a framework's.
    pub driver: bool,
}

/// What there was before the first entry of a device's trace.
#[derive(Clone, Debug, Default)]
pub struct Beginning {
    /// Blocks by address.
    pub blocks: BTreeMap<u64, Live>,
    /// Segments by address.
    pub segments: BTreeMap<u64, Range>,
    /// Of the blocks alive at the end: the `alloc` that made them → their size.
    pub rounded: HashMap<usize, u64>,
    /// Segments at the end that are the device layer's, by address.
    pub driver_segments: BTreeSet<u64>,
}

/// Segments and trace say different things.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contradiction {
    /// An `alloc` whose block is neither freed later nor among the blocks at the end.
    NeverFreed(u64),
    /// A `free_requested` of a block that nobody holds afterwards.
    NotPending(u64),
    /// A block is freed while, by what follows, another one is at the same addresses.
    Overlap(u64, u64),
    /// A block that is in no segment at that time.
    OutsideSegments(u64, u64),
    /// A `segment_alloc` or `segment_map` of a range that is not there afterwards.
    NoSegment(Action, u64, u64),
    /// A segment appears while, by the entries before, a block already is in it.
    BlockBefore(u64, u64),
    /// A segment goes while, by what follows, another one is at the same addresses.
    SegmentOverlap(u64, u64),
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverFreed(addr) => {
                write!(
                    f,
                    "alloc at {addr:#x} is not freed later, nor is the block among the segments"
                )
            }
            Self::NotPending(addr) => write!(
                f,
                "free_requested at {addr:#x}, but the block is neither completed later nor pending at the end"
            ),
            Self::Overlap(addr, other) => {
                write!(
                    f,
                    "block at {addr:#x} overlaps the block at {other:#x}, which lives at that time"
                )
            }
            Self::OutsideSegments(addr, size) => {
                write!(f, "block at {addr:#x} of {size} bytes lies in no segment of that time")
            }
            Self::NoSegment(action, addr, size) => write!(
                f,
                "{} at {addr:#x} of {size} bytes, but no such segment is there afterwards",
                action.name()
            ),
            Self::BlockBefore(addr, block) => {
                write!(
                    f,
                    "segment at {addr:#x} is new, yet the block at {block:#x} lay in it before"
                )
            }
            Self::SegmentOverlap(addr, other) => {
                write!(f, "segment at {addr:#x} goes, yet it overlaps the segment at {other:#x}")
            }
        }
    }
}

/// Takes back the whole trace of a device. `report` gets each
/// contradiction with the index of its entry.
pub fn rewind(
    snapshot: &Snapshot,
    device: usize,
    report: &mut dyn FnMut(usize, Contradiction),
) -> Beginning {
    let mut state = Rewind { at: Beginning::default(), index: 0, report };
    for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
        let range = Range { size: segment.total_size, stream: segment.stream, driver: false };
        state.at.segments.insert(segment.address, range);
        for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
            let live = Live {
                requested: block.requested_size,
                rounded: Some(block.size),
                stack: block.frames,
                pending: block.state == BlockState::ActivePendingFree,
                driver: false,
            };
            state.at.blocks.insert(block.address, live);
        }
    }
    let trace = snapshot.device_traces.get(device).map_or(&[][..], Vec::as_slice);
    state.mark_driver(trace);
    for (index, entry) in trace.iter().enumerate().rev() {
        state.index = index;
        state.undo(entry);
    }
    state.at
}

struct Rewind<'r> {
    at: Beginning,
    index: usize,
    report: &'r mut dyn FnMut(usize, Contradiction),
}

impl Rewind<'_> {
    /// What is alive at the end is the device layer's if the entry that made it was.
    fn mark_driver(&mut self, trace: &[TraceEntry]) {
        if !trace.iter().any(|e| driver_call(e).is_some()) {
            return;
        }
        for entry in trace {
            let driver = driver_call(entry).is_some();
            match entry.action {
                Action::Alloc => {
                    self.at.blocks.entry(entry.addr).and_modify(|b| b.driver = driver);
                }
                Action::SegmentAlloc | Action::SegmentMap => {
                    self.at.segments.entry(entry.addr).and_modify(|s| s.driver = driver);
                }
                _ => {}
            }
        }
        let marked = self.at.segments.iter().filter(|(_, s)| s.driver);
        self.at.driver_segments = marked.map(|(addr, _)| *addr).collect();
    }

    fn undo(&mut self, entry: &TraceEntry) {
        let TraceEntry { addr, size, .. } = *entry;
        match entry.action {
            Action::Alloc => match self.at.blocks.remove(&addr) {
                Some(Live { rounded: Some(size), .. }) => {
                    self.at.rounded.insert(self.index, size);
                }
                Some(_) => {}
                None => self.contradiction(Contradiction::NeverFreed(addr)),
            },
            Action::FreeCompleted => self.revive(entry),
            Action::FreeRequested => match self.at.blocks.get_mut(&addr) {
                Some(block) if block.pending => block.pending = false,
                _ => self.contradiction(Contradiction::NotPending(addr)),
            },
            Action::SegmentAlloc => {
                let same = self.at.segments.get(&addr).is_some_and(|s| s.size == size);
                if same {
                    self.empty(addr, size);
                    self.at.segments.remove(&addr);
                } else {
                    self.contradiction(Contradiction::NoSegment(Action::SegmentAlloc, addr, size));
                }
            }
            Action::SegmentMap => self.unmap(addr, size),
            Action::SegmentFree => {
                self.add_segment(entry);
            }
            Action::SegmentUnmap => {
                if self.add_segment(entry) {
                    self.merge(addr);
                }
            }
            Action::Snapshot | Action::Oom | Action::Other(_) => {}
        }
    }

    /// A block that was free after this entry was pending before it.
    fn revive(&mut self, entry: &TraceEntry) {
        let TraceEntry { addr, size, .. } = *entry;
        let end = addr.saturating_add(size.max(1));
        let neighbour = self.at.blocks.range(..end).next_back();
        if let Some((&other, live)) = neighbour
            && other.saturating_add(live.requested.max(1)) > addr
        {
            self.contradiction(Contradiction::Overlap(addr, other));
        }
        if !self.contains(addr, size) {
            self.contradiction(Contradiction::OutsideSegments(addr, size));
        }
        // The stack of a free may be that of the `alloc` or its own: it does not say who allocated.
        let driver = driver_call(entry).is_some();
        let live = Live { requested: size, rounded: None, stack: None, pending: true, driver };
        self.at.blocks.insert(addr, live);
    }

    fn contains(&self, addr: u64, size: u64) -> bool {
        self.at
            .segments
            .range(..=addr)
            .next_back()
            .is_some_and(|(start, s)| addr.saturating_add(size) <= start.saturating_add(s.size))
    }

    /// Says so if a block is in a range that is about to go.
    fn empty(&mut self, addr: u64, size: u64) {
        let block = self.at.blocks.range(addr..addr.saturating_add(size)).next();
        if let Some((&block, _)) = block {
            self.contradiction(Contradiction::BlockBefore(addr, block));
        }
    }

    fn unmap(&mut self, addr: u64, size: u64) {
        let end = addr.saturating_add(size);
        let found = self.at.segments.range(..=addr).next_back().map(|(a, s)| (*a, *s));
        let Some((start, range)) = found.filter(|(a, s)| end <= a.saturating_add(s.size)) else {
            self.contradiction(Contradiction::NoSegment(Action::SegmentMap, addr, size));
            return;
        };
        self.empty(addr, size);
        self.at.segments.remove(&start);
        if start < addr {
            self.at.segments.insert(start, Range { size: addr - start, ..range });
        }
        let rest = start.saturating_add(range.size) - end;
        if rest > 0 {
            self.at.segments.insert(end, Range { size: rest, ..range });
        }
    }

    fn add_segment(&mut self, entry: &TraceEntry) -> bool {
        let TraceEntry { addr, size, stream, .. } = *entry;
        let end = addr.saturating_add(size);
        let neighbour = self.at.segments.range(..end).next_back();
        if let Some((&other, s)) = neighbour
            && other.saturating_add(s.size) > addr
        {
            self.contradiction(Contradiction::SegmentOverlap(addr, other));
            return false;
        }
        let driver = driver_call(entry).is_some();
        self.at.segments.insert(addr, Range { size, stream, driver });
        true
    }

    /// Joins a mapped range with the ranges it touches, if they are of its stream.
    fn merge(&mut self, addr: u64) {
        let segments = &mut self.at.segments;
        let Some(mut range) = segments.remove(&addr) else { return };
        let mut start = addr;
        let end = addr.saturating_add(range.size);
        if let Some(next) = segments.get(&end).copied().filter(|n| n.stream == range.stream) {
            segments.remove(&end);
            range.size = range.size.saturating_add(next.size);
        }
        let previous = segments.range(..addr).next_back().map(|(a, s)| (*a, *s));
        if let Some((before, p)) = previous
            && before.saturating_add(p.size) == addr
            && p.stream == range.stream
        {
            start = before;
            range.size = range.size.saturating_add(p.size);
        }
        segments.insert(start, range);
    }

    fn contradiction(&mut self, contradiction: Contradiction) {
        (self.report)(self.index, contradiction);
    }
}

/// What one entry of the trace changed, for whoever adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A block came.
    Allocated(Live),
    /// A block was given back and waits.
    Requested(Live),
    /// A block is free; it was waiting if its `pending` is set.
    Freed(Live),
    /// A segment or mapping came.
    Reserved(Range),
    /// A segment or mapping went.
    Returned(Range),
}

/// The trace of a device run forwards from its beginning.
pub struct Forward<'a> {
    /// The live blocks now.
    pub blocks: BTreeMap<u64, Live>,
    rounded: &'a HashMap<usize, u64>,
}

impl<'a> Forward<'a> {
    /// Before the first entry.
    pub fn new(beginning: &'a Beginning) -> Self {
        Forward { blocks: beginning.blocks.clone(), rounded: &beginning.rounded }
    }

    /// Takes one entry into account.
    pub fn apply(&mut self, index: usize, entry: &TraceEntry) -> Option<Change> {
        let driver = driver_call(entry).is_some();
        let range = Range { size: entry.size, stream: entry.stream, driver };
        match entry.action {
            Action::Alloc => {
                let live = Live {
                    requested: entry.size,
                    rounded: self.rounded.get(&index).copied(),
                    stack: entry.frames,
                    pending: false,
                    driver,
                };
                self.blocks.insert(entry.addr, live);
                Some(Change::Allocated(live))
            }
            Action::FreeRequested => {
                let block = self.blocks.get_mut(&entry.addr).filter(|b| !b.pending)?;
                let before = *block;
                block.pending = true;
                Some(Change::Requested(before))
            }
            Action::FreeCompleted => self.blocks.remove(&entry.addr).map(Change::Freed),
            Action::SegmentAlloc | Action::SegmentMap => Some(Change::Reserved(range)),
            Action::SegmentFree | Action::SegmentUnmap => Some(Change::Returned(range)),
            Action::Snapshot | Action::Oom | Action::Other(_) => None,
        }
    }
}

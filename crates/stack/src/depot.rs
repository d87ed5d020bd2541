//! The depot of stacks: a trie of (parent, frame), written by every thread at once.
//!
//! A node is written completely before anybody can find it: its words are filled in first, then one
//! compare-and-swap puts its id into the hash table. So there is no lock and no half-made node.
//! That holds for another thread, and for whoever reads the file of a process that was killed
//! between two instructions. Two threads that add the same frame at the same time both write a
//! node. The table takes one, the other node is lost (16 bytes), and both threads get the same id.
//!
//! The depot never grows. When it is full, every new stack is [`DEPOT_FULL`], a node that says so,
//! and the number of refusals is kept in the header.

use memtrace_format::stacks::{
    DEPOT_FULL, DEPOT_MAGIC, DepotShape, HEAD_CAPACITY, HEAD_NEXT, HEAD_REFUSED, RawFrame, Reason,
    StackId,
};

use memtrace_os::space::{Room, Space};
use memtrace_os::sync::{AtomicU64, Ordering, Real, zeroed_words};

/// The longest run of taken slots that is searched. At three quarters full, longer ones don't occur
/// in practice; if one does, the depot counts as full for that frame.
const MAX_PROBES: usize = 256;

/// The trie, in words that others own.
pub struct Depot {
    words: &'static [AtomicU64],
    shape: DepotShape,
    /// Ids by hash: in memory of the process's own, because no reader needs
    /// them and they are all over their place.
    slots: &'static [AtomicU64],
    room: Room,
}

impl Depot {
    /// An empty depot in `words`, all of which must be 0. `None` if they are not, or are too few.
    pub fn new(words: &'static [AtomicU64], space: Space) -> Option<Depot> {
        let shape = DepotShape::of(words.len())?;
        let (slots, room) = (zeroed_words(shape.slots), Room::new(words, space));
        let depot = Depot { words, shape, slots, room };
        if slots.len() < shape.slots || words[0].load(Ordering::Acquire) != 0 {
            return None;
        }
        words[HEAD_CAPACITY].store(shape.capacity as u64, Ordering::Relaxed);
        words[HEAD_NEXT].store(u64::from(DEPOT_FULL) + 1, Ordering::Relaxed);
        depot.write(DEPOT_FULL, 0, RawFrame::Missing(Reason::DepotFull).pack());
        words[0].store(DEPOT_MAGIC, Ordering::Release);
        Some(depot)
    }

    /// The words, for a reader.
    pub fn words(&self) -> &'static [Real] {
        memtrace_os::sync::to_file(self.words)
    }

    /// How often a stack found no room.
    pub fn refused(&self) -> u64 {
        self.words[HEAD_REFUSED].load(Ordering::Relaxed)
    }

    /// Nodes in use, and how many there can be.
    pub fn usage(&self) -> (u64, u64) {
        let capacity = self.shape.capacity as u64;
        (self.words[HEAD_NEXT].load(Ordering::Relaxed).min(capacity), capacity)
    }

    /// The id of `frame` called from `parent` (0: the outermost frame).
    pub fn intern(&self, parent: StackId, frame: u64) -> StackId {
        if parent == DEPOT_FULL {
            return self.refuse();
        }
        let hash = hash(parent, frame);
        let mask = self.shape.slots - 1;
        let tag = hash >> 32 << 32;
        let mut slot = hash as usize & mask;
        let mut made = 0;
        for _ in 0..MAX_PROBES {
            let Some(cell) = self.slots.get(slot) else { break };
            let mut seen = cell.load(Ordering::Acquire);
            if seen == 0 {
                if made == 0 {
                    made = match self.make(parent, frame) {
                        DEPOT_FULL => return DEPOT_FULL,
                        id => id,
                    };
                }
                let entry = tag | u64::from(made);
                match cell.compare_exchange(0, entry, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return made,
                    Err(other) => seen = other,
                }
            }
            if u32::try_from(seen ^ tag).is_ok() && self.is(seen as u32, parent, frame) {
                return seen as u32;
            }
            slot = (slot + 1) & mask;
        }
        self.refuse()
    }

    /// The innermost frame of a stack.
    pub fn frame(&self, id: StackId) -> Option<u64> {
        if id == 0 {
            return None;
        }
        self.node(id).map(|[frame, _]| frame.load(Ordering::Relaxed))
    }

    /// Interns frames from the outermost inwards and returns the id of the innermost.
    #[cfg(test)]
    fn intern_all(&self, outermost_first: impl IntoIterator<Item = u64>) -> StackId {
        outermost_first.into_iter().fold(0, |parent, frame| self.intern(parent, frame))
    }

    fn make(&self, parent: StackId, frame: u64) -> StackId {
        // A full depot's counter stays where it is, and readers go as far as it says.
        let claim = |next: u64| {
            let at = self.shape.node(StackId::try_from(next).ok()?)?;
            self.room.reaches(at + 2).then_some(next + 1)
        };
        let next = &self.words[HEAD_NEXT];
        let Ok(id) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim) else {
            return self.refuse();
        };
        self.write(id as u32, parent, frame);
        id as u32
    }

    fn write(&self, id: StackId, parent: StackId, frame: u64) {
        let depth = self.depth(parent) + 1;
        if let Some([a, b]) = self.node(id) {
            a.store(frame, Ordering::Relaxed);
            b.store(u64::from(parent) | u64::from(depth) << 32, Ordering::Relaxed);
        }
    }

    fn is(&self, id: StackId, parent: StackId, frame: u64) -> bool {
        self.node(id).is_some_and(|[a, b]| {
            a.load(Ordering::Relaxed) == frame && b.load(Ordering::Relaxed) as u32 == parent
        })
    }

    fn depth(&self, id: StackId) -> u32 {
        self.node(id).map_or(0, |[_, b]| (b.load(Ordering::Relaxed) >> 32) as u32)
    }

    fn node(&self, id: StackId) -> Option<&[AtomicU64; 2]> {
        self.words.get(self.shape.node(id)?..)?.first_chunk()
    }

    #[cold]
    fn refuse(&self) -> StackId {
        self.words[HEAD_REFUSED].fetch_add(1, Ordering::Relaxed);
        DEPOT_FULL
    }
}

/// Both halves of the product of two odd-ish numbers, folded: every bit of
/// the input reaches every bit.
#[inline(always)]
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ 0x9e37_79b9_7f4a_7c15) * u128::from(b ^ 0xd1b5_4a32_d192_ed03);
    product as u64 ^ (product >> 64) as u64
}

fn hash(parent: StackId, frame: u64) -> u64 {
    mix(frame, u64::from(parent) << 20 | 1)
}

#[cfg(test)]
#[path = "depot_tests.rs"]
mod tests;

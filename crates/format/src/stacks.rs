//! Recorded call stacks: their layout in memory and in a file, and how to read them back.
//!
//! Three regions of 64-bit words. The *depot* is a trie. A node is a frame and the node of its
//! caller. A stack is the id of its innermost node. Stacks that share their outer part share its
//! nodes. The *code* region holds what is known of each Python code object, the *module* region
//! what is known of each loaded library. Both are rows of records that only ever grow. A hook
//! writes frames raw: a program counter, or a code object and a position in it. Names and lines are
//! worked out by whoever writes the snapshot.
//!
//! Regions hold positions and no pointers. So they mean the same in the process that wrote them, in
//! another that maps the same file, and after a crash. A reader trusts nothing: every position is
//! checked, and a record that was cut short by the end of the process reads as absent.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

pub use crate::event::{NO_STACK, StackId};
use crate::numbered::numbered;

/// The stack that says: the depot was full. It is a node like any other,
/// so readers need not know it.
pub const DEPOT_FULL: StackId = 1;

/// The versions of CPython whose frames are read: 3.n for these n. A further one doesn't compile
/// before the walk has a layout for it.
pub const PYTHONS: RangeInclusive<u8> = 9..=13;

/// First word of a depot; the last digit is the version of its layout.
pub const DEPOT_MAGIC: u64 = u64::from_le_bytes(*b"mtdepot1");
/// First word of a code region.
pub const CODE_MAGIC: u64 = u64::from_le_bytes(*b"mtpcode1");
/// First word of a module region.
pub const MODULE_MAGIC: u64 = u64::from_le_bytes(*b"mtmodul1");

/// Words before the first node or record of a region.
pub const HEADER: usize = 8;
/// Header word: how many nodes fit, or where the records begin.
pub const HEAD_CAPACITY: usize = 1;
/// Header word: the next free node, or the next free word.
pub const HEAD_NEXT: usize = 2;
/// Header word: how often something found no room.
pub const HEAD_REFUSED: usize = 3;

numbered! {
    /// Why a stack is empty or cut.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Reason {
        /// There is no Python in the process.
        NoPython = 1,
        /// A CPython that memtrace has no table for.
        VersionUnknown = 2,
        /// The interpreter's structures are not where its version has them.
        LayoutCheckFailed = 3,
        /// A free-threaded build.
        FreeThreaded = 4,
        /// The thread has no Python state: a C++ thread, such as an autograd worker.
        NoThreadState = 5,
        /// The interpreter is shutting down.
        Finalizing = 6,
        /// memtrace was already inside a hook on this thread.
        InHook = 7,
        /// What is further out could not be walked.
        Truncated = 8,
        /// Stacks are switched off.
        Disabled = 9,
        /// The thread has a Python state but runs no Python code.
        NoFrame = 10,
        /// The depot was full.
        DepotFull = 11,
        /// No memory for the thread's scratch space.
        NoMemory = 12,
    }
}

impl Reason {
    /// The reason in words.
    pub fn text(self) -> &'static str {
        match self {
            Reason::NoPython => "no Python in this process",
            Reason::VersionUnknown => "this version of Python is not known to memtrace",
            Reason::LayoutCheckFailed => "this build of Python lays its objects out in another way",
            Reason::FreeThreaded => "free-threaded Python is not supported",
            Reason::NoThreadState => "the thread runs no Python",
            Reason::Finalizing => "Python is shutting down",
            Reason::InHook => "memtrace was busy on this thread",
            Reason::Truncated => "the outer frames could not be read",
            Reason::Disabled => "stacks are switched off",
            Reason::NoFrame => "the thread runs no Python code just now",
            Reason::DepotFull => "no room for more stacks",
            Reason::NoMemory => "no memory for the stack walk",
        }
    }
}

/// A frame as a hook writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RawFrame {
    /// A return address, and how often addresses had been given to another library by then.
    Native {
        /// The address that the callee returns to.
        pc: u64,
        /// Which of the libraries that were at this address.
        epoch: u16,
    },
    /// A Python code object and where in it.
    Python {
        /// Position of its record in the code region; [`NO_CODE`] if that was full.
        code: u32,
        /// Index of the two-byte code unit; `None` before the first.
        unit: Option<u32>,
    },
    /// Nothing here, and why.
    Missing(Reason),
    /// Frames were left out in the middle of a deep stack.
    Elided,
}

/// The code id of a code object that found no room.
pub const NO_CODE: u32 = 0;

const KIND: u32 = 60;
const NATIVE: u64 = 1;
const PYTHON: u64 = 2;
const MISSING: u64 = 3;
const ELIDED: u64 = 4;
const PC_BITS: u32 = 48;
const CODE_AT: u32 = 30;
/// Code ids are below this.
pub const CODE_LIMIT: u32 = 1 << 26;
/// Epochs are at most this.
pub const EPOCH_MAX: u16 = (1 << 12) - 1;
/// Positions in a code object are below this.
const UNIT_LIMIT: u32 = (1 << CODE_AT) - 1;

impl RawFrame {
    /// The frame as one word, never 0.
    #[inline]
    pub fn pack(self) -> u64 {
        match self {
            RawFrame::Native { pc, epoch } => {
                NATIVE << KIND
                    | u64::from(epoch.min(EPOCH_MAX)) << PC_BITS
                    | pc & ((1 << PC_BITS) - 1)
            }
            RawFrame::Python { code, unit } => {
                let code = if code < CODE_LIMIT { code } else { NO_CODE };
                let unit = unit.map_or(0, |u| u.min(UNIT_LIMIT - 1) + 1);
                PYTHON << KIND | u64::from(code) << CODE_AT | u64::from(unit)
            }
            RawFrame::Missing(reason) => MISSING << KIND | reason as u64,
            RawFrame::Elided => ELIDED << KIND,
        }
    }

    /// Reads a word; `None` if it is no frame.
    pub fn unpack(word: u64) -> Option<RawFrame> {
        Some(match word >> KIND {
            NATIVE => RawFrame::Native {
                pc: word & ((1 << PC_BITS) - 1),
                epoch: (word >> PC_BITS) as u16 & EPOCH_MAX,
            },
            PYTHON => RawFrame::Python {
                code: (word >> CODE_AT) as u32 & (CODE_LIMIT - 1),
                unit: (word as u32 & UNIT_LIMIT).checked_sub(1),
            },
            MISSING => RawFrame::Missing(Reason::from_u8(word as u8)?),
            ELIDED => RawFrame::Elided,
            _ => return None,
        })
    }
}

/// A region of words: live in this process, or read from a file.
pub trait Words {
    /// How many words there are.
    fn count(&self) -> usize;
    /// Literal `i`; 0 beyond the end.
    fn word(&self, i: usize) -> u64;
}

impl Words for [u64] {
    fn count(&self) -> usize {
        self.len()
    }
    fn word(&self, i: usize) -> u64 {
        self.get(i).copied().unwrap_or(0)
    }
}

impl Words for [AtomicU64] {
    fn count(&self) -> usize {
        self.len()
    }
    fn word(&self, i: usize) -> u64 {
        self.get(i).map_or(0, |w| w.load(Ordering::Acquire))
    }
}

impl<W: Words + ?Sized> Words for &W {
    fn count(&self) -> usize {
        (**self).count()
    }
    fn word(&self, i: usize) -> u64 {
        (**self).word(i)
    }
}

/// Where things are in a depot of a given size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DepotShape {
    /// Ids below this have room for their node.
    pub capacity: usize,
    /// First word of the hash table.
    pub table: usize,
    /// Slots of the hash table, a power of two.
    pub slots: usize,
}

impl DepotShape {
    /// The shape of a depot of `words` words; `None` if that is too few to be of use.
    pub fn of(words: usize) -> Option<DepotShape> {
        let room = words.checked_sub(HEADER)?.min(1 << 40);
        // A node takes two words and the table is at most three quarters full.
        let slots = (room / 2).checked_ilog2().map(|bits| 1_usize << bits)?;
        let capacity = ((room - slots) / 2).min(slots / 4 * 3).min(u32::MAX as usize);
        (capacity >= 8).then_some(DepotShape { capacity, table: HEADER + 2 * capacity, slots })
    }

    /// Where a node is: its frame, and then its parent (low half) and its depth (high half).
    pub fn node(&self, id: StackId) -> Option<usize> {
        let id = id as usize;
        (id != 0 && id < self.capacity).then_some(HEADER + 2 * id)
    }
}

/// The frames of a stack, innermost first. `None` for [`NO_STACK`] and for
/// an id that names nothing.
pub fn frames<W: Words + ?Sized>(depot: &W, id: StackId) -> Option<Vec<u64>> {
    if depot.word(0) != DEPOT_MAGIC {
        return None;
    }
    let shape = DepotShape::of(depot.count())?;
    let depth = (depot.word(shape.node(id)? + 1) >> 32) as u32;
    let mut frames = Vec::with_capacity(depth.min(4096) as usize);
    let (mut id, mut depth) = (id, depth);
    while id != 0 {
        let at = shape.node(id)?;
        let (frame, link) = (depot.word(at), depot.word(at + 1));
        // Depths fall by one a step: a damaged trie can't lead us in a circle.
        if frame == 0 || (link >> 32) as u32 != depth {
            return None;
        }
        frames.push(frame);
        (id, depth) = (link as u32, depth.wrapping_sub(1));
    }
    Some(frames)
}

/// The frames of all nodes, in no useful order.
pub fn all_frames<W: Words + ?Sized>(depot: &W) -> impl Iterator<Item = u64> {
    let shape = DepotShape::of(depot.count()).filter(|_| depot.word(0) == DEPOT_MAGIC);
    let used = depot.word(HEAD_NEXT).min(shape.map_or(0, |s| s.capacity as u64));
    (1..used as u32)
        .filter_map(move |id| Some(depot.word(shape?.node(id)?)))
        .filter(|frame| *frame != 0)
}

/// What a record is about, in its first word beside its length.
pub const RECORD_READY: u64 = 1 << 63;
/// Flag in the first word of a code record: the line table was too long and is left out.
pub const RECORD_CUT: u64 = 1 << 62;

/// Words of a code record before its bytes: length and version, two of key, first line, lengths.
pub const CODE_FIXED: usize = 6;
/// Words of a module record before its bytes: length, base, start, end, epochs, lengths.
pub const MODULE_FIXED: usize = 7;

/// What is known of a Python code object.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CodeRecord {
    /// Minor version of the interpreter, which decides the format of `lines`.
    pub minor: u8,
    /// First source line.
    pub first_line: i32,
    /// `co_name`.
    pub name: String,
    /// `co_qualname`, from 3.11 on.
    pub qualname: String,
    /// `co_filename`.
    pub filename: String,
    /// The raw line table; empty if it was too long.
    pub lines: Vec<u8>,
}

/// The code object with this id.
pub fn code<W: Words + ?Sized>(region: &W, id: u32) -> Option<CodeRecord> {
    let at = id as usize;
    let head = record(region, CODE_MAGIC, at, CODE_FIXED)?;
    let (first_line, sizes) = (region.word(at + 3) as i32, region.word(at + 4));
    let lengths = [
        sizes as u32 as usize,
        (sizes >> 32) as usize,
        region.word(at + 5) as u32 as usize,
        (region.word(at + 5) >> 32) as usize,
    ];
    let [name, qualname, filename, lines] = bytes(region, at, CODE_FIXED, head, lengths)?;
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
    Some(CodeRecord {
        minor: (head >> 32) as u8,
        first_line,
        name: text(name),
        qualname: text(qualname),
        filename: text(filename),
        lines,
    })
}

/// A library that is or was loaded.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ModuleRecord {
    /// What the loader added to the addresses in the file.
    pub base: u64,
    /// First mapped address.
    pub start: u64,
    /// Address after the last mapped one.
    pub end: u64,
    /// Epoch in which it was first seen.
    pub from: u16,
    /// Last epoch in which it was there; `None` while it is loaded.
    pub until: Option<u16>,
    /// GNU build id, if the file has one.
    pub build_id: Vec<u8>,
    /// Path of the file.
    pub path: String,
}

/// All libraries, in the order in which they were seen.
pub fn modules<W: Words + ?Sized>(region: &W) -> Vec<ModuleRecord> {
    let end = (region.word(HEAD_NEXT) as usize).min(region.count());
    let mut at = region.word(HEAD_CAPACITY) as usize;
    let mut found = Vec::new();
    while at < end {
        let Some(head) = record(region, MODULE_MAGIC, at, MODULE_FIXED) else { break };
        let epochs = region.word(at + 4);
        let sizes = region.word(at + 5);
        let lengths = [sizes as u32 as usize, (sizes >> 32) as usize];
        let Some([build_id, path]) = bytes(region, at, MODULE_FIXED, head, lengths) else { break };
        found.push(ModuleRecord {
            base: region.word(at + 1),
            start: region.word(at + 2),
            end: region.word(at + 3),
            from: epochs as u16,
            until: ((epochs >> 32) as u16).checked_sub(1),
            build_id,
            path: String::from_utf8_lossy(&path).into_owned(),
        });
        at += head as u32 as usize;
    }
    found
}

/// The first word of the record at `at`, if there is a complete one.
pub(crate) fn record<W: Words + ?Sized>(
    region: &W,
    magic: u64,
    at: usize,
    fixed: usize,
) -> Option<u64> {
    if region.word(0) != magic || at < region.word(HEAD_CAPACITY) as usize || at < HEADER {
        return None;
    }
    let head = region.word(at);
    let words = head as u32 as usize;
    let fits = words >= fixed && at.checked_add(words)? <= region.count();
    (head & RECORD_READY != 0 && fits).then_some(head)
}

/// The byte strings of a record, which follow each other behind its fixed part.
pub(crate) fn bytes<W: Words + ?Sized, const N: usize>(
    region: &W,
    at: usize,
    fixed: usize,
    head: u64,
    lengths: [usize; N],
) -> Option<[Vec<u8>; N]> {
    let room = (head as u32 as usize - fixed) * 8;
    let total = lengths.iter().try_fold(0_usize, |sum, n| sum.checked_add(*n))?;
    if total > room {
        return None;
    }
    let mut next = 0;
    Some(lengths.map(|n| {
        let first = next;
        next += n;
        let byte = |i: usize| (region.word(at + fixed + i / 8) >> (i % 8 * 8)) as u8;
        (first..next).map(byte).collect()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_frame() -> impl Strategy<Value = RawFrame> {
        prop_oneof![
            (0..1_u64 << PC_BITS, 0..=EPOCH_MAX)
                .prop_map(|(pc, epoch)| RawFrame::Native { pc, epoch }),
            (0..CODE_LIMIT, prop::option::of(0..UNIT_LIMIT - 1))
                .prop_map(|(code, unit)| RawFrame::Python { code, unit }),
            prop::sample::select(Reason::ALL).prop_map(RawFrame::Missing),
            Just(RawFrame::Elided),
        ]
    }

    proptest! {
        #[test]
        fn a_frame_survives_its_word(frame in any_frame()) {
            prop_assert_ne!(frame.pack(), 0);
            prop_assert_eq!(RawFrame::unpack(frame.pack()), Some(frame));
        }

        #[test]
        fn different_frames_are_different_words(a in any_frame(), b in any_frame()) {
            prop_assert_eq!(a == b, a.pack() == b.pack());
        }

        #[test]
        fn damaged_regions_are_read_without_harm(mut words in prop::collection::vec(any::<u64>(), 0..200), small in prop::collection::vec(0_u64..64, 0..200), id in 0_u32..200) {
            for (w, s) in words.iter_mut().zip(&small) {
                *w = *w & (RECORD_READY | 0xff << 32) | s;
            }
            for magic in [DEPOT_MAGIC, CODE_MAGIC, MODULE_MAGIC] {
                if let Some(first) = words.first_mut() {
                    *first = magic;
                }
                let _ = frames(&words[..], id);
                let _ = code(&words[..], id);
                let _ = modules(&words[..]);
            }
        }

        #[test]
        fn a_depot_of_any_size_fits_into_its_words(words in 0_usize..1 << 20) {
            if let Some(s) = DepotShape::of(words) {
                prop_assert!(s.table >= HEADER + 2 * s.capacity);
                prop_assert!(s.table + s.slots <= words);
                prop_assert!(s.capacity < s.slots);
                prop_assert!(s.capacity * 6 >= words, "most of it holds nodes");
            } else {
                prop_assert!(words < 64);
            }
        }
    }

    #[test]
    fn words_that_are_no_frame_are_refused() {
        assert_eq!(RawFrame::unpack(0), None);
        assert_eq!(RawFrame::unpack(MISSING << KIND), None);
        assert_eq!(RawFrame::unpack(u64::MAX), None);
    }

    #[test]
    fn every_reason_has_its_number_and_words() {
        for &r in Reason::ALL {
            assert_eq!(Reason::from_u8(r as u8), Some(r));
            assert!(!r.text().is_empty());
        }
        assert_eq!(Reason::from_u8(0), None);
    }
}

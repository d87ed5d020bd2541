//! The black box: one file that holds everything a process records, while it runs and after it died.
//!
//! The file is a header page and six regions, all in 64-bit little-endian words and all positions, no
//! pointers. The process maps it and writes it in place; the kernel keeps what was written whatever happens to
//! the process. Nothing here is ever moved or compacted, so a reader needs no cooperation from the writer:
//!
//! | region | what | written |
//! |---|---|---|
//! | ring | slots of 8 words: sequence number, event | by every hook |
//! | live | tables of what is alive, each twice the size of the one before | by whoever retires events |
//! | depot, code, modules | stacks, Python code, libraries ([`crate::stacks`]) | at first sight |
//! | about | JSON: host, command, rank, settings | once, at the start |
//!
//! **State = live table + replay of the ring from `retired` on.** A slot counts if its first word is its
//! ticket + 1; a slot that was being written when the process died has 0 there and is counted as torn, never
//! guessed. An entry of the live table counts if its first word is [`LIVE`]; applying the event at `retired` a
//! second time changes nothing, so a process killed between the table and the counter loses nothing either. The
//! table's sequence number tells: it goes up by two for each event.
//!
//! A reader trusts nothing in the file: every position and length is checked.

use std::ops::Range;

use serde_json::Value;

use crate::event::{Event, FLAG_FAILED, Kind, LAYOUT_VERSION, Layer, WORDS, What};
use crate::replay::State;

/// First word of the file.
pub const MAGIC: u64 = u64::from_le_bytes(*b"memtrace");
/// Version of everything below; it moves together with the event's.
pub const VERSION: u64 = (1 << 32) | LAYOUT_VERSION as u64;

/// Words of the header page.
pub const HEADER_WORDS: usize = 512;

/// Positions of the header's words. Counters that many threads write stand in cache lines of their own.
pub mod at {
    /// [`super::MAGIC`], stored last when the file is ready.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`].
    pub const VERSION: usize = 1;
    /// Process id.
    pub const PID: usize = 2;
    /// Start of recording, nanoseconds since 1970.
    pub const STARTED_NS: usize = 3;
    /// How the process is doing: a [`super::Life`].
    pub const LIFE: usize = 4;
    /// Six pairs: first byte and length in bytes of each [`super::Region`].
    pub const REGIONS: usize = 8;
    /// Length of the text in the about region, bytes.
    pub const ABOUT_BYTES: usize = 24;
    /// Slots of the ring in use: a power of two that doubles while the ring fills for the first time.
    pub const RING_CAPACITY: usize = 32;
    /// Which of the live tables is in use.
    pub const LIVE_TABLE: usize = 33;
    /// Entries in it.
    pub const LIVE_USED: usize = 34;
    /// Entries that found no room: the live set is no longer exact.
    pub const LIVE_REFUSED: usize = 35;
    /// Twice the number of events applied to the table; odd while it is being changed.
    pub const LIVE_SEQUENCE: usize = 36;
    /// Events that contradict the live table.
    pub const ANOMALIES: usize = 37;
    /// The next ticket.
    pub const HEAD: usize = 64;
    /// Every ticket below has been applied to the live table.
    pub const RETIRED: usize = 72;
    /// Events that found the ring full and retired a batch themselves.
    pub const STALLS: usize = 80;
    /// The longest such wait, nanoseconds.
    pub const LONGEST_STALL_NS: usize = 81;
}

/// The regions, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Region {
    Ring,
    Live,
    Depot,
    Code,
    Modules,
    About,
}

/// How many regions there are.
pub const REGIONS: usize = 6;

/// How the process was doing when the header was last written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Life {
    /// Recording; if the process is gone, it was killed.
    Recording = 1,
    /// It ended and wrote its last snapshot.
    Ended = 2,
    /// Recording was switched off after an internal error.
    SwitchedOff = 3,
}

/// Entries of the smallest live table.
pub const LIVE_FIRST: usize = 1 << 12;
/// How many tables there are, each twice the one before.
pub const LIVE_TABLES: usize = 10;

/// First word of an entry that counts. 0 is an entry never used, 1 one that is free again.
pub const LIVE: u64 = 2;
/// First word of an entry that is free again.
pub const FREE_AGAIN: u64 = 1;

/// Where table `n` lies in the live region, in entries.
pub fn live_table(n: usize) -> Range<usize> {
    let start = (LIVE_FIRST << n) - LIVE_FIRST;
    start..start + (LIVE_FIRST << n)
}

/// Words of the whole live region.
pub const LIVE_WORDS: usize = ((LIVE_FIRST << LIVE_TABLES) - LIVE_FIRST) * WORDS;

/// What a live entry is about; with an address (or a handle) it is the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Class {
    Segment = 1,
    Page = 2,
    Driver = 3,
    Block = 4,
    Wait = 5,
    Array = 6,
    External = 7,
    Handle = 8,
    Mapping = 9,
    Reservation = 10,
    Object = 11,
    PoolReserved = 12,
}

impl Class {
    /// Where an allocation of this sort is kept: handles and addresses are apart.
    pub fn of_allocation(what: What) -> Class {
        match what {
            What::Array => Class::Array,
            What::External => Class::External,
            _ => Class::Driver,
        }
    }
}

/// The class and the key of an event that is kept in the live table; `None` for one that isn't.
pub fn key(event: &Event) -> Option<(Class, u64)> {
    Some(match (event.layer, event.kind) {
        (Layer::Framework, Kind::Alloc) => (Class::Block, event.addr),
        (Layer::Framework, Kind::SegmentAlloc) => (Class::Segment, event.addr),
        (Layer::Framework, Kind::SegmentMap) => (Class::Page, event.addr),
        (Layer::Framework, Kind::WaitsFor) => (Class::Wait, event.extra),
        (Layer::Framework, _) => return None,
        (_, Kind::Alloc) => (Class::of_allocation(event.what), event.addr),
        (_, Kind::HandleCreate) => (Class::Handle, event.addr),
        (_, Kind::Map) => (Class::Mapping, event.addr),
        (_, Kind::Reserve) => (Class::Reservation, event.addr),
        (_, Kind::Create) => (Class::Object, event.addr),
        (_, Kind::PoolReserved) => (Class::PoolReserved, event.addr),
        _ => return None,
    })
}

/// Could a hook have written this? A damaged file must not make a reader walk through exabytes.
fn plausible(event: &Event) -> bool {
    /// No machine maps more at a time.
    const LARGEST: u64 = 1 << 41;
    let numbers = [event.addr, event.size, event.stream, event.extra];
    let tried = event.flags & FLAG_FAILED != 0 || event.kind == Kind::Oom;
    // Addresses are cheap: libraries reserve more of them than there is memory.
    let largest = if event.kind == Kind::Reserve { 1 << 57 } else { LARGEST };
    let is_block = event.layer == Layer::Framework && event.kind == Kind::Alloc;
    numbers.iter().all(|n| *n < 1 << 63)
        && (tried || event.addr < 1 << 57 && event.size <= largest)
        && (!is_block || tried || event.extra <= LARGEST)
}

/// Why a file can't be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// It doesn't begin as a black box does.
    NotABlackBox,
    /// The process died before its first event, or the file was cut to nothing.
    NotReady,
    /// It was written by a memtrace whose layout this one doesn't know.
    Version(u64),
    /// The header names a place outside the file.
    Damaged(String),
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OpenError::NotABlackBox => write!(f, "not a memtrace black box"),
            OpenError::NotReady => {
                write!(f, "the black box is empty: the process died as recording began")
            }
            OpenError::Version(v) => write!(
                f,
                "written by another version of memtrace (layout {}.{}, this one reads {}.{}): use that version",
                v >> 32,
                v & 0xffff_ffff,
                VERSION >> 32,
                VERSION & 0xffff_ffff
            ),
            OpenError::Damaged(what) => write!(f, "damaged black box: {what}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// A black box that somebody has read into memory.
pub struct BlackBox<'a> {
    bytes: &'a [u8],
}

/// What a black box says.
pub struct Contents {
    /// What was alive before the first event of `events`.
    pub live: State,
    /// Published events from `retired` on, in ticket order.
    pub events: Vec<Event>,
    /// Tickets given out.
    pub written: u64,
    /// Tickets that only the live table remembers.
    pub retired: u64,
    /// Slots that were claimed and not published, or whose words are no event.
    pub torn: u64,
}

impl<'a> BlackBox<'a> {
    /// Checks the header of a file's bytes.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(bytes: &'a [u8]) -> Result<BlackBox<'a>, OpenError> {
        let file = BlackBox { bytes };
        match file.word(at::MAGIC) {
            Some(MAGIC) => {}
            Some(0) | None if bytes.iter().take(64).all(|b| *b == 0) => {
                return Err(OpenError::NotReady);
            }
            _ => return Err(OpenError::NotABlackBox),
        }
        match file.word(at::VERSION) {
            Some(VERSION) => {}
            other => return Err(OpenError::Version(other.unwrap_or(0))),
        }
        if bytes.len() < HEADER_WORDS * 8 {
            return Err(OpenError::Damaged("the header is cut short".to_owned()));
        }
        Ok(file)
    }

    fn word(&self, i: usize) -> Option<u64> {
        let at = i.checked_mul(8)?;
        Some(u64::from_le_bytes(self.bytes.get(at..at + 8)?.try_into().ok()?))
    }

    /// A word of the header.
    pub fn header(&self, i: usize) -> u64 {
        self.word(i).unwrap_or(0)
    }

    /// The bytes of a region, as far as the file has them.
    pub fn region(&self, region: Region) -> &'a [u8] {
        let start = self.header(at::REGIONS + 2 * region as usize) as usize;
        let len = self.header(at::REGIONS + 2 * region as usize + 1) as usize;
        let end = start.saturating_add(len).min(self.bytes.len());
        self.bytes.get(start..end).unwrap_or_default()
    }

    /// The words of a region.
    pub fn words(&self, region: Region) -> impl Iterator<Item = u64> + 'a {
        self.region(region)
            .chunks_exact(8)
            .map(|c| u64::from_le_bytes(c.try_into().unwrap_or_default()))
    }

    /// What the process said of itself when it began.
    pub fn about(&self) -> Value {
        let len = self.header(at::ABOUT_BYTES) as usize;
        let text = self.region(Region::About);
        serde_json::from_slice(&text[..len.min(text.len())]).unwrap_or(Value::Null)
    }

    fn entry(region: &[u8], i: u64) -> Option<[u64; WORDS]> {
        let at = usize::try_from(i).ok()?.checked_mul(WORDS * 8)?;
        let bytes = region.get(at..at + WORDS * 8)?;
        let mut words = [0; WORDS];
        for (w, c) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *w = u64::from_le_bytes(c.try_into().ok()?);
        }
        Some(words)
    }

    fn event(words: [u64; WORDS]) -> Option<Event> {
        let [_, rest @ ..] = words;
        Event::unpack(rest).filter(plausible)
    }

    /// Reads state and history. `again`: the same file read a second time, if the process is alive: what
    /// changed between the two is not believed.
    ///
    /// # Errors
    /// The ring's place or size is impossible.
    pub fn contents(&self, again: Option<&BlackBox<'_>>) -> Result<Contents, OpenError> {
        let capacity = self.header(at::RING_CAPACITY);
        let ring = self.region(Region::Ring);
        if !capacity.is_power_of_two() || ring.len() < (capacity as usize).saturating_mul(WORDS * 8)
        {
            return Err(OpenError::Damaged(format!(
                "a ring of {capacity} slots in {} bytes (was the file cut?)",
                ring.len()
            )));
        }
        let written = self.header(at::HEAD);
        let mut retired = self.header(at::RETIRED);
        // Who claims a ticket in a full ring waits until its slot may be overwritten.
        let to = written.min(retired.saturating_add(capacity));
        let mut events = Vec::new();
        let mut torn = written.saturating_sub(to);
        let second = again.map(|b| b.region(Region::Ring));
        let published = |ticket: u64| {
            let slot = ticket & (capacity - 1);
            let words = Self::entry(ring, slot)
                .filter(|w| w[0] == ticket + 1)
                .filter(|w| second.is_none_or(|s| Self::entry(s, slot) == Some(*w)));
            words.and_then(Self::event)
        };
        let mut live = self.live();
        if retired < to
            && self.header(at::LIVE_SEQUENCE) != retired.wrapping_mul(2)
            && let Some(half) = published(retired)
        {
            let anomalies = live.anomalies;
            if !live.ledger.counted(&half, retired) {
                live.apply(&half, &|_| "", &mut |_, _| ());
            }
            live.anomalies = anomalies;
            retired += 1;
        }
        for ticket in retired..to {
            match published(ticket) {
                Some(event) => events.push(event),
                None => torn += 1,
            }
        }
        Ok(Contents { live, events, written, retired, torn })
    }

    fn live(&self) -> State {
        let region = self.region(Region::Live);
        let table = (self.header(at::LIVE_TABLE) as usize).min(LIVE_TABLES - 1);
        let entries = live_table(table)
            .filter_map(|i| Self::entry(region, i as u64))
            .filter(|words| words[0] == LIVE)
            .filter_map(Self::event);
        let mut state = State::restore(entries);
        state.anomalies = self.header(at::ANOMALIES);
        state
    }
}

//! The black box: one file that holds everything a process records, while
//! it runs and after it died.
//!
//! The file is a header page and eight regions, all in 64-bit little-endian words and all
//! positions, no pointers. The process maps it and writes it in place; the kernel keeps what was
//! written whatever happens to the process. Nothing here is ever moved or compacted, so a reader
//! needs no cooperation from the writer:
//!
//! | region | what | written |
//! |---|---|---|
//! | ring | slots of 8 words: sequence number, event | by every hook |
//! | live | the table of what is alive, in no order | by whoever retires events |
//! | depot, code, modules | stacks, Python code, libraries ([`crate::stacks`]) | at first sight |
//! | about | JSON: host, command, rank, settings | once, at the start; the settings behind it when they are others |
//! | entry points | how often each entry point was called, and by which libraries ([`entry_point_uses`]) | by every hook |
//! | labels | what the program says it is doing ([`crate::labels`]) | at first sight |
//!
//! **State = live table + the events of the ring from `retired` on.** A slot counts if its first
//! word is its ticket + 1. A slot that was being written when the process died has 0 there. It is
//! counted as torn, never guessed. An entry of the live table counts if its first word is
//! [`LIVE`]. Applying the event at `retired` a second time changes nothing. So a process killed
//! between the table and the counter loses nothing either. The table's sequence number goes up by
//! two for each event, and is odd meanwhile.
//!
//! This module has the layout; [`read`](BlackBox) is the reader.

mod read;

use crate::event::{Event, FLAG_FAILED, Kind, LAYOUT_VERSION, Layer, What};
use crate::key::Counters;

pub use read::{BlackBox, Bytes, LiveTable, OpenError, Part, Reading};

/// First word of the file.
pub const MAGIC: u64 = u64::from_le_bytes(*b"memtrace");
/// Version of everything below; it moves together with the event's.
pub const VERSION: u64 = (4 << 32) | LAYOUT_VERSION as u64;

/// Words of the header page.
pub const HEADER_WORDS: usize = 512;

/// Positions of the header's words. Counters that many threads write are
/// in cache lines of their own.
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
    /// Eight pairs: first byte and length in bytes of each [`super::Region`].
    pub const REGIONS: usize = 8;
    /// Length of the text in the about region, bytes.
    pub const ABOUT_BYTES: usize = 24;
    /// Slots of the ring in use: a power of two that doubles while the
    /// ring fills for the first time.
    pub const RING_CAPACITY: usize = 32;
    /// Entries of the live table that have ever been in use: nothing is behind them.
    pub const LIVE_ROOM: usize = 33;
    /// Entries that are there, in the file or outside.
    pub const LIVE_USED: usize = 34;
    /// Entries that found no room, neither in the file nor in memory: the
    /// live set is no longer exact.
    pub const LIVE_REFUSED: usize = 35;
    /// Twice the number of events applied to the table; odd while it is being changed.
    pub const LIVE_SEQUENCE: usize = 36;
    /// Events that contradict the live table.
    pub const ANOMALIES: usize = 37;
    /// Entries that are kept in the process's own memory, because the file has no room for
    /// them. Who reads the file lacks them.
    pub const LIVE_OUTSIDE: usize = 38;
    /// Bytes of the memory that those stand for.
    pub const LIVE_OUTSIDE_BYTES: usize = 39;
    /// Bytes of the memory that the refused entries stand for.
    pub const LIVE_REFUSED_BYTES: usize = 40;
    /// Where behind the description the settings are that PyTorch's allocator has read since: the
    /// first byte and, from bit 32, the length of the text; [`super::NOT_NOTED`] where there was no
    /// room. 0: it has read none since the description was written.
    pub const SETTINGS: usize = 41;
    /// The next ticket.
    pub const HEAD: usize = 64;
    /// Every ticket below has been applied to the live table.
    pub const RETIRED: usize = 72;
    /// Events that found the ring full and retired a batch themselves.
    pub const STALLS: usize = 80;
    /// Visits to the recorder that were timed.
    pub const SAMPLED: usize = 88;
    /// How long they took together, nanoseconds.
    pub const SAMPLED_NS: usize = 89;
    /// Events that stand for no call of the program's: measurements, first
    /// entries of a device, and marks.
    pub const OWN_EVENTS: usize = 90;
    /// Which rank the process is, if it has joined a communicator: a [`crate::world::World`].
    pub const WORLD: usize = 91;
    /// Calls about memory that came from a signal handler while its thread was inside
    /// the recorder: they are not recorded.
    pub const INTERRUPTED: usize = 92;
    /// What each device has seen: [`super::PAST_WORDS`] words for each of [`super::PAST_DEVICES`].
    pub const PAST: usize = 128;
}

/// Words in the header for what one device has seen: held now, at most,
/// taken in all, how many times.
pub const PAST_WORDS: usize = 4;
/// Devices that have places of their own there; the last place is that of a
/// device that no call has named (−1).
pub const PAST_DEVICES: usize = 64;

/// In place of where the settings are: they are unknown.
pub const NOT_NOTED: u64 = 1;

/// Settings of PyTorch's allocator, as it has read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// The last words.
    pub last: String,
    /// Words that stand for everything that holds.
    pub all: String,
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
    EntryPoints,
    Labels,
}

/// How many regions there are.
pub const REGIONS: usize = 8;

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

/// Entries of the live table that there is room for at the start.
pub const LIVE_FIRST: usize = 1 << 10;
/// Entries that the live region is made for.
pub const LIVE_MOST: usize = 1 << 21;

/// First word of an entry that counts. 0 is an entry never used, 1 one that is free again.
pub const LIVE: u64 = 2;
/// First word of an entry that is free again.
pub const FREE_AGAIN: u64 = 1;

/// What a snapshot lacks, as its `counters` say: from the header, and for a reader that has only
/// the file or for the process itself.
pub fn count_from_header(header: &dyn Fn(usize) -> u64, only_file: bool, counters: &mut Counters) {
    let outside = |word| if only_file { header(word) } else { 0 };
    counters.live_refused = header(at::LIVE_REFUSED);
    counters.live_refused_bytes = header(at::LIVE_REFUSED_BYTES);
    counters.live_outside = outside(at::LIVE_OUTSIDE);
    counters.live_outside_bytes = outside(at::LIVE_OUTSIDE_BYTES);
    counters.interrupted = header(at::INTERRUPTED);
    counters.stalls = header(at::STALLS);
    counters.measured = header(at::OWN_EVENTS);
}

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
    Entered = 13,
    HostBlock = 14,
}

impl Class {
    /// Where an allocation of this kind is kept: handles and addresses are apart.
    pub fn of_allocation(what: What) -> Class {
        match what {
            What::Array => Class::Array,
            What::External => Class::External,
            What::HostBlock => Class::HostBlock,
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
        (_, Kind::Alloc) if event.what == What::HostBlock => (Class::HostBlock, event.extra),
        (_, Kind::Alloc) => (Class::of_allocation(event.what), event.addr),
        (_, Kind::HandleCreate) => (Class::Handle, event.addr),
        (_, Kind::Map) => (Class::Mapping, event.addr),
        (_, Kind::Reserve) => (Class::Reservation, event.addr),
        (_, Kind::Create) => (Class::Object, event.addr),
        (_, Kind::PoolReserved) => (Class::PoolReserved, event.addr),
        (_, Kind::Entered) => (Class::Entered, u64::from(event.device as u8)),
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
    // What a device says is less than it has room for, also of what others hold.
    let measured = event.kind != Kind::Measured || numbers.iter().all(|n| *n < 1 << 57);
    let is_block = event.layer == Layer::Framework && event.kind == Kind::Alloc;
    numbers.iter().all(|n| *n < 1 << 63)
        && measured
        && (tried || event.addr < 1 << 57 && event.size <= largest)
        && (!is_block || tried || event.extra <= LARGEST)
}

/// Words of an entry point in its region. The first counts the calls of those who found
/// no place. Then there are [`ENTRY_POINT_CALLERS`] places: first address of a library,
/// the address after it, and its calls.
pub const ENTRY_POINT_WORDS: usize = 16;
/// Libraries that are counted apart for each entry point.
pub const ENTRY_POINT_CALLERS: usize = 5;

/// How an entry point was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryPointUse {
    /// Its number.
    pub api: u16,
    /// Calls of libraries that found no place.
    pub others: u64,
    /// An address in each calling library, and its calls.
    pub callers: Vec<(u64, u64)>,
}

/// The entry points that were used, from the words of that region.
pub fn entry_point_uses(words: &[u64]) -> Vec<EntryPointUse> {
    let rows = words.as_chunks::<ENTRY_POINT_WORDS>().0.iter().zip(0..);
    let used = rows.map(|(row, api)| {
        let callers =
            row[1..].as_chunks::<3>().0.iter().filter(|[_, end, calls]| *end != 0 && *calls != 0);
        EntryPointUse {
            api,
            others: row[0],
            callers: callers.map(|[at, _, calls]| (*at, *calls)).collect(),
        }
    });
    used.filter(|used| used.others != 0 || !used.callers.is_empty()).collect()
}

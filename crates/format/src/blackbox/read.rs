//! Reading a black box, of a dead process or of a living one.
//!
//! A reader trusts nothing in the file: every position and length is checked. It
//! reads only what is in use, and the ring a batch at a time. What it means is worked
//! out by whoever reads the recording.
//!
//! **A living process** goes on writing, and is not asked to wait. The live table is believed if
//! its sequence number was even, and the same before and after it was read. An event is believed if
//! its slot was published at a first read and not overwritten after a second one.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{
    EntryPointUse, HEADER_WORDS, LIVE, MAGIC, NOT_NOTED, PAST_DEVICES, PAST_WORDS, REGIONS, Read,
    Region, VERSION, at, entry_point_uses, plausible,
};
use crate::event::{Event, WORDS};
use crate::key::{Description, Memtrace};
use crate::stacks::{HEAD_NEXT, HEADER, Words};
use crate::world::World;

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
    /// The system's answer.
    Unreadable(String),
}

impl From<io::Error> for OpenError {
    fn from(e: io::Error) -> OpenError {
        OpenError::Unreadable(e.to_string())
    }
}

impl From<OpenError> for io::Error {
    fn from(e: OpenError) -> io::Error {
        io::Error::other(e)
    }
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
            OpenError::Unreadable(why) => write!(f, "cannot be read: {why}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// A file's bytes, or bytes in memory.
pub trait Bytes {
    /// How many there are.
    ///
    /// # Errors
    /// The system's.
    fn length(&self) -> io::Result<u64>;

    /// Reads from a position until `into` is full or there is no more. Returns how many were read.
    ///
    /// # Errors
    /// The system's.
    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<usize>;
}

impl Bytes for &[u8] {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<usize> {
        let rest = self.get(usize::try_from(at).unwrap_or(usize::MAX)..).unwrap_or_default();
        let length = rest.len().min(into.len());
        into[..length].copy_from_slice(&rest[..length]);
        Ok(length)
    }
}

const HEADER_BYTES: usize = HEADER_WORDS * 8;
const SLOT: usize = WORDS * 8;
/// No region but the ring and the live table has more bytes in use.
const LARGEST_PART: u64 = 1 << 28;
/// No process has so many threads in the middle of an event.
const TORN: u64 = 1000;
/// The largest ring that a recorder makes.
const LARGEST_RING: u64 = 1 << 30;
/// How long a process may change its live table faster than it can be read.
const PATIENCE: Duration = Duration::from_secs(20);

fn word_of(bytes: &[u8], i: usize) -> u64 {
    let bytes = i.checked_mul(8).and_then(|at| bytes.get(at..)?.first_chunk());
    bytes.map_or(0, |b| u64::from_le_bytes(*b))
}

fn words_of(slot: &[u8]) -> [u64; WORDS] {
    std::array::from_fn(|i| word_of(slot, i))
}

fn event_of(words: [u64; WORDS]) -> Option<Event> {
    let [_, rest @ ..] = words;
    Event::unpack(rest).filter(plausible)
}

/// The part of a region that is in use, with zeros behind it.
pub struct Part {
    used: Vec<u8>,
    count: usize,
}

impl Words for Part {
    fn count(&self) -> usize {
        self.count
    }
    fn word(&self, i: usize) -> u64 {
        word_of(&self.used, i)
    }
}

/// A black box that can be read.
pub struct BlackBox<B> {
    file: B,
    header: Vec<u8>,
}

impl<B: Bytes> BlackBox<B> {
    /// Reads and checks the header.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(file: B) -> Result<BlackBox<B>, OpenError> {
        let mut header = vec![0; HEADER_BYTES];
        let length = file.read_at(0, &mut header)?;
        header.truncate(length);
        let file = BlackBox { file, header };
        match file.header(at::MAGIC) {
            MAGIC => {}
            0 if file.header.iter().take(64).all(|b| *b == 0) => return Err(OpenError::NotReady),
            _ => return Err(OpenError::NotABlackBox),
        }
        match file.header(at::VERSION) {
            VERSION => {}
            other => return Err(OpenError::Version(other)),
        }
        if length < HEADER_BYTES {
            return Err(OpenError::Damaged("the header is cut short".to_owned()));
        }
        Ok(file)
    }

    /// A word of the header, as it was when the file was opened.
    pub fn header(&self, i: usize) -> u64 {
        word_of(&self.header, i)
    }

    /// A word of the header, as it is now.
    fn now(&self, i: usize) -> Result<u64, OpenError> {
        let mut word = [0; 8];
        self.file.read_at(i as u64 * 8, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Where a region is, cut to what the file has.
    fn region(&self, region: Region) -> Result<Range<u64>, OpenError> {
        let [start, length] = [0, 1].map(|i| self.header(at::REGIONS + 2 * region as usize + i));
        let end = start.saturating_add(length).min(self.file.length()?);
        Ok(start.min(end)..end)
    }

    /// The bytes of a region, as far as they are in the file.
    fn bytes(&self, region: Region, part: Range<u64>) -> Result<Vec<u8>, OpenError> {
        let all = self.region(region)?;
        let [start, end] = [part.start, part.end].map(|n| all.start.saturating_add(n).min(all.end));
        if end - start > LARGEST_PART {
            return Err(OpenError::Damaged(format!("{} bytes of {region:?}", end - start)));
        }
        let mut bytes = vec![0; (end - start) as usize];
        let length = self.file.read_at(start, &mut bytes)?;
        bytes.truncate(length);
        Ok(bytes)
    }

    /// What is in use of one of the regions of stacks. Everything that an event refers to
    /// is complete before the event has its ticket. So it is there in a living process,
    /// too, if it is read after the ticket.
    ///
    /// # Errors
    /// The file can't be read, or the region is damaged.
    pub fn part(&self, region: Region) -> Result<Part, OpenError> {
        let next = word_of(&self.bytes(region, 0..HEADER as u64 * 8)?, HEAD_NEXT);
        // The depot counts nodes of two words, the others words.
        let words = if region == Region::Depot { next.saturating_mul(2) } else { next };
        let used = self.bytes(region, 0..words.saturating_add(HEADER as u64).saturating_mul(8))?;
        let all = self.region(region)?;
        Ok(Part { used, count: ((all.end - all.start) / 8) as usize })
    }

    /// How the entry points were used.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn entry_points(&self) -> Result<Vec<EntryPointUse>, OpenError> {
        let bytes = self.bytes(Region::EntryPoints, 0..LARGEST_PART)?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        Ok(entry_point_uses(&words))
    }

    /// What the process said of itself when it began, and which rank it
    /// became. `None`: that is damaged.
    pub fn about(&self) -> Option<Description> {
        let text = self.bytes(Region::About, 0..self.header(at::ABOUT_BYTES)).unwrap_or_default();
        let mut about = Description::read(&text)?;
        if let Some(world) = World::unpack(self.header(at::WORLD)) {
            world.tell(&mut about.memtrace);
        }
        Some(about)
    }

    /// The settings of PyTorch's allocator that were read last. They are those read since the
    /// description was written, or else those of the description, as `of_description` understands
    /// them. `None`: they are not recorded.
    pub fn settings(&self, of_description: impl Fn(&Memtrace) -> Option<Read>) -> Option<Read> {
        const TIMES: usize = 10;
        let read = |place: u64| {
            let (start, length) = (place & u64::from(u32::MAX), place >> 32);
            let text = self.bytes(Region::About, start..start + length).ok()?;
            let both: Value = serde_json::from_slice(&text).ok()?;
            let word = |key: &str| Some(both[key].as_str()?.to_owned());
            Some(Read { last: word("last")?, all: word("all")? })
        };
        // A living process may write over what is being read, after it has noted another place.
        for _ in 0..TIMES {
            let place = self.now(at::SETTINGS).ok()?;
            let found = match place {
                0 => self.about().and_then(|about| of_description(&about.memtrace)),
                NOT_NOTED => None,
                place => read(place),
            };
            if self.now(at::SETTINGS).ok()? == place {
                return found;
            }
        }
        None
    }

    /// State and history. `alive`: somebody is writing it.
    ///
    /// # Errors
    /// The ring's place or size is impossible.
    pub fn recording(&self, alive: bool) -> Result<Reading<'_, B>, OpenError> {
        let end = |i| {
            let [start, length] = [0, 1].map(|n| self.header(at::REGIONS + 2 * i + n));
            start.saturating_add(length)
        };
        let (there, wanted) = (self.file.length()?, (0..REGIONS).map(end).max().unwrap_or(0));
        if there < wanted {
            return Err(OpenError::Damaged(format!(
                "{there} of {wanted} bytes are there (was the file cut?)"
            )));
        }
        let capacity = self.header(at::RING_CAPACITY);
        let ring = self.region(Region::Ring)?;
        let length = ring.end - ring.start;
        if !capacity.is_power_of_two()
            || capacity > LARGEST_RING
            || length < capacity.saturating_mul(SLOT as u64)
        {
            return Err(OpenError::Damaged(format!(
                "a ring of {capacity} slots in {length} bytes (was the file cut?)"
            )));
        }
        Ok(Reading { file: self, alive, ring: ring.start, live: self.region(Region::Live)? })
    }
}

/// The live table of a moment.
pub struct LiveTable {
    /// Twice the number of events that had been applied to it; odd if it was being changed.
    pub sequence: u64,
    /// The ticket from which on events are in the ring.
    pub retired: u64,
    /// Events that contradicted it.
    pub anomalies: u64,
    /// What the devices have seen, as words; of a living process, perhaps
    /// a moment later than its live table.
    pub past: Vec<u64>,
    bytes: Vec<u8>,
}

impl LiveTable {
    /// An event for each thing that is alive, in no order.
    pub fn entries(&self) -> impl Iterator<Item = Event> {
        let live = self.bytes.chunks_exact(SLOT).filter(|slot| word_of(slot, 0) == LIVE);
        live.map(words_of).filter_map(event_of)
    }
}

/// See [`BlackBox::recording`].
pub struct Reading<'a, B> {
    file: &'a BlackBox<B>,
    alive: bool,
    /// Where the ring begins.
    ring: u64,
    /// Where the live table is.
    live: Range<u64>,
}

impl<B: Bytes> Reading<'_, B> {
    fn word(&self, i: usize) -> Result<u64, OpenError> {
        if self.alive { self.file.now(i) } else { Ok(self.file.header(i)) }
    }

    /// Words that differ between any two states of the live table.
    fn live_state(&self) -> Result<[u64; 3], OpenError> {
        Ok([self.word(at::LIVE_SEQUENCE)?, self.word(at::RETIRED)?, self.word(at::LIVE_ROOM)?])
    }

    /// Tickets given out so far.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn written(&self) -> Result<u64, OpenError> {
        // Who claims a ticket in a full ring waits until its slot may be overwritten.
        let room = self.word(at::RETIRED)?.saturating_add(self.word(at::RING_CAPACITY)?);
        Ok(self.word(at::HEAD)?.min(room))
    }

    /// The live table as it is now.
    ///
    /// # Errors
    /// The file can't be read, or its process changes the table for longer than anybody would wait.
    pub fn live_table(&self) -> Result<LiveTable, OpenError> {
        let (sequence, retired, bytes) = self.table()?;
        let anomalies = self.word(at::ANOMALIES)?;
        Ok(LiveTable { sequence, retired, anomalies, past: self.past()?, bytes })
    }

    /// The live table: its sequence number, what had been retired, and its bytes.
    fn table(&self) -> Result<(u64, u64, Vec<u8>), OpenError> {
        let end = Instant::now() + PATIENCE;
        let mut bytes = Vec::new();
        for tries in 1.. {
            let before = self.live_state()?;
            if !self.alive || before[0] % 2 == 0 {
                self.read_table(before[2], &mut bytes)?;
                if !self.alive || self.live_state()? == before {
                    return Ok((before[0], before[1], bytes));
                }
            }
            if Instant::now() > end {
                break;
            }
            // It is changed for short moments, one after the other.
            if tries % 16 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let why = "it allocates faster than what it holds can be read; try again, or let it write snapshots itself \
                   (MEMTRACE_SIGNAL=USR2)";
        Err(OpenError::Unreadable(why.to_owned()))
    }

    /// What the devices have seen: of a living process, perhaps a moment later than its live table.
    fn past(&self) -> Result<Vec<u64>, OpenError> {
        let mut bytes = [0; PAST_WORDS * PAST_DEVICES * 8];
        self.file.file.read_at(at::PAST as u64 * 8, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    /// So many entries of the live table, with as few calls as possible: there may be little time.
    fn read_table(&self, entries: u64, into: &mut Vec<u8>) -> Result<(), OpenError> {
        let there = self.live.end - self.live.start;
        let Some(length) = entries.checked_mul(SLOT as u64).filter(|length| *length <= there)
        else {
            return Err(OpenError::Damaged(
                "the list of live blocks is not all there (was the file cut?)".to_owned(),
            ));
        };
        into.resize(length as usize, 0);
        self.file.file.read_at(self.live.start, into)?;
        Ok(())
    }

    /// The slots of these tickets, whatever is in them.
    fn slots(
        &self,
        from: u64,
        to: u64,
        capacity: u64,
        into: &mut Vec<u8>,
    ) -> Result<(), OpenError> {
        into.clear();
        into.resize((to - from) as usize * SLOT, 0);
        let first = from & (capacity - 1);
        let before_the_end = (to - from).min(capacity - first) as usize * SLOT;
        let (ahead, wrapped) = into.split_at_mut(before_the_end);
        self.file.file.read_at(self.ring + first * SLOT as u64, ahead)?;
        self.file.file.read_at(self.ring, wrapped)?;
        Ok(())
    }
    /// Appends the events with the tickets `from..to`, in order. Returns how
    /// many of them are missing because they are not published (yet); `None` if
    /// one of them may have been overwritten.
    ///
    /// # Errors
    /// The file can't be read, or there are no events where there should be.
    pub fn read(
        &self,
        from: u64,
        to: u64,
        events: &mut Vec<Event>,
    ) -> Result<Option<u64>, OpenError> {
        let capacity = self.word(at::RING_CAPACITY)?;
        if !capacity.is_power_of_two() || to.saturating_sub(from) > capacity {
            return Ok(None);
        }
        let (mut first, mut second) = (Vec::new(), Vec::new());
        self.slots(from, to, capacity, &mut first)?;
        if self.alive {
            self.slots(from, to, capacity, &mut second)?;
            let head = self.word(at::HEAD)?;
            if self.word(at::RETIRED)? > from && head > from.saturating_add(capacity) {
                return Ok(None);
            }
        }
        let mut torn = 0;
        for (ticket, i) in (from..to).zip(0..) {
            let slot = |all: &[u8]| words_of(all.get(i * SLOT..).unwrap_or_default());
            let mut words = slot(&first);
            let published = words[0] == ticket.wrapping_add(1);
            if self.alive {
                words = slot(&second);
            }
            let event = event_of(words).filter(|_| published && words[0] == ticket.wrapping_add(1));
            match event {
                Some(event) => events.push(event),
                None => torn += 1,
            }
        }
        // Each thread may die in the middle of one; so many were never written.
        if !self.alive && torn >= TORN && torn == to - from {
            let why = "there are no events where there should be (was the file cut, or emptied?)";
            return Err(OpenError::Damaged(why.to_owned()));
        }
        Ok(Some(torn))
    }
}

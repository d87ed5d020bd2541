//! Reading a black box: of a dead process at rest, of a living one while it is written.
//!
//! The file is sparse and hundreds of megabytes long. Only what is in use is read, each region as far as its own
//! header says, into a picture of the file whose untouched parts cost no memory. The file is never mapped: a mapping
//! of a file that somebody cuts short would kill this process.
//!
//! **A living process** goes on writing, and is not asked to wait. The live table is believed if its sequence number
//! was even and the same before and after it was read; an event if its slot was the same in two readings; both
//! together if meanwhile no slot was claimed for a second time. Otherwise everything is read again.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use memmap2::{MmapMut, MmapOptions};
use memtrace_format::blackbox::{
    BlackBox, HEADER_WORDS, LIVE_TABLES, OpenError, REGIONS, Region, at, live_table,
};
use memtrace_format::event::WORDS;
use memtrace_format::snapshot::Snapshot;
use memtrace_format::stacks::{HEAD_NEXT, HEADER};

const HEADER_BYTES: usize = HEADER_WORDS * 8;
const SLOT: usize = WORDS * 8;
/// Bytes that are read at a time; zeros of this size stay untouched memory.
const PIECE: usize = 1 << 16;
/// How long a process may change its file faster than it can be read.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why a black box can't be read.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It isn't one, or is damaged.
    Open(OpenError),
    /// Anything else, in words.
    Other(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Open(e) => e.fmt(f),
            Trouble::Other(text) => f.write_str(text),
        }
    }
}

impl From<OpenError> for Trouble {
    fn from(e: OpenError) -> Trouble {
        Trouble::Open(e)
    }
}

impl From<io::Error> for Trouble {
    fn from(e: io::Error) -> Trouble {
        Trouble::Other(format!("cannot be read: {e}"))
    }
}

/// A picture of a file, as far as it has been read.
pub(crate) struct Image {
    bytes: MmapMut,
}

impl Image {
    /// The header page, and nothing else yet.
    fn begin(file: &File) -> Result<Image, Trouble> {
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(Trouble::Other("not a file".to_owned()));
        }
        let length = usize::try_from(about.len()).unwrap_or(usize::MAX).max(1);
        let bytes = MmapOptions::new().len(length).no_reserve_swap().map_anon();
        let bytes = bytes.map_err(|e| {
            Trouble::Other(format!("its {length} bytes find no room in memory: {e}"))
        })?;
        let mut image = Image { bytes };
        image.header(file)?;
        Ok(image)
    }

    fn header(&mut self, file: &File) -> io::Result<()> {
        self.read(file, 0..HEADER_BYTES)
    }

    /// Reads bytes that have not been read before, or that are never all zeros.
    fn read(&mut self, file: &File, range: Range<usize>) -> io::Result<()> {
        let mut piece = vec![0; PIECE.min(range.len())];
        let mut at = range.start;
        let end = range.end.min(self.bytes.len());
        while at < end {
            let want = piece.len().min(end - at);
            let got = match file.read_at(&mut piece[..want], at as u64) {
                Ok(0) => break, // cut short meanwhile
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if piece[..got].iter().any(|b| *b != 0) {
                self.bytes[at..at + got].copy_from_slice(&piece[..got]);
            }
            at += got;
        }
        Ok(())
    }

    /// The file, if its header is sound.
    pub(crate) fn open(&self) -> Result<BlackBox<'_>, OpenError> {
        BlackBox::open(&self.bytes)
    }

    fn word(&self, i: usize) -> u64 {
        let bytes = self.bytes.get(i * 8..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |b| u64::from_le_bytes(*b))
    }

    /// Where a region is, cut to what the file has.
    fn region(&self, region: Region) -> Range<usize> {
        let [start, length] = [0, 1].map(|i| self.word(at::REGIONS + 2 * region as usize + i));
        let end = start.saturating_add(length).min(self.bytes.len() as u64) as usize;
        (start as usize).min(end)..end
    }

    /// Bytes of a region.
    fn part(&self, region: Region, bytes: Range<usize>) -> Range<usize> {
        let all = self.region(region);
        let place = |n: usize| all.start.saturating_add(n).min(all.end);
        place(bytes.start)..place(bytes.end)
    }

    fn read_live(&mut self, file: &File) -> io::Result<()> {
        let table = (self.word(at::LIVE_TABLE) as usize).min(LIVE_TABLES - 1);
        let entries = live_table(table);
        let part = self.part(Region::Live, entries.start * SLOT..entries.end * SLOT);
        self.read(file, part)
    }

    fn read_ring(&mut self, file: &File) -> io::Result<()> {
        let slots = self.word(at::RING_CAPACITY).min(self.word(at::HEAD)) as usize;
        self.read(file, self.part(Region::Ring, 0..slots.saturating_mul(SLOT)))
    }

    /// Stacks, names and the description. A stack is complete before an event has it, so this is read after the ring.
    fn read_rest(&mut self, file: &File) -> io::Result<()> {
        for region in [Region::Depot, Region::Code, Region::Modules] {
            self.read(file, self.part(region, 0..HEADER * 8))?;
            let next = self.word(self.region(region).start / 8 + HEAD_NEXT) as usize;
            // The depot counts nodes of two words, the others words.
            let words = if region == Region::Depot { next.saturating_mul(2) } else { next };
            let end = words.saturating_add(HEADER).saturating_mul(8);
            self.read(file, self.part(region, HEADER * 8..end))?;
        }
        let length = self.word(at::ABOUT_BYTES) as usize;
        self.read(file, self.part(Region::About, 0..length))
    }

    /// Words that tell one state of the live table from another.
    fn live_state(&self) -> [u64; 3] {
        [at::LIVE_SEQUENCE, at::RETIRED, at::LIVE_TABLE].map(|i| self.word(i))
    }
}

/// A black box that nobody writes any more.
pub(crate) fn at_rest(file: &File) -> Result<Image, Trouble> {
    let mut image = Image::begin(file)?;
    image.open()?;
    image.read_live(file)?;
    image.read_ring(file)?;
    image.read_rest(file)?;
    Ok(image)
}

/// A black box that is being written, and its ring read a second time.
pub(crate) fn alive(file: &File) -> Result<[Image; 2], Trouble> {
    let end = Instant::now() + PATIENCE;
    loop {
        match look(file) {
            Ok(Some(both)) => return Ok(both),
            // It is just being made.
            Ok(None) | Err(Trouble::Open(OpenError::NotReady)) if Instant::now() < end => {}
            Err(e) => return Err(e),
            Ok(None) => {
                let advice = "it allocates faster than its black box can be read: try again, or let \
                              it write snapshots itself (MEMTRACE_SIGNAL=USR2)";
                return Err(Trouble::Other(advice.to_owned()));
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn look(file: &File) -> Result<Option<[Image; 2]>, Trouble> {
    let mut image = Image::begin(file)?;
    image.open()?;
    let before = image.live_state();
    if before[0] % 2 != 0 {
        return Ok(None);
    }
    image.read_live(file)?;
    image.header(file)?;
    if image.live_state() != before {
        return Ok(None);
    }
    image.read_ring(file)?;
    let mut again = Image::begin(file)?;
    // The places are those of the first reading.
    again.bytes[..HEADER_BYTES].copy_from_slice(&image.bytes[..HEADER_BYTES]);
    again.read_ring(file)?;
    image.read_rest(file)?;
    let last = Image::begin(file)?;
    let room = image.word(at::RETIRED).saturating_add(image.word(at::RING_CAPACITY));
    Ok((last.word(at::HEAD) <= room).then_some([image, again]))
}

/// The snapshot in what was read.
pub(crate) fn snapshot(
    image: &Image,
    again: Option<&Image>,
    reason: &str,
) -> Result<Snapshot, String> {
    let written_us = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |t| t.as_micros() as u64);
    let read = || {
        let again = again.map(Image::open).transpose()?;
        memtrace_naming::snapshot(&image.open()?, again.as_ref(), reason, written_us)
    };
    read().map_err(|e: OpenError| e.to_string())
}

const _: () = assert!(HEADER_WORDS > at::REGIONS + 2 * REGIONS);

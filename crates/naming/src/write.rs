//! From a recording to a snapshot file, in one pass and in little memory.
//!
//! What is slow comes first: the names of functions are read from the libraries before the live table is copied. Then
//! the ring is read from that table's ticket on, a batch at a time, and each event's entries go straight into the file;
//! the state at the end, which the reader of the file sees first, is written last ([`memtrace_format::stream`]).
//!
//! A program that fills its whole ring in less time than this needs may overwrite what has not been read. Then
//! everything begins again, with half of the history that is left, and if need be with half of that: the state is exact
//! whatever happens, and what the history lacks at its beginning is counted.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use memtrace_format::event::Event;
use memtrace_format::recording::Recording;
use memtrace_format::replay::{self, ApiName, State};
use memtrace_format::snapshot::Snapshot;
use memtrace_format::stacks::Words;
use memtrace_format::stream::Stream;

use crate::names::Namer;

/// Events that are read at a time.
const BATCH: u64 = 1024;
/// After so many beginnings the history is left out.
const TRIES: u32 = 12;

/// How a snapshot came about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// It shows the state before this ticket.
    pub events: u64,
    /// Its history begins at this ticket.
    pub first: u64,
    /// Events of the history.
    pub kept: u64,
    /// Events of the history that were claimed and not published.
    pub unpublished: u64,
    /// Events that were there when the writing began, and overwritten when their turn came.
    pub overwritten: u64,
    /// By how many events the state is later than the one that was asked for.
    pub late: u64,
    /// Entries in all traces.
    pub entries: u64,
}

impl Counts {
    /// For a snapshot's `memtrace` key.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "events": self.events,
            "events_kept": self.kept,
            "events_retired": self.first,
            "unpublished": self.unpublished,
            "overwritten": self.overwritten,
            "late": self.late,
        })
    }
}

/// Writes the state before ticket `to`, or the present one if that is lower, and the history until then. `open` opens
/// the file, empty; it may be called again. `rest` adds to what is known at the end what only the caller knows.
///
/// # Errors
/// Those of the recording and of the file.
pub fn write<W: Words, O: Write>(
    recording: &mut dyn Recording,
    to: u64,
    namer: &mut Namer<W>,
    api: ApiName<'_>,
    open: &mut dyn FnMut() -> io::Result<Stream<O>>,
    rest: &mut dyn FnMut(&mut Snapshot, &Counts, &Namer<W>),
) -> io::Result<Counts> {
    let to = to.min(recording.written()?);
    namer.read_libraries();
    let mut oldest = None;
    for tries in 0.. {
        let (mut state, from) = recording.live()?;
        let oldest = *oldest.get_or_insert(from);
        let end = if tries < TRIES { to.max(from) } else { from };
        let first = end - ((end - from) >> tries);
        let mut counts = Counts {
            events: end,
            first,
            overwritten: first - oldest,
            late: end.saturating_sub(to),
            ..Counts::default()
        };
        let mut stream = open()?;
        if history(recording, &mut state, from, api, namer, &mut stream, &mut counts)? {
            let mut snapshot = replay::assemble(&state, &mut |id| namer.stack(id));
            rest(&mut snapshot, &counts, namer);
            stream.finish(&snapshot, namer.tables())?;
            return Ok(counts);
        }
    }
    unreachable!("a history without events is never overwritten")
}

/// Plays the events from `from` on and writes the entries of those from `counts.first` on. `false`: some were overwritten.
fn history<W: Words, O: Write>(
    recording: &mut dyn Recording,
    state: &mut State,
    from: u64,
    api: ApiName<'_>,
    namer: &mut Namer<W>,
    stream: &mut Stream<O>,
    counts: &mut Counts,
) -> io::Result<bool> {
    let mut written = Ok(());
    let mut entries = 0;
    let mut sink = |place, mut entry: memtrace_format::snapshot::TraceEntry| {
        if written.is_ok() {
            entries += 1;
            entry.frames = entry.frames.and_then(|id| namer.stack(id));
            written = stream.entry(place, entry, namer.tables());
        }
    };
    let mut events: Vec<Event> = Vec::with_capacity(BATCH as usize);
    let mut at = from;
    while at < counts.events {
        let before = at < counts.first;
        let next = at.saturating_add(BATCH).min(if before { counts.first } else { counts.events });
        events.clear();
        let Some(unpublished) = recording.read(at, next, &mut events)? else { return Ok(false) };
        for event in &events {
            if before {
                state.apply(event, api, &mut |_, _| ());
            } else {
                state.apply(event, api, &mut sink);
            }
        }
        if !before {
            counts.kept += events.len() as u64;
            counts.unpublished += unpublished;
        }
        at = next;
    }
    state.finish(&mut sink);
    counts.entries = entries;
    written.map(|()| true)
}

/// A pickle in this file, which is emptied.
///
/// # Errors
/// The system's.
pub fn pickle_file(path: &Path) -> io::Result<Stream<File>> {
    Stream::pickle(OpenOptions::new().write(true).create(true).truncate(true).open(path)?)
}

/// JSON in this file, which is emptied. While it is written, what is scratch lies beside it without a name.
///
/// # Errors
/// The system's.
pub fn json_file(path: &Path) -> io::Result<Stream<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(".trace");
    let beside = PathBuf::from(beside);
    Ok(Stream::json(file, Box::new(move || scratch(&beside))))
}

fn scratch(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

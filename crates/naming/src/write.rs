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

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::event::{Kind, Layer, What};
    use memtrace_format::snapshot::TraceEntry;
    use proptest::prelude::*;
    use std::cell::RefCell;

    use crate::names::Splice;

    /// A ring of `capacity` slots whose program writes `pace` events for each batch that is read.
    struct Tape {
        events: Vec<Event>,
        capacity: u64,
        head: u64,
        pace: u64,
    }

    impl Tape {
        fn retired(&self) -> u64 {
            self.head.saturating_sub(self.capacity)
        }
    }

    impl Recording for Tape {
        fn written(&mut self) -> io::Result<u64> {
            Ok(self.head)
        }

        fn live(&mut self) -> io::Result<(State, u64)> {
            Ok((state(&self.events[..self.retired() as usize]), self.retired()))
        }

        fn read(&mut self, from: u64, to: u64, events: &mut Vec<Event>) -> io::Result<Option<u64>> {
            self.head = (self.head + self.pace).min(self.events.len() as u64);
            if self.retired() > from {
                return Ok(None);
            }
            events.extend(&self.events[from as usize..to as usize]);
            Ok(Some(0))
        }
    }

    fn state(events: &[Event]) -> State {
        let mut state = State::default();
        for event in events {
            state.apply(event, &|_| "", &mut |_, _| ());
        }
        state
    }

    /// A program that allocates and frees on two devices, its blocks in turn.
    fn program(n: u64) -> Vec<Event> {
        let event = |i: u64| Event {
            kind: if i % 128 < 64 { Kind::Alloc } else { Kind::FreeRequested },
            layer: Layer::Framework,
            device: (i % 2) as i8,
            flags: 0,
            api: 0,
            what: What::Device,
            time_ns: i * 1000,
            addr: 512 + i % 64 * 512 + i % 2 * (1 << 30),
            size: 100 + i % 7,
            extra: 512,
            stream: 0,
            stack: 0,
            thread: 1,
        };
        (0..n).map(event).collect()
    }

    /// The snapshot whose history is events `first..to`, made in the simplest way.
    fn expected(events: &[Event], first: u64, to: u64) -> Snapshot {
        let mut state = state(&events[..first as usize]);
        let mut traces: Vec<Vec<TraceEntry>> = vec![Vec::new(); 2];
        let mut sink = |place, entry| match place {
            replay::Place::Device(d) => traces[d].push(entry),
            replay::Place::Host => unreachable!("nothing is on the host"),
        };
        for event in &events[first as usize..to as usize] {
            state.apply(event, &|_| "", &mut sink);
        }
        state.finish(&mut sink);
        let mut whole = replay::assemble(&state, &mut |_| None);
        traces.truncate(whole.device_traces.len());
        whole.device_traces = traces;
        whole
    }

    fn written(tape: &mut Tape, to: u64) -> (Counts, Snapshot) {
        struct Shared<'a>(&'a RefCell<Vec<u8>>);
        impl Write for Shared<'_> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.borrow_mut().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let nothing: &[u64] = &[];
        let mut namer = Namer::new(nothing, nothing, nothing, Splice::PyTorch);
        let out = RefCell::new(Vec::new());
        let mut open = || {
            out.borrow_mut().clear();
            Stream::pickle(Shared(&out))
        };
        let counts = write(tape, to, &mut namer, &|_| "", &mut open, &mut |_, _, _| ());
        let snapshot = Snapshot::read(&out.borrow()).expect("a snapshot");
        (counts.expect("written"), snapshot)
    }

    /// Anything but what only the caller knows.
    fn same(found: &Snapshot, expect: &Snapshot) {
        assert_eq!(found.segments, expect.segments);
        assert_eq!(found.device_traces, expect.device_traces);
        assert_eq!(found.memtrace, expect.memtrace);
    }

    #[test]
    fn a_program_that_waits_loses_nothing() {
        let events = program(10_000);
        let mut tape = Tape { events: events.clone(), capacity: 8192, head: 10_000, pace: 0 };
        let (counts, found) = written(&mut tape, u64::MAX);
        let first = 10_000 - 8192;
        let expect = Counts {
            events: 10_000,
            first,
            kept: 8192,
            entries: counts.entries,
            ..Counts::default()
        };
        assert_eq!(counts, expect);
        let whole = expected(&events, first, 10_000);
        assert_eq!(
            counts.entries as usize,
            whole.device_traces.iter().map(Vec::len).sum::<usize>()
        );
        same(&found, &whole);
    }

    #[test]
    fn a_program_as_fast_as_the_reader_loses_nothing() {
        let events = program(60_000);
        let mut tape = Tape { events: events.clone(), capacity: 8192, head: 7000, pace: BATCH };
        let (counts, found) = written(&mut tape, u64::MAX);
        assert_eq!((counts.events, counts.first, counts.overwritten), (7000, 0, 0));
        assert!(tape.head > 13_000, "it went on meanwhile");
        same(&found, &expected(&events, 0, 7000));
    }

    #[test]
    fn a_state_that_has_passed_is_said_to_be_later() {
        let events = program(10_000);
        let mut tape = Tape { events: events.clone(), capacity: 1024, head: 10_000, pace: 0 };
        let (counts, found) = written(&mut tape, 5000);
        let retired = 10_000 - 1024;
        assert_eq!((counts.events, counts.first, counts.kept), (retired, retired, 0));
        assert_eq!(counts.late, retired - 5000);
        same(&found, &expected(&events, retired, retired));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// However fast the program is: an exact state, a history without holes, and every missing event counted.
        #[test]
        fn a_program_faster_than_the_reader_loses_only_the_beginning(
            capacity in 10_u32..14,
            head in 0_u64..20_000,
            pace in 0_u64..20_000,
            before in 0_u64..2000,
        ) {
            let events = program(200_000);
            let capacity = 1 << capacity;
            let mut tape = Tape { events: events.clone(), capacity, head, pace };
            let oldest = tape.retired();
            let to = head.saturating_sub(before);
            let (counts, found) = written(&mut tape, to);
            prop_assert_eq!(counts.events, to + counts.late);
            prop_assert_eq!(counts.first, oldest + counts.overwritten);
            prop_assert_eq!(counts.events, counts.first + counts.kept + counts.unpublished);
            same(&found, &expected(&events, counts.first, counts.events));
        }
    }
}

//! From a recording to a snapshot file, in one pass and in little memory.
//!
//! What is slow comes first: the names of functions are read from the libraries before the live
//! table is copied. Then the ring is read from that table's ticket on, a batch at a time, and each
//! event's entries go straight into the file. The state at the end, which the reader of the file
//! sees first, is written last ([`memtrace_format::stream`]).
//!
//! A program that makes events faster than they are written here would overwrite what has not been
//! read. When it gains on the reader, the rest is first copied as it is into a scratch file. That
//! is several times faster than any program makes events. A reader that is overtaken all the same,
//! because it did not get a processor for that long, begins again and copies at once. So the state
//! is exact whatever happens, and what the history lacks at its beginning is counted.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::ops::Range;

use memtrace_files::NewFile;
use memtrace_format::event::{Event, NO_LABEL, WORDS};
use memtrace_format::json;
use memtrace_format::key::{Counters, Memtrace};
use memtrace_format::snapshot::{Snapshot, TraceEntry};
use memtrace_format::stacks::Words;
use memtrace_format::stream::Stream;
use memtrace_state::recording::{self, Recording};
use memtrace_state::{ApiName, State, assemble};
use memtrace_symbols::Namer;

use crate::accounts::Accounts;
use crate::end;
use crate::labels::Labels;
use crate::owner::Names;

/// Events that are read at a time.
const BATCH: u64 = 1024;
/// Beginnings; long before, a program so fast has retired all that was asked for,
/// and there is no history left to read.
const TRIES: u32 = 10_000;
/// Beginnings after which the present is no longer what it is then.
const NEW_PRESENTS: u32 = 8;
/// Bytes of an event in the scratch file.
const EVENT_BYTES: usize = (WORDS - 1) * 8;

/// How a snapshot is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// As a pickle.
    Pickle,
    /// As JSON.
    Json(json::Stacks),
}

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
    /// For a snapshot's `memtrace` key, beside what is in it already.
    pub fn fill(&self, counters: &mut Counters) {
        counters.events = self.events;
        counters.events_kept = self.kept;
        counters.events_retired = self.first;
        counters.unpublished = self.unpublished;
        counters.overwritten = self.overwritten;
        counters.late = self.late;
    }
}

/// The moment that a snapshot shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The state before this ticket, or the present one if that is lower.
    Ticket(u64),
    /// Of a process that ends or has ended. It is the state in which Python began to end, if that
    /// is still in the history. Else it is the last one.
    End,
}

/// Writes the state of a moment, and the history until then, into a new file. Scratch files are
/// beside it, without a name. `rest` puts the `memtrace` key into the snapshot: what was worked out
/// here, and what only the caller knows.
///
/// # Errors
/// Those of the recording and of the file.
pub fn write<W: Words>(
    recording: &mut dyn Recording,
    moment: Moment,
    namer: &mut Namer<W>,
    api: ApiName<'_>,
    (file, encoding): (&NewFile, Encoding),
    rest: &mut dyn FnMut(&mut Snapshot, Memtrace, &Namer<W>),
) -> io::Result<Counts> {
    namer.read_libraries();
    let ending = match moment {
        Moment::End => {
            let mut known = HashMap::new();
            let mut is_of_end =
                |stack| *known.entry(stack).or_insert_with(|| namer.is_of_python_s_end(stack));
            recording::ending(recording, &mut is_of_end)?
        }
        Moment::Ticket(_) => None,
    };
    let namer = &mut Names::of(namer);
    let (mut oldest, mut present) = (None, 0);
    for tries in 0..TRIES {
        let (mut state, first) = recording.live()?;
        let oldest = *oldest.get_or_insert(first);
        // Whoever asks for the present gets that of the last beginning, and with it a ring full of
        // history. But this must not go on for ever.
        if tries < NEW_PRESENTS {
            present = recording.written()?;
        }
        // Where Python's end is longer than the history, the end of the process must do.
        let ending = ending.filter(|ticket| *ticket >= first);
        let to = match (moment, ending) {
            (Moment::Ticket(ticket), _) | (Moment::End, Some(ticket)) => ticket.min(present),
            (Moment::End, None) => present,
        };
        let events = to.max(first);
        let mut counts = Counts {
            events,
            first,
            overwritten: first.saturating_sub(oldest),
            late: events.saturating_sub(to),
            ..Counts::default()
        };
        let source = if tries == 0 {
            let may_lag = Some((recording.written()?.saturating_sub(first), file));
            Source::Ring { recording: &mut *recording, next: first, end: events, may_lag }
        } else if let Some(scratch) = copy_to_scratch(recording, first..events, file)? {
            Source::Scratch(scratch)
        } else {
            continue;
        };
        let mut stream = begin(file, encoding)?;
        let mut accounts = Accounts::new(&state, first > 0, namer);
        let mut labels = Labels::new(&state);
        state.watch();
        let to = (&mut stream, &mut counts, &mut accounts, &mut labels);
        if history(source, &mut state, api, namer, to)? {
            let after = match ending {
                Some(ticket) => end::events_after(recording, ticket..present)?,
                None => Vec::new(),
            };
            end::measured(&after, &mut |event| accounts.note(event, &[], namer));
            let mut snapshot = assemble(&state, &mut |id| namer.stack(id));
            let mut about = *snapshot.memtrace.take().unwrap_or_default();
            counts.fill(about.counters.get_or_insert_default());
            accounts.fill(&mut about, api, namer);
            labels.fill(&mut about, namer);
            snapshot.external_annotations = labels.annotations(namer);
            about.ends = ending.map(|ticket| end::ends(state, ticket, &after, api));
            rest(&mut snapshot, about, namer);
            stream.finish(&snapshot, namer.tables())?;
            return Ok(counts);
        }
    }
    Err(io::Error::other("the ring is overwritten faster than it can be read"))
}

/// Where the events of the history come from.
enum Source<'a> {
    /// The ring itself, from the ticket `next` to `end`. If the program gets ahead by
    /// clearly more than the events that `may_lag` names, which it was ahead by at the
    /// beginning, the rest is put beside the file.
    Ring {
        recording: &'a mut dyn Recording,
        next: u64,
        end: u64,
        may_lag: Option<(u64, &'a NewFile)>,
    },
    /// A copy of it.
    Scratch(ScratchEvents),
}

/// Events in a scratch file.
struct ScratchEvents {
    file: BufReader<File>,
    /// How many are still to be read.
    left: u64,
    /// How many were not published when the others were copied.
    unpublished: u64,
}

/// What a source says.
enum Next {
    /// Some events, and how many are missing among them.
    Batch(u64),
    /// There are no more.
    End,
    /// An event has been overwritten.
    Overtaken,
}

impl Source<'_> {
    /// Changes the ring for a copy of what is left, if the program gains on the
    /// reader. `false`: it was too late for that.
    fn keep_up(&mut self) -> io::Result<bool> {
        let Source::Ring { recording, next, end, may_lag: Some((lag, file)) } = self else {
            return Ok(true);
        };
        if recording.written()?.saturating_sub(*next) <= lag.saturating_add(*lag / 32 + BATCH) {
            return Ok(true);
        }
        let scratch = copy_to_scratch(&mut **recording, *next..*end, file)?;
        Ok(scratch.map(|scratch| *self = Source::Scratch(scratch)).is_some())
    }

    fn next(&mut self, events: &mut Vec<Event>) -> io::Result<Next> {
        match self {
            Source::Ring { next, end, .. } if *next >= *end => Ok(Next::End),
            Source::Ring { recording, next, end, .. } => {
                let to = next.saturating_add(BATCH).min(*end);
                let unpublished = recording.read(*next, to, events)?;
                *next = to;
                Ok(unpublished.map_or(Next::Overtaken, Next::Batch))
            }
            Source::Scratch(ScratchEvents { left: 0, unpublished: 0, .. }) => Ok(Next::End),
            Source::Scratch(ScratchEvents { file, left, unpublished }) => {
                let batch = BATCH.min(*left);
                for _ in 0..batch {
                    let mut bytes = [0; EVENT_BYTES];
                    file.read_exact(&mut bytes)?;
                    let mut words = [0; WORDS - 1];
                    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                        *word = u64::from_le_bytes(*bytes);
                    }
                    events.extend(Event::unpack(words));
                }
                *left -= batch;
                Ok(Next::Batch(std::mem::take(unpublished)))
            }
        }
    }
}

/// Copies the events with these tickets; `None` if one of them has been overwritten.
fn copy_to_scratch(
    recording: &mut dyn Recording,
    tickets: Range<u64>,
    beside: &NewFile,
) -> io::Result<Option<ScratchEvents>> {
    let Range { start: next, end } = tickets;
    let mut ring = Source::Ring { recording, next, end, may_lag: None };
    let mut file = memtrace_files::scratch(beside.folder())?;
    let mut events = Vec::with_capacity(BATCH as usize);
    let mut bytes = Vec::with_capacity(BATCH as usize * EVENT_BYTES);
    let (mut left, mut unpublished) = (0, 0);
    loop {
        match ring.next(&mut events)? {
            Next::Overtaken => return Ok(None),
            Next::End => break,
            Next::Batch(missing) => unpublished += missing,
        }
        left += events.len() as u64;
        bytes.clear();
        bytes.extend(events.drain(..).flat_map(|e| e.pack()).flat_map(u64::to_le_bytes));
        file.write_all(&bytes)?;
    }
    file.rewind()?;
    Ok(Some(ScratchEvents { file: BufReader::with_capacity(1 << 18, file), left, unpublished }))
}

/// Plays the events and writes their entries. `false`: some were overwritten.
fn history<W: Words>(
    mut source: Source<'_>,
    state: &mut State,
    api: ApiName<'_>,
    namer: &mut Names<'_, W>,
    (stream, counts, accounts, labels): (
        &mut Stream<File>,
        &mut Counts,
        &mut Accounts,
        &mut Labels,
    ),
) -> io::Result<bool> {
    let mut written = Ok(());
    let mut entries = 0;
    let mut sink = |namer: &mut Names<'_, W>, label, place, mut entry: TraceEntry| {
        if written.is_ok() {
            entries += 1;
            let stack = entry.frames.take();
            let label = namer.label(label);
            if let Some(text) = entry.user_metadata.as_mut() {
                // The state has said which call it was, if it was none of PyTorch's allocator.
                let of_driver = !text.is_empty();
                if of_driver && let Some(owner) = stack.and_then(|id| namer.owner(id)) {
                    *text = format!("{text} by {owner}").into();
                }
                match label {
                    Some(label) if of_driver => *text = format!("{text} in {label}").into(),
                    Some(label) => *text = label.to_string().into(),
                    None => {}
                }
            }
            entry.frames = stack.and_then(|id| namer.stack(id));
            written = stream.entry(place, entry, namer.tables());
        }
    };
    let mut events = Vec::with_capacity(BATCH as usize);
    loop {
        if !source.keep_up()? {
            return Ok(false);
        }
        match source.next(&mut events)? {
            Next::Overtaken => return Ok(false),
            Next::End => break,
            Next::Batch(unpublished) => counts.unpublished += unpublished,
        }
        counts.kept += events.len() as u64;
        for event in events.drain(..) {
            let label = event.label;
            state.apply(&event, api, &mut |place, entry| sink(namer, label, place, entry));
            let moves = state.take_moves();
            accounts.note(&event, &moves, namer);
            labels.note(&event, &moves);
        }
    }
    state.finish(&mut |place, entry| sink(namer, NO_LABEL, place, entry));
    counts.entries = entries;
    written.map(|()| true)
}

/// From the file's beginning, whatever is in it.
fn begin(new: &NewFile, encoding: Encoding) -> io::Result<Stream<File>> {
    let mut file = new.file().try_clone()?;
    file.set_len(0)?;
    file.rewind()?;
    match encoding {
        Encoding::Pickle => Stream::pickle(file),
        Encoding::Json(stacks) => {
            let folder = new.folder().to_owned();
            Ok(Stream::json(file, stacks, Box::new(move || memtrace_files::scratch(&folder))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_files::Readers;
    use memtrace_format::event::{BlockEvent, Kind};
    use memtrace_format::snapshot::Trace;
    use memtrace_symbols::Splice;
    use proptest::prelude::*;

    /// A ring of `capacity` slots whose program writes `pace` events for each
    /// batch that is read, until it rests.
    struct FakeRing {
        events: Vec<Event>,
        capacity: u64,
        head: u64,
        pace: u64,
        /// Batches until then.
        rest_after: u64,
        /// Events that it writes while a batch is turned into entries, after
        /// which the reader looks how far it is.
        meanwhile: u64,
    }

    impl FakeRing {
        fn of(events: &[Event], capacity: u64, head: u64, pace: u64) -> FakeRing {
            FakeRing {
                events: events.to_vec(),
                capacity,
                head,
                pace,
                rest_after: u64::MAX,
                meanwhile: 0,
            }
        }

        fn retired(&self) -> u64 {
            self.head.saturating_sub(self.capacity)
        }
    }

    impl Recording for FakeRing {
        fn written(&mut self) -> io::Result<u64> {
            self.head = (self.head + self.meanwhile).min(self.events.len() as u64);
            Ok(self.head)
        }

        fn live(&mut self) -> io::Result<(State, u64)> {
            Ok((state(&self.events[..self.retired() as usize]), self.retired()))
        }

        fn read(&mut self, from: u64, to: u64, events: &mut Vec<Event>) -> io::Result<Option<u64>> {
            if self.rest_after > 0 {
                self.rest_after -= 1;
                self.head = (self.head + self.pace).min(self.events.len() as u64);
            }
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
        let kind = |i| if i % 128 < 64 { Kind::Alloc } else { Kind::FreeRequested };
        let event = |i: u64| Event {
            device: (i % 2) as i8,
            time_ns: i * 1000,
            thread: 1,
            ..BlockEvent {
                addr: 512 + i % 64 * 512 + i % 2 * (1 << 30),
                asked: 100 + i % 7,
                size: 512,
                stream: 0,
            }
            .event(kind(i))
        };
        (0..n).map(event).collect()
    }

    /// The snapshot whose history is events `first..to`, made in the simplest way.
    fn expected(events: &[Event], first: u64, to: u64) -> Snapshot {
        let mut state = state(&events[..first as usize]);
        let mut traces: Vec<Vec<TraceEntry>> = vec![Vec::new(); 2];
        let mut sink = |place, entry| match place {
            Trace::Device(d) => traces[d].push(entry),
            Trace::Host => unreachable!("nothing is on the host"),
        };
        for event in &events[first as usize..to as usize] {
            state.apply(event, &|_| "", &mut sink);
        }
        state.finish(&mut sink);
        let mut whole = assemble(&state, &mut |_| None);
        traces.truncate(whole.device_traces.len());
        whole.device_traces = traces;
        whole
    }

    fn written(ring: &mut FakeRing, moment: Moment) -> (Counts, Snapshot) {
        let folder = tempfile::tempdir().expect("a folder");
        let new = NewFile::within(folder.path(), Readers::Owner).expect("made");
        let nothing: &[u64] = &[];
        let mut namer = Namer::new(nothing, nothing, nothing, Splice::PyTorch);
        let target = (&new, Encoding::Pickle);
        let counts = write(ring, moment, &mut namer, &|_| "", target, &mut |snapshot, about, _| {
            snapshot.memtrace = Some(Box::new(about));
        });
        let files = folder.path().read_dir().expect("readable").count();
        assert_eq!(files, 1, "scratch is left");
        let snapshot =
            Snapshot::read(&std::fs::read(new.path()).expect("a file")).expect("a snapshot");
        (counts.expect("written"), snapshot)
    }

    /// Anything but what only the caller knows, and what the accounts add.
    fn same(found: &Snapshot, expect: &Snapshot) {
        assert_eq!(found.segments, expect.segments);
        assert_eq!(found.device_traces, expect.device_traces);
        let about = |s: &Snapshot| s.memtrace.clone().expect("the key");
        let (found, expect) = (about(found), about(expect));
        assert_eq!(found.ledger, expect.ledger);
        let anomalies = |about: &Memtrace| about.counters.as_ref().map(|c| c.anomalies);
        assert_eq!(anomalies(&found), anomalies(&expect));
    }

    #[test]
    fn a_program_that_waits_loses_nothing() {
        let events = program(10_000);
        let mut ring = FakeRing::of(&events, 8192, 10_000, 0);
        let (counts, found) = written(&mut ring, Moment::Ticket(u64::MAX));
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
        let mut ring = FakeRing::of(&events, 8192, 7000, BATCH);
        let (counts, found) = written(&mut ring, Moment::Ticket(u64::MAX));
        assert_eq!((counts.events, counts.first, counts.overwritten), (7000, 0, 0));
        assert!(ring.head > 13_000, "it went on meanwhile");
        same(&found, &expected(&events, 0, 7000));
    }

    #[test]
    fn what_the_second_beginning_finds_is_kept() {
        let events = program(20_000);
        let mut ring = FakeRing { rest_after: 1, ..FakeRing::of(&events, 8192, 8192, 2000) };
        let (counts, found) = written(&mut ring, Moment::Ticket(u64::MAX));
        assert_eq!((counts.events, counts.first, counts.overwritten), (10_192, 2000, 2000));
        assert_eq!((counts.kept, counts.late), (8192, 0));
        same(&found, &expected(&events, 2000, 10_192));
    }

    #[test]
    fn a_program_twice_as_fast_as_the_reader_loses_nothing() {
        let events = program(60_000);
        let mut ring =
            FakeRing { meanwhile: 2 * BATCH, ..FakeRing::of(&events, 1 << 14, 10_000, 128) };
        let (counts, found) = written(&mut ring, Moment::Ticket(u64::MAX));
        assert_eq!((counts.first, counts.overwritten, counts.late), (0, 0, 0));
        assert_eq!(counts.events, 10_000 + 2 * BATCH);
        same(&found, &expected(&events, 0, counts.events));
    }

    #[test]
    fn a_state_that_has_passed_is_said_to_be_later() {
        let events = program(10_000);
        let mut ring = FakeRing::of(&events, 1024, 10_000, 0);
        let (counts, found) = written(&mut ring, Moment::Ticket(5000));
        let retired = 10_000 - 1024;
        assert_eq!((counts.events, counts.first, counts.kept), (retired, retired, 0));
        assert_eq!(counts.late, retired - 5000);
        same(&found, &expected(&events, retired, retired));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// However fast the program is: an exact state, a history without
        /// holes, and every missing event counted.
        #[test]
        fn a_program_faster_than_the_reader_loses_only_the_beginning(
            capacity in 10_u32..14,
            head in 0_u64..20_000,
            pace in 0_u64..20_000,
            before in 0_u64..2000,
            rest_after in 0_u64..60,
        ) {
            let events = program(200_000);
            let capacity = 1 << capacity;
            let mut ring = FakeRing { rest_after, ..FakeRing::of(&events, capacity, head, pace) };
            let oldest = ring.retired();
            let to = head.saturating_sub(before);
            let (counts, found) = written(&mut ring, Moment::Ticket(to));
            prop_assert_eq!(counts.events, to + counts.late);
            prop_assert_eq!(counts.first, oldest + counts.overwritten);
            prop_assert_eq!(counts.events, counts.first + counts.kept + counts.unpublished);
            same(&found, &expected(&events, counts.first, counts.events));
        }
    }
}

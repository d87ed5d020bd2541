//! Will PyTorch's viewers show this file, and does it agree with itself?
//!
//! The viewers say nothing useful when they don't like a file: a page stays blank, an
//! assertion names a line of somebody else's script. Each rule here is one of theirs, or one
//! without which the picture is wrong. Blocks fill their segment, sums are sums, addresses are
//! in order and integers fit. And the history can be taken back from the segments
//! ([`crate::history`]). What they survive but the user should know is a warning or a note: a
//! history that begins late is not damage.

use std::fmt;

use memtrace_format::pickle::Facts;
use memtrace_format::snapshot::{
    Action, Block, BlockState, NO_LINE, Other, Place, Segment, Snapshot, TraceEntry,
};
use memtrace_format::{Part, ReadError};

use crate::history::{self, rewind};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing wrong; worth knowing.
    Note,
    /// A viewer may get into trouble, or a number is doubtful.
    Warning,
    /// A viewer fails or shows something false.
    Error,
}

impl Level {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Level::Note => "note",
            Level::Warning => "warning",
            Level::Error => "error",
        }
    }
}

/// Something about a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub level: Level,
    /// Where: `segments[3].blocks[0].size`; empty for the file as a whole.
    pub place: String,
    /// What.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.place.is_empty() { "" } else { ": " };
        write!(f, "{}: {}{separator}{}", self.level.name(), self.place, self.what)
    }
}

/// Problems of one kind that are listed one by one. Of further ones only the number is said.
const LISTED: usize = 10;

/// Of so many things in a file that are no snapshots each is named.
const UNREAD: usize = 10;

/// The viewer spreads a batch as arguments of a call. A thousand is what Python writes; at about a
/// hundred thousand a browser's stack is full.
const BATCH_OF_PYTHON: usize = 1000;
const BATCH_TOO_LARGE: usize = 50_000;

/// Where users report that the viewer gets slow, and where a browser dies.
const SLOW_BYTES: usize = 100 << 20;
const DEADLY_BYTES: usize = 900 << 20;

/// The viewer's list of events shows no more, a browser's page ends there.
const LISTED_EVENTS: usize = 600_000;

/// Checks a file: how it is written and what it says.
pub fn file(bytes: &[u8]) -> Vec<Problem> {
    parts(bytes.len(), &Snapshot::read_all(bytes, usize::MAX))
}

/// As [`file()`], for a file of this length in which this was found.
pub fn parts(length: usize, parts: &Result<Vec<Part>, ReadError>) -> Vec<Problem> {
    let mut found = Findings::default();
    if length >= SLOW_BYTES {
        let deadly = length >= DEADLY_BYTES;
        let does = if deadly { "fails" } else { "is slow" };
        found.warning("", format!("{} MiB: the viewer {does} on a file this large", length >> 20));
    }
    match parts {
        Ok(parts) => found.parts(length, parts),
        Err(error) => found.unread(error),
    }
    found.sorted()
}

/// Checks what a snapshot says.
pub fn check(snapshot: &Snapshot) -> Vec<Problem> {
    let mut found = Findings::default();
    found.snapshot(snapshot);
    found.sorted()
}

fn is_active(block: &Block) -> bool {
    block.state != BlockState::Inactive
}

fn add_up(segment: &Segment, counts: impl Fn(&Block) -> bool, size: impl Fn(&Block) -> u64) -> u64 {
    let sizes = segment.blocks.iter().filter(|b| counts(b)).map(size);
    sizes.fold(0, u64::saturating_add)
}

#[derive(Default)]
struct Findings {
    problems: Vec<Problem>,
}

impl Findings {
    fn error(&mut self, place: impl Into<String>, what: impl Into<String>) {
        self.add(Level::Error, place.into(), what.into());
    }

    fn warning(&mut self, place: impl Into<String>, what: impl Into<String>) {
        self.add(Level::Warning, place.into(), what.into());
    }

    fn note(&mut self, place: impl Into<String>, what: impl Into<String>) {
        self.add(Level::Note, place.into(), what.into());
    }

    fn add(&mut self, level: Level, place: String, what: String) {
        self.problems.push(Problem { level, place, what });
    }

    /// The worst first, otherwise in the order of the file.
    fn sorted(mut self) -> Vec<Problem> {
        self.problems.sort_by_key(|p| std::cmp::Reverse(p.level));
        self.problems
    }

    fn pickle(&mut self, facts: &Facts) {
        if facts.protocol > 4 {
            let what = format!(
                "pickle protocol {}; the viewer reads 2 to 4 (write with pickle.dump(…, protocol=4))",
                facts.protocol
            );
            self.error("", what);
        }
        let (items, at) = facts.largest_batch;
        if items > BATCH_OF_PYTHON {
            let what = format!(
                "byte {at}: {items} items in one APPENDS; the viewer fails on many, 1000 are safe"
            );
            let level = if items > BATCH_TOO_LARGE { Level::Error } else { Level::Warning };
            self.add(level, String::new(), what);
        }
        if let Some((opcode, at)) = facts.unknown_to_viewer {
            self.error(
                "",
                format!("byte {at}: the viewer does not know pickle opcode 0x{opcode:02x}"),
            );
        }
        if facts.mixed_memo {
            self.error("", "MEMOIZE and BINPUT are mixed; the viewer numbers them apart");
        }
    }

    fn parts(&mut self, length: usize, parts: &[Part]) {
        let facts: Vec<&Facts> = parts.iter().filter_map(|part| part.facts.as_ref()).collect();
        for facts in &facts {
            self.pickle(facts);
        }
        let pickled: usize = facts.iter().map(|facts| facts.length).sum();
        // One that is cut off has no facts.
        let is_cut =
            parts.last().is_some_and(|last| last.snapshot.is_err() && last.facts.is_none())
                && pickled < length;
        if pickled > 0 && pickled < length && !is_cut {
            self.warning(
                "",
                format!("{} bytes follow the pickle, which nobody reads", length - pickled),
            );
        }
        if let [one] = parts
            && one.key.is_none()
        {
            return self.part(one);
        }
        let shows = if facts.len() + usize::from(is_cut) == parts.len() {
            "only the first"
        } else {
            "none"
        };
        let sound = parts.iter().filter(|part| part.snapshot.is_ok()).count();
        let what = match parts.len() {
            1 => "a snapshot inside of another value, where the viewer does not look: write it into a file of its own"
                .to_owned(),
            n if n > sound => format!(
                "{n} things in one file of which {sound} can be read as snapshots, and the viewer shows {shows}: write \
                 each into a file of its own"
            ),
            n => format!(
                "{n} snapshots in one file, of which the viewer shows {shows}: write each into a file of its own"
            ),
        };
        self.error("", what);
        let mut unread = 0;
        for (i, part) in parts.iter().enumerate() {
            unread += usize::from(part.snapshot.is_err());
            if part.snapshot.is_err() && unread > UNREAD {
                continue;
            }
            let before = self.problems.len();
            let key = part.key.as_ref().map_or_else(String::new, |key| format!(" (key {key})"));
            self.part(part);
            for problem in &mut self.problems[before..] {
                let dot = if problem.place.is_empty() { "" } else { ", " };
                problem.place = format!("snapshot {}{key}{dot}{}", i + 1, problem.place);
            }
        }
        if unread > UNREAD {
            self.error("", format!("and {} more that are no snapshots", unread - UNREAD));
        }
    }

    fn part(&mut self, part: &Part) {
        if part.has_tables {
            let what = "stacks are shared, which the viewer does not know: `memtrace symbolize --expand --out FILE` \
                        writes a file with every stack spelled out";
            self.error("stacks", what);
        }
        match &part.snapshot {
            Ok(snapshot) => self.snapshot(snapshot),
            Err(error) => self.unread(error),
        }
    }

    fn unread(&mut self, error: &ReadError) {
        match error {
            ReadError::Shape { place, what } => self.error(place, what),
            error => self.error("", error.to_string()),
        }
    }

    fn snapshot(&mut self, snapshot: &Snapshot) {
        self.segments(snapshot);
        self.host(snapshot);
        self.frames(snapshot);
        let mut actions = Vec::new();
        for (d, trace) in snapshot.device_traces.iter().enumerate() {
            self.trace(&format!("device_traces[{d}]"), trace, &mut actions);
            self.history(snapshot, d);
        }
        self.trace("host_traces", &snapshot.host_traces, &mut actions);
        for action in actions {
            self.note("", format!("action {action:?} is not one that the viewer draws"));
        }
        self.categories(&snapshot.other);
        let entries: usize = snapshot.device_traces.iter().map(Vec::len).sum();
        if entries == 0 {
            self.note("device_traces", "no history: the viewer can show the segments only");
        } else if entries > LISTED_EVENTS {
            let what =
                format!("{entries} entries; the viewer's list ends at about {LISTED_EVENTS}");
            self.warning("device_traces", what);
        }
        if snapshot.device_traces.iter().flatten().any(|e| e.time_us.is_none()) {
            self.note("device_traces", "entries without a time (PyTorch before 2.2)");
        }
    }

    fn segments(&mut self, snapshot: &Snapshot) {
        let devices = snapshot.device_traces.len();
        let mut before: Option<(usize, &Segment)> = None;
        for (i, segment) in snapshot.segments.iter().enumerate() {
            let place = format!("segments[{i}]");
            let device = segment.device;
            if usize::try_from(device).is_err() || (devices > 0 && device as usize >= devices) {
                let what = format!("{device}, but there are traces of {devices} devices");
                self.error(format!("{place}.device"), what);
            }
            if let Some((j, last)) = before.filter(|(_, last)| last.device == device) {
                if last.address > segment.address {
                    let what = format!("{:#x}, below that of segments[{j}]", segment.address);
                    self.error(format!("{place}.address"), what);
                } else if last.address.saturating_add(last.total_size) > segment.address {
                    let what = format!("{:#x}, inside segments[{j}]", segment.address);
                    self.error(format!("{place}.address"), what);
                }
            } else if let Some((j, last)) = before.filter(|(_, last)| last.device > device) {
                let what = format!("{device}, after device {} in segments[{j}]", last.device);
                self.error(format!("{place}.device"), what);
            }
            before = Some((i, segment));
            self.segment(&place, segment);
            self.requested(&place, segment);
        }
    }

    fn host(&mut self, snapshot: &Snapshot) {
        for (i, segment) in snapshot.host_segments.iter().enumerate() {
            let place = format!("host_segments[{i}]");
            if segment.device != -1 {
                self.error(format!("{place}.device"), format!("{}, not -1", segment.device));
            }
            self.segment(&place, segment);
        }
    }

    fn segment(&mut self, place: &str, segment: &Segment) {
        for (key, n) in [
            ("address", segment.address),
            ("stream", segment.stream),
            ("requested_size", segment.requested_size),
        ] {
            self.fits(|| format!("{place}.{key}"), n);
        }
        let mut at = segment.address;
        for (j, block) in segment.blocks.iter().enumerate() {
            self.block(|| format!("{place}.blocks[{j}]"), block, at);
            at = block.address.saturating_add(block.size);
        }
        let sum = |counts: fn(&Block) -> bool| add_up(segment, counts, |b| b.size);
        let allocated = |b: &Block| b.state == BlockState::ActiveAllocated;
        for (key, is, should, of) in [
            ("total_size", segment.total_size, sum(|_| true), "blocks"),
            ("allocated_size", segment.allocated_size, sum(allocated), "allocated blocks"),
            ("active_size", segment.active_size, sum(is_active), "active blocks"),
        ] {
            self.fits(|| format!("{place}.{key}"), is);
            if is != should {
                self.error(
                    format!("{place}.{key}"),
                    format!("{is}, but its {of} add up to {should}"),
                );
            }
        }
    }

    /// Not for pinned host memory, where PyTorch leaves the last request in a segment that is free.
    fn requested(&mut self, place: &str, segment: &Segment) {
        let is = segment.requested_size;
        let should = add_up(segment, is_active, |b| b.requested_size);
        if is != should {
            let what = format!("{is}, but the requests of its active blocks add up to {should}");
            self.error(format!("{place}.requested_size"), what);
        }
    }

    fn block(&mut self, place: impl Fn() -> String, block: &Block, expected: u64) {
        self.fits(|| format!("{}.size", place()), block.size);
        self.fits(|| format!("{}.requested_size", place()), block.requested_size);
        if block.address != expected {
            let what =
                format!("{:#x}, but the block before it ends at {expected:#x}", block.address);
            self.error(format!("{}.address", place()), what);
        }
        if block.size == 0 {
            self.error(format!("{}.size", place()), "0");
        }
        if block.state != BlockState::Inactive && block.requested_size > block.size {
            let what =
                format!("{}, more than the block's {} bytes", block.requested_size, block.size);
            self.error(format!("{}.requested_size", place()), what);
        }
    }

    fn frames(&mut self, snapshot: &Snapshot) {
        for frame in snapshot.frames.iter().filter(|f| f.line != NO_LINE) {
            self.fits(
                || format!("line of the frame {} in {:?}", frame.name, frame.filename),
                frame.line,
            );
        }
    }

    fn trace(&mut self, place: &str, trace: &[TraceEntry], unknown: &mut Vec<String>) {
        for (i, entry) in trace.iter().enumerate() {
            let addr = if entry.action == Action::Oom { "device_free" } else { "addr" };
            for (key, n) in [(addr, entry.addr), ("size", entry.size), ("stream", entry.stream)] {
                self.fits(|| format!("{place}[{i}].{key}"), n);
            }
            if let Action::Other(name) = &entry.action
                && name != "annotate"
                && !unknown.contains(name)
            {
                unknown.push(name.clone());
            }
        }
    }

    fn history(&mut self, snapshot: &Snapshot, device: usize) {
        let mut contradictions = Vec::new();
        let mut report = |index: usize, c: history::Contradiction| {
            contradictions.push((index, c));
        };
        let beginning = rewind(snapshot, device, &mut report);
        // The walk goes backwards; a reader of the file goes forwards.
        contradictions.reverse();
        let more = contradictions.len().saturating_sub(LISTED);
        for (index, contradiction) in contradictions.into_iter().take(LISTED) {
            self.error(format!("device_traces[{device}][{index}]"), contradiction.to_string());
        }
        if more > 0 {
            let what = format!("{more} more entries contradict the segments or each other");
            self.error(format!("device_traces[{device}]"), what);
        }
        let traced = snapshot.device_traces.get(device).is_some_and(|t| !t.is_empty());
        if traced && !beginning.blocks.is_empty() {
            let bytes: u64 =
                beginning.blocks.values().map(|b| b.requested).fold(0, u64::saturating_add);
            let what = format!(
                "the history begins late: {} blocks of {bytes} bytes are older than its first entry",
                beginning.blocks.len()
            );
            self.note(format!("device_traces[{device}]"), what);
        }
    }

    /// A misspelled word in the viewer throws when there are categories and none is `unknown`.
    fn categories(&mut self, others: &[Other]) {
        let mut categories = others
            .iter()
            .filter(|o| matches!(o.place, Place::Entry(..)) && o.key == "category")
            .peekable();
        if categories.peek().is_some() && categories.all(|o| o.value != "unknown") {
            self.error(
                "device_traces",
                "entries have a category and none is \"unknown\", on which the viewer fails",
            );
        }
    }

    fn fits(&mut self, place: impl Fn() -> String, n: u64) {
        if i64::try_from(n).is_err() {
            self.error(place(), format!("{n} is 2^63 or more; the viewer can't read it"));
        }
    }
}

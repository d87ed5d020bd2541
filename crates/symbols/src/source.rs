//! Source files, lines and inlined functions, from a library's debug information (DWARF).
//!
//! A recorder leaves native frames as library and offset, because looking these up may take longer
//! than a program should wait for its end. This does the rest afterwards, in parallel over
//! libraries, and bounded. A library with more debug information than [`LARGEST`], or one that
//! takes longer than [`PATIENCE`], is left as it is and reported. So is one that is not the file
//! that was loaded, if its build id says so.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use addr2line::Loader;
use memtrace_format::snapshot::{Frame, FrameIx, NO_LINE, Snapshot};
use object::{Object, ObjectSection, ObjectSegment};

use crate::file;

/// The most debug information that is read of a library, bytes.
pub const LARGEST: u64 = 2 << 30;
/// The longest that a library may take.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// What became of the native frames of a snapshot.
#[derive(Debug, Default)]
pub struct Report {
    /// Frames that have a source line now.
    pub named: usize,
    /// Native frames that are as they were.
    pub left: usize,
    /// A line for each library that could have been read and wasn't, and why.
    pub notes: Vec<String>,
}

/// Replaces native frames (library and offset) by source frames, inlined functions first, where
/// there is debug information for them.
pub fn symbolize(snapshot: &mut Snapshot) -> Report {
    let libraries = snapshot.memtrace.as_ref().and_then(|about| about.libraries.as_ref());
    let build_ids = libraries.cloned().unwrap_or_default();
    let mut libraries: BTreeMap<&str, Vec<FrameIx>> = BTreeMap::new();
    for (i, frame) in snapshot.frames.iter().enumerate() {
        // A line that Python doesn't know is no offset.
        if frame.filename.starts_with('/') && frame.line != NO_LINE {
            libraries.entry(&frame.filename).or_default().push(i as FrameIx);
        }
    }
    let libraries: Vec<(&str, Vec<FrameIx>)> = libraries.into_iter().collect();
    let offsets = |frames: &[FrameIx]| -> Vec<u64> {
        frames.iter().map(|f| snapshot.frames[*f as usize].line).collect()
    };
    let look = |(path, frames): &(&str, Vec<FrameIx>)| {
        let id = build_ids.get(*path).map(String::as_str).unwrap_or_default();
        lines_of(Path::new(path), id, &offsets(frames), PATIENCE)
    };
    let mut report = Report::default();
    let mut replaced: HashMap<FrameIx, Vec<Frame>> = HashMap::new();
    let mut asked = libraries.iter();
    memtrace_workers::each(&libraries, look, |done| {
        let Some((path, frames)) = asked.next() else { return ControlFlow::Break(()) };
        let found = match done {
            Ok(Some(found)) => found,
            Ok(None) => return ControlFlow::Continue(()), // no library at all: a Python file
            Err(panic) => Found::none(frames.len(), format!("can't be read: {panic}")),
        };
        if let Some(note) = found.note {
            report.notes.push(format!("{path}: {note}"));
        }
        for (ix, mut lines) in frames.iter().zip(found.frames) {
            let Some(outer) = lines.last_mut() else {
                report.left += 1;
                continue;
            };
            report.named += 1;
            // The symbol table knows it, too, and PyTorch's viewers know it by that.
            let known = &snapshot.frames[*ix as usize].name;
            if outer.name.is_empty() || known != "??" {
                outer.name.clone_from(known);
            }
            replaced.insert(*ix, lines);
        }
        ControlFlow::Continue(())
    });
    replace(snapshot, &replaced);
    // Frames outside the libraries are Python's no longer.
    if report.named > 0
        && let Some(about) = &mut snapshot.memtrace
    {
        about.symbolized = Some(true);
    }
    report
}

/// Puts the new frames in the places of the old.
fn replace(snapshot: &mut Snapshot, replaced: &HashMap<FrameIx, Vec<Frame>>) {
    let mut frames: Vec<Frame> = Vec::new();
    let mut known: HashMap<Frame, FrameIx> = HashMap::new();
    let mut add = |frame: &Frame| -> FrameIx {
        *known.entry(frame.clone()).or_insert_with(|| {
            frames.push(frame.clone());
            (frames.len() - 1) as FrameIx
        })
    };
    let new: Vec<Vec<FrameIx>> = (0..)
        .zip(&snapshot.frames)
        .map(|(i, old)| match replaced.get(&i) {
            Some(lines) => lines.iter().map(&mut add).collect(),
            None => vec![add(old)],
        })
        .collect();
    for stack in &mut snapshot.stacks {
        *stack =
            stack.iter().flat_map(|f| new.get(*f as usize).cloned().unwrap_or_default()).collect();
    }
    snapshot.frames = frames;
}

/// The source frames of a library's offsets, innermost first; none where nothing is known.
#[derive(Debug, Default)]
pub struct Found {
    /// For each offset.
    pub frames: Vec<Vec<Frame>>,
    /// Why there may be more to know.
    pub note: Option<String>,
}

impl Found {
    /// No frame for any of so many offsets, and why.
    fn none(offsets: usize, note: String) -> Found {
        Found { frames: vec![Vec::new(); offsets], note: Some(note) }
    }
}

/// The source frames at these offsets of a library. `None`: the file is no library. With a
/// build id: only of the file that has it.
pub fn lines_of(path: &Path, build_id: &str, offsets: &[u64], patience: Duration) -> Option<Found> {
    let end = Instant::now() + patience;
    let mut found = Found { frames: vec![Vec::new(); offsets.len()], note: None };
    let note = |mut found: Found, text: String| {
        found.note = Some(text);
        Some(found)
    };
    let looks_native = path.to_string_lossy().contains(".so") || !build_id.is_empty();
    let Ok(mapped) = file::map(path) else {
        return if looks_native { note(found, "is not here".to_owned()) } else { None };
    };
    let elf = object::File::parse(&*mapped).ok()?;
    let own_id = elf.build_id().ok().flatten().map(file::hex);
    if !build_id.is_empty() && own_id.is_some_and(|id| id != build_id) {
        return note(found, "is not the file that was loaded: its build id is another".to_owned());
    }
    let debug = elf.sections().filter(|s| s.name().is_ok_and(|n| n.starts_with(".debug")));
    let size: u64 = debug.map(|s| s.size()).sum();
    if size > LARGEST {
        return note(found, format!("has {} MiB of debug information: left as it is", size >> 20));
    }
    // Offsets count from the first mapped page.
    let first = elf.segments().map(|s| s.address()).min().unwrap_or(0) & !0xfff;
    let loader = match Loader::new(path) {
        Ok(loader) => loader,
        Err(e) => return note(found, format!("its debug information can't be read: {e}")),
    };
    for (offset, place) in offsets.iter().zip(&mut found.frames) {
        if Instant::now() > end {
            let seconds = patience.as_secs();
            return note(
                found,
                format!("took longer than {seconds} s: some of it is left as it is"),
            );
        }
        *place = lines(&loader, first + offset);
    }
    Some(found)
}

/// The functions at an address, inlined ones first. Nothing if the address has no source line.
fn lines(loader: &Loader, address: u64) -> Vec<Frame> {
    let mut found = Vec::new();
    let Ok(mut frames) = loader.find_frames(address) else { return found };
    while let Ok(Some(frame)) = frames.next() {
        let name = frame.function.as_ref().and_then(|f| f.demangle().ok()).unwrap_or_default();
        let Some(location) = frame.location else { continue };
        if let (Some(file), Some(line)) = (location.file, location.line) {
            found.push(Frame {
                name: name.into_owned(),
                filename: file.to_owned(),
                line: line.into(),
            });
        }
    }
    found
}

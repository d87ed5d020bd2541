//! Which files are meant, and in which order.
//!
//! A folder stands for the snapshots in it. Files that memtrace has named come by rank and then by
//! number, 2 before 10. That holds for a folder and for a shell's pattern. If one has another name,
//! all come in the order in which they were given.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use memtrace_terminal::shell::quoted;

use crate::FileError;
use crate::left_out::{LeftOut, left_out};

/// What a snapshot's name ends in, before what a packer adds.
pub(crate) const ENDINGS: [&str; 3] = ["pickle", "pkl", "json"];
/// What a packer adds that can be read.
const PACKED: [&str; 2] = ["gz", "zst"];

/// What arguments stand for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The files.
    pub files: Vec<PathBuf>,
    /// More than one file could have been meant: several arguments, or a folder.
    pub several: bool,
    /// What the user should know, a line each.
    pub notes: Vec<String>,
    /// Of several arguments, those that stand for nothing.
    pub troubles: Vec<FileError>,
}

/// Replaces folders by the snapshots in them, and puts all in order.
///
/// # Errors
/// The only argument is a folder that can't be read, or has no snapshot.
pub fn find(arguments: &[PathBuf]) -> Result<Found, FileError> {
    let mut found = Found { several: arguments.len() > 1, ..Found::default() };
    for path in arguments {
        // Alone it is standard input, also where a folder has that name.
        if path.as_os_str() == "-" || !path.is_dir() {
            found.files.push(path.clone());
            continue;
        }
        match folder(path, &mut found) {
            Err(trouble) if arguments.len() > 1 => found.troubles.push(trouble),
            result => result?,
        }
        found.several = true;
    }
    if found.files.iter().all(|path| has_our_name(path)) {
        found.files.sort_by(|a, b| order(a, b));
    }
    found.files.dedup();
    Ok(found)
}

fn folder(path: &Path, found: &mut Found) -> Result<(), FileError> {
    let unread = |e: std::io::Error| FileError::new(path, format!("cannot be read: {e}"));
    let (mut files, mut left, mut boxes) = (Vec::new(), LeftOut::default(), 0);
    let mut folders = LeftOut::default();
    for entry in fs::read_dir(path).map_err(unread)? {
        let entry = entry.map_err(unread)?;
        let file = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && !is_snapshot(&file) {
            folders.add(&file, "a folder: name it if it is meant".to_owned());
        } else if file.extension() == Some(OsStr::new("blackbox")) {
            boxes += 1;
        } else if let Some(why) = left_out(&file) {
            left.add(&file, why);
        } else if is_snapshot(&file) {
            files.push(file);
        }
    }
    // Where memtrace has written, other files with such endings are other things.
    if files.iter().any(|file| has_our_name(file)) {
        files.retain(|file| {
            if !has_our_name(file) {
                left.add(file, "not named by memtrace: name it if it is meant".to_owned());
            }
            has_our_name(file)
        });
    }
    let folder = path.display();
    let recover = match boxes {
        1 => "a black box, of a process that is alive or was killed, is in it".to_owned(),
        n => format!("{n} black boxes, of processes that are alive or were killed, are in it"),
    };
    let recover = format!(
        "{recover}: `memtrace recover {}` makes snapshots of those that were killed",
        quoted(path)
    );
    let mut say = Vec::new();
    if files.is_empty() && boxes == 0 {
        let which = if left.is_empty() { "" } else { " that can be read" };
        say.push(format!(
            "no snapshot{which} is in this folder (*.pickle, *.pkl or *.json, also .gz or .zst)"
        ));
    }
    say.extend((boxes > 0).then_some(recover));
    say.extend(left.line(!files.is_empty()));
    if files.is_empty() {
        say.extend(folders.line(false));
        return Err(FileError::new(path, say.join("; ")));
    }
    found.notes.extend(say.iter().map(|note| format!("{folder}: {note}")));
    files.sort_by(|a, b| order(a, b));
    found.files.append(&mut files);
    Ok(())
}

pub(crate) fn is_snapshot(path: &Path) -> bool {
    let ends = |path: &Path, with: &[&str]| {
        path.extension().and_then(OsStr::to_str).is_some_and(|e| with.contains(&e))
    };
    ends(path, &ENDINGS)
        || ends(path, &PACKED)
            && path.file_stem().is_some_and(|stem| ends(Path::new(stem), &ENDINGS))
}

/// `memtrace-HOST-PID[-rankR]-N.pickle`
pub(crate) fn has_our_name(path: &Path) -> bool {
    path.file_name().unwrap_or_default().to_string_lossy().starts_with("memtrace-")
}

/// By folder, then by rank where there is one, then by name, in which numbers count as numbers.
fn order(a: &Path, b: &Path) -> Ordering {
    let key = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (path.parent().map(Path::to_owned), rank(&name).unwrap_or(u64::MAX), name)
    };
    let ((folder_a, rank_a, name_a), (folder_b, rank_b, name_b)) = (key(a), key(b));
    (folder_a, rank_a).cmp(&(folder_b, rank_b)).then_with(|| by_numbers(&name_a, &name_b))
}

fn rank(name: &str) -> Option<u64> {
    let (_, rest) = name.rsplit_once("-rank")?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

fn by_numbers(a: &str, b: &str) -> Ordering {
    pieces(a).cmp(pieces(b)).then_with(|| a.cmp(b))
}

/// A name as digits, by their value, and what is between.
fn pieces(name: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut rest = name;
    std::iter::from_fn(move || {
        let digit = rest.chars().next()?.is_ascii_digit();
        let end = rest.find(|c: char| c.is_ascii_digit() != digit).unwrap_or(rest.len());
        let (piece, after) = rest.split_at(end);
        rest = after;
        // Of two numbers without leading zeros the longer is the larger.
        let piece = if digit { piece.trim_start_matches('0') } else { piece };
        Some((if digit { piece.len() + 1 } else { 0 }, piece))
    })
}

//! The bytes of a file, unpacked.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use memtrace_format::snapshot::Snapshot;
use memtrace_format::{BYTE_ORDER_MARK, Part, ReadError, looks_like_json};
use ruzstd::decoding::StreamingDecoder;

use crate::gzip::Members;
use crate::open::{Opened, open};
use crate::{FileError, Limit, kind, too_large};

/// How much of a file is looked at to know what it is.
const HEAD: u64 = 4096;

/// How a file is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// With gzip.
    Gzip,
    /// With zstd.
    Zstd,
}

impl Packing {
    fn of(bytes: &[u8]) -> Option<Packing> {
        match bytes {
            [0x1f, 0x8b, ..] => Some(Packing::Gzip),
            // Some packers put a frame in front that holds nothing but a length.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                Some(Packing::Zstd)
            }
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Packing::Gzip => "gzip",
            Packing::Zstd => "zstd",
        }
    }
}

/// What is in a file.
#[derive(Debug)]
pub struct Contents {
    path: PathBuf,
    /// The unpacked bytes.
    pub bytes: Vec<u8>,
    /// How they were packed.
    pub packing: Option<Packing>,
    /// Bytes of memory that reading them may take.
    memory: u64,
}

impl Contents {
    /// The snapshots that are in it, at least one.
    ///
    /// # Errors
    /// What it is instead, or what is wrong with it.
    pub fn snapshots(&self) -> Result<Vec<Part>, ReadError> {
        let left = self.memory.saturating_sub(self.bytes.len() as u64);
        let parts = Snapshot::read_all(&self.bytes, usize::try_from(left).unwrap_or(usize::MAX));
        parts.map_err(|error| kind(&self.bytes, &self.path).map_or(error, ReadError::NotASnapshot))
    }

    /// The one snapshot that is in it, and whether its stacks are in tables.
    ///
    /// # Errors
    /// It has none, or several.
    pub fn one(&self) -> Result<(Snapshot, bool), FileError> {
        let mut parts = self.snapshots().map_err(|e| self.trouble(&e))?;
        let unread = parts.iter().filter(|part| part.snapshot.is_err()).count();
        if let (Some(Part { snapshot: Ok(snapshot), has_tables, .. }), 0) =
            (parts.pop(), parts.len())
        {
            return Ok((snapshot, has_tables));
        }
        let none = match unread {
            0 => String::new(),
            n => format!(", {n} of which can't be read"),
        };
        let what = format!(
            "it holds {} snapshots{none}, and one is wanted: write each into a file of its own",
            parts.len() + 1
        );
        Err(FileError::new(&self.path, what))
    }

    /// Why this file gives no answer.
    pub fn trouble(&self, error: &ReadError) -> FileError {
        FileError::new(&self.path, self.why(error))
    }

    /// What is wrong, and what to do.
    pub(crate) fn why(&self, error: &ReadError) -> String {
        match error {
            ReadError::TooLarge => too_large(self.memory),
            other => other.to_string(),
        }
    }
}

/// Reads a file, or standard input for `-`, and unpacks it.
///
/// # Errors
/// The file can't be read, is damaged, or is larger than allowed.
pub fn contents(path: &Path, limit: Limit) -> Result<Contents, FileError> {
    let trouble = |what: String| FileError::new(path, what);
    let unread = |e: io::Error| trouble(format!("cannot be read: {e}"));
    let (bytes, length) = if path.as_os_str() == "-" {
        (bounded(io::stdin().lock(), 0, limit.of(0)).map_err(unread)?, 0)
    } else {
        let Opened { bytes, length, on_disk } =
            open(path, limit.several, limit.silent).map_err(trouble)?;
        (bounded(bytes, length, limit.of(on_disk)).map_err(unread)?, on_disk)
    };
    let memory = limit.of(length);
    let Some(bytes) = bytes else { return Err(trouble(too_large(memory))) };
    let packing = Packing::of(&bytes);
    let unpacked = match packing {
        None => Ok(Some(bytes)),
        Some(Packing::Gzip) => bounded(Members::new(&bytes), 0, memory),
        Some(Packing::Zstd) => zstd(&bytes, memory),
    };
    let how = packing.map_or("", Packing::name);
    let bytes = unpacked.map_err(|e| trouble(damaged(how, &e)))?;
    let Some(bytes) = bytes else {
        return Err(trouble(format!("unpacked with {how}, {}", too_large(memory))));
    };
    Ok(Contents { path: path.to_owned(), bytes, packing, memory })
}

fn damaged(how: &str, e: &io::Error) -> String {
    if e.kind() == io::ErrorKind::UnexpectedEof {
        return format!("the {how} file ends too early (cut off?)");
    }
    format!("damaged {how} file: {e}")
}

/// All that there is to read, `length` bytes or more; `None` if that is more than `most`. Of what
/// is no snapshot only the beginning, by which it is named: it may have no end.
fn bounded(mut from: impl Read, length: u64, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    (&mut from).take(HEAD).read_to_end(&mut bytes)?;
    if may_be_read(&bytes) {
        if length > most {
            return Ok(None);
        }
        from.take(most.saturating_add(1).saturating_sub(bytes.len() as u64))
            .read_to_end(&mut bytes)?;
    }
    Ok((bytes.len() as u64 <= most).then_some(bytes))
}

/// A snapshot perhaps, or a packed one.
fn may_be_read(head: &[u8]) -> bool {
    head.first() == Some(&0x80)
        || looks_like_json(head)
        || Packing::of(head).is_some()
        || head.starts_with(BYTE_ORDER_MARK)
        || head.iter().all(u8::is_ascii_whitespace)
}

/// One frame after the other.
fn zstd(packed: &[u8], most: u64) -> io::Result<Option<Vec<u8>>> {
    let (mut rest, mut all) = (packed, Vec::new());
    while !rest.is_empty() {
        if let Some(skipped) = skippable(rest) {
            rest = skipped;
            continue;
        }
        let mut frame = StreamingDecoder::new(&mut rest).map_err(io::Error::other)?;
        let left = most.saturating_add(1).saturating_sub(all.len() as u64);
        (&mut frame)
            .take(if all.is_empty() { left.min(HEAD) } else { left })
            .read_to_end(&mut all)?;
        if !may_be_read(&all) {
            break;
        }
        let left = most.saturating_add(1).saturating_sub(all.len() as u64);
        frame.take(left).read_to_end(&mut all)?;
        if all.len() as u64 > most {
            return Ok(None);
        }
    }
    Ok(Some(all))
}

/// What is behind a frame that holds nothing for us, if it is one.
fn skippable(bytes: &[u8]) -> Option<&[u8]> {
    let (magic, rest) = bytes.split_first_chunk().map(|(m, r)| (u32::from_le_bytes(*m), r))?;
    let (length, rest) = rest.split_first_chunk().map(|(l, r)| (u32::from_le_bytes(*l), r))?;
    (magic >> 4 == 0x184_d2a5).then(|| rest.get(length as usize..).unwrap_or_default())
}

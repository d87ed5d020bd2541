//! Files of a folder that look as if they were meant, and can't be read as they are:
//! the user gets a line for each kind.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use crate::find::{ENDINGS, has_our_name, is_snapshot};

/// What packers add to a name, and what to do with the file.
const PACKERS: [(&[&str], &str); 9] = [
    (&["xz"], "compressed with xz: unpack it first, xz -d"),
    (&["bz2"], "compressed with bzip2: unpack it first, bzip2 -d"),
    (&["zip"], "a zip archive: unpack it first, unzip"),
    (&["lz4"], "compressed with lz4: unpack it first, lz4 -d"),
    (&["lzma"], "compressed with lzma: unpack it first, xz -d --format=lzma"),
    (&["gz"], "compressed with gzip, more than once: unpack it first, gzip -d"),
    (&["zst"], "compressed with zstd, more than once: unpack it first, zstd -d"),
    (&["Z", "zz", "br", "sz", "lzo", "lz"], "compressed: unpack it first"),
    (&["tar", "tgz", "tbz2", "txz", "7z", "rar"], "an archive: unpack it first"),
];

/// Of each kind so many are named.
const NAMED: usize = 3;

/// Why a file of a folder is left out though it looks as if it were meant,
/// by its name and by what it is.
pub(crate) fn left_out(path: &Path) -> Option<String> {
    if is_snapshot(path) {
        return no_file(path);
    }
    let name = path.file_name()?.to_string_lossy();
    let mut parts = name.trim_start_matches('.').split('.').skip(1);
    let is_meant = parts.any(|part| ENDINGS.contains(&part));
    let ending = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let packer = PACKERS.iter().find(|(endings, _)| endings.contains(&ending));
    match packer {
        Some((_, why)) if is_meant || has_our_name(path) => Some((*why).to_owned()),
        // What begins with a dot is somebody's file of the moment.
        _ if is_meant && !name.starts_with('.') => {
            Some("of another ending: name it if it is meant".to_owned())
        }
        _ => None,
    }
}

/// What is there under the name of a snapshot, if it is no file.
fn no_file(path: &Path) -> Option<String> {
    let Ok(about) = fs::metadata(path) else {
        // What this user may not look at is said when it is read.
        let is_link = fs::symlink_metadata(path).is_ok_and(|about| about.is_symlink());
        return is_link.then(|| "a link that leads nowhere".to_owned());
    };
    let kind = about.file_type();
    let what = match () {
        () if kind.is_file() => return None,
        () if kind.is_dir() => "a folder: name it if it is meant",
        () if kind.is_fifo() => "a pipe (FIFO)",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Some(what.to_owned())
}

/// Names, by what is wrong with them.
#[derive(Default)]
pub(crate) struct LeftOut(Vec<(String, Vec<String>)>);

impl LeftOut {
    pub(crate) fn add(&mut self, file: &Path, why: String) {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match self.0.iter_mut().find(|(known, _)| *known == why) {
            Some((_, names)) => names.push(name),
            None => self.0.push((why, vec![name])),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them in one line. The order of a folder is no order.
    pub(crate) fn line(mut self, besides: bool) -> Option<String> {
        self.0.sort();
        let kinds: Vec<String> = self
            .0
            .iter_mut()
            .map(|(why, names)| {
                names.sort();
                let mut text = names[..names.len().min(NAMED)].join(", ");
                if names.len() > NAMED {
                    let _ = write!(text, " and {} more", names.len() - NAMED);
                }
                format!("{text} ({why})")
            })
            .collect();
        let count: usize = self.0.iter().map(|(_, names)| names.len()).sum();
        let more = if besides { " more" } else { "" };
        (count > 0).then(|| format!("{count}{more} left out: {}", kinds.join("; ")))
    }
}

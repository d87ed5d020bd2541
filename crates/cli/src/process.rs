//! Which black box a process has mapped. Nothing else says for certain whose it
//! is and whether it is still written.
//!
//! `/proc/PID/maps` lists the mapping as long as the process runs, whatever happened to the file's
//! name. A number that was given to another process, a zombie, and a process that became another
//! program by `exec` don't list it. Nothing is stopped and nothing attached to.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What a black box's name ends in.
pub(crate) const EXTENSION: &str = "blackbox";
const GONE: &str = " (deleted)";

/// A mapping of a black box.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    /// As `/proc/PID/map_files` names it.
    range: String,
    inode: u64,
    path: PathBuf,
}

/// The black boxes in the text of `/proc/PID/maps`; a file that is mapped in pieces comes once.
fn mappings(maps: &str) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in maps.lines() {
        let mut rest = line;
        let mut field = || {
            let (field, after) = rest.split_once(' ')?;
            rest = after.trim_start();
            Some(field)
        };
        let (Some(range), Some(_), Some(_), Some(_), Some(inode)) =
            (field(), field(), field(), field(), field())
        else {
            continue;
        };
        let path = Path::new(rest.strip_suffix(GONE).unwrap_or(rest));
        let Ok(inode) = inode.parse() else { continue };
        if path.extension().is_some_and(|e| e == EXTENSION)
            && found.iter().all(|f| f.inode != inode)
        {
            found.push(Mapping { range: range.to_owned(), inode, path: path.to_owned() });
        }
    }
    found
}

fn maps(pid: u64) -> io::Result<Vec<Mapping>> {
    let text = fs::read(format!("/proc/{pid}/maps"))?;
    Ok(mappings(&String::from_utf8_lossy(&text)))
}

/// Does this process write this black box?
pub(crate) fn writes(pid: u64, path: &Path, file: &File) -> io::Result<bool> {
    let inode = file.metadata()?.ino();
    match maps(pid) {
        Ok(found) => {
            Ok(found.iter().any(|m| m.inode == inode && m.path.file_name() == path.file_name()))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        // Gone between opening and reading.
        Err(e) if e.raw_os_error() == Some(3) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The process that writes this black box, by the number that it has here.
pub(crate) fn writer(path: &Path, file: &File) -> io::Result<Option<u64>> {
    for entry in fs::read_dir("/proc")? {
        let number = entry?.file_name().to_str().and_then(|n| n.parse().ok());
        // Of another user's processes it isn't known.
        if let Some(pid) = number
            && writes(pid, path, file).unwrap_or(false)
        {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// The black box of a living process, opened.
pub(crate) fn black_box(pid: u64) -> Result<File, String> {
    let found = maps(pid).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => format!(
            "there is no process {pid}: of one that has died, `memtrace recover` reads the black box"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("process {pid} belongs to somebody else: run this as its user, or as root")
        }
        _ => format!("cannot look at process {pid}: {e}"),
    })?;
    let Some(mapping) = found.first() else { return Err(nothing(pid)) };
    let is_it = |file: &File| file.metadata().is_ok_and(|m| m.ino() == mapping.inode);
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let descriptors = descriptors.map(|d| d.path()).filter(|link| {
        fs::read_link(link).is_ok_and(|to| to.to_string_lossy().contains(EXTENSION))
    });
    let inside = Path::new("/proc").join(pid.to_string());
    let named = mapping.path.strip_prefix("/").unwrap_or(&mapping.path);
    let others = [inside.join("root").join(named), inside.join("map_files").join(&mapping.range)];
    let mut last = None;
    for path in descriptors.chain(others) {
        match File::open(&path) {
            Ok(file) if is_it(&file) => return Ok(file),
            Ok(_) => {}
            Err(e) => last = Some(e),
        }
    }
    let why = last.map_or_else(|| "its name is gone".to_owned(), |e| e.to_string());
    Err(format!(
        "cannot open the black box {} of process {pid}: {why}; run this as root",
        mapping.path.display()
    ))
}

fn nothing(pid: u64) -> String {
    let has = |name: &str| {
        fs::read(format!("/proc/{pid}/maps"))
            .is_ok_and(|m| String::from_utf8_lossy(&m).contains(name))
    };
    if has("libmemtrace.so") {
        format!(
            "process {pid} has no black box: it has not called CUDA yet, or records into plain memory \
             (MEMTRACE_BLACKBOX=off, or no folder had room)"
        )
    } else {
        format!("process {pid} is not recorded: start it with `memtrace run -- CMD`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn black_boxes_are_found_among_mappings() {
        let maps = "\
7f00-7f10 rw-s 00000000 00:1a 77                         /dev/shm/my job/a b.blackbox\n\
7f10-7f20 rw-s 00010000 00:1a 77                         /dev/shm/my job/a b.blackbox\n\
7f20-7f30 rw-s 00000000 00:1a 78                         /x.blackbox (deleted)\n\
7f30-7f40 r-xp 00000000 fe:00 9                          /lib/libc.so.6\n\
7f40-7f50 rw-p 00000000 00:00 0 \n\
nonsense\n";
        let found = mappings(maps);
        let places: Vec<_> =
            found.iter().map(|m| (m.range.as_str(), m.inode, m.path.to_str())).collect();
        let expect = [
            ("7f00-7f10", 77, Some("/dev/shm/my job/a b.blackbox")),
            ("7f20-7f30", 78, Some("/x.blackbox")),
        ];
        assert_eq!(places, expect);
    }
}

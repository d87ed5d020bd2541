//! What the fuzz targets share.
//!
//! A target hands bytes to a reader and asks for three things. It returns, it doesn't
//! panic, and what it has read can be written and read again. How much memory it takes is
//! watched by the fuzzer (`-rss_limit_mb`).

use std::path::PathBuf;

use memtrace_format::json::{self, Stacks};
use memtrace_format::pickle;
use memtrace_format::snapshot::Snapshot;

/// The most memory that a reader is given, bytes.
const MEMORY: usize = 256 << 20;

/// Reads a file and asks everything of what is in it.
pub fn read(bytes: &[u8]) {
    for part in Snapshot::read_all(bytes, MEMORY).unwrap_or_default() {
        part.snapshot.iter().for_each(questions);
    }
}

/// All that is asked of a snapshot after it was read. What was read must be the
/// same when it is written and read again.
pub fn questions(snapshot: &Snapshot) {
    let _ = memtrace_analysis::summary::summary(snapshot);
    let _ = memtrace_analysis::report::report(snapshot);
    let _ = memtrace_analysis::check::check(snapshot);
    let mut bytes = Vec::new();
    again(pickle::write(snapshot, &mut bytes), &bytes);
    for stacks in [Stacks::Shared, Stacks::Expanded] {
        bytes.clear();
        again(json::write(snapshot, stacks, &mut bytes), &bytes);
    }
}

fn again(written: std::io::Result<()>, bytes: &[u8]) {
    match written {
        Ok(()) => drop(Snapshot::read(bytes).expect("our own")),
        Err(e) => {
            let e = e.to_string();
            assert!(e.contains("2^63") || e.contains("deeper"), "{e}");
        }
    }
}

/// Where files are in memory, if there is such a folder.
pub fn folder() -> PathBuf {
    let shm = PathBuf::from("/dev/shm");
    if shm.is_dir() { shm } else { std::env::temp_dir() }
}

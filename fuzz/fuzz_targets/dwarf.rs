//! A library with debug information, as `memtrace symbolize` reads it.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use memtrace_symbols::source;

static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    memtrace_fuzz::folder().join(format!("memtrace-fuzz-dwarf.so-{}", std::process::id()))
});
/// Every sixteenth byte of a small library's code.
static OFFSETS: LazyLock<Vec<u64>> = LazyLock::new(|| (0..0x2000).step_by(64).collect());

fuzz_target!(|bytes: &[u8]| {
    std::fs::write(&*FILE, bytes).expect("room for a small file");
    let _ = source::lines_of(&FILE, "", &OFFSETS, Duration::from_secs(10));
});

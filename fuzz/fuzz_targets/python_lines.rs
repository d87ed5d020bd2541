//! A Python code object's line table, in each of the three formats.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_symbols::line;

fuzz_target!(|input: (u8, i32, Option<u32>, &[u8])| {
    let (minor, first, unit, table) = input;
    let _ = line(minor, first, table, unit);
    // A position before the end of any table, too: most 32-bit numbers are behind it.
    let _ = line(minor, first, table, unit.map(|unit| unit % 256));
});

//! Any bytes as a pickle.

#![no_main]

use libfuzzer_sys::fuzz_target;
use memtrace_format::looks_like_json;

fuzz_target!(|bytes: &[u8]| {
    if !looks_like_json(bytes) {
        memtrace_fuzz::read(bytes);
    }
});

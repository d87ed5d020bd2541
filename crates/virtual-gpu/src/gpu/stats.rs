//! What a recorder wants to know of the virtual GPU: that it is one,
//! which, and how far to trust the run.

use super::boundary::Out;
use super::config::machine;
use super::{contents, launches};
use crate::libs::planned;
use core::ffi::c_char;
use core::sync::atomic::Ordering::Relaxed;
use std::fmt::Write as _;

fn json() -> String {
    let machine = machine();
    let mut text = String::from("{");
    // Writing to a string can't fail. Names and keys come from our own tables and need no escapes.
    let _ = write!(text, "\"spec\":\"{}\",", machine.spec);
    if let Some(gpu) = machine.gpus.first() {
        let _ = write!(text, "\"profile\":\"{}\",", gpu.profile.key);
        let _ = write!(text, "\"name\":\"{}\",", gpu.profile.name);
        let _ = write!(text, "\"context_source\":\"{}\",", gpu.profile.context_source);
    }
    let _ = write!(text, "\"nccl_source\":\"{}\",", crate::libs::NCCL_MEMORY);
    let _ = write!(text, "\"lazy\":{},", machine.lazy);
    let _ = write!(text, "\"launches\":{},", launches());
    let _ = write!(text, "\"zero_reads\":{},", contents::zero_reads());
    let _ = write!(text, "\"cudnn\":{},\"devices\":[", planned());
    for (i, gpu) in machine.devices().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let (used, total) = (gpu.used.load(Relaxed), gpu.total());
        let context = gpu.profile.context_bytes();
        let _ = write!(
            text,
            "{comma}{{\"device\":{i},\"used\":{used},\"total\":{total},\"context\":{context}}}"
        );
    }
    text.push_str("]}");
    text
}

/// Writes a JSON object about the virtual GPU and a final zero into `buffer`, cut to `room` bytes.
/// Returns how many bytes the object has, without the zero. A `room` of 0 only asks for the length.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_virtual_stats(buffer: Out<c_char>, room: usize) -> usize {
    let text = json();
    if room > 0 {
        // Null asks for the length too.
        let _ = buffer.text(&text, room);
    }
    text.len()
}

#[cfg(test)]
mod tests {
    #[test]
    fn has_what_the_recorder_reads() {
        let text = super::json();
        for key in [
            "\"spec\"",
            "\"zero_reads\":",
            "\"launches\":",
            "\"cudnn\":{\"unknown\":",
            "\"devices\":[{\"device\":0",
        ] {
            assert!(text.contains(key), "{key} in {text}");
        }
    }
}

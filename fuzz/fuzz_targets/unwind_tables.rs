//! Unwind tables, as the recorder reads them of whatever is loaded:
//! `.eh_frame_hdr`, and what it leads to, by a rule and by a whole step. The stack
//! that the step reads is made of the same bytes.

#![no_main]

use std::cell::Cell;

use libfuzzer_sys::fuzz_target;
use memtrace_libraries::objects::Object;
use memtrace_os::checked::{Memory, Window};
use memtrace_stack::native::odd;
use memtrace_stack::{rules, tables};

/// Where the bytes seem to be.
const AT: u64 = 0x10_0000;

struct Made<'a>(&'a [u8]);

impl Memory for Made<'_> {
    fn copy(&self, at: u64, to: &[Cell<u64>]) -> bool {
        for (i, cell) in to.iter().enumerate() {
            let start = at.wrapping_sub(AT).wrapping_add(8 * i as u64) as usize;
            let Some(word) = self.0.get(start..).and_then(|rest| rest.first_chunk()) else {
                return false;
            };
            cell.set(u64::from_ne_bytes(*word));
        }
        true
    }
}

fuzz_target!(|bytes: &[u8]| {
    // Whole lines, as memory has.
    let mut all = bytes.to_vec();
    all.resize(bytes.len().next_multiple_of(256) + 256, 0);
    let memory = Made(&all);
    let object = Object { start: AT, end: AT + 0x10_0000, eh_frame_hdr: AT };
    for pc in [0x10_1000, 0x10_1001, 0x10_1800, 0x10_1fff] {
        let _ = tables::in_object(&Window::new(&memory), &object, pc, rules::translate);
        let _ = odd::step_in(&Window::new(&memory), &object, pc, AT + 64);
    }
});

//! The system's unwinder, which a test may ask through the crate `backtrace`: nothing in
//! a test program is described wrongly.

use super::super::{Entry, Found, Native, Step, own_code};

/// The calling thread's frames.
#[inline(never)]
pub fn frames(found: &mut Found) {
    found.0.clear();
    backtrace::trace(|frame| {
        // What the unwinder calls a frame's CFA while it is at that frame
        // is the stack pointer there.
        let (pc, sp) = (frame.ip().addr() as u64, frame.sp().addr() as u64);
        let own = own_code();
        let ours = found.0.is_empty() && (own.0..own.1).contains(&pc);
        if pc != 0 && !ours {
            let frame = Native { pc, sp, ..Native::default() };
            found.0.push(Entry { frame, step: Step::UNKNOWN });
        }
        true
    });
}

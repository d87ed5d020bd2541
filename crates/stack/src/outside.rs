//! Who called: the frames of the calling thread, one after the other, of which nothing is written
//! down.

use super::native::{odd, own_code};
use super::registers::{here, stack_pointer};
use super::scratch::mine;

/// Shows the calling thread's frames outside of memtrace, innermost first: where each goes on, and
/// its stack pointer there. Ends when `visit` says so; `None` tells it that the walk begins again.
pub fn each_frame(visit: &mut dyn FnMut(Option<(u64, u64)>) -> bool) {
    mine(|mine| {
        let Some(room) = mine.room() else { return };
        // Taken in this function, whose frame lasts: in a function handed to another one
        // it would be of a frame that is gone.
        let here = match room.left_at(stack_pointer() as u64) {
            Some(left) => left,
            None => here(),
        };
        room.run(|| odd::walk(room, &here, visit));
    });
}

/// The innermost return address of the calling thread that is neither memtrace's own nor one that
/// `skipped` accepts, if it is known how to get there.
pub fn first_outside(skipped: impl Fn(u64) -> bool) -> Option<u64> {
    /// Frames that are looked at.
    const NEAR: usize = 64;
    let own = own_code();
    let (mut seen, mut found) = (0, None);
    each_frame(&mut |frame| {
        let Some((pc, _)) = frame else {
            seen = 0;
            return false;
        };
        seen += 1;
        found = Some(pc).filter(|_| !(own.0..own.1).contains(&pc) && !skipped(pc));
        found.is_some() || seen == NEAR
    });
    found
}

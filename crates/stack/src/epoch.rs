//! Which libraries addresses mean: a number that each native frame carries.
//!
//! A return address means something only together with the library that was at that place
//! at that time. An address is given to another library only after the first was
//! unloaded, which is rare. So the number goes up exactly when a library is found at an
//! address that had belonged to another.

use std::sync::atomic::Ordering;

use memtrace_format::stacks::EPOCH_MAX;

use super::left::Left;
use super::line::LINE;

/// Which libraries addresses mean now.
#[inline]
pub fn epoch() -> u16 {
    LINE.epoch.load(Ordering::Relaxed)
}

static LEFT: Left = Left::new();

/// Called with each library at which a thread meets an unknown address: if it lies where another
/// one was, addresses mean something new from now on.
pub fn met(start: u64, end: u64) {
    let up = |e: u16| (e < EPOCH_MAX).then_some(e + 1);
    LEFT.met(start, end, || {
        let _ = LINE.epoch.fetch_update(Ordering::AcqRel, Ordering::Relaxed, up);
    });
}

/// Notes what an unloaded library leaves.
pub fn leave(start: u64, end: u64) {
    LEFT.leave(start, end);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_used_again_begins_an_epoch() {
        let _alone = crate::testing::alone();
        let before = epoch();
        leave(0x7000_0000, 0x7000_2000);
        met(0x7000_2000, 0x7000_3000);
        assert_eq!(epoch(), before, "beside it");
        met(0x7000_1000, 0x7000_3000);
        assert_eq!(epoch(), before + 1, "on it");
        met(0x7000_1000, 0x7000_3000);
        assert_eq!(epoch(), before + 1, "once");
    }
}

//! Which calls about memory are under way, so that a device's own figures are
//! compared with a ledger that is complete.

use memtrace_format::event::Event;

use crate::os::sync::{AtomicU64, Ordering, last, of_process};
use crate::record::Recorder;
use crate::record::guard;

of_process! {
    /// Calls about memory: how many have begun (from bit 32), and how many of them are under way.
    static CALLS: AtomicU64 = AtomicU64::new(0);
}

/// A call about memory, from before the real one until it is in the ledger.
pub struct UnderWay(());

impl UnderWay {
    /// It begins.
    #[inline]
    pub fn begin() -> UnderWay {
        CALLS.fetch_add(1 << 32 | 1, Ordering::SeqCst);
        UnderWay(())
    }
}

impl Drop for UnderWay {
    #[inline]
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A piece of physical memory that PyTorch's allocator has taken for a segment, or cut
/// off one. Until [`pieces_end`] it is taken from the device, and in no segment of the
/// ledger. So long this thread counts as having a call about memory under way. PyTorch
/// may ask in between how much is free.
pub(super) fn piece_begins() {
    guard::local(|local| {
        if local.pieces.replace(local.pieces.get().saturating_add(1)) == 0 {
            std::mem::forget(UnderWay::begin());
        }
    });
}

/// So many of them are in the ledger, or given back.
pub(super) fn pieces_end(done: u32) {
    guard::local(|local| {
        let pieces = local.pieces.get();
        local.pieces.set(pieces.saturating_sub(done));
        if (1..=done).contains(&pieces) {
            drop(UnderWay(()));
        }
    });
}

/// The same answer twice, and not `None`, means that the ledger was
/// complete and stayed so in between.
pub fn at_rest() -> Option<u64> {
    Some(last(&CALLS)).filter(|calls| *calls as u32 == 0)
}

/// Records what a device has answered, at the very place in the order of events at which it
/// answered. That is only done if no call about memory has been under way since `before`, the
/// answer of [`at_rest`] before the question. Between a look and a write others may have taken or
/// given back gigabytes. `false`: there was no such moment.
pub fn write_measured(recorder: &Recorder, before: Option<u64>, said: &Event) -> bool {
    /// Events in between may be about blocks of a framework's, which don't concern the device.
    const TRIES: usize = 8;
    (0..TRIES).any(|_| {
        let written = recorder.written();
        before.is_some() && at_rest() == before && recorder.write_at(written, said)
    })
}

/// A forked child is without the parent's other threads.
pub fn forget_others() {
    CALLS.store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    /// Seen red: without the second look whether calls are under way, and where a call that has
    /// begun and ended leaves the word as it was.
    #[cfg(loom)]
    mod model {
        use super::super::*;
        use loom::sync::Arc;
        use loom::thread;

        /// What the device has given out, and how many events there are.
        #[derive(Default)]
        struct World {
            taken: AtomicU64,
            written: AtomicU64,
        }

        #[test]
        fn what_a_device_says_is_held_against_complete_books() {
            loom::model(|| {
                let world = Arc::new(World::default());
                let takes = world.clone();
                let takes = thread::spawn(move || {
                    let _call = UnderWay::begin();
                    takes.taken.fetch_add(1, Ordering::AcqRel);
                    takes.written.fetch_add(1, Ordering::AcqRel);
                });
                let before = at_rest();
                let said = last(&world.taken);
                let written = last(&world.written);
                if before.is_some() && at_rest() == before {
                    let here = written + 1;
                    let (order, fail) = (Ordering::AcqRel, Ordering::Relaxed);
                    if world.written.compare_exchange(written, here, order, fail).is_ok() {
                        assert_eq!(said, written, "as much as all events before it say");
                    }
                }
                takes.join().unwrap();
            });
        }
    }
}

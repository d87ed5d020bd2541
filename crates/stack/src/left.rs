//! What unloaded libraries left: ranges of addresses, by which the next library there means
//! something new.

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_os::sync::Word;

/// Ranges that are known at a time. If there are ever more, the newest
/// take the places of older ones.
const PLACES: usize = if cfg!(loom) { 1 } else { 64 };

/// See the module's documentation. Starts and ends; an end of 0 is a free place.
pub struct Left<W = AtomicU64>([[W; 2]; PLACES]);

impl Left {
    /// Nothing.
    pub const fn new() -> Left {
        Left([const { [const { AtomicU64::new(0) }; 2] }; PLACES])
    }
}

impl<W: Word<Value = u64>> Left<W> {
    /// A library lies here: `anew` is called if it lies where another one was, by
    /// whoever is among the first to meet it.
    pub fn met(&self, start: u64, end: u64, anew: impl Fn()) {
        for [s, e] in &self.0 {
            let left = e.load(Ordering::Acquire);
            if start < left && end > s.load(Ordering::Acquire) {
                // In this order: for who finds the place free it is known.
                anew();
                let _ = e.compare_exchange(left, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    /// A library lay here. For one thread at a time.
    pub fn leave(&self, start: u64, end: u64) {
        let free = self.0.iter().position(|[_, e]| e.load(Ordering::Relaxed) == 0);
        let [s, e] = &self.0[free.unwrap_or(start as usize >> 12 & (PLACES - 1))];
        s.store(start, Ordering::Release);
        e.store(end, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod tests {
    /// Seen red: where the place is free before it is known that addresses mean something new.
    mod model {
        use super::super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicU64 as Modelled;
        use loom::thread;

        #[test]
        fn who_has_met_a_library_knows_that_addresses_mean_something_new() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let left = Left([[0; 2].map(Modelled::new)]);
                left.leave(10, 20);
                let all = Arc::new((left, Modelled::new(0)));
                let meets = |(left, epoch): &(Left<Modelled>, Modelled)| {
                    left.met(15, 25, || _ = epoch.fetch_add(1, Ordering::AcqRel));
                    assert_ne!(epoch.load(Ordering::Relaxed), 0);
                };
                let other = all.clone();
                let other = thread::spawn(move || {
                    meets(&other);
                    other.0.leave(30, 40);
                });
                meets(&all);
                other.join().unwrap();
            });
        }
    }
}

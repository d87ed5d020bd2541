//! Which entry points are used, by whom and how often.
//!
//! The counts lie in the black box, so that a dead process's file has them, too. Each entry point
//! has a few places for the libraries that call it, by the address that the call returns to. A
//! place is claimed once; from then on a call is one addition. A library that finds no place is
//! counted with the others. Only glibc's lock-free search is asked which library an address is in;
//! where there is none, a place is for one call site.

use memtrace_format::blackbox::{ENTRY_POINT_WORDS, EntryPointUse, Region, entry_point_uses};

use crate::libraries::objects;
use crate::os::sync::{AtomicU64, Ordering, of_file};
use crate::record::blackbox::Mapped;

/// See the module's documentation.
pub struct Usage(&'static [[AtomicU64; ENTRY_POINT_WORDS]]);

impl Usage {
    /// In the region of a black box.
    pub fn new(blackbox: &Mapped) -> Usage {
        Usage(of_file(blackbox.region(Region::EntryPoints)).as_chunks().0)
    }

    /// The entry point of this number was used by a call that returns to `caller`.
    pub fn count(&self, entry: usize, caller: u64) {
        let Some([others, places @ ..]) = self.0.get(entry) else { return };
        for [start, end, calls] in places.as_chunks::<3>().0 {
            if end.load(Ordering::Acquire) == 0 {
                let found = objects::library_at(caller).unwrap_or(caller..caller + 1);
                let claim =
                    start.compare_exchange(0, found.start, Ordering::AcqRel, Ordering::Relaxed);
                if claim.is_err() {
                    continue; // another thread's, this moment
                }
                end.store(found.end, Ordering::Release);
            }
            let range = start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed);
            if range.contains(&caller) {
                calls.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        others.fetch_add(1, Ordering::Relaxed);
    }

    /// What has been counted.
    pub fn read(&self) -> Vec<EntryPointUse> {
        let words: Vec<u64> =
            self.0.as_flattened().iter().map(|w| w.load(Ordering::Relaxed)).collect();
        entry_point_uses(&words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::sync::zeroed_words;

    /// What was counted at an entry point, by first address, and for others.
    fn counted(usage: &Usage) -> (Vec<(u64, u64)>, u64) {
        let found = usage.read();
        found.first().map_or((Vec::new(), 0), |door| (door.callers.clone(), door.others))
    }

    fn empty() -> Usage {
        Usage(zeroed_words(ENTRY_POINT_WORDS).as_chunks().0)
    }

    /// Seen red: where a place is claimed without an exchange.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        #[test]
        fn each_call_is_counted_once_with_its_own_caller() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(2);
            builder.check(|| {
                let usage = Arc::new(empty());
                let other = usage.clone();
                let other = thread::spawn(move || other.count(0, 200));
                usage.count(0, 100);
                usage.count(0, 100);
                other.join().unwrap();
                let (callers, others) = counted(&usage);
                let of =
                    |caller| callers.iter().filter(|c| c.0 == caller).map(|c| c.1).sum::<u64>();
                assert_eq!((of(100), of(200), others), (2, 1, 0));
            });
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn who_finds_no_place_is_counted_with_the_others() {
        let usage = empty();
        (1..=7).for_each(|n| (0..n).for_each(|_| usage.count(0, 100 * n)));
        assert_eq!(counted(&usage), ((1..=5).map(|n| (100 * n, n)).collect(), 6 + 7));
    }
}

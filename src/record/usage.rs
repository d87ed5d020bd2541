//! Which entry points are used, by whom and how often.
//!
//! The counts lie in the black box, so that a dead process's file has them, too. Each entry point
//! has a few places for the libraries that call it, by the address that the call returns to. A
//! place is claimed once; from then on a call is one addition. A library that finds no place is
//! counted with the others. Only glibc's lock-free search is asked which library an address is in;
//! where there is none, a place is for one call site.

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::blackbox::{ENTRY_POINT_WORDS, EntryPointUse, Region, entry_point_uses};

use crate::libraries::objects;
use crate::record::blackbox::Mapped;

/// See the module's documentation.
pub struct Usage(&'static [[AtomicU64; ENTRY_POINT_WORDS]]);

impl Usage {
    /// In the region of a black box.
    pub fn new(blackbox: &Mapped) -> Usage {
        Usage(blackbox.region(Region::EntryPoints).as_chunks().0)
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

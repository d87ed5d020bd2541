//! A device that only counts: so much memory, addresses that are the same in every
//! run, events that are ready at once.

use std::collections::BTreeMap;

use memtrace_format::snapshot::PoolId;

use crate::driver::Driver;

/// Where addresses begin; any number that is nobody's would do.
const BASE: u64 = 0x7000_0000_0000;
/// What the driver hands memory out in.
const PAGE: u64 = 2 << 20;

/// A device that only counts.
#[derive(Clone, Debug)]
pub struct Counter {
    capacity: u64,
    /// What is in use: the part that is not ours, and segments.
    used: u64,
    peak: u64,
    /// Free address ranges below `top`.
    gaps: BTreeMap<u64, u64>,
    top: u64,
    next_event: u64,
    /// Events up to this one are done.
    done: u64,
    lazy: bool,
}

impl Counter {
    /// A device of `capacity` bytes, `overhead` of which are taken by
    /// others (the context, libraries).
    pub fn new(capacity: u64, overhead: u64) -> Counter {
        Counter {
            capacity,
            used: overhead.min(capacity),
            peak: 0,
            gaps: BTreeMap::new(),
            top: BASE,
            next_event: 0,
            done: 0,
            lazy: false,
        }
    }

    /// Events are not ready before somebody waits for them.
    #[must_use]
    pub fn lazy(mut self) -> Counter {
        self.lazy = true;
        self
    }

    /// Others take so much more memory now, or less; they get it even if there is none.
    pub fn others(&mut self, bytes: i64) {
        self.used = self.used.saturating_add_signed(bytes);
        self.peak = self.peak.max(self.used);
    }

    /// The most memory that was ever in use, overhead included.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    fn take(&mut self, size: u64) -> bool {
        let Some(size) = size.checked_next_multiple_of(PAGE) else { return false };
        if self.used.saturating_add(size) > self.capacity {
            return false;
        }
        self.used += size;
        self.peak = self.peak.max(self.used);
        true
    }

    fn give(&mut self, size: u64) {
        self.used = self.used.saturating_sub(size.next_multiple_of(PAGE));
    }

    /// The lowest addresses that are free.
    fn addresses(&mut self, size: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(PAGE)?;
        if let Some((&addr, &gap)) = self.gaps.iter().find(|(_, gap)| **gap >= size) {
            self.gaps.remove(&addr);
            if gap > size {
                self.gaps.insert(addr + size, gap - size);
            }
            return Some(addr);
        }
        let addr = self.top;
        self.top = addr.checked_add(size)?;
        Some(addr)
    }

    fn free_addresses(&mut self, mut addr: u64, size: u64) {
        let mut size = size.next_multiple_of(PAGE);
        if let Some((&before, &gap)) = self.gaps.range(..addr).next_back()
            && before + gap == addr
        {
            self.gaps.remove(&before);
            addr = before;
            size += gap;
        }
        if let Some(gap) = self.gaps.remove(&(addr + size)) {
            size += gap;
        }
        if addr + size == self.top {
            self.top = addr;
        } else {
            self.gaps.insert(addr, size);
        }
    }
}

impl Driver for Counter {
    fn total(&self) -> u64 {
        self.capacity
    }

    fn free_now(&mut self) -> u64 {
        self.capacity.saturating_sub(self.used)
    }

    fn alloc(&mut self, size: u64, _: PoolId) -> Option<u64> {
        if !self.take(size) {
            return None;
        }
        self.addresses(size)
    }

    fn free(&mut self, addr: u64, size: u64, _: PoolId) {
        self.give(size);
        self.free_addresses(addr, size);
    }

    fn reserve(&mut self, size: u64, _: u64, _: u64, _: PoolId) -> Option<u64> {
        self.addresses(size)
    }

    fn unreserve(&mut self, addr: u64, size: u64) {
        self.free_addresses(addr, size);
    }

    fn map(&mut self, _: u64, size: u64, chunk: u64, _: u64) -> bool {
        let chunks = size / chunk.max(1);
        let real = chunk.checked_next_multiple_of(PAGE).and_then(|c| c.checked_mul(chunks));
        real.is_some_and(|real| self.take(real))
    }

    fn unmap(&mut self, _: u64, size: u64, chunk: u64, _: u64) {
        let chunks = size / chunk.max(1);
        self.give(chunk.next_multiple_of(PAGE).saturating_mul(chunks));
    }

    fn record(&mut self, _: u64) -> u64 {
        self.next_event += 1;
        self.next_event
    }

    fn query(&mut self, event: u64) -> bool {
        !self.lazy || event <= self.done
    }

    fn synchronize(&mut self, event: u64) {
        self.done = self.done.max(event);
    }

    fn capturing(&mut self) -> bool {
        false
    }
}

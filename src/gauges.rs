//! What PyTorch's allocator has on each device, as its last report said, and the most of it: for whoever asks now.
//!
//! History and snapshots don't need it. Two plain stores and two comparisons per report, all relaxed: the numbers of one
//! device are written under PyTorch's lock for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Devices of a machine.
const DEVICES: usize = 64;

/// One device's.
#[derive(Default)]
#[repr(align(64))]
pub struct Gauge {
    allocated: AtomicU64,
    reserved: AtomicU64,
    most_allocated: AtomicU64,
    most_reserved: AtomicU64,
}

static GAUGES: [Gauge; DEVICES] = [const {
    Gauge {
        allocated: AtomicU64::new(0),
        reserved: AtomicU64::new(0),
        most_allocated: AtomicU64::new(0),
        most_reserved: AtomicU64::new(0),
    }
}; DEVICES];

/// That of a device.
#[inline]
pub fn of(device: usize) -> Option<&'static Gauge> {
    GAUGES.get(device)
}

impl Gauge {
    /// A report.
    #[inline]
    pub fn set(&self, allocated: u64, reserved: u64) {
        let raise = |most: &AtomicU64, now: u64| {
            if now > most.load(Ordering::Relaxed) {
                most.store(now, Ordering::Relaxed);
            }
        };
        self.allocated.store(allocated, Ordering::Relaxed);
        self.reserved.store(reserved, Ordering::Relaxed);
        raise(&self.most_allocated, allocated);
        raise(&self.most_reserved, reserved);
    }

    /// A report of the allocator's own work: what is allocated now, and by how much what is reserved has changed.
    #[inline]
    pub fn change(&self, allocated: u64, reserved: i64) {
        self.set(allocated, self.reserved.load(Ordering::Relaxed).saturating_add_signed(reserved));
    }

    /// The most was at least that: what was known before a restart.
    pub fn raise(&self, allocated: u64, reserved: u64) {
        self.most_allocated.fetch_max(allocated, Ordering::Relaxed);
        self.most_reserved.fetch_max(reserved, Ordering::Relaxed);
    }

    /// Allocated, reserved, and the most of each.
    pub fn read(&self) -> [u64; 4] {
        [&self.allocated, &self.reserved, &self.most_allocated, &self.most_reserved]
            .map(|n| n.load(Ordering::Relaxed))
    }

    /// From here on the most is counted anew.
    pub fn restart(&self) {
        self.most_allocated.store(self.allocated.load(Ordering::Relaxed), Ordering::Relaxed);
        self.most_reserved.store(self.reserved.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// The child of a fork has no memory of a device's.
pub fn forget() {
    for gauge in &GAUGES {
        gauge.allocated.store(0, Ordering::Relaxed);
        gauge.reserved.store(0, Ordering::Relaxed);
        gauge.restart();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_is_that_since_the_restart() {
        let gauge = Gauge::default();
        for (allocated, reserved) in [(10, 20), (30, 40), (5, 40)] {
            gauge.set(allocated, reserved);
        }
        assert_eq!(gauge.read(), [5, 40, 30, 40]);
        gauge.restart();
        assert_eq!(gauge.read(), [5, 40, 5, 40]);
        gauge.set(7, 8);
        assert_eq!(gauge.read(), [7, 8, 7, 40]);
        gauge.raise(30, 40);
        assert_eq!(gauge.read(), [7, 8, 30, 40]);
        gauge.change(6, -3);
        assert_eq!(gauge.read(), [6, 5, 30, 40]);
    }
}

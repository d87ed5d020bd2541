//! What PyTorch's allocator has on each device, as its last report said, and
//! the most of it: for whoever asks now.
//!
//! History and snapshots don't need it. Two plain stores and two comparisons per report, all
//! relaxed: the numbers of one device are written under PyTorch's lock for it.

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

/// Blocks that the program gave back and that wait for other streams: active, but not allocated.
pub mod waiting {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::DEVICES;

    /// Waits that are known at a time: those of more are not counted.
    const WAITS: usize = 1024;
    /// Blocks that wait at a time.
    const BLOCKS: usize = 512;
    /// How many events a block still waits for; the last one gives it back.
    struct Block {
        events: AtomicU64,
        bytes: AtomicU64,
        device: AtomicU64,
    }
    static BLOCK: [Block; BLOCKS] = [const {
        Block { events: AtomicU64::new(0), bytes: AtomicU64::new(0), device: AtomicU64::new(0) }
    }; BLOCKS];
    /// CUDA event, and which block waits for it.
    static WAIT: [[AtomicU64; 2]; WAITS] = [const { [const { AtomicU64::new(0) }; 2] }; WAITS];
    static PENDING: AtomicU64 = AtomicU64::new(0);
    static BYTES: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];

    /// Bytes that wait.
    pub fn of(device: usize) -> u64 {
        BYTES.get(device).map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// A block that was given back waits for these events.
    pub fn add(device: usize, bytes: u64, events: &[u64]) {
        let Some(total) = BYTES.get(device) else { return };
        let n = events.len() as u64;
        let Some((i, block)) = BLOCK.iter().enumerate().find(|(_, block)| {
            let free = block.events.compare_exchange(0, n, Ordering::AcqRel, Ordering::Relaxed);
            free.is_ok()
        }) else {
            return;
        };
        block.bytes.store(bytes, Ordering::Relaxed);
        block.device.store(device as u64, Ordering::Relaxed);
        total.fetch_add(bytes, Ordering::Relaxed);
        PENDING.fetch_add(n, Ordering::AcqRel);
        let mut free = WAIT.iter();
        for event in events {
            let place = free.find(|wait| {
                wait[0].compare_exchange(0, *event, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            });
            match place {
                Some(place) => place[1].store(i as u64, Ordering::Release),
                None => one_less(i), // it is not waited for here
            }
        }
    }

    /// The event has come to pass.
    #[inline]
    pub fn reached(event: u64) {
        if PENDING.load(Ordering::Relaxed) == 0 {
            return;
        }
        for wait in &WAIT {
            if wait[0].load(Ordering::Acquire) == event {
                let block = wait[1].load(Ordering::Acquire) as usize;
                wait[0].store(0, Ordering::Release);
                one_less(block);
                return;
            }
        }
    }

    /// Nothing waits.
    pub(super) fn forget() {
        let all =
            BLOCK.iter().map(|block| &block.events).chain(WAIT.iter().map(|[event, _]| event));
        for word in all.chain([&PENDING]).chain(&BYTES) {
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }

    fn one_less(block: usize) {
        PENDING.fetch_sub(1, Ordering::AcqRel);
        let Some(block) = BLOCK.get(block) else { return };
        let (bytes, device) = (block.bytes.load(Ordering::Relaxed), &block.device);
        let device = device.load(Ordering::Relaxed) as usize;
        if block.events.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(total) = BYTES.get(device)
        {
            total.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_block_waits_for_the_last_of_its_events() {
            add(3, 1000, &[11, 12]);
            add(3, 500, &[11]);
            assert_eq!(of(3), 1500);
            reached(12);
            assert_eq!(of(3), 1500);
            reached(11); // the first that waited
            assert_eq!(of(3), 500);
            reached(11);
            reached(11);
            assert_eq!(of(3), 0);
        }
    }
}

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

    /// A report of the allocator's own work: what is allocated now, and by
    /// how much what is reserved has changed.
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
    waiting::forget();
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

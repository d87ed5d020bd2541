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
    use super::DEVICES;
    use crate::os::sync::{AtomicU64, Ordering, atomics, constant, of_process};
    use crate::pair::{FREE, Pair};

    /// Waits that are known at a time, few in a model: those of more are not counted.
    const WAITS: usize = if cfg!(loom) { 2 } else { 1024 };
    /// Blocks that wait at a time.
    const BLOCKS: usize = if cfg!(loom) { 2 } else { 512 };
    /// How many events a block still waits for; the last one gives it back.
    struct Block {
        events: AtomicU64,
        bytes: AtomicU64,
        device: AtomicU64,
    }
    impl Block {
        constant! {
            fn new() -> Block {
                Block {
                    events: AtomicU64::new(0),
                    bytes: AtomicU64::new(0),
                    device: AtomicU64::new(0),
                }
            }
        }
    }
    of_process! {
        static BLOCK: [Block; BLOCKS] = atomics![Block::new(); BLOCKS];
    }
    of_process! {
        /// CUDA events, and which block waits for each.
        static WAIT: [Pair; WAITS] = atomics![Pair::new(); WAITS];
    }
    of_process! {
        static PENDING: AtomicU64 = AtomicU64::new(0);
    }
    of_process! {
        static BYTES: [AtomicU64; DEVICES] = atomics![AtomicU64::new(0); DEVICES];
    }

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
            if !free.any(|wait| wait.put(FREE, *event, i as u64)) {
                one_less(i); // it is not waited for here
            }
        }
    }

    /// The event has come to pass.
    #[inline]
    pub fn reached(event: u64) {
        if PENDING.load(Ordering::Relaxed) == 0 {
            return;
        }
        let is_it = |wait: &Pair| wait.get(event).filter(|_| wait.remove(event));
        if let Some(block) = WAIT.iter().find_map(is_it) {
            one_less(block as usize);
        }
    }

    /// Nothing waits.
    pub(super) fn forget() {
        WAIT.iter().filter(|wait| wait.key() != FREE).for_each(|wait| _ = wait.remove(wait.key()));
        let (blocks, pending): (_, &AtomicU64) = (BLOCK.iter().map(|b| &b.events), &PENDING);
        for word in blocks.chain([pending]).chain(BYTES.iter()) {
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

        /// Seen red: where a block's bytes are read when it may be another one's already.
        #[cfg(loom)]
        mod model {
            use super::*;
            use loom::thread;

            #[test]
            fn blocks_of_two_devices_wait_beside_each_other() {
                let waits = |device: usize, bytes: u64, event: u64| {
                    add(device, bytes, &[event]);
                    assert_eq!(of(device), bytes);
                    reached(event);
                    assert_eq!(of(device), 0);
                };
                let mut builder = loom::model::Builder::new();
                builder.preemption_bound = Some(2);
                builder.check(move || {
                    let other = thread::spawn(move || waits(1, 500, 12));
                    waits(0, 1000, 11);
                    other.join().unwrap();
                    assert_eq!(PENDING.load(Ordering::Relaxed), 0);
                    assert!(BLOCK.iter().all(|b| b.events.load(Ordering::Relaxed) == 0));
                    assert!(WAIT.iter().all(|wait| wait.key() == FREE));
                });
            }
        }

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

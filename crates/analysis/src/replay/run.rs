//! Requests, through an allocator that only counts.

use memtrace_caching::{Allocator, BlockId, Counter, Driver, Event, Pending, Settings, Sink};
use memtrace_format::snapshot::{PoolId, Segment};
use serde::Serialize;

use super::requests::{Request, RequestKind, Requests, Slot};

/// Points of the curve over time, at most.
const POINTS: usize = 200;
/// Without a capacity: more than any card has.
const UNLIMITED: u64 = 1 << 50;
/// The entry that stands for what was there before the trace.
pub const BEFORE: u32 = u32::MAX;
/// To what a smallest capacity is found.
const STEP: u64 = 2 << 20;

/// What it runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Card {
    /// Bytes in all; `None` for as much as it takes.
    pub capacity: Option<u64>,
    /// Bytes that are not ours: the context, libraries, other processes.
    pub overhead: u64,
}

/// How it went.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// The most bytes from the device.
    pub peak_reserved: u64,
    /// The most bytes in blocks that are handed out or wait for their free.
    pub peak_active: u64,
    /// The most bytes in blocks that are handed out.
    pub peak_allocated: u64,
    /// Bytes from the device, at the end.
    pub reserved: u64,
    /// Bytes in blocks that are handed out, at the end.
    pub allocated: u64,
    /// Calls that got memory from the device.
    pub device_allocs: u64,
    /// Calls that gave some back.
    pub device_frees: u64,
    /// How often everything cached was given back to make room.
    pub retries: u64,
    /// The request that failed, if one did: there it ends.
    pub oom: Option<Oom>,
    /// Requests that had failed in the recorded run and fail here too.
    pub failed_again: u64,
    /// Requests that had failed in the recorded run and do not here.
    pub failed_no_more: u64,
    /// Over time.
    pub curve: Vec<Point>,
}

/// A request that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Oom {
    /// Which entry of the trace.
    pub entry: u32,
    /// Bytes that were asked for.
    pub requested: u64,
    /// Bytes asked of the device.
    pub segment: u64,
    /// Bytes handed out then.
    pub allocated: u64,
    /// Bytes from the device then.
    pub reserved: u64,
    /// Bytes the device had free then.
    pub device_free: u64,
}

/// A moment.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Point {
    /// Entries of the trace so far.
    pub entry: u32,
    /// Bytes handed out or waiting.
    pub active: u64,
    /// Bytes from the device.
    pub reserved: u64,
    /// The part of the reserved bytes that nobody uses, 0 to 1.
    pub fragmentation: f64,
}

impl Outcome {
    /// Every request got its memory, those too that had not when recorded.
    pub fn fits(&self) -> bool {
        self.oom.is_none() && self.failed_again == 0
    }

    /// At the peak of the reserved bytes, at best: the part of them that nobody ever used at once.
    pub fn overhead(&self) -> f64 {
        fragmentation(self.peak_active, self.peak_reserved)
    }
}

fn fragmentation(active: u64, reserved: u64) -> f64 {
    if reserved == 0 { 0.0 } else { 1.0 - active as f64 / reserved as f64 }
}

/// Who listens to a replay: the allocator's events, each with the entry of
/// the trace that caused it.
pub trait Listener: Sink {
    /// What follows is caused by this entry.
    fn at(&mut self, entry: u32);
}

impl Listener for () {
    fn at(&mut self, _: u32) {}
}

/// All events with what caused them.
#[derive(Clone, Debug, Default)]
pub struct Log {
    entry: u32,
    /// Entry of the trace, event.
    pub events: Vec<(u32, Event)>,
}

impl Sink for Log {
    fn event(&mut self, event: &Event) {
        self.events.push((self.entry, *event));
    }
}

impl Listener for Log {
    fn at(&mut self, entry: u32) {
        self.entry = entry;
    }
}

/// Runs the requests to their end, or to the first that fails and had not failed before.
pub fn run(requests: &Requests, settings: &Settings, card: Card) -> Outcome {
    listen(requests, settings, card, ()).0
}

/// The same. It also gives the events and the segments at the end.
pub fn listen<L: Listener>(
    requests: &Requests,
    settings: &Settings,
    card: Card,
    listener: L,
) -> (Outcome, L, Vec<Segment>) {
    let capacity = card.capacity.unwrap_or(UNLIMITED);
    let counter = Counter::new(capacity, card.overhead).lazy();
    let mut replay = Replay::new(Allocator::new(counter, settings.clone(), listener), requests);
    let every = (requests.during.len() / POINTS).max(1);
    let mut oom = requests.before.iter().find_map(|r| replay.count(r).err());
    if oom.is_none() {
        for (n, request) in requests.during.iter().enumerate() {
            if n.is_multiple_of(every) {
                replay.point(request.entry);
            }
            if let Err(failed) = replay.count(request) {
                oom = Some(failed);
                break;
            }
        }
    }
    replay.outcome.oom = oom;
    replay.end(requests.device as i64)
}

/// The smallest capacity on which the requests run to their end, to 2 MiB. It is found by
/// bisection, between what they use at once and what they take where there is enough.
pub fn smallest_capacity(requests: &Requests, settings: &Settings, overhead: u64) -> Option<u64> {
    let fits =
        |capacity: u64| run(requests, settings, Card { capacity: Some(capacity), overhead }).fits();
    let free = run(requests, settings, Card { capacity: None, overhead });
    let others = others_peak(requests) + overhead;
    let mut too_small = (free.peak_active / STEP).saturating_sub(1);
    let mut enough = (free.peak_reserved + others).div_ceil(STEP);
    // A memory fraction needs more than is ever taken.
    let mut tries = 0;
    while !fits(enough * STEP) {
        (too_small, enough) = (enough, enough * 2);
        tries += 1;
        if tries > 20 {
            return None;
        }
    }
    while too_small + 1 < enough {
        let middle = too_small.midpoint(enough);
        if fits(middle * STEP) { enough = middle } else { too_small = middle }
    }
    Some(enough * STEP)
}

fn others_peak(requests: &Requests) -> u64 {
    let mut now = 0_i64;
    let mut peak = 0;
    for request in requests.before.iter().chain(&requests.during) {
        if let RequestKind::Others(bytes) = request.what {
            now += bytes;
            peak = peak.max(now);
        }
    }
    peak as u64
}

#[derive(Clone, Copy)]
enum Held {
    Nothing,
    Block(BlockId),
    Waits(Pending),
}

/// An allocator, and what the program has of it.
pub(super) struct Replay<D, L> {
    pub(super) allocator: Allocator<D, L>,
    held: Vec<Held>,
    outcome: Outcome,
}

impl<D: Driver, L: Listener> Replay<D, L> {
    pub(super) fn new(allocator: Allocator<D, L>, requests: &Requests) -> Self {
        let held = vec![Held::Nothing; requests.slots as usize];
        Replay { allocator, held, outcome: Outcome::default() }
    }

    /// The program has this block already.
    pub(super) fn hold(&mut self, slot: Slot, id: BlockId) {
        self.held[slot as usize] = Held::Block(id);
    }

    /// Asks for what was asked for. What others do on the device is the caller's business.
    pub(super) fn step(&mut self, request: &Request) -> Result<(), Oom> {
        self.allocator.sink_mut().at(request.entry);
        match request.what {
            RequestKind::Alloc { slot, size, stream, pool } => {
                let id = self.malloc(request.entry, size, stream, pool)?;
                self.hold(slot, id);
            }
            RequestKind::Failed { size, stream, pool } => {
                if let Ok(id) = self.malloc(request.entry, size, stream, pool) {
                    self.outcome.failed_no_more += 1;
                    // What the program would have done with it, nobody knows.
                    let _ = self.allocator.free(id);
                } else {
                    self.outcome.failed_again += 1;
                }
            }
            RequestKind::Free(slot) => {
                if let Held::Block(id) = self.take(slot) {
                    let _ = self.allocator.free(id);
                }
            }
            RequestKind::FreeLater(slot) => {
                if let Held::Block(id) = self.held[slot as usize]
                    && let Ok(pending) = self.allocator.free_waiting(id)
                {
                    self.held[slot as usize] = Held::Waits(pending);
                }
            }
            RequestKind::Complete(slot) => {
                if let Held::Waits(pending) = self.take(slot) {
                    self.allocator.complete_free(pending);
                }
            }
            RequestKind::EmptyCache => self.allocator.empty_cache(),
            RequestKind::Release(pool) => drop(self.allocator.release_pool(pool)),
            RequestKind::EmptyPool(pool) => self.allocator.empty_pool(pool),
            RequestKind::Others(_) => {}
        }
        Ok(())
    }

    fn take(&mut self, slot: Slot) -> Held {
        std::mem::replace(&mut self.held[slot as usize], Held::Nothing)
    }

    fn malloc(&mut self, entry: u32, size: u64, stream: u64, pool: PoolId) -> Result<BlockId, Oom> {
        let result = if pool == (0, 0) {
            self.allocator.malloc(size, stream)
        } else {
            self.allocator.malloc_in(pool, size, stream)
        };
        result.map(|a| a.id).map_err(|e| Oom {
            entry,
            requested: e.requested,
            segment: e.segment,
            allocated: e.allocated,
            reserved: e.reserved,
            device_free: e.device_free,
        })
    }

    fn point(&mut self, entry: u32) {
        let active = self.allocator.stats().active_bytes.all.current as u64;
        let reserved = self.allocator.reserved();
        let fragmentation = fragmentation(active, reserved);
        self.outcome.curve.push(Point { entry, active, reserved, fragmentation });
    }

    fn end(mut self, device: i64) -> (Outcome, L, Vec<Segment>) {
        let stats = self.allocator.stats();
        let outcome = &mut self.outcome;
        outcome.peak_reserved = stats.reserved_bytes.all.peak as u64;
        outcome.peak_active = stats.active_bytes.all.peak as u64;
        outcome.peak_allocated = stats.allocated_bytes.all.peak as u64;
        outcome.reserved = stats.reserved_bytes.all.current as u64;
        outcome.allocated = stats.allocated_bytes.all.current as u64;
        outcome.device_allocs = stats.num_device_alloc;
        outcome.device_frees = stats.num_device_free;
        outcome.retries = stats.num_alloc_retries;
        let segments = self.allocator.segments(device);
        (self.outcome, self.allocator.into_parts().1, segments)
    }
}

impl<L: Listener> Replay<Counter, L> {
    /// The same where others count too.
    fn count(&mut self, request: &Request) -> Result<(), Oom> {
        if let RequestKind::Others(bytes) = request.what {
            self.allocator.device_mut().others(bytes);
        }
        self.step(request)
    }
}

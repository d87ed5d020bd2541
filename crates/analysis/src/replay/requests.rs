//! From what the allocator did to what it was asked.
//!
//! A trace entry `alloc` is a request of its size; `free_requested` gives it back, and the free is
//! complete where the trace says so. Segments that go without a request that needs the room were
//! sent away by `empty_cache`. Directly before a new segment or an `oom` the allocator may have
//! done that by itself, and would not have to on a larger card: see `needed`. What there was before
//! the trace ([`crate::history::rewind`]) is requested first, in the order of addresses.

use std::collections::{BTreeMap, HashMap};

use memtrace_caching::sizes;
use memtrace_format::snapshot::{Action, PoolId, Snapshot, TraceEntry};

use super::run::BEFORE;
use crate::history::{Beginning, driver_call, rewind};

/// Names a block in the order of the requests.
pub type Slot = u32;

/// One thing that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// A block.
    Alloc {
        /// Its name from now on.
        slot: Slot,
        /// Bytes.
        size: u64,
        /// Raw stream handle.
        stream: u64,
        /// Its pool.
        pool: PoolId,
    },
    /// A block that there was no memory for.
    Failed {
        /// Bytes, rounded: that is all the trace has.
        size: u64,
        /// Raw stream handle.
        stream: u64,
        /// Its pool.
        pool: PoolId,
    },
    /// It is given back and free.
    Free(Slot),
    /// It is given back; other streams still use it.
    FreeLater(Slot),
    /// They no longer do.
    Complete(Slot),
    /// Everything cached goes back to the device.
    EmptyCache,
    /// Nobody holds this pool any more.
    Release(PoolId),
    /// What this pool has cached goes back to the device.
    EmptyPool(PoolId),
    /// Others on the device, driver calls of the program's own, take so much more, or less.
    Others(i64),
}

/// What, and which entry of the trace says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Index of the entry; [`BEFORE`] for what was there before.
    pub entry: u32,
    /// What was asked.
    pub what: RequestKind,
}

/// Everything that one device was asked.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// Which device.
    pub device: usize,
    /// What was there before the trace, as requests.
    pub before: Vec<Request>,
    /// In the order of the trace.
    pub during: Vec<Request>,
    /// Names in use: one more than the largest.
    pub slots: Slot,
    /// Address and name of each block of `before`.
    pub seeds: Vec<(u64, Slot)>,
    /// What the reader of the result should know.
    pub notes: Vec<String>,
    pub(crate) beginning: Beginning,
}

/// What a device of a snapshot was asked.
pub fn requests(snapshot: &Snapshot, device: usize) -> Requests {
    let trace = snapshot.device_traces.get(device).map_or(&[][..], Vec::as_slice);
    let mut contradictions = 0;
    let beginning = rewind(snapshot, device, &mut |_, _| contradictions += 1);
    let mut reader = Reader {
        out: Requests { device, ..Requests::default() },
        alive: HashMap::new(),
        pools: pools_by_address(snapshot, device, trace),
        released: Vec::new(),
        reserved: 0,
        room: None,
    };
    reader.before(&beginning);
    reader.room = room(snapshot, trace, reader.reserved);
    let mut at = 0;
    while at < trace.len() {
        at = reader.entry(trace, at);
    }
    let mut out = reader.out;
    if !beginning.blocks.is_empty() {
        out.notes.push(format!(
            "already there when the trace begins: {} in {}; taken from the final state, run backwards, their order is \
             unknown",
            many(beginning.blocks.len(), "block"),
            many(beginning.segments.len(), "segment")
        ));
    }
    if contradictions > 0 {
        out.notes.push(format!(
            "trace and segments contradict each other ({}): see memtrace check",
            many(contradictions, "time")
        ));
    }
    out.beginning = beginning;
    out
}

fn many(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// Before PyTorch 2.12 only the segments at the end have their pool: the
/// pool of each one, by address.
fn pools_by_address(
    snapshot: &Snapshot,
    device: usize,
    trace: &[TraceEntry],
) -> BTreeMap<u64, (u64, PoolId)> {
    let segments = snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device));
    let mut pools: BTreeMap<u64, (u64, PoolId)> =
        segments.map(|s| (s.address, (s.total_size, s.pool_id))).collect();
    // An address that was somebody else's before says nothing about then.
    for entry in trace.iter().filter(|e| e.action == Action::SegmentFree) {
        pools.remove(&entry.addr);
    }
    pools.retain(|_, (_, pool)| *pool != (0, 0));
    pools
}

struct Reader {
    out: Requests,
    /// Address → name, and whether its free is complete.
    alive: HashMap<u64, Slot>,
    pools: BTreeMap<u64, (u64, PoolId)>,
    released: Vec<PoolId>,
    /// Bytes in segments now.
    reserved: u64,
    /// So many the device certainly has; `None` if segments may go before it is full.
    room: Option<u64>,
}

/// The most that the trace ever has in segments: the device is at least as large. With settings
/// that give segments back before the device is full it says nothing.
fn room(snapshot: &Snapshot, trace: &[TraceEntry], before: u64) -> Option<u64> {
    let settings = super::settings(&super::own_conf(snapshot)).ok()?.settings;
    if settings.garbage_collection_threshold > 0.0 || settings.max_split_size != u64::MAX {
        return None;
    }
    let (mut now, mut most) = (before, before);
    for entry in trace.iter().filter(|e| driver_call(e).is_none()) {
        match entry.action {
            Action::SegmentAlloc | Action::SegmentMap => now = now.saturating_add(entry.size),
            Action::SegmentFree | Action::SegmentUnmap => now = now.saturating_sub(entry.size),
            _ => {}
        }
        most = most.max(now);
    }
    Some(most)
}

impl Reader {
    fn pool(&self, entry: &TraceEntry) -> PoolId {
        entry.pool_id.unwrap_or_else(|| self.pool_at(entry.addr))
    }

    fn pool_at(&self, addr: u64) -> PoolId {
        let segment = self.pools.range(..=addr).next_back();
        segment
            .filter(|(start, (size, _))| addr < *start + size)
            .map_or((0, 0), |(_, (_, pool))| *pool)
    }

    fn slot(&mut self, addr: u64) -> Slot {
        let slot = self.out.slots;
        self.out.slots += 1;
        self.alive.insert(addr, slot);
        slot
    }

    fn before(&mut self, beginning: &Beginning) {
        self.reserved = beginning.segments.values().filter(|s| !s.driver).map(|s| s.size).sum();
        for (&addr, live) in &beginning.blocks {
            if live.driver {
                self.push_before(RequestKind::Others(live.requested as i64));
                continue;
            }
            let segment = beginning.segments.range(..=addr).next_back();
            let stream = segment.map_or(0, |(_, s)| s.stream);
            let slot = self.slot(addr);
            let pool = self.pool_at(addr);
            // Where the requested size is the block's own, nothing is lost;
            // else rounding it again gives the block.
            self.push_before(RequestKind::Alloc {
                slot,
                size: live.requested.max(1),
                stream,
                pool,
            });
            self.out.seeds.push((addr, slot));
            if live.pending {
                self.push_before(RequestKind::FreeLater(slot));
            }
        }
    }

    fn push_before(&mut self, what: RequestKind) {
        self.out.before.push(Request { entry: BEFORE, what });
    }

    fn push(&mut self, entry: usize, what: RequestKind) {
        self.out.during.push(Request { entry: entry as u32, what });
    }

    /// Reads the entry at `at`, and those that belong to it; gives the index of the next.
    fn entry(&mut self, trace: &[TraceEntry], at: usize) -> usize {
        let entry = &trace[at];
        if driver_call(entry).is_some() {
            match entry.action {
                Action::Alloc => self.push(at, RequestKind::Others(entry.size as i64)),
                Action::FreeCompleted => self.push(at, RequestKind::Others(-(entry.size as i64))),
                _ => {}
            }
            return at + 1;
        }
        match entry.action {
            Action::Alloc => {
                let pool = self.pool(entry);
                let slot = self.slot(entry.addr);
                let TraceEntry { size, stream, .. } = *entry;
                self.push(at, RequestKind::Alloc { slot, size, stream, pool });
            }
            Action::FreeRequested => {
                let completes =
                    |e: &TraceEntry| e.action == Action::FreeCompleted && e.addr == entry.addr;
                if trace.get(at + 1).is_some_and(completes) {
                    if let Some(slot) = self.alive.remove(&entry.addr) {
                        self.push(at, RequestKind::Free(slot));
                    }
                    return at + 2;
                }
                if let Some(&slot) = self.alive.get(&entry.addr) {
                    self.push(at, RequestKind::FreeLater(slot));
                }
            }
            Action::FreeCompleted => {
                if let Some(slot) = self.alive.remove(&entry.addr) {
                    self.push(at, RequestKind::Complete(slot));
                }
            }
            Action::Oom => {
                let pool = entry.pool_id.unwrap_or((0, 0));
                let TraceEntry { size, stream, .. } = *entry;
                self.push(at, RequestKind::Failed { size, stream, pool });
            }
            Action::SegmentFree | Action::SegmentUnmap => return self.gone(trace, at),
            Action::SegmentAlloc | Action::SegmentMap => {
                self.reserved = self.reserved.saturating_add(entry.size);
            }
            Action::Snapshot | Action::Other(_) => {}
        }
        at + 1
    }

    /// A run of segments that went: by request, or because the allocator needed the room.
    fn gone(&mut self, trace: &[TraceEntry], at: usize) -> usize {
        let goes = |e: &TraceEntry| {
            matches!(e.action, Action::SegmentFree | Action::SegmentUnmap)
                && driver_call(e).is_none()
        };
        let end = trace[at..].iter().position(|e| !goes(e)).map_or(trace.len(), |n| at + n);
        let pools: Vec<PoolId> = trace[at..end].iter().map(|e| self.pool(e)).collect();
        let needed = self.needed(&trace[at..end], &trace[end..]);
        let gone: u64 = trace[at..end].iter().map(|e| e.size).sum();
        self.reserved = self.reserved.saturating_sub(gone);
        for pool in pools.iter().filter(|p| **p != (0, 0)) {
            if !self.released.contains(pool) {
                self.released.push(*pool);
                self.push(at, RequestKind::Release(*pool));
            }
        }
        if needed {
            return end;
        }
        match pools.first() {
            Some(&pool) if pool != (0, 0) && pools.iter().all(|p| *p == pool) => {
                self.push(at, RequestKind::EmptyPool(pool));
            }
            _ => self.push(at, RequestKind::EmptyCache),
        }
        end
    }

    /// Whether the allocator itself made room. Then the next thing is a segment or an `oom`, none
    /// of the segments that went was large enough for it, and there was no room for it beside them.
    fn needed(&self, gone: &[TraceEntry], after: &[TraceEntry]) -> bool {
        let Some(next) = after.first() else { return false };
        let wanted = match next.action {
            Action::Oom => next.size,
            Action::SegmentAlloc | Action::SegmentMap => {
                let first =
                    after.iter().find(|e| e.action == Action::Alloc && e.stream == next.stream);
                first.map_or(next.size, |e| e.size)
            }
            _ => return false,
        };
        let small = |segment: &TraceEntry| segment.size == sizes::SMALL_SEGMENT;
        let serves = |e: &TraceEntry| {
            e.stream == next.stream
                && self.pool(e) == self.pool(next)
                && e.size >= wanted
                && small(e) == sizes::is_small(wanted)
        };
        if gone.iter().any(serves) {
            return false;
        }
        let with = self.reserved.saturating_add(next.size);
        next.action == Action::Oom || self.room.is_none_or(|room| with > room)
    }
}

//! The recorded run itself, again: the same settings, and the answers of the recorded driver.
//!
//! What comes out is compared with the trace, event for event. A difference is a fact about this
//! file. The trace lacks something (settings changed under way, or blocks older than the trace have
//! no known size), or PyTorch was of another release.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use memtrace_caching::{
    Action as Did, Allocator, BlockId, Event, Ready, Script, Settings, Step, sizes,
};
use memtrace_format::snapshot::{Action, Block, BlockState, Segment, Snapshot, TraceEntry};
use serde::Serialize;

use super::requests::{RequestKind, Requests};
use super::run::{Log, Replay};
use crate::history::driver_call;

/// How equal it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Exact {
    /// Events of the allocator in the trace.
    pub events: u64,
    /// How many come out equal before the first difference.
    pub equal: u64,
    /// `segment_…` events in the trace.
    pub segment_events: u64,
    /// How many come out, in their order.
    pub segment_events_equal: u64,
    /// Blocks that the trace hands out.
    pub allocs: u64,
    /// How many come out at their address.
    pub allocs_equal: u64,
    /// The most bytes from the device, from the beginning of the trace on.
    pub peak_reserved: u64,
    /// The most bytes in use.
    pub peak_active: u64,
    /// The first difference, in words.
    pub difference: Option<String>,
    /// Blocks of one size are ordered by the age of their segments, or by
    /// address alone as in older releases.
    pub by_age: bool,
}

/// Repeats the recorded run; `None` if expandable segments of the
/// beginning do not go with the settings.
pub fn exact(snapshot: &Snapshot, requests: &Requests, settings: &Settings) -> Option<Exact> {
    let with_age = repeat(snapshot, requests, settings, true)?;
    if with_age.difference.is_none() {
        return Some(with_age);
    }
    let without = repeat(snapshot, requests, settings, false)?;
    let better = |e: &Exact| (e.segment_events_equal, e.allocs_equal);
    Some(if better(&without) > better(&with_age) { without } else { with_age })
}

fn repeat(
    snapshot: &Snapshot,
    requests: &Requests,
    settings: &Settings,
    by_age: bool,
) -> Option<Exact> {
    let trace = snapshot.device_traces.get(requests.device).map_or(&[][..], Vec::as_slice);
    let expected: Vec<Event> = trace.iter().filter_map(event).collect();
    let before = segments_before(snapshot, requests, settings)?;
    let of_driver =
        |e: &&Event| !matches!(e.action, Did::Alloc | Did::FreeRequested | Did::FreeCompleted);
    let steps = expected.iter().filter(of_driver);
    let steps = steps.map(|&Event { action, addr, size, stream, pool, .. }| Step {
        action,
        addr,
        size,
        stream,
        pool,
    });
    let total = super::recorded_card(snapshot, requests.device).and_then(|c| c.capacity);
    let total = total.unwrap_or_else(|| total_of(&expected));
    let reservations = reservations(&before, &expected, settings, total);
    let device =
        Script::new(total, steps).with_events(Ready::Reported).with_reservations(&reservations);
    let mut allocator = Allocator::new(device, settings.clone(), Log::default());
    if !by_age {
        allocator.ignore_age();
    }
    let mut replay = Replay::new(allocator, requests);
    begin(&mut replay, requests, &before, &reservations);
    for request in &requests.during {
        // A refusal is in the trace, or the comparison finds it.
        let _ = replay.step(request);
    }
    let log = std::mem::take(replay.allocator.sink_mut());
    let stats = replay.allocator.stats();
    let (reserved, active) =
        (stats.reserved_bytes.all.peak as u64, stats.active_bytes.all.peak as u64);
    Some(Exact {
        peak_reserved: reserved,
        peak_active: active,
        by_age,
        ..compare(&expected, trace, &log)
    })
}

/// What the device had in all, as far as it matters: expandable segments reserve 9/8 of it,
/// so that no two are nearer than that. Maps that are as far apart as all memory in use is
/// large are of different reservations.
fn total_of(expected: &[Event]) -> u64 {
    let (mut mapped, mut peak) = (0_u64, 0);
    for e in expected {
        match e.action {
            Did::SegmentMap => mapped = mapped.saturating_add(e.size),
            Did::SegmentUnmap => mapped = mapped.saturating_sub(e.size),
            _ => {}
        }
        peak = peak.max(mapped);
    }
    let maps = expected.iter().filter(|e| e.action == Did::SegmentMap);
    let maps: BTreeMap<u64, u64> = maps.map(|e| (e.addr, e.size)).collect();
    let mut bases: Vec<u64> = Vec::new();
    let mut end = 0;
    for (addr, size) in maps {
        if bases.is_empty() || addr > peak.saturating_add(end) {
            bases.push(addr);
        }
        end = end.max(addr.saturating_add(size));
    }
    let apart = bases.windows(2).map(|pair| pair[1] - pair[0]).min();
    apart.unwrap_or(1 << 50) / 9 * 8
}

/// Where the expandable segments of the beginning have their reservations. Each is taken to start
/// at its lowest address that is ever mapped, which may be higher than its true base.
fn reservations(
    before: &[Segment],
    expected: &[Event],
    settings: &Settings,
    total: u64,
) -> Vec<(u64, u64)> {
    type SizeClass = (u64, (u64, u64), bool);
    let mut addrs: BTreeMap<SizeClass, BTreeSet<u64>> = BTreeMap::new();
    for s in before.iter().filter(|s| s.is_expandable) {
        addrs.entry((s.stream, s.pool_id, s.small)).or_default().insert(s.address);
    }
    for e in expected.iter().filter(|e| e.action == Did::SegmentMap) {
        if let Some(known) = addrs.get_mut(&(e.stream, e.pool, e.size == sizes::SMALL_SEGMENT)) {
            known.insert(e.addr);
        }
    }
    let mut bases: Vec<(u64, u64)> = Vec::new();
    for ((_, _, small), addrs) in addrs {
        let chunk = if small { sizes::SMALL_SEGMENT } else { settings.large_segment };
        let size = (total + total / 8).div_ceil(chunk) * chunk;
        let mut end = 0;
        for addr in addrs {
            if addr >= end {
                bases.push((addr, size));
                end = addr + size;
            }
        }
    }
    // Others come later, when they are reserved.
    let holds = |(base, size): &(u64, u64)| {
        before.iter().any(|s| s.is_expandable && s.address >= *base && s.address - *base < *size)
    };
    bases.retain(holds);
    bases.sort_unstable();
    // If the guess is too large, the next one limits it.
    for i in 1..bases.len() {
        let next = bases[i].0;
        let before = &mut bases[i - 1];
        before.1 = before.1.min(next - before.0);
    }
    bases
}

fn event(entry: &TraceEntry) -> Option<Event> {
    if driver_call(entry).is_some() {
        return None;
    }
    let action = match entry.action {
        Action::Alloc => Did::Alloc,
        Action::FreeRequested => Did::FreeRequested,
        Action::FreeCompleted => Did::FreeCompleted,
        Action::SegmentAlloc => Did::SegmentAlloc,
        Action::SegmentFree => Did::SegmentFree,
        Action::SegmentMap => Did::SegmentMap,
        Action::SegmentUnmap => Did::SegmentUnmap,
        Action::Oom => Did::Oom,
        Action::Snapshot | Action::Other(_) => return None,
    };
    let TraceEntry { addr, size, stream, .. } = *entry;
    Some(Event {
        action,
        addr,
        size,
        stream,
        pool: entry.pool_id.unwrap_or((0, 0)),
        with_address: false,
    })
}

/// What there was before the trace, as segments full of blocks.
fn segments_before(
    snapshot: &Snapshot,
    requests: &Requests,
    settings: &Settings,
) -> Option<Vec<Segment>> {
    let beginning = &requests.beginning;
    let trace = snapshot.device_traces.get(requests.device).map_or(&[][..], Vec::as_slice);
    let first_alloc = Firsts::new(trace);
    let mut segments = Vec::new();
    for (&address, range) in beginning.segments.iter().filter(|(_, r)| !r.driver) {
        let at_end =
            snapshot.segments.iter().find(|s| s.address == address && s.total_size == range.size);
        let expandable = settings.expandable_segments;
        if !expandable && at_end.is_some_and(|s| s.is_expandable) {
            // The settings changed under way.
            return None;
        }
        let small = match at_end {
            Some(segment) => segment.small,
            None if !expandable => range.size == sizes::SMALL_SEGMENT,
            // The range grew or shrank: part of it may be there at the end, or what is in it says.
            None => {
                let end = address + range.size;
                let overlaps = |s: &&Segment| s.address < end && address < s.address + s.total_size;
                let part = snapshot.segments.iter().find(overlaps).map(|s| s.small);
                let live = beginning.blocks.range(address..end).next();
                let is_small = |requested| sizes::is_small(sizes::round(settings, requested));
                part.unwrap_or_else(|| live.is_none_or(|(_, b)| is_small(b.requested)))
            }
        };
        let mut segment = Segment {
            device: requests.device as i64,
            address,
            total_size: range.size,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: range.stream,
            small,
            pool_id: at_end.map_or((0, 0), |s| s.pool_id),
            is_expandable: expandable,
            frames: None,
            blocks: Vec::new(),
        };
        let end = address + range.size;
        let mut at = address;
        let mut live = beginning.blocks.range(address..end).filter(|(_, b)| !b.driver).peekable();
        while let Some((&addr, block)) = live.next() {
            if addr < at {
                continue;
            }
            segment.fill_gap(at, addr);
            let next = live.peek().map_or(end, |(addr, _)| **addr);
            let size = block.rounded.unwrap_or_else(|| {
                let rounded = sizes::round(settings, block.requested);
                // What was too little to be cut off stayed with the block. It reaches up to the
                // next block, or to where the next one will be while this one lives.
                let next = first_alloc.next_while_alive(addr, next).unwrap_or(next);
                let rest = (next - addr).saturating_sub(rounded);
                let cut = small || expandable || rest > sizes::SMALL_LIMIT;
                if cut { rounded } else { rounded + rest }
            });
            let size = size.min(next - addr);
            segment.blocks.push(Block {
                address: addr,
                size,
                requested_size: block.requested,
                state: BlockState::ActiveAllocated,
                frames: None,
            });
            at = addr + size;
        }
        segment.fill_gap(at, end);
        segments.push(segment);
    }
    Some(segments)
}

/// By address: the first entry that hands a block out there, and the first that takes one back.
struct Firsts {
    allocs: BTreeMap<u64, usize>,
    frees: HashMap<u64, usize>,
}

impl Firsts {
    fn new(trace: &[TraceEntry]) -> Firsts {
        let mut firsts = Firsts { allocs: BTreeMap::new(), frees: HashMap::new() };
        for (n, entry) in trace.iter().enumerate() {
            match entry.action {
                Action::Alloc => drop(firsts.allocs.entry(entry.addr).or_insert(n)),
                Action::FreeRequested => drop(firsts.frees.entry(entry.addr).or_insert(n)),
                _ => {}
            }
        }
        firsts
    }

    /// The lowest address behind `addr` at which something is handed out
    /// before what is at `addr` goes.
    fn next_while_alive(&self, addr: u64, end: u64) -> Option<u64> {
        let goes = self.frees.get(&addr).copied().unwrap_or(usize::MAX);
        self.allocs.range(addr + 1..end).find(|(_, n)| **n < goes).map(|(a, _)| *a)
    }
}

/// Puts what was there before into the allocator.
fn begin(
    replay: &mut Replay<Script, Log>,
    requests: &Requests,
    segments: &[Segment],
    reservations: &[(u64, u64)],
) {
    let blocks = replay.allocator.begin_with(segments, reservations);
    let by_addr: HashMap<u64, BlockId> = blocks.into_iter().collect();
    for (addr, slot) in &requests.seeds {
        if let Some(id) = by_addr.get(addr) {
            replay.hold(*slot, *id);
        }
    }
    for request in requests.before.iter().filter(|r| !matches!(r.what, RequestKind::Alloc { .. })) {
        let _ = replay.step(request);
    }
    replay.allocator.sink_mut().events.clear();
}

fn compare(expected: &[Event], trace: &[TraceEntry], log: &Log) -> Exact {
    type Key = (Did, u64, u64, u64);
    let key = |e: &Event| -> Key { (e.action, e.addr, e.size, e.stream) };
    let got: Vec<Key> = log.events.iter().map(|(_, e)| key(e)).collect();
    let wanted: Vec<Key> = expected.iter().map(key).collect();
    let equal = got.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
    let segment = |k: &&Key| {
        matches!(k.0, Did::SegmentAlloc | Did::SegmentFree | Did::SegmentMap | Did::SegmentUnmap)
    };
    let segments_wanted: Vec<&Key> = wanted.iter().filter(segment).collect();
    let segments_got: Vec<&Key> = got.iter().filter(segment).collect();
    let segments_equal =
        segments_got.iter().zip(&segments_wanted).take_while(|(a, b)| a == b).count();
    let allocs = log.events.iter().filter(|(_, e)| e.action == Did::Alloc);
    let same = |(entry, e): &&(u32, Event)| {
        trace.get(*entry as usize).is_some_and(|t| t.action == Action::Alloc && t.addr == e.addr)
    };
    let difference = (equal < got.len().max(wanted.len())).then(|| {
        let say = |k: Option<&Key>| {
            k.map_or("nothing".to_owned(), |(did, addr, size, _)| {
                format!("{} at {addr:#x} of {size} bytes", did.name())
            })
        };
        format!(
            "event {equal}: {} comes out, {} is recorded",
            say(got.get(equal)),
            say(wanted.get(equal))
        )
    });
    Exact {
        events: wanted.len() as u64,
        equal: equal as u64,
        segment_events: segments_wanted.len() as u64,
        segment_events_equal: segments_equal as u64,
        allocs: wanted.iter().filter(|k| k.0 == Did::Alloc).count() as u64,
        allocs_equal: allocs.filter(same).count() as u64,
        difference,
        ..Exact::default()
    }
}

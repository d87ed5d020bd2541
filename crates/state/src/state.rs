//! From events to the state of memory, and to the history that PyTorch would have written.
//!
//! The hooks write down only what they see: an address given back, a CUDA event that has
//! completed. What follows from it is worked out here, once, by applying events in the order of
//! their tickets: how large the block was, whose free is now complete, which blocks are in which
//! segment. The same code serves the ring's retirement, a dump of a living process and the file of
//! a dead one, so the three can't disagree.
//!
//! What comes and goes with an event is said by [`crate::framework`] and [`crate::ledger`], for the
//! live table, too. What PyTorch's trace would say is said here. A free that is complete at once
//! has two entries. Neighbouring free blocks of a segment are always merged, so the gaps between
//! active blocks are the inactive blocks. An expandable segment shows as one segment for each
//! contiguous mapped range of one reservation.
//!
//! It must never panic on any sequence of events: a ring may have lost its
//! beginning, and a file may be damaged.

mod live_entries;
mod segments;

use std::collections::{BTreeMap, HashMap};

use memtrace_format::blackbox::key;
use memtrace_format::event::{
    Event, FLAG_FAILED, Kind, LabelId, Layer, NO_STACK, OUT_OF_MEMORY, OomEvent, Pool, ReadyEvent,
    RefusalEvent, SnapshotEvent, StackId,
};
use memtrace_format::snapshot::{Action, PoolId, Segment, StackIx, Trace, TraceEntry};

use crate::framework::{self, Change, PAGE, Rules};
use crate::ledger::{Ledger, LiveEntries, Move, Moves};
use crate::past::Past;
use live_entries::framework_move;

pub use segments::assemble;

/// An active block: handed out, or waiting for its free to complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Rounded size in bytes.
    pub size: u64,
    /// Bytes the program asked for.
    pub requested: u64,
    /// Raw handle of the stream it was allocated on.
    pub stream: u64,
    /// Where it was allocated.
    pub stack: StackId,
    /// What its thread said it was doing.
    pub label: LabelId,
    /// Its free has been requested.
    pub pending: bool,
    /// CUDA events its free still waits for.
    pub waits: u32,
}

/// A range got from the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveSegment {
    /// Bytes.
    pub size: u64,
    /// Raw handle of the stream whose request made it.
    pub stream: u64,
    /// Where it was made.
    pub stack: StackId,
    /// PyTorch's "small" kind.
    pub small: bool,
    /// The allocator's pool that it belongs to.
    pub pool: Pool,
}

/// One mapped page of an expandable segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedPage {
    /// First address of the reservation it is in.
    pub reservation: u64,
    /// Raw handle of the stream.
    pub stream: u64,
    /// Where it was mapped.
    pub stack: StackId,
    /// PyTorch's "small" kind.
    pub small: bool,
    /// The allocator's pool that it belongs to.
    pub pool: Pool,
}

/// What a framework's allocator holds on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceState {
    /// Active blocks by address.
    pub blocks: BTreeMap<u64, LiveBlock>,
    /// Segments by address.
    pub segments: BTreeMap<u64, LiveSegment>,
    /// Mapped pages of expandable segments by address.
    pub pages: BTreeMap<u64, MappedPage>,
    /// There has been memory of another pool than the default one.
    private: bool,
    /// Trace of a run of page-wise unmappings that PyTorch writes as one entry.
    unmapping: Option<(u32, TraceEntry)>,
}

/// What is alive, everywhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// Devices by ordinal.
    pub devices: Vec<DeviceState>,
    /// What no framework's allocator made.
    pub ledger: Ledger,
    /// CUDA events that frees wait for: handle → (device, block).
    waiting: HashMap<u64, (usize, u64)>,
    /// What frameworks took and gave back.
    moves: Moves,
    /// What the devices had seen when a live table was read; events that
    /// are applied later are not in it.
    pub past: BTreeMap<i8, Past>,
    /// Events that contradict what was known: a free of an unknown block,
    /// an address allocated twice.
    pub anomalies: u64,
}

/// Receives the history: whose, and the entry, whose `frames` is a depot stack id.
pub type Sink<'a> = &'a mut dyn FnMut(Trace, TraceEntry);

/// Names an API function for an entry's `user_metadata`: index in the table of entry points → name.
pub type ApiName<'a> = &'a dyn Fn(u16) -> &'a str;

impl State {
    /// Takes one event into account and says what PyTorch's trace would say about it.
    pub fn apply(&mut self, event: &Event, api: ApiName<'_>, sink: Sink<'_>) {
        match (Rules::of(event), event.kind) {
            (_, Kind::Mark) => return, // nothing that a trace has
            (Rules::Driver, _) => return self.driver(event, api, sink),
            (Rules::None, kind) if kind != Kind::Oom && event.flags & FLAG_FAILED != 0 => {
                return self.failed(event, api, sink);
            }
            _ => {}
        }
        let Some(device) = self.device_of(event) else { return };
        if event.kind != Kind::SegmentUnmap {
            self.flush_unmapping(device, sink);
        }
        match event.kind {
            Kind::Oom => {
                let OomEvent { asked, free } = OomEvent::of(event);
                let oom = TraceEntry { addr: free, ..entry(event, Action::Oom, asked) };
                sink(Trace::Device(device), oom);
            }
            Kind::Snapshot => {
                let SnapshotEvent { active } = SnapshotEvent::of(event);
                sink(Trace::Device(device), entry(event, Action::Snapshot, active));
            }
            _ => self.framework(event, device, sink),
        }
    }

    /// A call of the device layer's that failed. A framework tells of its
    /// own failures; so does `oom` here.
    fn failed(&mut self, event: &Event, api: ApiName<'_>, sink: Sink<'_>) {
        if event.layer == Layer::Framework || RefusalEvent::of(event).answer != OUT_OF_MEMORY {
            return;
        }
        let place = match event.layer {
            Layer::Host => Some(Trace::Host),
            _ => self.device_of(event).map(Trace::Device),
        };
        if let Some(place) = place {
            sink(place, driver_entry(event, Action::Oom, event.size, api));
        }
    }

    /// From now on, what comes and goes is kept for [`Self::take_moves`].
    pub fn watch(&mut self) {
        self.moves.watch();
        self.ledger.watch();
    }

    /// What has come and gone since the last time.
    pub fn take_moves(&mut self) -> Vec<Move> {
        let mut moves = self.moves.take();
        moves.append(&mut self.ledger.take_moves());
        moves
    }

    /// Everything that is there, as if it came now.
    pub fn holdings(&self) -> Vec<Move> {
        let mut all: Vec<Move> = self.ledger.holdings().collect();
        for (device, state) in self.devices.iter().enumerate() {
            let segments = state.segments.values().map(|s| (s.size, s.stack));
            let pages = state.pages.values().map(|p| (PAGE, p.stack));
            all.extend(
                segments
                    .chain(pages)
                    .map(|(bytes, stack)| framework_move(device, bytes, stack, true)),
            );
        }
        all
    }

    /// An event that no framework's allocator made.
    fn driver(&mut self, event: &Event, api: ApiName<'_>, sink: Sink<'_>) {
        if event.layer == Layer::Device
            && let Some(device) = self.device_of(event)
        {
            self.flush_unmapping(device, sink);
        }
        let fits = self.ledger.apply(event, api, sink);
        self.anomalies += u64::from(!fits);
    }

    /// The state that these entries of a live table stand for: one event
    /// for each thing alive, in any order.
    pub fn restore(entries: impl Iterator<Item = Event>) -> State {
        let mut state = State::default();
        let (waits, others): (Vec<_>, Vec<_>) = entries.partition(|e| e.kind == Kind::WaitsFor);
        for event in others.iter().chain(&waits) {
            if event.layer == Layer::Device {
                state.device_with(event.device);
            }
            if let Some((class, k)) = key(event) {
                state.put(class, k, event);
            }
        }
        state.ledger.settle();
        state
    }

    /// To be called once after the last event: entries that waited to be
    /// joined with a following one.
    pub fn finish(&mut self, sink: Sink<'_>) {
        for d in 0..self.devices.len() {
            self.flush_unmapping(d, sink);
        }
    }

    /// Which list an event belongs to. Addresses are unique over all devices (unified addressing),
    /// so a free is looked up where the block lives, whatever device the thread had selected.
    fn device_of(&mut self, event: &Event) -> Option<usize> {
        let known = match event.kind {
            Kind::FreeRequested | Kind::FreeCompleted | Kind::WaitsFor => {
                self.devices.iter().position(|d| d.blocks.contains_key(&event.addr))
            }
            Kind::SegmentFree => {
                self.devices.iter().position(|d| d.segments.contains_key(&event.addr))
            }
            Kind::SegmentUnmap => {
                self.devices.iter().position(|d| d.pages.contains_key(&(event.addr / PAGE * PAGE)))
            }
            Kind::EventReady => {
                self.waiting.get(&ReadyEvent::of(event).handle).map(|(device, _)| *device)
            }
            _ => None,
        };
        known.or_else(|| self.device_with(event.device))
    }

    /// An event that follows the rules of the framework's allocator, and its entries.
    fn framework(&mut self, event: &Event, device: usize, sink: Sink<'_>) {
        let Change { before, completed, anomalies } = framework::apply(self, event);
        self.anomalies += anomalies;
        let state = &self.devices[device];
        let write = |sink: Sink<'_>, e| sink(Trace::Device(device), e);
        match event.kind {
            Kind::Alloc => {
                let pool = state.pool_of(event.addr).unwrap_or(event.pool);
                write(sink, entry(&Event { pool, ..*event }, Action::Alloc, event.size));
            }
            Kind::FreeRequested | Kind::FreeCompleted | Kind::EventReady => {
                let asked = event.kind == Kind::FreeRequested;
                if before.is_none() && !asked {
                    return;
                }
                let Event { addr, size, stream, .. } =
                    before.unwrap_or(Event { size: event.extra, ..*event });
                let pool_id = Some(state.pool_id(addr));
                let of =
                    |action| TraceEntry { addr, stream, pool_id, ..entry(event, action, size) };
                if asked {
                    write(sink, of(Action::FreeRequested));
                }
                if completed {
                    self.flush_unmapping(device, sink);
                    write(sink, of(Action::FreeCompleted));
                }
            }
            Kind::SegmentAlloc => write(sink, entry(event, Action::SegmentAlloc, event.size)),
            Kind::SegmentFree => {
                if let Some(Event { pool, stream, size, .. }) = before {
                    let of = Event { pool, stream, ..*event };
                    write(sink, entry(&of, Action::SegmentFree, size));
                }
            }
            Kind::SegmentMap => write(sink, entry(event, Action::SegmentMap, event.size)),
            Kind::SegmentUnmap => self.unmapped(event, device, before, sink),
            _ => {}
        }
    }

    /// PyTorch unmaps chunk by chunk and writes one entry for the range.
    /// `page` is the last one that went.
    fn unmapped(&mut self, event: &Event, device: usize, page: Option<Event>, sink: Sink<'_>) {
        if let Some((thread, e)) = &mut self.devices[device].unmapping
            && *thread == event.thread
            && e.addr + e.size == event.addr
        {
            e.size += event.size;
            return;
        }
        self.flush_unmapping(device, sink);
        let Event { pool, stream, .. } = page.unwrap_or(*event);
        let e = entry(&Event { pool, stream, ..*event }, Action::SegmentUnmap, event.size);
        self.devices[device].unmapping = Some((event.thread, e));
    }

    fn flush_unmapping(&mut self, device: usize, sink: Sink<'_>) {
        if let Some((_, e)) = self.devices[device].unmapping.take() {
            sink(Trace::Device(device), e);
        }
    }

    /// The table of who holds what, for the snapshot's `memtrace` key: the driver's ledger, and
    /// what the framework's allocator has reserved.
    pub fn ledger_key(&self) -> memtrace_format::key::Ledger {
        let mut totals = self.ledger.totals();
        for (d, state) in self.devices.iter().enumerate() {
            let Ok(ordinal) = i8::try_from(d) else { break };
            let segments = state.segments.values().map(|s| s.size).fold(0, u64::saturating_add);
            totals.devices.entry(ordinal).or_default().framework =
                segments.saturating_add(PAGE * state.pages.len() as u64);
        }
        totals.to_key()
    }

    /// The segments and blocks of all devices, as a snapshot lists them. `stack` turns a depot
    /// stack id into the snapshot's own index.
    pub fn segments(&self, stack: &mut dyn FnMut(StackId) -> Option<StackIx>) -> Vec<Segment> {
        let mut out = self.ledger.segments(false, stack);
        for (d, state) in self.devices.iter().enumerate() {
            out.extend(state.to_segments(d as i64, stack));
        }
        out.sort_by_key(|s| (s.device, s.address));
        out
    }
}

impl DeviceState {
    /// The pool of the segment that an address is in; `None` if no segment is known there. A
    /// search for each block, so it is made only where there is more than one pool.
    fn pool_of(&self, addr: u64) -> Option<Pool> {
        if !self.private {
            return None;
        }
        let segment = self.segments.range(..=addr).next_back();
        match segment.filter(|(start, s)| addr - *start < s.size) {
            Some((_, segment)) => Some(segment.pool),
            None => self.pages.get(&(addr / PAGE * PAGE)).map(|page| page.pool),
        }
    }

    fn pool_id(&self, addr: u64) -> PoolId {
        self.pool_of(addr).unwrap_or_default().id()
    }
}

pub(crate) fn entry(event: &Event, action: Action, size: u64) -> TraceEntry {
    TraceEntry {
        action,
        addr: event.addr,
        size,
        stream: event.stream,
        time_us: Some((event.time_ns / 1000) as i64),
        compile_context: Some("N/A".into()),
        user_metadata: Some("".into()),
        pool_id: Some(event.pool.id()),
        frames: (event.stack != NO_STACK).then_some(event.stack),
    }
}

pub(crate) fn driver_entry(
    event: &Event,
    action: Action,
    size: u64,
    api: ApiName<'_>,
) -> TraceEntry {
    let user_metadata = Some(format!("driver: {}", api(event.api)).into());
    // The place of the pool says something else in these events.
    let event = Event { pool: Pool::DEFAULT, ..*event };
    TraceEntry { user_metadata, ..entry(&event, action, size) }
}

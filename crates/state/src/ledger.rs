//! The driver's ledger: what the device and the host layer hold, in columns
//! that are never added up twice.
//!
//! What is alive is kept as the event that made it, under the key that the live table of the black
//! box uses, too. So there is one set of rules ([`apply`]) for both, and they can't disagree. The
//! rules follow NVIDIA's public documentation:
//!
//! - memory belongs to the device that it was taken from, whatever device
//!   a later call has selected;
//! - *physical* memory (`cuMemCreate`) goes when its last reference is released **and** its
//!   last mapping is gone, in whichever order. A *mapping* takes addresses and no memory,
//!   however often the same memory is mapped;
//! - what another process or another API shares (IPC, pool pointers, external memory) is in use
//!   here and held there. It has a column of its own and is in no sum;
//! - a call that can't have worked changes nothing, because hooks record a free
//!   before they know how it ends. Such are a range that isn't made of whole
//!   mappings, and host memory given to `cuMemFree`;
//! - a context takes with it what was allocated in it; a reset does so for the primary context.
//!
//! Memory in stream order is counted as used from the call that gives it to the
//! call that takes it back. What a pool keeps reserved beyond that is known only if
//! the program itself has asked for it.
//!
//! It must never panic on any sequence of events.

mod host;
mod moves;
mod references;
mod totals;

pub use moves::{MemoryKind, Move, Moves};
pub use references::References;
pub use totals::{DeviceTotals, HostTotals, Totals};

use std::collections::BTreeMap;
use std::ops::Range;

use crate::state::{ApiName, Sink, driver_entry};
use memtrace_format::blackbox::{Class, key};
use memtrace_format::event::{Event, Kind, Layer, What};
use memtrace_format::snapshot::{Action, Block, BlockState, Segment, StackIx, Trace};

/// Where the rules keep what is alive.
pub trait LiveEntries {
    /// The entry under this key.
    fn get(&self, class: Class, key: u64) -> Option<Event>;
    /// Enters something new. What was there under this key.
    fn put(&mut self, class: Class, key: u64, event: &Event) -> Option<Event>;
    /// Changes an entry's `stream` or `extra`.
    fn update(&mut self, class: Class, key: u64, change: &dyn Fn(&mut Event));
    /// Takes an entry out.
    fn remove(&mut self, class: Class, key: u64) -> Option<Event>;
    /// The keys of the entries of one class that `is` accepts.
    fn select(&self, class: Class, is: &dyn Fn(&Event) -> bool) -> Vec<u64>;
}

/// Applies one event of the device or host layer. `gone` gets what went. Says whether the event
/// fits what was known: what the driver will have refused does.
pub fn apply(
    entries: &mut dyn LiveEntries,
    event: &Event,
    ticket: u64,
    gone: &mut dyn FnMut(&Event),
) -> bool {
    match event.kind {
        Kind::Alloc | Kind::Reserve | Kind::Create | Kind::PoolReserved => enter(entries, event),
        Kind::FreeRequested => free(entries, event, gone),
        Kind::HandleCreate | Kind::HandleRetain => reference(entries, event, ticket),
        Kind::HandleRelease => release(entries, event.addr, ticket),
        Kind::Map => map(entries, event),
        Kind::Unmap => unmap(entries, event, gone),
        Kind::Unreserve => unreserve(entries, event),
        Kind::Destroy => destroy(entries, event, gone),
        Kind::Reset => {
            remove_all(entries, gone, &|e| {
                e.device == event.device
                    && (e.what == What::Pool || [0, event.extra].contains(&e.extra))
            });
            true
        }
        // The first call on a device says who used it first.
        Kind::Entered => {
            let known = key(event).and_then(|(class, k)| entries.get(class, k));
            known.is_some() || enter(entries, event)
        }
        Kind::Measured => true,
        _ => false,
    }
}

fn enter(entries: &mut dyn LiveEntries, event: &Event) -> bool {
    let Some((class, k)) = key(event) else { return false };
    let before = entries.put(class, k, event);
    before.is_none() || event.kind != Kind::Alloc
}

fn free(entries: &mut dyn LiveEntries, event: &Event, gone: &mut dyn FnMut(&Event)) -> bool {
    let class = Class::of_allocation(event.what);
    // A block of the host's may have been handed out before the recording began.
    let Some(found) = entries.get(class, event.addr) else { return event.what == What::HostBlock };
    if event.what.frees(found.what) {
        entries.remove(class, event.addr);
        gone(&found);
    }
    true
}

/// A handle that nobody has seen made is a framework's own, or came around us: not ours to count.
fn reference(entries: &mut dyn LiveEntries, event: &Event, ticket: u64) -> bool {
    let known = entries.get(Class::Handle, event.addr);
    match (known, event.kind) {
        (Some(e), _) => {
            let count = References::of(&e).count().saturating_add(1);
            let new = References::changed(count, ticket);
            entries.update(Class::Handle, event.addr, &|e| e.stream = new.word());
        }
        (None, Kind::HandleCreate) => {
            let stream = References::changed(References::of(event).count(), ticket).word();
            entries.put(Class::Handle, event.addr, &Event { stream, extra: 0, ..*event });
        }
        _ => {}
    }
    true
}

fn release(entries: &mut dyn LiveEntries, handle: u64, ticket: u64) -> bool {
    let Some(e) = entries.get(Class::Handle, handle) else { return true };
    let Some(count) = References::of(&e).count().checked_sub(1) else {
        return true; // released already, and kept by a mapping: refused
    };
    let new = References::changed(count, ticket);
    entries.update(Class::Handle, handle, &|e| e.stream = new.word());
    drop_unused(entries, handle);
    true
}

/// A handle's `extra` is the number of its mappings.
fn drop_unused(entries: &mut dyn LiveEntries, handle: u64) {
    let unused = |e: &Event| References::of(e).count() == 0 && e.extra == 0;
    if entries.get(Class::Handle, handle).is_some_and(|e| unused(&e)) {
        entries.remove(Class::Handle, handle);
    }
}

/// A mapping's `extra` is its handle, or 0 if that isn't known.
fn map(entries: &mut dyn LiveEntries, event: &Event) -> bool {
    let before = entries.get(Class::Mapping, event.addr);
    if let Some(before) = before {
        forget_mapping(entries, &before);
    }
    let mapping = match entries.get(Class::Handle, event.extra) {
        Some(physical) => Event { layer: physical.layer, device: physical.device, ..*event },
        None => Event { extra: 0, ..*event },
    };
    entries.put(Class::Mapping, event.addr, &mapping);
    entries.update(Class::Handle, mapping.extra, &|e| e.extra += 1);
    before.is_none()
}

fn forget_mapping(entries: &mut dyn LiveEntries, mapping: &Event) {
    entries.remove(Class::Mapping, mapping.addr);
    entries.update(Class::Handle, mapping.extra, &|e| e.extra = e.extra.saturating_sub(1));
    drop_unused(entries, mapping.extra);
}

fn unmap(entries: &mut dyn LiveEntries, event: &Event, gone: &mut dyn FnMut(&Event)) -> bool {
    let end = event.addr.saturating_add(event.size);
    let mut parts = Vec::new();
    let mut at = event.addr;
    while at < end
        && let Some(mapping) = entries.get(Class::Mapping, at).filter(|m| m.size > 0)
    {
        at = at.saturating_add(mapping.size);
        parts.push(mapping);
    }
    if at != end {
        return true; // a framework's own mapping, or a range that the driver refuses
    }
    for mapping in parts {
        forget_mapping(entries, &mapping);
        gone(&mapping);
    }
    true
}

fn unreserve(entries: &mut dyn LiveEntries, event: &Event) -> bool {
    let Some(found) = entries.get(Class::Reservation, event.addr) else { return false };
    let range = event.addr..event.addr.saturating_add(event.size);
    let inside = |e: &Event| range.contains(&e.addr);
    if found.size == event.size && entries.select(Class::Mapping, &inside).is_empty() {
        entries.remove(Class::Reservation, event.addr);
    }
    true
}

fn destroy(entries: &mut dyn LiveEntries, event: &Event, gone: &mut dyn FnMut(&Event)) -> bool {
    entries.remove(Class::Object, event.addr);
    match event.what {
        What::MemoryPool => {
            entries.remove(Class::PoolReserved, event.addr);
        }
        What::Context if event.addr != 0 => {
            remove_all(entries, gone, &|e| e.what != What::Pool && e.extra == event.addr);
        }
        _ => {}
    }
    true // what the runtime has made for itself is not known, and holds nothing that was counted
}

/// What is in a context: allocations (`extra` says which context) and what was loaded into it.
fn remove_all(
    entries: &mut dyn LiveEntries,
    gone: &mut dyn FnMut(&Event),
    is: &dyn Fn(&Event) -> bool,
) {
    let in_context = |class: Class, e: &Event| match class {
        Class::Object => matches!(e.what, What::Module | What::Executable),
        _ => e.what != What::Imported,
    };
    for class in [Class::Driver, Class::Array, Class::Object] {
        for k in entries.select(class, &|e| in_context(class, e) && is(e)) {
            if let Some(e) = entries.remove(class, k) {
                gone(&e);
            }
        }
    }
}

/// What the device and the host layer hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    entries: BTreeMap<(Class, u64), Event>,
    moves: Moves,
}

impl LiveEntries for Ledger {
    fn get(&self, class: Class, key: u64) -> Option<Event> {
        self.entries.get(&(class, key)).copied()
    }
    fn put(&mut self, class: Class, key: u64, event: &Event) -> Option<Event> {
        let before = self.entries.insert((class, key), *event);
        self.moved(class, before, false);
        self.moved(class, Some(*event), true);
        before
    }
    fn update(&mut self, class: Class, key: u64, change: &dyn Fn(&mut Event)) {
        if let Some(event) = self.entries.get_mut(&(class, key)) {
            change(event);
        }
    }
    fn remove(&mut self, class: Class, key: u64) -> Option<Event> {
        let gone = self.entries.remove(&(class, key));
        self.moved(class, gone, false);
        gone
    }
    fn select(&self, class: Class, is: &dyn Fn(&Event) -> bool) -> Vec<u64> {
        let all = self.entries.range((class, 0)..=(class, u64::MAX));
        all.filter(|(_, e)| is(e)).map(|((_, k), _)| *k).collect()
    }
}

impl Ledger {
    /// From now on, what comes and goes is kept for [`Self::take_moves`].
    pub fn watch(&mut self) {
        self.moves.watch();
    }

    /// What has come and gone since the last time.
    pub fn take_moves(&mut self) -> Vec<Move> {
        self.moves.take()
    }

    /// Everything that is there, as if it came now.
    pub fn holdings(&self) -> impl Iterator<Item = Move> {
        self.entries.iter().flat_map(|((class, _), e)| self.moves_of(*class, e, true))
    }

    fn moves_of(&self, class: Class, e: &Event, came: bool) -> impl Iterator<Item = Move> + use<> {
        [Move::of(class, e, came), self.rounded_up(class, e, came)].into_iter().flatten()
    }

    fn moved(&mut self, class: Class, event: Option<Event>, came: bool) {
        if self.moves.are_watched()
            && let Some(e) = event
        {
            self.moves_of(class, &e, came).for_each(|m| self.moves.push(Some(m)));
        }
    }

    /// How the process came to each device: the first call on it, and the contexts that are there.
    pub fn ways_in(&self) -> impl Iterator<Item = &Event> {
        let is = |class: Class, e: &Event| match class {
            Class::Entered => true,
            Class::Object => e.what == What::Context,
            _ => false,
        };
        self.entries.iter().filter(move |((class, _), e)| is(*class, e)).map(|(_, e)| e)
    }

    /// NCCL's communicators that are there.
    pub fn communicators(&self) -> impl Iterator<Item = &Event> {
        self.entries.values().filter(|e| e.kind == Kind::Create && e.what == What::Communicator)
    }

    /// Takes one event into account, and says what the trace says about it.
    pub fn apply(&mut self, event: &Event, api: ApiName<'_>, sink: Sink<'_>) -> bool {
        const TAKEN: &[Action] = &[Action::SegmentAlloc, Action::Alloc];
        const GIVEN: &[Action] =
            &[Action::FreeRequested, Action::FreeCompleted, Action::SegmentFree];
        const MAPPED: &[Action] = &[Action::SegmentMap, Action::Alloc];
        const UNMAPPED: &[Action] =
            &[Action::FreeRequested, Action::FreeCompleted, Action::SegmentUnmap];
        let mut entries = |of: &Event, actions: &[Action]| {
            let place = match of.layer {
                Layer::Host => Some(Trace::Host),
                _ => usize::try_from(of.device).ok().map(Trace::Device),
            };
            for action in actions {
                let mut entry = driver_entry(event, action.clone(), of.size, api);
                (entry.addr, entry.stream) = (of.addr, shown_stream(of));
                if let Some(place) = place {
                    sink(place, entry);
                }
            }
        };
        if event.what == What::HostBlock {
            return self.apply_block(event, sink);
        }
        let handles = self.handles_of(event);
        let before = self.shown(&handles, event);
        let fits = apply(self, event, 0, &mut |gone| {
            if gone.kind == Kind::Alloc && is_shown(gone.what) {
                entries(gone, if host::is_of_blocks(gone) { &GIVEN[2..] } else { GIVEN });
            }
        });
        let after = self.shown(&handles, event);
        before.iter().filter(|m| !after.contains(m)).for_each(|m| entries(m, UNMAPPED));
        after.iter().filter(|m| !before.contains(m)).for_each(|m| entries(m, MAPPED));
        if event.kind == Kind::Alloc && is_shown(event.what) {
            entries(event, if host::is_of_blocks(event) { &TAKEN[..1] } else { TAKEN });
        }
        fits
    }

    fn mappings(&self, range: Range<u64>) -> impl Iterator<Item = &Event> {
        let keys = (Class::Mapping, range.start)..(Class::Mapping, range.end.max(range.start));
        self.entries.range(keys).map(|(_, e)| e)
    }

    /// The physical memory that a mapping or its end is about.
    fn handles_of(&self, event: &Event) -> Vec<u64> {
        if !matches!(event.kind, Kind::Map | Kind::Unmap) {
            return Vec::new();
        }
        let range = event.addr..event.addr.saturating_add(event.size);
        let mut handles: Vec<u64> = self.mappings(range).map(|m| m.extra).collect();
        handles.extend((event.kind == Kind::Map).then_some(event.extra));
        handles.sort_unstable();
        handles.dedup();
        handles
    }

    /// The mappings that show each byte of these handles' memory once: where it is mapped at the
    /// lowest address. `near` is where they probably are.
    fn shown(&self, handles: &[u64], near: &Event) -> Vec<Event> {
        let mut shown = Vec::new();
        for handle in handles {
            let counted = |p: &Event| p.what == What::Device && p.extra > 0;
            let Some(physical) = self.get(Class::Handle, *handle).filter(counted) else { continue };
            let of_handle = |range| -> Vec<&Event> {
                self.mappings(range).filter(|m| m.extra == *handle).collect()
            };
            let mut all = of_handle(near.addr..near.addr.saturating_add(near.size));
            if all.len() as u64 != physical.extra {
                all = of_handle(0..u64::MAX);
            }
            lay_out(&all, &mut shown);
        }
        shown
    }

    /// To be called when the last entry of a live table is in: counts the
    /// mappings of each handle anew.
    pub(crate) fn settle(&mut self) {
        let mut mappings: BTreeMap<u64, u64> = BTreeMap::new();
        for ((class, _), e) in &self.entries {
            if *class == Class::Mapping {
                *mappings.entry(e.extra).or_default() += 1;
            }
        }
        self.entries.retain(|(class, handle), e| {
            if *class != Class::Handle {
                return true;
            }
            e.extra = mappings.get(handle).copied().unwrap_or(0);
            e.extra > 0 || References::of(e).count() > 0
        });
    }

    /// Had this event, which was being applied when the process died,
    /// changed a number of references already?
    pub fn counted(&self, event: &Event, ticket: u64) -> bool {
        matches!(event.kind, Kind::HandleCreate | Kind::HandleRetain | Kind::HandleRelease)
            && self
                .get(Class::Handle, event.addr)
                .is_some_and(|e| References::of(&e).changed_by(ticket))
    }

    /// The same of all handles.
    fn all_shown(&self) -> Vec<Event> {
        let mut mappings: Vec<&Event> = self.of(Class::Mapping).collect();
        mappings.sort_by_key(|m| (m.extra, m.addr));
        let mut shown = Vec::new();
        for of_one in mappings.chunk_by(|a, b| a.extra == b.extra) {
            let physical = self.get(Class::Handle, of_one[0].extra);
            if physical.is_some_and(|p| p.what == What::Device) {
                lay_out(of_one, &mut shown);
            }
        }
        shown
    }

    fn of(&self, class: Class) -> impl Iterator<Item = &Event> {
        self.entries.range((class, 0)..=(class, u64::MAX)).map(|(_, e)| e)
    }

    /// Everything that has an address and that this process holds, on devices or with
    /// the host, as segments with one block.
    pub fn segments(
        &self,
        host: bool,
        stack: &mut dyn FnMut(u32) -> Option<StackIx>,
    ) -> Vec<Segment> {
        let allocations = self.of(Class::Driver).copied();
        let shown = allocations.filter(|e| is_shown(e.what)).chain(self.all_shown());
        let blocks = self.host_blocks();
        let one = |e: Event| {
            if host::is_of_blocks(&e) {
                host::segment_of_blocks(&e, &blocks, stack)
            } else {
                segment(&e, stack)
            }
        };
        shown.filter(|e| (e.layer == Layer::Host) == host).map(one).collect()
    }
}

/// Of one handle's mappings in ascending order, those that meet no earlier
/// one in the memory behind them.
fn lay_out(mappings: &[&Event], shown: &mut Vec<Event>) {
    let first = shown.len();
    for m in mappings {
        let meets = |o: &Event| o.stream < m.stream + m.size && m.stream < o.stream + o.size;
        if !shown[first..].iter().any(meets) {
            shown.push(**m);
        }
    }
}

/// Is this memory that the process holds, at an address? (An array has none, only a handle.)
fn is_shown(what: What) -> bool {
    use What::{Device, Managed, Pinned, Pool, Registered};
    matches!(what, Device | Pool | Managed | Pinned | Registered)
}

/// A mapping's `stream` is an offset.
fn shown_stream(e: &Event) -> u64 {
    if e.kind == Kind::Map { 0 } else { e.stream }
}

fn segment(e: &Event, stack: &mut dyn FnMut(u32) -> Option<StackIx>) -> Segment {
    let frames = stack(e.stack);
    Segment {
        device: if e.layer == Layer::Host { -1 } else { i64::from(e.device) },
        address: e.addr,
        total_size: e.size,
        allocated_size: e.size,
        active_size: e.size,
        requested_size: e.size,
        stream: shown_stream(e),
        small: false,
        pool_id: (0, 0),
        is_expandable: e.kind == Kind::Map,
        frames,
        blocks: vec![Block {
            address: e.addr,
            size: e.size,
            requested_size: e.size,
            state: BlockState::ActiveAllocated,
            frames,
        }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: Kind, addr: u64, size: u64) -> Event {
        Event {
            device: 1,
            time_ns: 7,
            addr,
            size,
            stream: u64::from(kind == Kind::HandleCreate),
            thread: 1,
            ..Event::new(kind, Layer::Device)
        }
    }

    fn after(events: &[Event]) -> (Ledger, u64) {
        let mut ledger = Ledger::default();
        let unfit = events.iter().filter(|e| !ledger.apply(e, &|_| "", &mut |_, _| ())).count();
        (ledger, unfit as u64)
    }

    const HANDLE: u64 = 0x77;

    #[test]
    fn physical_memory_goes_when_it_is_released_and_unmapped() {
        let map = Event { extra: HANDLE, ..event(Kind::Map, 4096, 100) };
        let made = [event(Kind::HandleCreate, HANDLE, 100), map];
        let [release, unmap] =
            [event(Kind::HandleRelease, HANDLE, 0), event(Kind::Unmap, 4096, 100)];
        for (last, physical) in [
            ([release; 1].as_slice(), 100),
            (&[unmap], 100),
            (&[release, unmap], 0),
            (&[unmap, release], 0),
        ] {
            let (ledger, unfit) = after(&[&made, last].concat());
            let device = ledger.totals().devices.get(&1).copied().unwrap_or_default();
            assert_eq!((device.physical, device.held(), unfit), (physical, physical, 0));
        }
    }

    #[test]
    fn what_others_hold_is_in_no_sum() {
        let imported = Event { what: What::Imported, ..event(Kind::HandleCreate, HANDLE, 100) };
        let opened = Event { what: What::Imported, ..event(Kind::Alloc, 8192, 50) };
        let (ledger, _) = after(&[imported, opened]);
        let device = ledger.totals().devices[&1];
        assert_eq!((device.held(), device.imported), (0, 150));
        assert_eq!(ledger.segments(false, &mut |_| None), []);
        let wrong = after(&[opened, event(Kind::FreeRequested, 8192, 0)]);
        assert_eq!(wrong, after(&[opened]), "cuMemFree doesn't close it");
        assert_eq!(after(&[event(Kind::FreeRequested, 8192, 0)]).1, 1, "nobody has seen it come");
    }

    #[test]
    fn a_reference_counted_before_the_process_died_is_not_counted_again() {
        let mut ledger = Ledger::default();
        let (create, retain) =
            (event(Kind::HandleCreate, HANDLE, 100), event(Kind::HandleRetain, HANDLE, 0));
        apply(&mut ledger, &create, 5, &mut |_| ());
        assert!(ledger.counted(&create, 5) && !ledger.counted(&retain, 6));
        apply(&mut ledger, &retain, 6, &mut |_| ());
        assert!(ledger.counted(&retain, 6) && !ledger.counted(&retain, 7));
        let count = ledger.get(Class::Handle, HANDLE).map(|e| References::of(&e).count());
        assert_eq!(count, Some(2));
    }

    #[test]
    fn a_context_takes_what_is_in_it_and_a_reset_what_is_in_no_other() {
        let inside = |context, addr| Event { extra: context, ..event(Kind::Alloc, addr, 10) };
        let all = [inside(0, 1), inside(9, 2), inside(8, 3)];
        let gone = Event { what: What::Context, ..event(Kind::Destroy, 9, 0) };
        let reset = Event { extra: 8, ..event(Kind::Reset, 0, 0) };
        let left = |last: Event| -> Vec<u64> {
            let (ledger, _) = after(&[&all[..], &[last]].concat());
            ledger.segments(false, &mut |_| None).iter().map(|s| s.address).collect()
        };
        assert_eq!(left(gone), [1, 3]);
        assert_eq!(left(reset), [2]);
    }

    #[test]
    fn references_without_end_leave_the_ticket_alone() {
        let mut ledger = Ledger::default();
        let create = Event { stream: u32::MAX.into(), ..event(Kind::HandleCreate, HANDLE, 100) };
        let retain = event(Kind::HandleRetain, HANDLE, 0);
        for (one, ticket) in [(create, 5), (retain, 6), (retain, 7)] {
            apply(&mut ledger, &one, ticket, &mut |_| ());
            assert!(ledger.counted(&one, ticket) && !ledger.counted(&one, ticket + 1));
        }
        let count = ledger.get(Class::Handle, HANDLE).map(|e| References::of(&e).count());
        assert_eq!(count, Some(u32::MAX));
    }
}

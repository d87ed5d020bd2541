//! Page-locked memory of a framework's allocator, and the blocks that it hands out of it.
//!
//! PyTorch's allocator of pinned memory rounds requests up (to powers of two, mostly) and keeps
//! what is given back. The driver sees only the rounded request, so what was asked for is in
//! events of its own ([`memtrace_format::event::What::HostBlock`]). A segment shows them as a
//! device's does. Memory that nobody uses is an inactive block. What rounding adds is the
//! difference between a block's size and its request.
//!
//! The size of a block is never reported. It ends where its memory ends, unless PyTorch
//! takes a large piece in advance (`pinned_reserve_segment_size_mb`). In that, a block is
//! the next power of two, and at least a page.

use std::collections::BTreeMap;

use super::{Ledger, LiveEntries, MemoryKind, Move, apply, segment};
use crate::state::{Sink, entry};
use memtrace_format::blackbox::Class;
use memtrace_format::event::{Event, FLAG_OF_BLOCKS, HostBlockEvent, HostFreeEvent, Kind, Layer};
use memtrace_format::snapshot::{Action, Block, BlockState, Segment, StackIx, Trace};

/// What blocks in a piece that was taken in advance are rounded to, bytes.
const PAGE: u64 = 4096;

/// Is this memory that blocks are handed out of?
pub(super) fn is_of_blocks(e: &Event) -> bool {
    e.layer == Layer::Host && e.flags & FLAG_OF_BLOCKS != 0
}

impl Ledger {
    /// A block comes or goes.
    pub(super) fn apply_block(&mut self, event: &Event, sink: Sink<'_>) -> bool {
        if event.kind == Kind::FreeRequested {
            self.trace_block(event, sink);
            return apply(self, event, 0, &mut |_| ());
        }
        // One whose end was missed is there no more.
        apply(self, event, 0, &mut |_| ());
        self.trace_block(event, sink);
        true
    }

    /// What the trace says about a block that is there.
    fn trace_block(&self, event: &Event, sink: Sink<'_>) {
        let handle = match event.kind {
            Kind::Alloc => HostBlockEvent::of(event).handle,
            _ => HostFreeEvent::of(event).handle,
        };
        let Some(block) = self.get(Class::HostBlock, handle) else { return };
        if self.memory_of(&block).is_none() {
            return;
        }
        let actions: &[Action] = match event.kind {
            Kind::Alloc => &[Action::Alloc],
            _ => &[Action::FreeRequested, Action::FreeCompleted],
        };
        for action in actions {
            let of = Event { addr: block.addr, ..*event };
            sink(Trace::Host, entry(&of, action.clone(), block.size));
        }
    }

    /// The memory that blocks are handed out of in which this one is.
    fn memory_of(&self, block: &Event) -> Option<&Event> {
        let below = (Class::Driver, 0)..=(Class::Driver, block.addr);
        let (_, memory) = self.entries.range(below).next_back()?;
        Some(memory).filter(|m| is_of_blocks(m) && block.addr - m.addr < m.size)
    }

    /// What rounding adds to a block.
    pub(super) fn rounded_up(&self, class: Class, block: &Event, came: bool) -> Option<Move> {
        if class != Class::HostBlock {
            return None;
        }
        let memory = self.memory_of(block)?;
        let bytes = size_in(memory, block).saturating_sub(block.size);
        let (kind, stack, label) = (MemoryKind::RoundedUp, block.stack, block.label);
        Some(Move { device: None, kind, stack, label, bytes, came, part: 0 })
            .filter(|m| m.bytes > 0)
    }

    /// The host's blocks by address.
    pub(super) fn host_blocks(&self) -> BTreeMap<u64, Event> {
        self.of(Class::HostBlock).map(|b| (b.addr, *b)).collect()
    }
}

/// How large a block is in this memory.
fn size_in(memory: &Event, block: &Event) -> u64 {
    let rounded = block.size.checked_next_power_of_two().unwrap_or(u64::MAX);
    let rest = memory.addr.saturating_add(memory.size).saturating_sub(block.addr);
    rounded.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX).min(rest)
}

/// Memory of an allocator's as a segment with these blocks, of which some may be elsewhere.
pub(super) fn segment_of_blocks(
    memory: &Event,
    blocks: &BTreeMap<u64, Event>,
    stack: &mut dyn FnMut(u32) -> Option<StackIx>,
) -> Segment {
    let end = memory.addr.saturating_add(memory.size);
    let mut all = Segment {
        allocated_size: 0,
        active_size: 0,
        requested_size: 0,
        blocks: Vec::new(),
        ..segment(memory, stack)
    };
    let mut at = memory.addr;
    for (&addr, block) in blocks.range(memory.addr..end) {
        let size = size_in(memory, block);
        if addr < at || size < block.size {
            continue; // contradicts its memory or its neighbour: part of the history is missing
        }
        all.fill_gap(at, addr);
        all.allocated_size += size;
        all.active_size += size;
        all.requested_size += block.size;
        all.blocks.push(Block {
            address: addr,
            size,
            requested_size: block.size,
            state: BlockState::ActiveAllocated,
            frames: stack(block.stack),
        });
        at = addr + size;
    }
    all.fill_gap(at, end);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::event::What;

    fn event(kind: Kind, what: What, addr: u64, size: u64) -> Event {
        Event { what, time_ns: 7, addr, size, thread: 1, ..Event::new(kind, Layer::Host) }
    }

    fn memory(addr: u64, size: u64) -> Event {
        Event { flags: FLAG_OF_BLOCKS, ..event(Kind::Alloc, What::Pinned, addr, size) }
    }

    fn block(handle: u64, addr: u64, size: u64) -> Event {
        let block = HostBlockEvent { addr, asked: size, handle };
        Event { time_ns: 7, thread: 1, ..block.event() }
    }

    fn gone(handle: u64) -> Event {
        HostFreeEvent { handle }.event()
    }

    /// The ledger after these events, and the trace.
    fn after(events: &[Event]) -> (Ledger, Vec<(Action, u64, u64)>) {
        let (mut ledger, mut trace) = (Ledger::default(), Vec::new());
        for e in events {
            let fits = ledger.apply(e, &|_| "", &mut |place, e| {
                assert_eq!(place, Trace::Host);
                trace.push((e.action, e.addr, e.size));
            });
            assert!(fits, "{e:?}");
        }
        (ledger, trace)
    }

    fn shape(s: &Segment) -> Vec<(u64, u64, bool)> {
        s.blocks
            .iter()
            .map(|b| (b.size, b.requested_size, b.state != BlockState::Inactive))
            .collect()
    }

    #[test]
    fn memory_of_an_allocator_shows_what_was_asked_for_and_what_lies_idle() {
        let taken = [memory(0x10_0000, 1 << 20), block(7, 0x10_0000, 600_000)];
        let (ledger, trace) = after(&taken);
        let host = ledger.totals().host;
        assert_eq!((host.pinned, host.framework, host.requested), (1 << 20, 1 << 20, 600_000));
        let [segment] = &ledger.segments(true, &mut |_| None)[..] else { panic!("one segment") };
        assert_eq!((segment.active_size, segment.requested_size), (1 << 20, 600_000));
        assert_eq!(shape(segment), [(1 << 20, 600_000, true)]);
        assert_eq!(
            trace,
            [(Action::SegmentAlloc, 0x10_0000, 1 << 20), (Action::Alloc, 0x10_0000, 600_000)]
        );
        // It is kept, and used again for less.
        let again = [gone(7), block(7, 0x10_0000, 600_001)];
        let (idle, trace) = after(&[&taken[..], &again[..1]].concat());
        assert_eq!((idle.totals().host.framework, idle.totals().host.requested), (1 << 20, 0));
        assert_eq!(shape(&idle.segments(true, &mut |_| None)[0]), [(1 << 20, 0, false)]);
        assert_eq!(
            trace[2..],
            [
                (Action::FreeRequested, 0x10_0000, 600_000),
                (Action::FreeCompleted, 0x10_0000, 600_000)
            ]
        );
        let (used, _) = after(&[&taken[..], &again].concat());
        assert_eq!(used.totals().host.requested, 600_001);
        let back = event(Kind::FreeRequested, What::Pinned, 0x10_0000, 0);
        let (ledger, trace) = after(&[&taken[..], &again[..1], &[back]].concat());
        assert_eq!(ledger, Ledger::default());
        assert_eq!(trace[4..], [(Action::SegmentFree, 0x10_0000, 1 << 20)]);
    }

    #[test]
    fn blocks_of_a_piece_that_was_taken_in_advance_are_powers_of_two() {
        let (ledger, _) = after(&[
            memory(0x10_0000, 1 << 20),
            block(7, 0x10_0000, 5000),
            block(8, 0x10_3000, 100),
        ]);
        let [segment] = &ledger.segments(true, &mut |_| None)[..] else { panic!("one segment") };
        let rest = (1 << 20) - 0x4000;
        assert_eq!(
            shape(segment),
            [(8192, 5000, true), (4096, 0, false), (4096, 100, true), (rest, 0, false)]
        );
    }

    #[test]
    fn memory_that_is_no_power_of_two_ends_where_it_ends() {
        let (ledger, _) = after(&[memory(0x10_0000, 700_000), block(7, 0x10_0000, 650_000)]);
        assert_eq!(shape(&ledger.segments(true, &mut |_| None)[0]), [(700_000, 650_000, true)]);
    }

    #[test]
    fn a_block_elsewhere_is_asked_for_and_in_no_segment() {
        let plain = event(Kind::Alloc, What::Registered, 0x10_0000, 4096);
        let (ledger, trace) = after(&[plain, block(7, 0x10_0000, 100), gone(8)]);
        assert_eq!((ledger.totals().host.framework, ledger.totals().host.requested), (0, 100));
        assert_eq!(shape(&ledger.segments(true, &mut |_| None)[0]), [(4096, 4096, true)]);
        assert_eq!(trace.len(), 2, "{trace:?}");
    }
}

//! The state in a snapshot's shape: segments with their blocks.
//!
//! Gaps between active blocks of a segment are its inactive blocks. Neighbouring pages of an
//! expandable segment in one reservation are one segment.

use std::collections::BTreeMap;

use super::{DeviceState, LiveSegment, MappedPage, PAGE, State};
use memtrace_format::event::{NO_STACK, Pool, StackId};
use memtrace_format::key::{Counters, Memtrace};
use memtrace_format::snapshot::{Block, BlockState, Segment, Snapshot, StackIx};

/// The state in a snapshot's shape, each device with an empty trace. The caller adds the
/// history, frames, settings and what it knows of the process. `stack` turns a depot
/// stack id into the snapshot's own index.
pub fn assemble(live: &State, stack: &mut dyn FnMut(StackId) -> Option<StackIx>) -> Snapshot {
    Snapshot {
        segments: live.segments(stack),
        host_segments: live.ledger.segments(true, stack),
        device_traces: vec![Vec::new(); live.devices.len()],
        memtrace: Some(Box::new(Memtrace {
            counters: Some(Counters { anomalies: live.anomalies, ..Counters::default() }),
            ledger: Some(live.ledger_key()),
            ..Memtrace::default()
        })),
        ..Snapshot::default()
    }
}

impl DeviceState {
    /// Segments by address with their blocks. Blocks that are in no known segment (their allocator
    /// got its memory around us) get a segment of their own.
    pub fn to_segments(
        &self,
        device: i64,
        stack: &mut dyn FnMut(StackId) -> Option<StackIx>,
    ) -> Vec<Segment> {
        let mut ranges: BTreeMap<u64, (LiveSegment, bool)> =
            self.segments.iter().map(|(a, s)| (*a, (*s, false))).collect();
        let mut open: Option<(u64, u64)> = None; // first address and reservation of the run
        for (&addr, page) in &self.pages {
            if let Some((start, reservation)) = open
                && let Some((run, true)) = ranges.get_mut(&start)
                && start + run.size == addr
                && reservation == page.reservation
                && (run.stream, run.pool) == (page.stream, page.pool)
            {
                run.size += PAGE;
                continue;
            }
            let MappedPage { stream, small, pool, .. } = *page;
            let run = LiveSegment { size: PAGE, stream, stack: NO_STACK, small, pool };
            ranges.insert(addr, (run, true));
            open = Some((addr, page.reservation));
        }
        let mut covered_to = 0;
        for (&addr, block) in &self.blocks {
            if let Some((start, (s, _))) = ranges.range(..=addr).next_back() {
                covered_to = start + s.size;
            }
            if addr >= covered_to || ranges.is_empty() {
                let own = LiveSegment {
                    size: block.size,
                    stream: block.stream,
                    stack: block.stack,
                    small: false,
                    pool: Pool::DEFAULT,
                };
                ranges.insert(addr, (own, false));
            }
        }
        ranges
            .into_iter()
            .map(|(addr, (s, expandable))| self.to_segment(device, addr, s, expandable, stack))
            .collect()
    }

    fn to_segment(
        &self,
        device: i64,
        address: u64,
        s: LiveSegment,
        is_expandable: bool,
        stack: &mut dyn FnMut(StackId) -> Option<StackIx>,
    ) -> Segment {
        let end = address + s.size;
        let mut segment = Segment {
            device,
            address,
            total_size: s.size,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: s.stream,
            small: s.small,
            pool_id: s.pool.id(),
            is_expandable,
            frames: stack(s.stack),
            blocks: Vec::new(),
        };
        let mut at = address;
        for (&addr, b) in self.blocks.range(address..end) {
            if addr < at || addr + b.size > end {
                continue; // contradicts its neighbour: counted as an anomaly when it came
            }
            segment.fill_gap(at, addr);
            let state = if b.pending {
                BlockState::ActivePendingFree
            } else {
                segment.allocated_size += b.size;
                BlockState::ActiveAllocated
            };
            segment.active_size += b.size;
            segment.requested_size += b.requested;
            segment.blocks.push(Block {
                address: addr,
                size: b.size,
                requested_size: b.requested,
                state,
                frames: stack(b.stack),
            });
            at = addr + b.size;
        }
        segment.fill_gap(at, end);
        segment
    }
}

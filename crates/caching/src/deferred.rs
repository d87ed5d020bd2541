//! Frees that wait: other streams may still use the block.
//!
//! At the free an event is recorded on each such stream; each later request asks, stream by
//! stream, whether the oldest are done. While a graph is captured no event can be recorded, so the
//! block waits for the end of the capture.

use std::collections::{HashMap, VecDeque};

use memtrace_format::snapshot::PoolId;

use crate::allocator::{Allocator, Misuse};
use crate::blocks::{BlockId, BlockIndex};
use crate::driver::{AfterCapture, Driver};
use crate::event::Sink;
use crate::visit::PyTorchMap;

/// What waits for what.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waiting {
    /// By stream: event and block, oldest first.
    by_stream: PyTorchMap<VecDeque<(u64, BlockIndex)>>,
    /// Given back during a capture.
    after_capture: Vec<BlockIndex>,
}

impl<D: Driver, S: Sink> Allocator<D, S> {
    /// A block that other streams use was given back.
    pub(crate) fn free_later(&mut self, ix: BlockIndex) {
        if self.capturing() {
            self.waiting.after_capture.push(ix);
        } else {
            self.record_events(ix, |_| false);
        }
    }

    /// Records an event on each stream that uses the block, except some.
    fn record_events(&mut self, ix: BlockIndex, except: impl Fn(u64) -> bool) {
        self.blocks[ix].used = false;
        let Some(uses) = self.uses.remove(&ix) else { return };
        for (hash, stream) in uses.0.keys() {
            if except(stream) {
                continue;
            }
            let event = self.device.record(stream);
            self.blocks[ix].events += 1;
            self.waiting.by_stream.entry(hash, stream).push_back((event, ix));
        }
    }

    /// What was given back during a capture: streams that were named during
    /// it have been waited for by its end.
    fn after_capture(&mut self) {
        let waiting = std::mem::take(&mut self.waiting.after_capture);
        if waiting.is_empty() {
            return;
        }
        let by_addr: HashMap<u64, BlockIndex> =
            waiting.iter().map(|ix| (self.blocks[*ix].addr, *ix)).collect();
        let addrs = waiting.iter().map(|ix| self.blocks[*ix].addr);
        let mut blocks: Vec<AfterCapture> =
            addrs.map(|addr| AfterCapture { addr, done: false }).collect();
        self.device.after_capture(&mut blocks);
        for AfterCapture { addr, done } in blocks {
            let Some(&ix) = by_addr.get(&addr) else { continue };
            let in_capture = self.captured_uses.remove(&ix).unwrap_or_default();
            self.record_events(ix, |stream| done || in_capture.contains(&stream));
            if self.blocks[ix].events == 0 {
                self.complete(ix);
            }
        }
    }

    /// Completes the frees whose work is done.
    pub(crate) fn finish_waiting(&mut self) {
        self.after_capture();
        if self.waiting.by_stream.is_empty() {
            return;
        }
        let mut slot = 0;
        while let Some((at, hash, stream)) = self.waiting.by_stream.next_from(slot) {
            slot = at + 1;
            while let Some(queue) = self.waiting.by_stream.get_mut(hash, stream)
                && let Some(&(event, ix)) = queue.front()
            {
                if !self.device.query(event) {
                    break;
                }
                queue.pop_front();
                self.one_event_less(ix);
            }
            if self.waiting.by_stream.get_mut(hash, stream).is_some_and(|q| q.is_empty()) {
                self.waiting.by_stream.remove(hash, stream);
                // Those behind it may have moved up.
                slot = at;
            }
        }
    }

    fn one_event_less(&mut self, ix: BlockIndex) {
        let block = &mut self.blocks[ix];
        block.events -= 1;
        if block.events == 0 {
            self.complete(ix);
        }
    }

    /// Waits for all events, or for those of one pool's blocks.
    pub(crate) fn synchronize(&mut self, only: Option<PoolId>) {
        self.stats.num_sync_all_streams += 1;
        self.after_capture();
        for (hash, stream) in self.waiting.by_stream.keys() {
            let Some(queue) = self.waiting.by_stream.get_mut(hash, stream) else { continue };
            let mut kept = VecDeque::new();
            for (event, ix) in std::mem::take(queue) {
                let pool = self.pools[self.blocks[ix].pool as usize].id;
                if only.is_some_and(|only| only != pool) {
                    kept.push_back((event, ix));
                    continue;
                }
                self.device.synchronize(event);
                self.one_event_less(ix);
            }
            if only.is_some()
                && let Some(queue) = self.waiting.by_stream.get_mut(hash, stream)
            {
                *queue = kept;
            }
        }
        if only.is_none() {
            self.waiting.by_stream.drain();
        }
    }

    /// Gives a block back whose work on other streams is known to go on until
    /// [`Allocator::complete_free`]. It is for a replay, which knows when the work
    /// ended but not on which streams it was.
    ///
    /// # Errors
    /// It is not handed out.
    pub fn free_waiting(&mut self, id: BlockId) -> Result<Pending, Misuse> {
        let ix = self.blocks.find(id).ok_or(Misuse::NotAllocated)?;
        self.record_stream(id, UNKNOWN_STREAM)?;
        self.captured_uses.remove(&ix);
        self.free(id)?;
        Ok(Pending(self.blocks.id(ix)))
    }

    /// The work that such a block waited for has ended. Nothing happens if
    /// it was waited for already.
    pub fn complete_free(&mut self, pending: Pending) {
        let Pending(id) = pending;
        let hash = self.device.stream_hash(UNKNOWN_STREAM);
        let Some(queue) = self.waiting.by_stream.get_mut(hash, UNKNOWN_STREAM) else { return };
        let Some(at) = queue.iter().position(|(_, ix)| *ix == id.index) else { return };
        if self.blocks.id(id.index) != id {
            return;
        }
        queue.remove(at);
        if queue.is_empty() {
            self.waiting.by_stream.remove(hash, UNKNOWN_STREAM);
        }
        self.one_event_less(id.index);
    }
}

/// Stands for whatever streams used a block.
const UNKNOWN_STREAM: u64 = u64::MAX;

/// A free that waits; see [`Allocator::free_waiting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending(BlockId);

//! Frees that wait: a block that was given back while other streams may still use
//! it stays taken until they are done.
//!
//! PyTorch's own snapshot shows such a block, but not for whom it waits. Here each has its
//! interval, from the request to its completion, and the streams that were waited for.

use std::collections::HashMap;

use memtrace_format::event::{
    BlockEvent, CompletedEvent, Event, FLAG_PENDING, Kind, ReadyEvent, StackId, WaitEvent,
};
use memtrace_format::key::{DeferredFree, DeferredFrees, Kept};
use memtrace_format::stacks::Words;

use super::frames;
use crate::owner::Names;

/// How many are listed one by one: those that held most for longest.
const TOLD: usize = 16;

#[derive(Clone, Debug)]
struct Wait {
    device: i8,
    bytes: u64,
    since_us: u64,
    until_us: Option<u64>,
    streams: Vec<u64>,
    stack: StackId,
    left: u32,
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    /// By address.
    waiting: HashMap<u64, Wait>,
    /// The block that waits for a CUDA event.
    events: HashMap<u64, u64>,
    done: Vec<Wait>,
    count: u64,
    now: u64,
    most: u64,
}

impl Waits {
    /// An event of the framework's.
    pub(super) fn note(&mut self, event: &Event) {
        let time_us = event.time_ns / 1000;
        match event.kind {
            Kind::FreeRequested if event.flags & FLAG_PENDING != 0 => {
                let wait = Wait {
                    device: event.device,
                    bytes: BlockEvent::of(event).size,
                    since_us: time_us,
                    until_us: None,
                    streams: Vec::new(),
                    stack: event.stack,
                    left: 0,
                };
                self.count += 1;
                self.now = self.now.saturating_add(wait.bytes);
                self.most = self.most.max(self.now);
                self.waiting.insert(event.addr, wait);
            }
            Kind::WaitsFor => {
                let WaitEvent { block, handle, stream } = WaitEvent::of(event);
                if let Some(wait) = self.waiting.get_mut(&block) {
                    wait.left += 1;
                    wait.streams.push(stream);
                    self.events.insert(handle, block);
                }
            }
            Kind::EventReady => {
                let Some(addr) = self.events.remove(&ReadyEvent::of(event).handle) else { return };
                let Some(wait) = self.waiting.get_mut(&addr) else { return };
                wait.left = wait.left.saturating_sub(1);
                if wait.left == 0 {
                    self.complete(addr, time_us);
                }
            }
            Kind::FreeCompleted => self.complete(CompletedEvent::of(event).block, time_us),
            _ => {}
        }
    }

    fn complete(&mut self, addr: u64, time_us: u64) {
        let Some(wait) = self.waiting.remove(&addr) else { return };
        self.now = self.now.saturating_sub(wait.bytes);
        self.done.push(Wait { until_us: Some(time_us), ..wait });
        if self.done.len() >= 4 * TOLD {
            self.keep_longest(time_us);
        }
    }

    fn keep_longest(&mut self, now_us: u64) {
        let weight = |w: &Wait| {
            let us = w.until_us.unwrap_or(now_us).saturating_sub(w.since_us).max(1);
            u128::from(w.bytes) * u128::from(us)
        };
        self.done.sort_by_key(|w| std::cmp::Reverse(weight(w)));
        self.done.truncate(TOLD);
    }

    /// For the `memtrace` key; `None` if no free has waited.
    pub(super) fn describe<W: Words>(&self, namer: &mut Names<'_, W>) -> Option<DeferredFrees> {
        if self.count == 0 {
            return None;
        }
        let mut all = self.clone();
        let now_us = all.done.iter().filter_map(|w| w.until_us).max().unwrap_or(0);
        all.done.extend(all.waiting.values().cloned());
        all.keep_longest(now_us);
        let one = |w: &Wait| DeferredFree {
            device: w.device.into(),
            bytes: w.bytes,
            requested_us: w.since_us,
            completed_us: w.until_us,
            streams: w.streams.clone(),
            frames: frames(w.stack, namer),
            kept: Kept::NOTHING,
        };
        let longest = all.done.iter().map(one).collect();
        let (count, most_bytes, kept) = (self.count, self.most, Kept::NOTHING);
        Some(DeferredFrees { count, most_bytes, longest, kept })
    }
}

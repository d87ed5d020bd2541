//! Page-locked host memory: sums, its highest point, and how much of it was asked for.
//!
//! Of what a framework's allocator took, the blocks in use say what was asked for
//! ([`MemoryKind::Requested`]) and what rounding adds ([`MemoryKind::RoundedUp`]). Everybody else
//! has asked for exactly what they have. A program gives its tensors back before it ends, so the
//! highest point (of the recorded history) has the stacks, too.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use memtrace_format::key::{HostOwners, HostPeak, Kept, RoundedStack};
use memtrace_format::stacks::{StackId, Words};
use memtrace_state::ledger::{MemoryKind, Move};

use super::device::{add, change};
use super::{Amount, ByOwner, frames};
use crate::owner::Names;

/// Stacks that are listed: those to whose requests rounding adds most.
const TOLD: usize = 16;

/// What there is at one moment.
#[derive(Clone, Debug, Default)]
struct Sums {
    held: u64,
    framework: u64,
    requested: u64,
    rounding: u64,
    /// What rounding adds, by who asked.
    rounded: BTreeMap<StackId, Amount>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) by: ByOwner,
    now: Sums,
    /// The highest point, once it has been left.
    peak: Option<Sums>,
    peak_us: Option<u64>,
}

impl Host {
    pub(super) fn take(&mut self, one: &Move, owner: usize, time_us: Option<u64>) {
        let height = |s: &Sums| (s.held, s.requested);
        let is_peak = self.peak.as_ref().is_none_or(|p| height(p) < height(&self.now));
        if is_peak && !one.came {
            self.peak = Some(self.now.clone());
        }
        let change_by = |n: &mut u64| {
            *n = if one.came { n.saturating_add(one.bytes) } else { n.saturating_sub(one.bytes) };
        };
        match one.kind {
            MemoryKind::Requested => change_by(&mut self.now.requested),
            MemoryKind::RoundedUp => {
                change_by(&mut self.now.rounding);
                let sum = self.now.rounded.entry(one.stack).or_default();
                add(sum, one);
                if sum.count == 0 {
                    self.now.rounded.remove(&one.stack);
                }
            }
            kind => {
                change(&mut self.by, owner, one);
                change_by(&mut self.now.held);
                if kind == MemoryKind::Framework {
                    change_by(&mut self.now.framework);
                }
            }
        }
        if one.came && self.peak.as_ref().is_none_or(|p| height(p) < height(&self.now)) {
            self.peak_us = time_us;
        }
    }

    /// The sums, for the `memtrace` key; by owner and by communicator the caller knows.
    pub(super) fn describe<W: Words>(&self, namer: &mut Names<'_, W>) -> HostOwners {
        let height = |s: &Sums| (s.held, s.requested);
        let left = self.peak.as_ref().filter(|p| height(p) >= height(&self.now));
        let now = self.now.describe(namer);
        let mut peak = left.unwrap_or(&self.now).describe(namer);
        peak.time_us = self.peak_us;
        let HostPeak { held, framework, requested, rounding, rounded, .. } = now;
        let (by, communicators, kept) = (Vec::new(), Vec::new(), Kept::NOTHING);
        HostOwners { held, framework, requested, rounding, rounded, peak, by, communicators, kept }
    }
}

impl Sums {
    fn describe<W: Words>(&self, namer: &mut Names<'_, W>) -> HostPeak {
        let mut stacks: Vec<(StackId, Amount)> =
            self.rounded.iter().map(|(s, a)| (*s, *a)).collect();
        stacks.sort_by_key(|(_, a)| Reverse(a.bytes));
        stacks.truncate(TOLD);
        let one = |(stack, a): (StackId, Amount)| RoundedStack {
            bytes: a.bytes,
            count: a.count,
            frames: frames(stack, namer),
            kept: Kept::NOTHING,
        };
        let rounded = stacks.into_iter().map(one).collect();
        let Sums { held, framework, requested, rounding, .. } = *self;
        let (time_us, kept) = (None, Kept::NOTHING);
        HostPeak { held, framework, requested, rounding, rounded, time_us, kept }
    }
}

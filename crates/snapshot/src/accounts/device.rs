//! What is known of one device: sums, its highest point, and what it said of itself.

use std::collections::BTreeMap;

use memtrace_format::event::{Event, MeasuredEvent};
use memtrace_state::ledger::{MemoryKind, Move};
use memtrace_state::past::Past;

use super::growth::Growth;
use super::warnings::{Recent, TakenBefore};
use super::{Amount, BEFORE, ByOwner, CONTEXTS, ELASTIC, GRAPH_NODES, MANAGED, POOLS};

/// What a driver takes memory in, bytes; smaller requests share a piece.
const PIECE: u64 = 2 << 20;
/// The largest request that shares one.
const SHARED: u64 = 1 << 20;
/// What requests that share a piece are rounded to.
const GRAIN: u64 = 512;
/// What a driver's memory pools grow by, bytes (seen, not documented: an
/// estimate rests on it, no sum).
const STEP: u64 = 32 << 20;

/// What the driver's pieces add to what was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rounding {
    /// Of requests that have pieces of their own.
    large: u64,
    /// All requests that share pieces.
    small: u64,
    /// How many there are.
    small_count: u64,
}

impl Rounding {
    fn change(&mut self, bytes: u64, came: bool) {
        let add = |n: &mut u64, by: u64| {
            *n = if came { n.saturating_add(by) } else { n.saturating_sub(by) }
        };
        if bytes > SHARED {
            add(&mut self.large, bytes.next_multiple_of(PIECE) - bytes);
        } else {
            add(&mut self.small, bytes);
            add(&mut self.small_count, 1);
        }
    }

    /// If those that share pieces are side by side.
    pub(super) fn least(&self) -> u64 {
        self.large + self.small.next_multiple_of(PIECE) - self.small
    }

    /// If each has a piece of its own, and its own grains.
    pub(super) fn most(&self) -> u64 {
        let apart = self.small_count.saturating_mul(PIECE);
        self.large + apart.saturating_sub(self.small).max(self.small_count.saturating_mul(GRAIN))
    }
}

/// What a device said, and what was booked then.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) time_us: u64,
    pub(super) api: u16,
    pub(super) used: u64,
    pub(super) total: u64,
    pub(super) others: Option<u64>,
    /// In use by no process, as the device says.
    pub(super) nobodys: i64,
    pub(super) by: ByOwner,
    pub(super) rounding: Rounding,
    pub(super) managed: u64,
    pub(super) graph_nodes: u64,
    pub(super) pooled: u64,
    /// The most that pools may have grown to.
    pub(super) pools_most: u64,
}

/// Managed memory that was taken for one device. It is with the host or on a device, wherever it
/// was touched last. So it is part of no sum of what the device holds.
#[derive(Clone, Debug, Default)]
pub(super) struct Managed {
    pub(super) bytes: u64,
    pub(super) by: ByOwner,
    /// The most there was, when, and whose it was.
    pub(super) peak: u64,
    pub(super) peak_us: Option<u64>,
    peak_by: Option<ByOwner>,
    at_peak: bool,
}

impl Managed {
    fn take(&mut self, one: &Move, owner: usize, time_us: Option<u64>) {
        if !one.came && std::mem::take(&mut self.at_peak) {
            self.peak_by = Some(self.by.clone());
        }
        change(&mut self.by, owner, one);
        if !one.came {
            self.bytes = self.bytes.saturating_sub(one.bytes);
            return;
        }
        self.bytes = self.bytes.saturating_add(one.bytes);
        if self.bytes > self.peak {
            (self.peak, self.peak_us, self.at_peak) = (self.bytes, time_us, true);
        }
    }

    /// Whose it was when there was most.
    pub(super) fn peak_by(&self) -> &ByOwner {
        self.peak_by.as_ref().filter(|_| !self.at_peak).unwrap_or(&self.by)
    }
}

/// The sums of one device.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceAccounts {
    pub(super) by: ByOwner,
    pub(super) held: u64,
    pub(super) managed: Managed,
    pub(super) graph_nodes: u64,
    pub(super) pooled: u64,
    /// The most that `pooled` has been.
    pub(super) most_pooled: u64,
    pub(super) rounding: Rounding,
    /// The highest `held`, when, and by whom; the last only if it has been left since.
    pub(super) peak: u64,
    pub(super) peak_us: Option<u64>,
    /// Not known if the highest point is before the history.
    pub(super) peak_by: Option<ByOwner>,
    pub(super) at_peak: bool,
    /// Kinds of things that came or went since the last measurement.
    pub(super) touched: u8,
    /// Which kinds the first measurement was charged to.
    pub(super) first: u8,
    /// Bytes by the kinds that they are charged to.
    pub(super) overhead: BTreeMap<u8, i64>,
    pub(super) drift: i64,
    pub(super) measured: Option<Measured>,
    /// What pools have said they have reserved.
    pub(super) pools: BTreeMap<u64, u64>,
    /// How the process came here.
    pub(super) entered: Option<Event>,
    /// What the device has seen in all, bytes and times.
    pub(super) taken: Amount,
    pub(super) growth: Growth,
    pub(super) recent: Recent,
    pub(super) taken_before: Option<TakenBefore>,
}

impl DeviceAccounts {
    pub(super) fn take(&mut self, one: &Move, owner: usize, time_us: Option<u64>) {
        let up_or_down = |n: &mut u64| {
            *n = if one.came { n.saturating_add(one.bytes) } else { n.saturating_sub(one.bytes) };
        };
        match one.kind {
            MemoryKind::Managed => {
                self.managed.take(one, owner, time_us);
                self.touched |= MANAGED;
            }
            MemoryKind::GraphNode => {
                up_or_down(&mut self.graph_nodes);
                self.touched |= GRAPH_NODES;
            }
            MemoryKind::Pooled => {
                up_or_down(&mut self.pooled);
                self.most_pooled = self.most_pooled.max(self.pooled);
                self.touched |= POOLS;
            }
            MemoryKind::Requested | MemoryKind::RoundedUp => {} // the host's
            MemoryKind::Plain | MemoryKind::Framework => self.rounding.change(one.bytes, one.came),
        }
        if !one.kind.is_held() {
            return;
        }
        if one.kind == MemoryKind::Framework {
            self.growth.in_pool(one.bytes, one.came);
        } else {
            self.growth.outside(owner, one.bytes, one.came, one.stack);
            if let Some(time_us) = time_us {
                self.recent.note(time_us, owner, one.bytes, one.stack, one.came);
            }
        }
        if one.came && time_us.is_some() {
            self.taken.bytes = self.taken.bytes.saturating_add(one.bytes);
            self.taken.count = self.taken.count.saturating_add(1);
        }
        if !one.came && std::mem::take(&mut self.at_peak) {
            self.peak_by = Some(self.by.clone());
        }
        change(&mut self.by, owner, one);
        up_or_down(&mut self.held);
        if self.held > self.peak {
            (self.peak, self.peak_us, self.at_peak) = (self.held, time_us, true);
        }
    }

    /// What the device has seen before the history begins.
    pub(super) fn remember(&mut self, past: &Past) {
        self.taken = Amount { bytes: past.taken, count: past.count };
        if past.peak > self.peak {
            (self.peak, self.peak_us, self.at_peak, self.peak_by) = (past.peak, None, false, None);
        }
    }

    pub(super) fn enter(&mut self, way: &Event) {
        let first = self.entered.is_none_or(|e| way.time_ns < e.time_ns);
        self.entered = if first { Some(*way) } else { self.entered };
    }

    /// The difference between what the device says and what the ledger has.
    fn between(&self, used: u64, others: Option<u64>, nobodys: i64) -> i64 {
        let booked =
            self.held.saturating_add(self.rounding.least()).saturating_add(others.unwrap_or(0));
        let booked = i64::try_from(booked).unwrap_or(i64::MAX);
        (used as i64).saturating_sub(booked).saturating_sub(nobodys)
    }

    pub(super) fn measure(&mut self, event: &Event, cut: bool) {
        let MeasuredEvent { used, total, by } = MeasuredEvent::of(event);
        let last = self.measured.take();
        let before = last.as_ref().and_then(|m| m.others);
        let others = by.map_or(before, |(_, others)| Some(others));
        let nobodys = match (by, &last) {
            (Some((ours, others)), _) => used as i64 - ours as i64 - others as i64,
            (None, Some(m)) => m.nobodys,
            (None, None) => 0,
        };
        let now = self.between(used, others, nobodys);
        let delta = match &last {
            None => now,
            Some(m) => {
                now - self.overhead.values().sum::<i64>() - self.drift
                // Until others were known, they were charged with the first measurement.
                + if m.others.is_none() { others.unwrap_or(0) as i64 + nobodys } else { 0 }
            }
        };
        if let (Some(m), Some(others)) = (&last, others)
            && m.others.is_none()
        {
            *self.overhead.entry(self.first).or_default() -= others as i64 + nobodys;
        }
        let mut kinds = std::mem::take(&mut self.touched);
        if last.is_none() {
            kinds = if cut { BEFORE } else { kinds | CONTEXTS };
            self.first = kinds;
        }
        if kinds & !ELASTIC == 0 {
            self.drift = self.drift.saturating_add(delta);
        } else {
            *self.overhead.entry(kinds).or_default() += delta;
        }
        self.measured = Some(Measured {
            time_us: event.time_ns / 1000,
            api: event.api,
            used,
            total,
            others,
            nobodys,
            by: self.by.clone(),
            rounding: self.rounding,
            managed: self.managed.bytes,
            graph_nodes: self.graph_nodes,
            pooled: self.pooled,
            pools_most: self.most_pooled.next_multiple_of(STEP),
        });
    }

    /// What is charged to which kinds, and the drift, at the end. What one kind has given back of
    /// what it was charged with others is credited to all of them. Where one keeps or gives up
    /// memory at any time, as a pool does, drift counts as theirs, too.
    pub(super) fn settled(&self) -> (BTreeMap<u8, i64>, i64) {
        let (mut all, mut drift) = (self.overhead.clone(), self.drift);
        let kinds: Vec<u8> = all.keys().copied().collect();
        for one in kinds {
            let mut owed = all.remove(&one).unwrap_or_default();
            let shared = |s: &u8| s & one == one || s & one & ELASTIC != 0;
            all.iter_mut().filter(|(s, _)| shared(s)).for_each(|(_, n)| even(&mut owed, n));
            if one & ELASTIC != 0 {
                even(&mut owed, &mut drift);
            }
            all.insert(one, owed);
        }
        all.iter_mut().filter(|(s, _)| *s & ELASTIC != 0).for_each(|(_, n)| even(&mut drift, n));
        (all, drift)
    }
}

/// Pays what is owed in `debt`, if anything is, as far as `purse` goes.
fn even(debt: &mut i64, purse: &mut i64) {
    let part = (-*debt).min(*purse).max(0);
    (*debt, *purse) = (*debt + part, *purse - part);
}

pub(super) fn change(sums: &mut ByOwner, owner: usize, one: &Move) {
    if sums.len() <= owner {
        sums.resize(owner + 1, Amount::default());
    }
    if let Some(sum) = sums.get_mut(owner) {
        add(sum, one);
    }
}

/// What came or went, to one sum.
pub(super) fn add(sum: &mut Amount, one: &Move) {
    if one.came {
        *sum = Amount { bytes: sum.bytes.saturating_add(one.bytes), count: sum.count + 1 };
    } else {
        sum.bytes = sum.bytes.saturating_sub(one.bytes);
        sum.count = sum.count.saturating_sub(1);
    }
}

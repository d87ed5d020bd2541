//! A device that answers as a recorded driver did: the same addresses, and
//! memory when there was some.
//!
//! It is made of the segment events of a trace. Asked for a segment, it looks at what comes next.
//! If that is a segment of this size, it is handed out. If it is something else, there was no
//! memory. So it knows the future: whoever wants to know whether the refusals were right keeps a
//! ledger beside it ([`Script::with_capacity`]).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use memtrace_format::snapshot::PoolId;

use crate::driver::{AfterCapture, Driver};
use crate::event::Action;
use crate::sizes::SMALL_SEGMENT;

/// One thing that the driver did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// One of the segment actions, or [`Action::Oom`].
    pub action: Action,
    /// Its address; what the device had free for [`Action::Oom`].
    pub addr: u64,
    /// Bytes.
    pub size: u64,
    /// The stream.
    pub stream: u64,
    /// The private pool.
    pub pool: PoolId,
}

/// When a recorded event is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// At once.
    Always,
    /// When somebody has waited for anything since it was recorded: [`Script::waited`].
    AfterWait,
    /// Never by itself: the caller completes frees.
    Reported,
}

/// A device that answers as recorded.
#[derive(Clone, Debug)]
pub struct Script {
    steps: VecDeque<Step>,
    total: u64,
    /// Bytes that may be in use, and are.
    ledger: Option<(u64, u64)>,
    ready: Ready,
    waits: u64,
    capturing: bool,
    hashes: BTreeMap<u64, u64>,
    wanted: BTreeSet<(u64, u64)>,
    /// Address → place in the order that PyTorch left to chance.
    order: HashMap<u64, usize>,
    done: usize,
    /// Base → size.
    reservations: BTreeMap<u64, u64>,
    /// Addresses for what was never used.
    spare: u64,
    problem: Option<String>,
}

impl Script {
    /// A device of `total` bytes that takes these steps.
    pub fn new(total: u64, steps: impl IntoIterator<Item = Step>) -> Script {
        Script {
            steps: steps.into_iter().collect(),
            total,
            ledger: None,
            ready: Ready::Always,
            waits: 0,
            capturing: false,
            hashes: BTreeMap::new(),
            wanted: BTreeSet::new(),
            order: HashMap::new(),
            done: 0,
            reservations: BTreeMap::new(),
            spare: 1 << 60,
            problem: None,
        }
    }

    /// Keeps a ledger: a refusal or a grant that `capacity` bytes do not explain is a problem.
    #[must_use]
    pub fn with_capacity(mut self, capacity: u64) -> Script {
        self.ledger = Some((capacity, 0));
        self
    }

    /// Addresses that were reserved before the first step.
    #[must_use]
    pub fn with_reservations(mut self, reservations: &[(u64, u64)]) -> Script {
        self.reservations.extend(reservations.iter().copied());
        self
    }

    /// When events are ready.
    #[must_use]
    pub fn with_events(mut self, ready: Ready) -> Script {
        self.ready = ready;
        self
    }

    /// What PyTorch hashes a stream by.
    pub fn set_stream_hash(&mut self, stream: u64, hash: u64) {
        self.hashes.insert(stream, hash);
    }

    /// Allocations on these streams belong to
    /// [`Route::Ask`](crate::Route::Ask) of this number, and no others.
    pub fn set_wanted(&mut self, route: u64, streams: impl IntoIterator<Item = u64>) {
        self.wanted.retain(|(other, _)| *other != route);
        self.wanted.extend(streams.into_iter().map(|s| (route, s)));
    }

    /// What PyTorch left to chance ([`Driver::after_capture`]): the order, and
    /// how many of the first did not wait.
    pub fn set_order(&mut self, addrs: impl IntoIterator<Item = u64>, done: usize) {
        self.done = done;
        self.order.clear();
        for (n, addr) in addrs.into_iter().enumerate() {
            self.order.entry(addr).or_insert(n);
        }
    }

    /// The program has waited for the device.
    pub fn waited(&mut self) {
        self.waits += 1;
    }

    /// The current stream is being captured from now on, or no more.
    pub fn set_capturing(&mut self, capturing: bool) {
        self.capturing = capturing;
    }

    /// The first thing that did not go by the script.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Steps that have not been taken.
    pub fn left(&self) -> usize {
        self.steps.len()
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        if self.problem.is_none() {
            self.problem = Some(what());
        }
    }

    /// Takes the next step if it is this one.
    fn step(&mut self, is: impl Fn(&Step) -> bool) -> Option<Step> {
        if self.steps.front().is_some_and(is) { self.steps.pop_front() } else { None }
    }

    fn grant(&mut self, size: u64, granted: bool) {
        let Some((capacity, used)) = self.ledger else { return };
        let fits = used + size <= capacity;
        if fits != granted {
            self.note(|| {
                format!(
                    "{size} bytes on top of {used}: the script says {granted}, the books {fits}"
                )
            });
        }
        if granted {
            self.ledger = Some((capacity, used + size));
        }
    }

    fn back(&mut self, action: Action, addr: u64, size: u64) {
        let found = self.step(|s| s.action == action && s.addr == addr && s.size == size);
        if found.is_none() {
            let next = self.steps.front().copied();
            self.note(|| {
                format!("{} at {addr:#x} of {size} bytes; the script has {next:x?}", action.name())
            });
            // It may come later; what was given back is not given back twice.
            let later =
                self.steps.iter().position(|s| (s.action, s.addr, s.size) == (action, addr, size));
            if let Some(at) = later {
                self.steps.remove(at);
            }
        }
        if let Some((_, used)) = &mut self.ledger {
            *used = used.saturating_sub(size);
        }
    }
}

impl Driver for Script {
    fn total(&self) -> u64 {
        self.total
    }

    fn free_now(&mut self) -> u64 {
        if let Some(oom) = self.step(|s| s.action == Action::Oom) {
            return oom.addr;
        }
        self.ledger.map_or(0, |(capacity, used)| capacity.saturating_sub(used))
    }

    fn alloc(&mut self, size: u64, _: PoolId) -> Option<u64> {
        let found = self.step(|s| s.action == Action::SegmentAlloc && s.size == size);
        self.grant(size, found.is_some());
        found.map(|s| s.addr)
    }

    fn free(&mut self, addr: u64, size: u64, _: PoolId) {
        self.back(Action::SegmentFree, addr, size);
    }

    /// The base is where this pool and stream first map something outside
    /// all reservations that there are.
    fn reserve(&mut self, size: u64, chunk: u64, stream: u64, pool: PoolId) -> Option<u64> {
        let known = |addr: u64| {
            let before = self.reservations.range(..=addr).next_back();
            before.is_some_and(|(base, size)| addr < base + size)
        };
        // A small pool maps one chunk at a time, and no large one is a multiple of that.
        let fits = |bytes: u64| {
            if chunk == SMALL_SEGMENT { bytes == chunk } else { bytes.is_multiple_of(chunk) }
        };
        let mut maps = self.steps.iter().filter(|s| {
            (s.action, s.stream, s.pool) == (Action::SegmentMap, stream, pool)
                && fits(s.size)
                && !known(s.addr)
        });
        let base = if let Some(step) = maps.next() {
            step.addr
        } else {
            self.spare += size.next_power_of_two();
            self.spare
        };
        self.reservations.insert(base, size);
        Some(base)
    }

    fn unreserve(&mut self, addr: u64, _: u64) {
        self.reservations.remove(&addr);
    }

    fn map(&mut self, addr: u64, size: u64, _: u64, _: u64) -> bool {
        let found = self.step(|s| (s.action, s.addr, s.size) == (Action::SegmentMap, addr, size));
        self.grant(size, found.is_some());
        found.is_some()
    }

    fn unmap(&mut self, addr: u64, size: u64, _: u64, _: u64) {
        // The driver waits for the stream first.
        self.waits += 1;
        self.back(Action::SegmentUnmap, addr, size);
    }

    fn record(&mut self, _: u64) -> u64 {
        self.waits
    }

    fn query(&mut self, event: u64) -> bool {
        match self.ready {
            Ready::Always => true,
            Ready::AfterWait => event != self.waits,
            Ready::Reported => false,
        }
    }

    fn synchronize(&mut self, _: u64) {
        self.waits += 1;
    }

    fn capturing(&mut self) -> bool {
        self.capturing
    }

    fn after_capture(&mut self, blocks: &mut [AfterCapture]) {
        let place = |b: &AfterCapture| self.order.get(&b.addr).copied().unwrap_or(usize::MAX);
        blocks.sort_by_key(place);
        for block in blocks {
            block.done |= place(block) < self.done;
        }
    }

    fn wants(&mut self, route: u64, stream: u64) -> bool {
        self.wanted.contains(&(route, stream))
    }

    fn stream_hash(&self, stream: u64) -> u64 {
        self.hashes.get(&stream).copied().unwrap_or(stream)
    }
}

//! Who holds what, and whether it adds up to what the device itself says.
//!
//! The state reports everything that comes and goes ([`Move`]). Here it is added up by *owner*
//! ([`crate::owner`]), with a copy of the sums at each device's highest point. Where a device has
//! said how full it is, the sums are put beside that number. (The program asked for it, or NVML did
//! between calls.) The difference has no size in any API. It is inferred from what changed between
//! two measurements, and from what the process did in between:
//!
//! - if contexts, modules or graphs came or went, the difference is theirs (*measured*). If several
//!   kinds did, it is theirs together. What one of them alone gives back later is credited to both;
//! - memory without a fixed place counts as such a kind, too: what a pool keeps beyond what is in
//!   use, managed memory, and that of graphs;
//! - before the first measurement there was at least the context;
//! - if none did, it is drift. A driver takes memory in pieces of 2 MiB, so as much of it as that
//!   can explain is *estimated* to be rounding. Likewise managed memory, graphs and what pools keep
//!   explain as much as there is of them. That is what they have said, or what was once in use of
//!   them. The rest is **unexplained**, and is always reported.
//!
//! So the lines of the table add up to what the device said, at the moment when it said it.

mod device;
mod growth;
mod host;
mod waits;
mod warnings;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use memtrace_format::event::{
    Event, FLAG_FAILED, Kind, Layer, ONE_OF_SEVERAL, OUT_OF_MEMORY, OomEvent, RefusalEvent, What,
};
use memtrace_format::key::{
    CodeLine, Communicator, DeviceOwners, Entered, HostOwners, Kept, ManagedOwners, Memtrace,
    OutOfMemory, Owner, Owners, OwnersPeak, Reconciled, ReconciledLine, Taken,
};
use memtrace_format::stacks::{StackId, Words};
use memtrace_state::ledger::{MemoryKind, Move};
use memtrace_state::{ApiName, State};

use crate::owner::Names;
use device::{DeviceAccounts, Managed, add};

/// The owner of what a framework's allocator holds.
const FRAMEWORK: &str = "PyTorch";
/// The owner whose memory is reported for each communicator.
const NCCL: &str = "NCCL";
/// The owner of what has no stack.
const NOBODY: &str = "(no stack was recorded)";

/// Kinds of things without a size, as bits: which came or went since the last measurement.
const CONTEXTS: u8 = 1;
const MODULES: u8 = 2;
const EXECUTABLES: u8 = 4;
/// Likewise what has a size, but not the one that it takes on the device.
const POOLS: u8 = 8;
const MANAGED: u8 = 16;
const GRAPH_NODES: u8 = 32;
const ELASTIC: u8 = POOLS | MANAGED | GRAPH_NODES;
/// Whatever came before the history begins.
const BEFORE: u8 = 128;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amount {
    bytes: u64,
    count: u64,
}

/// Sums by owner, by the owner's number.
type ByOwner = Vec<Amount>;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    owners: Vec<Rc<str>>,
    numbers: HashMap<Rc<str>, usize>,
    devices: BTreeMap<i8, DeviceAccounts>,
    host: host::Host,
    /// Of NCCL's memory: by device (or the host's) and communicator.
    parts: BTreeMap<(Option<i8>, u16), Amount>,
    waits: waits::Waits,
    /// The communicators that have been seen, by number.
    communicators: BTreeMap<u16, Event>,
    oom: Option<Event>,
    /// The driver refused what that request came to; otherwise nobody knows, or PyTorch did.
    oom_by_driver: bool,
    /// All of PyTorch's failures that it refused: device and time.
    by_driver: Vec<(i8, u64)>,
    /// Threads whose last request for a segment it refused.
    refused: HashSet<u32>,
    /// The history has lost its beginning.
    cut: bool,
}

impl Accounts {
    /// The sums before the history begins.
    pub(crate) fn new<W: Words>(state: &State, cut: bool, namer: &mut Names<'_, W>) -> Accounts {
        let mut accounts = Accounts { cut, ..Accounts::default() };
        for one in state.holdings() {
            accounts.take(&one, None, namer);
        }
        for (device, past) in &state.past {
            accounts.devices.entry(*device).or_default().remember(past);
        }
        for it in state.ledger.communicators() {
            accounts.communicators.insert(it.part(), *it);
        }
        for way in state.ledger.ways_in() {
            accounts.devices.entry(way.device).or_default().enter(way);
        }
        accounts
    }

    /// One event, after which these things have come and gone.
    pub(crate) fn note<W: Words>(
        &mut self,
        event: &Event,
        moves: &[Move],
        namer: &mut Names<'_, W>,
    ) {
        for one in moves {
            self.take(one, Some(event.time_ns / 1000), namer);
        }
        if event.layer == Layer::Framework {
            self.waits.note(event);
            match event.kind {
                Kind::Oom => self.failed(event, namer),
                Kind::SegmentAlloc | Kind::SegmentMap => {
                    if event.flags & FLAG_FAILED != 0 {
                        self.refused.insert(event.thread);
                    } else {
                        self.refused.remove(&event.thread);
                    }
                }
                Kind::Alloc => {
                    if !self.refused.is_empty() {
                        self.refused.remove(&event.thread);
                    }
                    self.devices.entry(event.device).or_default().growth.tick();
                }
                _ => {}
            }
            return;
        }
        if event.flags & FLAG_FAILED != 0 {
            if RefusalEvent::of(event).answer == OUT_OF_MEMORY {
                self.failed(event, namer);
            }
            return;
        }
        let kind = match event.what {
            What::Context => CONTEXTS,
            What::Module => MODULES,
            What::Executable => EXECUTABLES,
            _ => 0,
        };
        let cut = self.cut;
        match event.kind {
            Kind::Create if event.what == What::Communicator => {
                self.communicators.insert(event.part(), *event);
            }
            Kind::Create | Kind::Destroy if kind != 0 => {
                let device = self.devices.entry(event.device).or_default();
                device.touched |= kind;
                if kind == CONTEXTS && event.kind == Kind::Create {
                    device.enter(event);
                }
            }
            Kind::Entered => {
                let device = self.devices.entry(event.device).or_default();
                device.touched |= CONTEXTS;
                device.enter(event);
            }
            Kind::Reset => self.devices.entry(event.device).or_default().touched |= CONTEXTS,
            Kind::Destroy if event.what == What::MemoryPool => {
                self.devices.entry(event.device).or_default().touched |= POOLS;
            }
            Kind::PoolReserved if event.what == What::MemoryPool => {
                self.devices.entry(event.device).or_default().pools.insert(event.addr, event.size);
            }
            Kind::Measured => self.devices.entry(event.device).or_default().measure(event, cut),
            _ => {}
        }
    }

    fn take<W: Words>(&mut self, one: &Move, time_us: Option<u64>, namer: &mut Names<'_, W>) {
        let owner = match one.kind {
            MemoryKind::Framework | MemoryKind::Requested | MemoryKind::RoundedUp => {
                self.number(FRAMEWORK)
            }
            _ => match namer.owner(one.stack) {
                Some(name) => self.number(&name),
                None => self.number(NOBODY),
            },
        };
        if self.owners.get(owner).is_some_and(|name| &**name == NCCL) && one.kind.is_held() {
            add(self.parts.entry((one.device, one.part)).or_default(), one);
        }
        match one.device {
            None => self.host.take(one, owner, time_us),
            Some(device) => self.devices.entry(device).or_default().take(one, owner, time_us),
        }
    }

    /// A request failed for want of memory.
    fn failed<W: Words>(&mut self, event: &Event, namer: &mut Names<'_, W>) {
        self.oom = Some(*event);
        let framework = event.kind == Kind::Oom;
        self.oom_by_driver = !framework || self.refused.remove(&event.thread);
        if framework && self.oom_by_driver {
            self.by_driver.push((event.device, event.time_ns / 1000));
        }
        if event.layer == Layer::Host {
            return;
        }
        let by = if framework { None } else { namer.owner(event.stack) };
        let by = by.map(|name| self.number(&name));
        let free = free_then(event);
        let device = self.devices.entry(event.device).or_default();
        let taken_before = device.recent.taken_before(event.time_ns / 1000, by, event.size, free);
        device.taken_before = taken_before.or(device.taken_before.take());
    }

    fn number(&mut self, name: &str) -> usize {
        if let Some(n) = self.numbers.get(name) {
            return *n;
        }
        let name: Rc<str> = Rc::from(name);
        self.owners.push(name.clone());
        self.numbers.insert(name, self.owners.len() - 1);
        self.owners.len() - 1
    }

    /// Adds what was worked out to a snapshot's `memtrace` key.
    pub(crate) fn fill<W: Words>(
        &self,
        about: &mut Memtrace,
        api: ApiName<'_>,
        namer: &mut Names<'_, W>,
    ) {
        let used = |d: &DeviceAccounts| d.peak > 0 || d.held > 0 || d.managed.peak > 0;
        let devices = self.devices.iter().filter(|(_, d)| used(d)).map(|(ordinal, d)| {
            let peak_by = if d.at_peak { Some(&d.by) } else { d.peak_by.as_ref() };
            let Amount { bytes, count } = d.taken;
            DeviceOwners {
                device: (*ordinal).into(),
                held: Some(d.held),
                by: self.by(&d.by),
                peak: Some(peak(d.peak, d.peak_us, peak_by.map(|by| self.by(by)))),
                taken: Taken { bytes, count, kept: Kept::NOTHING },
                communicators: self.by_communicator(Some(*ordinal)),
                managed: self.managed(&d.managed),
                kept: Kept::NOTHING,
            }
        });
        let devices = devices.collect();
        let host = HostOwners {
            by: self.by(&self.host.by),
            communicators: self.by_communicator(None),
            ..self.host.describe(namer)
        };
        about.owners = Some(Owners { devices, host, kept: Kept::NOTHING });
        let reconciled = self.devices.iter().filter_map(|(o, d)| self.reconcile(*o, d, api));
        about.reconcile = Some(reconciled.collect());
        let entered = self.devices.iter().filter_map(|(o, d)| Some((o, d.entered.as_ref()?)));
        let entered = entered.map(|(ordinal, e)| Entered {
            device: (*ordinal).into(),
            time_us: e.time_ns / 1000,
            call: api(e.api).to_owned(),
            owner: namer.owner(e.stack).map(|o| o.to_string()),
            frames: frames(e.stack, namer),
            kept: Kept::NOTHING,
        });
        about.entered = Some(entered.collect());
        about.deferred_frees = self.waits.describe(namer);
        about.warnings = Some(self.warnings(api, namer));
        if let Some(oom) = &self.oom {
            about.out_of_memory = Some(out_of_memory(oom, self.oom_by_driver, api, namer));
            let pairs = self.by_driver.iter().map(|(device, time)| (i64::from(*device), *time));
            about.refused_by_driver = Some(pairs.collect());
        }
    }

    /// What NCCL holds there for each communicator; number 0 is what is of none that is known.
    fn by_communicator(&self, device: Option<i8>) -> Vec<Communicator> {
        let mut all: BTreeMap<u16, Amount> = BTreeMap::new();
        for ((_, part), a) in self.parts.iter().filter(|((d, _), a)| *d == device && a.count > 0) {
            let sum = all.entry(if *part == ONE_OF_SEVERAL { 0 } else { *part }).or_default();
            *sum = Amount { bytes: sum.bytes.saturating_add(a.bytes), count: sum.count + a.count };
        }
        let line = |(number, a): (u16, Amount)| {
            let of = self.communicators.get(&number).filter(|c| c.size > 0);
            Communicator {
                communicator: number.into(),
                ranks: of.map(|c| c.size),
                rank: of.map(|c| c.stream),
                bytes: a.bytes,
                count: a.count,
                kept: Kept::NOTHING,
            }
        };
        all.into_iter().map(line).collect()
    }

    /// Managed memory; `None` where there was none.
    fn managed(&self, m: &Managed) -> Option<ManagedOwners> {
        (m.peak > 0).then(|| ManagedOwners {
            held: m.bytes,
            by: self.by(&m.by),
            peak: peak(m.peak, m.peak_us, Some(self.by(m.peak_by()))),
            kept: Kept::NOTHING,
        })
    }

    fn by(&self, sums: &ByOwner) -> Vec<Owner> {
        let mut all: Vec<(&str, Amount)> =
            self.owners.iter().map(|o| &**o).zip(sums.iter().copied()).collect();
        all.retain(|(_, a)| a.count > 0);
        all.sort_by(|(a, x), (b, y)| y.bytes.cmp(&x.bytes).then(a.cmp(b)));
        let line = |(owner, a): (&str, Amount)| Owner {
            owner: owner.to_owned(),
            bytes: a.bytes,
            count: a.count,
            kept: Kept::NOTHING,
        };
        all.into_iter().map(line).collect()
    }

    fn reconcile(
        &self,
        ordinal: i8,
        device: &DeviceAccounts,
        api: ApiName<'_>,
    ) -> Option<Reconciled> {
        let m = device.measured.as_ref()?;
        let one = |name: &str, bytes: i64, known: &str| ReconciledLine {
            name: name.to_owned(),
            bytes,
            known: known.to_owned(),
            kept: Kept::NOTHING,
        };
        let mut lines: Vec<ReconciledLine> = Vec::new();
        let mut line = |name: &str, bytes: i64, known: &str| {
            if bytes != 0 {
                lines.push(one(name, bytes, known));
            }
        };
        for owner in self.by(&m.by) {
            line(&owner.owner, i64::try_from(owner.bytes).unwrap_or(i64::MAX), "booked");
        }
        let (overhead, mut left) = device.settled();
        for (kinds, bytes) in overhead {
            line(&name_of(kinds, m.others.is_none() && kinds == device.first), bytes, "measured");
        }
        line("other processes", m.others.unwrap_or(0) as i64, "measured");
        line("kept by the driver for no process", m.nobodys, "measured");
        let mut up_to = |most: u64| {
            let part = left.clamp(0, most as i64);
            left -= part;
            part
        };
        let least = m.rounding.least();
        let rounding = least as i64 + up_to(m.rounding.most().saturating_sub(least));
        line("rounding to the driver's pieces of 2 MiB", rounding, "estimated");
        let reserved = device.pools.values().sum::<u64>().max(m.pools_most);
        line("kept by memory pools", up_to(reserved.saturating_sub(m.pooled)), "estimated");
        line("managed memory that lies here", up_to(m.managed), "estimated");
        line("memory of graphs", up_to(m.graph_nodes), "estimated");
        lines.push(one("unexplained", left, "what is left"));
        let source = if m.api == 0 { "NVML" } else { api(m.api) };
        Some(Reconciled {
            device: ordinal.into(),
            time_us: m.time_us,
            source: source.to_owned(),
            used: m.used,
            total: m.total,
            lines,
            unexplained: left,
            kept: Kept::NOTHING,
        })
    }
}

fn peak(held: u64, time_us: Option<u64>, by: Option<Vec<Owner>>) -> OwnersPeak {
    OwnersPeak { held: Some(held), time_us, by, kept: Kept::NOTHING }
}

fn name_of(kinds: u8, with_others: bool) -> String {
    let names = [
        (CONTEXTS, "contexts"),
        (MODULES, "modules"),
        (EXECUTABLES, "graph executables"),
        (POOLS, "memory pools"),
        (MANAGED, "managed memory"),
        (GRAPH_NODES, "memory of graphs"),
        (BEFORE, "contexts, modules and graphs from before the history"),
    ];
    let mut parts: Vec<&str> =
        names.iter().filter(|(bit, _)| kinds & bit != 0).map(|(_, name)| *name).collect();
    if with_others {
        parts.push("other processes");
    }
    match parts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => parts.concat(),
    }
}

/// Bytes that the device had free when a request failed.
fn free_then(oom: &Event) -> Option<u64> {
    match oom.kind {
        Kind::Oom => Some(OomEvent::of(oom).free),
        _ if oom.layer == Layer::Host => None,
        _ => Some(RefusalEvent::of(oom).free).filter(|free| *free > 0),
    }
}

/// A failed request, for whoever writes about it.
fn out_of_memory<W: Words>(
    oom: &Event,
    refused_by_driver: bool,
    api: ApiName<'_>,
    namer: &mut Names<'_, W>,
) -> OutOfMemory {
    let framework = oom.kind == Kind::Oom;
    let owner = if framework {
        Some(FRAMEWORK.to_owned())
    } else {
        namer.owner(oom.stack).map(|o| o.to_string())
    };
    OutOfMemory {
        device: (oom.layer != Layer::Host).then_some(oom.device.into()),
        time_us: Some(oom.time_ns / 1000),
        asked: Some(oom.size),
        free: free_then(oom),
        refused_by_driver,
        call: (!framework).then(|| api(oom.api).to_owned()),
        owner,
        frames: frames(oom.stack, namer),
        kept: Kept::NOTHING,
    }
}

/// A stack as PyTorch writes one.
fn frames<W: Words>(stack: StackId, namer: &mut Names<'_, W>) -> Vec<CodeLine> {
    namer.frames(stack).into_iter().map(CodeLine::from).collect()
}

#[cfg(test)]
mod tests;

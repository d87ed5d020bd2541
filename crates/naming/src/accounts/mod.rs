//! Who holds what, and whether it adds up to what the device itself says.
//!
//! The replay tells of everything that comes and goes ([`Move`]); here it is added up by *owner* ([`crate::owner`]), with
//! a copy of the sums at each device's highest point. Where a device has said how full it is (an answer that the program
//! itself asked for, or NVML's between calls), the sums are put beside it. What is between them has no size in any API.
//! It is known by what changed between two measurements, and by what the process did in between:
//!
//! - if contexts, modules or graphs came or went and nothing else of the kind, the difference is theirs (*measured*);
//!   if several sorts did, it is theirs together, and what one of them alone gives back later is credited to both;
//! - memory that is not where its name is counts as such a sort beside them: what a pool keeps beyond what is in use, managed memory,
//!   graphs';
//! - before the first measurement there was at least the context;
//! - if none did, it is drift. A driver takes memory in pieces of 2 MiB, so that as much of it as that can make is
//!   *estimated* to be rounding; likewise as much as there is of managed memory, of graphs' and of what pools keep: what
//!   they have said, or what was once in use of them. The rest is **unexplained**, and is always told.
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
    Event, FLAG_FAILED, Kind, Layer, ONE_OF_SEVERAL, OUT_OF_MEMORY, What,
};
use memtrace_format::ledger::{Move, Sort};
use memtrace_format::replay::{ApiName, State};
use memtrace_format::stacks::{StackId, Words};
use serde_json::{Value, json};

use crate::names::Namer;
use device::{Device, Managed, add};

/// The owner of what a framework's allocator holds.
const FRAMEWORK: &str = "PyTorch";
/// The owner whose memory is told apart by communicator.
const NCCL: &str = "NCCL";
/// The owner of what has no stack.
const NOBODY: &str = "(no stack was recorded)";

/// Sorts of things without a size, as bits: which came or went since the last measurement.
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

/// See the module's essay.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    owners: Vec<Rc<str>>,
    numbers: HashMap<Rc<str>, usize>,
    devices: BTreeMap<i8, Device>,
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
    pub(crate) fn new<W: Words>(state: &State, cut: bool, namer: &mut Namer<W>) -> Accounts {
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
    pub(crate) fn note<W: Words>(&mut self, event: &Event, moves: &[Move], namer: &mut Namer<W>) {
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
            if event.extra == OUT_OF_MEMORY {
                self.failed(event, namer);
            }
            return;
        }
        let sort = match event.what {
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
            Kind::Create | Kind::Destroy if sort != 0 => {
                let device = self.devices.entry(event.device).or_default();
                device.touched |= sort;
                if sort == CONTEXTS && event.kind == Kind::Create {
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

    fn take<W: Words>(&mut self, one: &Move, time_us: Option<u64>, namer: &mut Namer<W>) {
        let owner = match one.sort {
            Sort::Framework | Sort::Requested | Sort::RoundedUp => self.number(FRAMEWORK),
            _ => match namer.owner(one.stack) {
                Some(name) => self.number(&name),
                None => self.number(NOBODY),
            },
        };
        if self.owners.get(owner).is_some_and(|name| &**name == NCCL) && one.sort.is_held() {
            add(self.parts.entry((one.device, one.part)).or_default(), one);
        }
        match one.device {
            None => self.host.take(one, owner, time_us),
            Some(device) => self.devices.entry(device).or_default().take(one, owner, time_us),
        }
    }

    /// A request failed for want of memory.
    fn failed<W: Words>(&mut self, event: &Event, namer: &mut Namer<W>) {
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
        let crowded = device.recent.crowded(event.time_ns / 1000, by, event.size, free);
        device.crowded = crowded.or(device.crowded.take());
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
    pub(crate) fn tell<W: Words>(&self, about: &mut Value, api: ApiName<'_>, namer: &mut Namer<W>) {
        let devices: Vec<Value> = self
            .devices
            .iter()
            .filter(|(_, d)| d.peak > 0 || d.held > 0 || d.managed.peak > 0)
            .map(|(ordinal, d)| {
                let peak_by = if d.at_peak { Some(&d.by) } else { d.peak_by.as_ref() };
                let peak_by = peak_by.map(|by| self.by(by));
                json!({
                    "device": ordinal,
                    "held": d.held,
                    "by": self.by(&d.by),
                    "peak": {"held": d.peak, "time_us": d.peak_us, "by": peak_by},
                    "taken": {"bytes": d.taken.bytes, "count": d.taken.count},
                    "communicators": self.by_communicator(Some(*ordinal)),
                    "managed": self.managed(&d.managed),
                })
            })
            .collect();
        let mut host = self.host.tell(namer);
        host["by"] = self.by(&self.host.by);
        host["communicators"] = self.by_communicator(None);
        about["owners"] = json!({"devices": devices, "host": host});
        about["reconcile"] = self
            .devices
            .iter()
            .filter_map(|(ordinal, d)| self.reconcile(*ordinal, d, api))
            .collect();
        about["entered"] = self
            .devices
            .iter()
            .filter_map(|(ordinal, d)| Some((ordinal, d.entered.as_ref()?)))
            .map(|(ordinal, e)| {
                let owner = namer.owner(e.stack).map(|o| o.to_string());
                let frames = frames(e.stack, namer);
                json!({"device": ordinal, "time_us": e.time_ns / 1000, "call": api(e.api), "owner": owner, "frames": frames})
            })
            .collect();
        if let Some(waits) = self.waits.tell(namer) {
            about["deferred_frees"] = waits;
        }
        about["warnings"] = self.warnings(api, namer).into();
        if let Some(oom) = &self.oom {
            about["out_of_memory"] = told(oom, self.oom_by_driver, api, namer);
            about["refused_by_driver"] = json!(self.by_driver);
        }
    }

    /// What NCCL holds there for each communicator; number 0 is what can't be told.
    fn by_communicator(&self, device: Option<i8>) -> Value {
        let mut all: BTreeMap<u16, Amount> = BTreeMap::new();
        for ((_, part), a) in self.parts.iter().filter(|((d, _), a)| *d == device && a.count > 0) {
            let sum = all.entry(if *part == ONE_OF_SEVERAL { 0 } else { *part }).or_default();
            *sum = Amount { bytes: sum.bytes.saturating_add(a.bytes), count: sum.count + a.count };
        }
        let line = |(number, a): (u16, Amount)| {
            let of = self.communicators.get(&number);
            let ranks = of.map(|c| c.size).filter(|n| *n > 0);
            let rank = of.filter(|c| c.size > 0).map(|c| c.stream);
            json!({"communicator": number, "ranks": ranks, "rank": rank, "bytes": a.bytes, "count": a.count})
        };
        all.into_iter().map(line).collect()
    }

    /// Managed memory; null where there was none.
    fn managed(&self, m: &Managed) -> Value {
        if m.peak == 0 {
            return Value::Null;
        }
        let peak = json!({"held": m.peak, "time_us": m.peak_us, "by": self.by(m.peak_by())});
        json!({"held": m.bytes, "by": self.by(&m.by), "peak": peak})
    }

    fn by(&self, sums: &ByOwner) -> Value {
        let mut all: Vec<(&str, Amount)> =
            self.owners.iter().map(|o| &**o).zip(sums.iter().copied()).collect();
        all.retain(|(_, a)| a.count > 0);
        all.sort_by(|(a, x), (b, y)| y.bytes.cmp(&x.bytes).then(a.cmp(b)));
        let line = |(owner, a): (&str, Amount)| json!({"owner": owner, "bytes": a.bytes, "count": a.count});
        all.into_iter().map(line).collect()
    }

    fn reconcile(&self, ordinal: i8, device: &Device, api: ApiName<'_>) -> Option<Value> {
        let m = device.measured.as_ref()?;
        let mut lines: Vec<Value> = Vec::new();
        let mut line = |name: &str, bytes: i64, known: &str| {
            if bytes != 0 {
                lines.push(json!({"name": name, "bytes": bytes, "known": known}));
            }
        };
        for owner in self.by(&m.by).as_array().into_iter().flatten() {
            let bytes = owner["bytes"].as_i64().unwrap_or(i64::MAX);
            line(owner["owner"].as_str().unwrap_or_default(), bytes, "booked");
        }
        let (overhead, mut left) = device.settled();
        for (sorts, bytes) in overhead {
            line(&name_of(sorts, m.others.is_none() && sorts == device.first), bytes, "measured");
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
        lines.push(json!({"name": "unexplained", "bytes": left, "known": "what is left"}));
        let source = if m.api == 0 { "NVML" } else { api(m.api) };
        Some(json!({
            "device": ordinal,
            "time_us": m.time_us,
            "source": source,
            "used": m.used,
            "total": m.total,
            "lines": lines,
            "unexplained": left,
        }))
    }
}

fn name_of(sorts: u8, with_others: bool) -> String {
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
        names.iter().filter(|(bit, _)| sorts & bit != 0).map(|(_, name)| *name).collect();
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
        Kind::Oom => Some(oom.extra),
        _ if oom.layer == Layer::Host => None,
        _ => Some(oom.addr).filter(|free| *free > 0),
    }
}

/// A failed request, for whoever writes about it.
fn told<W: Words>(oom: &Event, by_driver: bool, api: ApiName<'_>, namer: &mut Namer<W>) -> Value {
    let framework = oom.kind == Kind::Oom;
    let owner = if framework {
        Some(FRAMEWORK.to_owned())
    } else {
        namer.owner(oom.stack).map(|o| o.to_string())
    };
    let device = (oom.layer != Layer::Host).then_some(oom.device);
    let free = free_then(oom);
    let call = (!framework).then(|| api(oom.api));
    let frames = frames(oom.stack, namer);
    json!({"device": device, "time_us": oom.time_ns / 1000, "asked": oom.size, "free": free, "refused_by_driver": by_driver, "call": call, "owner": owner, "frames": frames})
}

/// A stack as PyTorch writes one.
fn frames<W: Words>(stack: StackId, namer: &mut Namer<W>) -> Vec<Value> {
    let frame = |f: memtrace_format::snapshot::Frame| json!({"name": f.name, "filename": f.filename, "line": f.line});
    namer.frames(stack).into_iter().map(frame).collect()
}

#[cfg(test)]
mod tests;

//! Sub-totals by label: which of the program's own labels hold the memory of PyTorch's allocator,
//! now and at the peak. And which hold memory that was taken past it, from the driver.
//!
//! The peak is known only afterwards. So two numbers are kept: what is held now, and how much of
//! that has changed since the highest total so far. The second starts again at each new peak. The
//! difference is what was held at the peak.
//!
//! The points that the program marked are here, too, each with what was allocated then.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use memtrace_format::event::{
    BlockEvent, Event, FLAG_FAILED, Kind, LabelId, Layer, MarkEvent, NO_LABEL, Point,
};
use memtrace_format::key::{self, DeviceLabels, Kept, Labelled, Memtrace, OutsideLabels};
use memtrace_format::stacks::Words;
use memtrace_state::State;
use memtrace_state::ledger::{MemoryKind, Move};
use serde_json::{Value, json};

use crate::owner::Names;

/// Bytes and blocks.
type Sum = (i64, i64);

/// What is held of one kind of memory.
#[derive(Default)]
struct Held {
    now: HashMap<LabelId, Sum>,
    since_peak: HashMap<LabelId, Sum>,
    total: u64,
    peak: u64,
}

impl Held {
    fn add(&mut self, label: LabelId, bytes: u64, sign: i64) {
        for sums in [&mut self.now, &mut self.since_peak] {
            let sum = sums.entry(label).or_default();
            *sum = (sum.0 + sign * bytes as i64, sum.1 + sign);
        }
        self.total = self.total.saturating_add_signed(sign * bytes as i64);
        if self.total > self.peak {
            self.peak = self.total;
            self.since_peak.clear();
        }
    }

    fn describe<W: Words>(&self, namer: &mut Names<'_, W>) -> OutsideLabels {
        let before = |(label, sum): (&LabelId, &Sum)| {
            let (bytes, count) = self.since_peak.get(label).copied().unwrap_or_default();
            (*label, (sum.0 - bytes, sum.1 - count))
        };
        let now = self.now.iter().map(|(label, sum)| (*label, *sum));
        OutsideLabels {
            peak: self.peak,
            at_peak: sums(self.now.iter().map(before), namer),
            now: sums(now, namer),
            kept: Kept::NOTHING,
        }
    }
}

#[derive(Default)]
struct DeviceSums {
    /// Blocks of PyTorch's allocator.
    blocks: Held,
    /// What no framework's allocator holds.
    outside: Held,
}

/// A point that the program passed.
struct Mark {
    event: Event,
    allocated: Vec<u64>,
}

/// See the module's documentation.
pub struct Labels {
    devices: Vec<DeviceSums>,
    /// Blocks that have not been given back: device, label, bytes.
    blocks: HashMap<u64, (usize, LabelId, u64)>,
    marks: Vec<Mark>,
    labelled: bool,
}

impl Labels {
    /// Begins with what is there.
    pub fn new(state: &State) -> Labels {
        let mut labels = Labels {
            devices: Vec::new(),
            blocks: HashMap::new(),
            marks: Vec::new(),
            labelled: false,
        };
        labels.outside(&state.holdings());
        for (device, held) in state.devices.iter().enumerate() {
            for (addr, block) in held.blocks.iter().filter(|(_, block)| !block.pending) {
                labels.allocated(device, *addr, block.label, block.size);
            }
        }
        labels
    }

    /// Takes an event into account, by which these things have come and gone.
    pub fn note(&mut self, event: &Event, moves: &[Move]) {
        self.outside(moves);
        if event.layer != Layer::Framework || event.flags & FLAG_FAILED != 0 {
            return;
        }
        match event.kind {
            Kind::Alloc => {
                if let Ok(device) = usize::try_from(event.device) {
                    self.allocated(device, event.addr, event.label, BlockEvent::of(event).size);
                }
            }
            Kind::FreeRequested => self.freed(event.addr),
            Kind::Mark => {
                let allocated = self.devices.iter().map(|d| d.blocks.total).collect();
                self.marks.push(Mark { event: *event, allocated });
            }
            _ => {}
        }
    }

    fn allocated(&mut self, device: usize, addr: u64, label: LabelId, bytes: u64) {
        self.freed(addr); // whose free is missing
        self.labelled |= label != NO_LABEL;
        self.blocks.insert(addr, (device, label, bytes));
        self.device(device).blocks.add(label, bytes, 1);
    }

    fn outside(&mut self, moves: &[Move]) {
        for one in moves.iter().filter(|m| m.kind.is_held() && m.kind != MemoryKind::Framework) {
            if let Some(device) = one.device.and_then(|d| usize::try_from(d).ok()) {
                self.labelled |= one.label != NO_LABEL;
                let sign = if one.came { 1 } else { -1 };
                self.device(device).outside.add(one.label, one.bytes, sign);
            }
        }
    }

    fn device(&mut self, ordinal: usize) -> &mut DeviceSums {
        if self.devices.len() <= ordinal {
            self.devices.resize_with(ordinal + 1, DeviceSums::default);
        }
        &mut self.devices[ordinal]
    }

    fn freed(&mut self, addr: u64) {
        if let Some((device, label, bytes)) = self.blocks.remove(&addr) {
            self.devices[device].blocks.add(label, bytes, -1);
        }
    }

    /// Adds `labels` and `marks` to a snapshot's `memtrace` key, where there are any.
    pub fn fill<W: Words>(&self, about: &mut Memtrace, namer: &mut Names<'_, W>) {
        if self.labelled {
            let devices = self.devices.iter().zip(0..).map(|(device, ordinal)| {
                let OutsideLabels { peak, at_peak, now, .. } = device.blocks.describe(namer);
                let (outside, kept) = (device.outside.describe(namer), Kept::NOTHING);
                DeviceLabels { peak, at_peak, now, device: ordinal, outside, kept }
            });
            let devices = devices.collect();
            let refused = namer.labels_refused();
            about.labels = Some(key::Labels { devices, refused, kept: Kept::NOTHING });
        }
        if !self.marks.is_empty() {
            about.marks = Some(self.marks.iter().map(|mark| mark.describe(namer)).collect());
        }
    }

    /// The points as PyTorch's `external_annotations`.
    pub fn annotations<W: Words>(&self, namer: &mut Names<'_, W>) -> Vec<Value> {
        let mut all = Vec::new();
        let mut step: Option<(String, i8)> = None;
        for mark in &self.marks {
            let event = &mark.event;
            let mut name = mark.name(namer).to_string();
            let mut say = |stage: &str, name: &str, device: i8| {
                let time_us = event.time_ns / 1000;
                all.push(
                    json!({ "stage": stage, "name": name, "device": device, "time_us": time_us }),
                );
            };
            let mark = MarkEvent::of(event);
            match mark.point() {
                Some(Point::Step) => {
                    if let Some((name, device)) = step.take() {
                        say("END", &name, device);
                    }
                    name = format!("{name} {}", mark.number);
                    say("START", &name, event.device);
                    step = Some((name, event.device));
                }
                Some(Point::Begin) => say("START", &name, event.device),
                Some(Point::End) => say("END", &name, event.device),
                _ => {
                    say("START", &name, event.device);
                    say("END", &name, event.device);
                }
            }
        }
        all
    }
}

impl Mark {
    fn name<W: Words>(&self, namer: &mut Names<'_, W>) -> Rc<str> {
        namer.label(MarkEvent::of(&self.event).label as LabelId).unwrap_or_else(|| Rc::from(""))
    }

    fn describe<W: Words>(&self, namer: &mut Names<'_, W>) -> key::Mark {
        let mark = MarkEvent::of(&self.event);
        let sort = match mark.point() {
            Some(Point::Step) => "step",
            Some(Point::Begin) => "begin",
            Some(Point::End) => "end",
            _ => "mark",
        };
        key::Mark {
            time_us: self.event.time_ns / 1000,
            sort: sort.to_owned(),
            name: self.name(namer).to_string(),
            number: mark.number,
            label: namer.label(self.event.label).as_deref().unwrap_or_default().to_owned(),
            thread: self.event.thread.into(),
            allocated: self.allocated.clone(),
            kept: Kept::NOTHING,
        }
    }
}

/// Sums by name, largest first; what has no label has the name "".
fn sums<W: Words>(
    all: impl Iterator<Item = (LabelId, Sum)>,
    namer: &mut Names<'_, W>,
) -> Vec<Labelled> {
    let mut by_name: BTreeMap<Rc<str>, Sum> = BTreeMap::new();
    for (label, (bytes, count)) in all.filter(|(_, sum)| *sum != (0, 0)) {
        let name = namer.label(label).unwrap_or_else(|| Rc::from(""));
        let sum = by_name.entry(name).or_default();
        *sum = (sum.0 + bytes, sum.1 + count);
    }
    let mut all: Vec<_> = by_name.into_iter().collect();
    all.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
    let row = |(name, (bytes, count)): (Rc<str>, Sum)| Labelled {
        label: name.to_string(),
        bytes,
        count,
        kept: Kept::NOTHING,
    };
    all.into_iter().map(row).collect()
}

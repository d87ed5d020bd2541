//! One device: its history is run forwards from its beginning, and its segments are added up.

use std::collections::{BTreeMap, HashMap};

use memtrace_format::snapshot::{
    Action, BlockState, NO_LINE, Segment, Snapshot, StackIx, TraceEntry,
};

use super::{
    Amount, By, CodeLine, DeviceSummary, DriverMemory, Fragmentation, Oom, Peak, Segments, SiteUse,
    capacity,
};
use crate::conf::Known;
use crate::ends;
use crate::history::{Beginning, Change, Forward, Live, driver_call, rewind};
use crate::sites::{self, Lines, Site};

/// PyTorch rounds every request up to a multiple of this, at least.
const ROUNDING: u64 = 512;

/// The site of each stack, worked out once.
pub(super) struct Sites<'a> {
    snapshot: &'a Snapshot,
    lines: Lines,
    by: By,
    known: HashMap<Option<StackIx>, SitePair>,
}

/// The user's line, and the one that was asked for beside it.
type SitePair = (Site, Option<Site>);

impl<'a> Sites<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, by: By) -> Self {
        Sites { snapshot, lines: Lines::new(snapshot), by, known: HashMap::new() }
    }

    fn of(&mut self, stack: Option<StackIx>) -> &SitePair {
        let Sites { snapshot, lines, by, known } = self;
        let tables = snapshot.tables();
        known.entry(stack).or_insert_with(|| match by {
            By::Line => (lines.site(tables, stack), None),
            By::ModuleLine => (lines.site(tables, stack), lines.module_line(tables, stack)),
        })
    }

    /// Adds up by site, the largest first. A block from before the history may have no stack.
    fn group(&mut self, blocks: impl Iterator<Item = (Live, bool)>) -> Vec<SiteUse> {
        let mut amounts: HashMap<SitePair, Amount> = HashMap::new();
        let mut all = 0_u64;
        for (live, old) in blocks {
            let place = match self.of(live.stack) {
                (Site::NoStack, _) if old => (Site::BeforeHistory, None),
                place => place.clone(),
            };
            amounts.entry(place).or_default().add(live.requested);
            all = all.saturating_add(live.requested);
        }
        let mut amounts: Vec<(SitePair, Amount)> = amounts.into_iter().collect();
        amounts.sort_by(|a, b| b.1.bytes.cmp(&a.1.bytes).then_with(|| a.0.cmp(&b.0)));
        amounts.into_iter().map(|(place, amount)| SiteUse::new(&place, amount, all)).collect()
    }
}

impl SiteUse {
    fn new((site, module): &SitePair, amount: Amount, all: u64) -> SiteUse {
        let Amount { count, bytes } = amount;
        let code = code_line(site);
        let (file, line) =
            (code.as_ref().map(|c| c.file.clone()), code.as_ref().and_then(|c| c.line));
        let function = code.map(|c| c.function);
        let module = module.as_ref().and_then(code_line);
        let share = if all == 0 { 0.0 } else { bytes as f64 / all as f64 };
        SiteUse { site: site.to_string(), file, line, function, module, count, bytes, share }
    }
}

fn code_line(site: &Site) -> Option<CodeLine> {
    let (file, line, function) = match site {
        Site::Line { filename, line, name } => (filename, sites::known(*line), name),
        // An offset, which may be 0.
        Site::Native { filename, line, name } => {
            (filename, Some(*line).filter(|line| *line != NO_LINE), name)
        }
        Site::NoStack | Site::BeforeHistory => return None,
    };
    Some(CodeLine { file: file.clone(), line, function: function.clone() })
}

/// Running totals of the framework's memory and of the device layer's.
#[derive(Clone, Copy, Default)]
struct Totals {
    allocated: u64,
    waiting: u64,
    reserved: u64,
    driver: u64,
}

impl Totals {
    fn at(beginning: &Beginning) -> Totals {
        let mut totals = Totals::default();
        for block in beginning.blocks.values() {
            up(totals.of(block), block.requested);
        }
        for segment in beginning.segments.values().filter(|s| !s.driver) {
            up(&mut totals.reserved, segment.size);
        }
        totals
    }

    /// The total that a block is counted in.
    fn of(&mut self, block: &Live) -> &mut u64 {
        match block {
            Live { driver: true, .. } => &mut self.driver,
            Live { pending: true, .. } => &mut self.waiting,
            _ => &mut self.allocated,
        }
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Allocated(block) => up(self.of(block), block.requested),
            Change::Freed(block) => down(self.of(block), block.requested),
            // The device layer frees at once; its two entries are one change.
            Change::Requested(block) if block.driver => {}
            Change::Requested(block) => {
                down(&mut self.allocated, block.requested);
                up(&mut self.waiting, block.requested);
            }
            Change::Reserved(range) if !range.driver => up(&mut self.reserved, range.size),
            Change::Returned(range) if !range.driver => down(&mut self.reserved, range.size),
            Change::Reserved(_) | Change::Returned(_) => {}
        }
    }

    fn active(&self) -> u64 {
        self.allocated.saturating_add(self.waiting)
    }
}

fn up(total: &mut u64, bytes: u64) {
    *total = total.saturating_add(bytes);
}

fn down(total: &mut u64, bytes: u64) {
    *total = total.saturating_sub(bytes);
}

impl Peak {
    fn reach(&mut self, bytes: u64, entry: usize, after_us: Option<i64>) -> bool {
        let higher = bytes > self.bytes;
        if higher {
            *self = Peak { bytes, entry: Some(entry), after_us };
        }
        higher
    }

    fn start(bytes: u64) -> Peak {
        Peak { bytes, entry: None, after_us: None }
    }
}

impl Oom {
    /// The failure that an entry of a device reports.
    fn new(
        known: &Known,
        (device, failed): (usize, &TraceEntry),
        totals: &Totals,
        (entry, after_us, site): (usize, Option<i64>, String),
    ) -> Oom {
        let call = driver_call(failed).map(str::to_owned);
        let outside = if call.is_some() { totals.driver } else { 0 };
        let limit = match call {
            Some(_) => None,
            None => known.limit(device as i64, (failed.size, failed.addr, failed.time_us)),
        };
        Oom {
            entry,
            after_us,
            asked: failed.size,
            device_free: failed.addr,
            allocated: totals.allocated.saturating_add(outside),
            reserved: totals.reserved.saturating_add(outside),
            limited: limit.is_some(),
            allowed: limit.and_then(|l| l.allowed),
            call,
            site,
        }
    }
}

/// The answers before the first entry of the history, of which nothing has been looked at.
fn at_the_beginning(snapshot: &Snapshot, number: usize, totals: &Totals) -> DeviceSummary {
    DeviceSummary {
        device: number,
        entries: 0,
        span_us: None,
        before_history: Amount::default(),
        allocated: Peak::start(totals.allocated),
        allocated_rounded: 0,
        rounded_is_exact: true,
        waiting_at_peak: totals.waiting,
        active: Peak::start(totals.active()),
        reserved: Peak::start(totals.reserved),
        at_peak: Vec::new(),
        now: Amount::default(),
        at_process_end: ends::process_end(snapshot, number as i64),
        at_end: Vec::new(),
        segments: Segments::default(),
        fragmentation: Fragmentation::default(),
        ooms: Vec::new(),
        allocs: 0,
        frees: 0,
        segment_allocs: 0,
        segment_frees: 0,
        driver: None,
        capacity: capacity(snapshot, number),
        contradictions: 0,
    }
}

/// Answers for one device.
pub(super) fn device(
    (snapshot, known): (&Snapshot, &Known),
    number: usize,
    sites: &mut Sites<'_>,
) -> DeviceSummary {
    let mut contradictions = 0;
    let beginning = rewind(snapshot, number, &mut |_, _| contradictions += 1);
    let trace = snapshot.device_traces.get(number).map_or(&[][..], Vec::as_slice);
    let start_us = trace.iter().find_map(|e| e.time_us);
    let after = |e: &TraceEntry| Some(e.time_us?.saturating_sub(start_us?));

    let mut totals = Totals::at(&beginning);
    let mut before_history = Amount::default();
    for block in beginning.blocks.values().filter(|b| !b.driver) {
        before_history.add(block.requested);
    }
    let mut out = DeviceSummary {
        entries: trace.len(),
        span_us: trace.iter().rev().find_map(after),
        before_history,
        contradictions,
        ..at_the_beginning(snapshot, number, &totals)
    };
    let mut driver = DriverMemory { peak: Peak::start(totals.driver), ..DriverMemory::default() };

    let mut forward = Forward::new(&beginning);
    for (i, entry) in trace.iter().enumerate() {
        if entry.action == Action::Oom {
            let at = (i, after(entry), sites.of(entry.frames).0.to_string());
            out.ooms.push(Oom::new(known, (number, entry), &totals, at));
        }
        let call = driver_call(entry);
        if let (Some(call), Action::Alloc) = (call, &entry.action) {
            driver.calls.entry(call.to_owned()).or_default().add(entry.size);
        }
        if call.is_none() {
            out.count(&entry.action);
        }
        if let Some(change) = forward.apply(i, entry) {
            totals.apply(&change);
            if out.allocated.reach(totals.allocated, i, after(entry)) {
                out.waiting_at_peak = totals.waiting;
            }
            out.active.reach(totals.active(), i, after(entry));
            out.reserved.reach(totals.reserved, i, after(entry));
            driver.peak.reach(totals.driver, i, after(entry));
        }
    }

    let held = |b: &&Live| !b.pending && !b.driver;
    for block in forward.blocks.values().filter(held) {
        out.now.add(block.requested);
    }
    for block in forward.blocks.values().filter(|b| b.driver) {
        driver.now.add(block.requested);
    }
    let is_old = |addr: &u64, block: &Live| beginning.blocks.get(addr) == Some(block);
    out.at_end = sites
        .group(forward.blocks.iter().filter(|(_, b)| held(b)).map(|(a, b)| (*b, is_old(a, b))));
    let peak = state_at(&beginning, trace, out.allocated.entry);
    for block in peak.values().filter(held) {
        let rounded = block.rounded.unwrap_or_else(|| round_up(block.requested));
        out.allocated_rounded = out.allocated_rounded.saturating_add(rounded);
        out.rounded_is_exact &= block.rounded.is_some();
    }
    out.at_peak =
        sites.group(peak.iter().filter(|(_, b)| held(b)).map(|(a, b)| (*b, is_old(a, b))));
    let peak = state_at(&beginning, trace, driver.peak.entry);
    let outside = peak.iter().filter(|(_, b)| b.driver);
    driver.at_peak = sites.group(outside.map(|(a, b)| (*b, is_old(a, b))));
    out.end(snapshot.segments.iter().filter(|s| {
        usize::try_from(s.device) == Ok(number) && !beginning.driver_segments.contains(&s.address)
    }));
    out.driver = Some(driver).filter(|d| d.peak.bytes > 0 || !d.calls.is_empty());
    out
}

/// What a block for a request is at least.
fn round_up(requested: u64) -> u64 {
    requested.checked_next_multiple_of(ROUNDING).unwrap_or(requested)
}

/// The live blocks right after an entry; before the first if `None`.
fn state_at(
    beginning: &Beginning,
    trace: &[TraceEntry],
    entry: Option<usize>,
) -> BTreeMap<u64, Live> {
    let mut forward = Forward::new(beginning);
    for (i, entry) in trace.iter().enumerate().take(entry.map_or(0, |e| e + 1)) {
        forward.apply(i, entry);
    }
    forward.blocks
}

impl DeviceSummary {
    /// Did a framework's allocator take or hand out anything here?
    pub fn has_framework(&self) -> bool {
        self.driver.is_none()
            || self.allocs + self.segment_allocs + self.segments.all.count > 0
            || self.before_history.count > 0
    }

    /// An entry of a framework's allocator.
    fn count(&mut self, action: &Action) {
        match action {
            Action::Alloc => self.allocs += 1,
            Action::FreeRequested => self.frees += 1,
            Action::SegmentAlloc | Action::SegmentMap => self.segment_allocs += 1,
            Action::SegmentFree | Action::SegmentUnmap => self.segment_frees += 1,
            _ => {}
        }
    }

    /// The state of the segments at the end.
    fn end<'a>(&mut self, segments: impl Iterator<Item = &'a Segment>) {
        let f = &mut self.fragmentation;
        for segment in segments {
            let s = &mut self.segments;
            s.all.add(segment.total_size);
            (if segment.small { &mut s.small } else { &mut s.large }).add(segment.total_size);
            if segment.is_expandable {
                s.expandable.add(segment.total_size);
            }
            let mut free = 0_u64;
            let mut used = false;
            for block in &segment.blocks {
                if block.state == BlockState::Inactive {
                    free = free.saturating_add(block.size);
                    f.largest_free = f.largest_free.max(block.size);
                } else {
                    used = true;
                    let lost = block.size.saturating_sub(block.requested_size);
                    f.rounding = f.rounding.saturating_add(lost);
                }
            }
            let kind = if used { &mut f.in_used_segments } else { &mut f.in_free_segments };
            *kind = kind.saturating_add(free);
            let not_allocated = segment.total_size.saturating_sub(segment.allocated_size);
            f.reserved_not_allocated = f.reserved_not_allocated.saturating_add(not_allocated);
        }
        if self.segments.all.bytes > 0 {
            f.share = f.in_used_segments as f64 / self.segments.all.bytes as f64;
        }
    }
}

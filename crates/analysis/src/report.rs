//! Who has the rest: memory by owner, and whether it adds up to what each device says.
//!
//! The sums and the table were worked out when the snapshot was written, and are in its `memtrace`
//! key. Here they are put beside what the segments show, with a note on what a reader should look
//! at. A snapshot of PyTorch's own has no such key, and so no owner but PyTorch.

mod pinned;

use std::collections::{BTreeMap, BTreeSet};

use memtrace_format::key;
use memtrace_format::snapshot::{Action, BlockState, Frame, Snapshot, StackIx};
use serde::Serialize;

use crate::conf::Known;
use crate::ends::{self, ProcessEnd};
use crate::oom;
use crate::sites::Lines;
use crate::summary::{self, By, Estimate, Fragmentation, SiteUse, Summary};

pub use pinned::{Pinned, PinnedAt, RoundedUp};

/// Unexplained memory that is worth a warning, as a share of what is in use.
const UNEXPLAINED: f64 = 0.02;
/// Reserved and not allocated, as a share of what is reserved, that is worth a warning.
const UNUSED: f64 = 0.25;

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Set if the numbers come from a virtual GPU.
    pub estimate: Option<Estimate>,
    /// What memtrace wrote about the run; `None` for a file of PyTorch's own.
    pub recorded_by: Option<Box<key::Memtrace>>,
    /// Devices that the process was on.
    pub devices: Vec<DeviceReport>,
    /// Page-locked host memory by owner.
    pub host: Vec<Owner>,
    /// Of NCCL's page-locked host memory: by communicator.
    pub host_communicators: Vec<Owner>,
    /// Of PyTorch's page-locked host memory: what was asked for. `None` where that is not known.
    pub pinned: Option<Pinned>,
    /// Frees that waited for other streams, as the `memtrace` key has them.
    pub deferred_frees: Option<key::DeferredFrees>,
    /// What to look at.
    pub warnings: Vec<String>,
    /// What only the process itself could have said, and what a virtual GPU did not know.
    pub unknown: Vec<String>,
}

/// Memory of one owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Owner {
    /// Who.
    pub owner: String,
    /// Bytes.
    pub bytes: u64,
    /// Allocations (segments, for PyTorch).
    pub count: u64,
}

/// Memory of PyTorch's in which one of its libraries works.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Workspace {
    /// Which.
    pub library: String,
    /// On which stream.
    pub stream: u64,
    /// Bytes at the end.
    pub bytes: u64,
    /// Blocks at the end.
    pub count: u64,
    /// Bytes at most, as far as the history goes.
    pub peak: u64,
}

/// Memory that was taken under one label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Labelled {
    /// What the thread said it was doing, outermost first; empty for what has no label.
    pub label: String,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub count: u64,
}

/// Managed memory (`cudaMallocManaged`), which is on the host or on a
/// device, wherever it was touched last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Managed {
    /// Bytes at the end.
    pub held: u64,
    /// By owner, at the end.
    pub owners: Vec<Owner>,
    /// The most there was.
    pub peak_held: u64,
    /// By owner, at that moment.
    pub owners_at_peak: Vec<Owner>,
}

/// A line of the table that adds up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What it is.
    pub name: String,
    /// Bytes.
    pub bytes: i64,
    /// How that is known.
    pub known: String,
}

/// What a device said is in use, and of what it is made up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reconcile {
    /// Who said it.
    pub source: String,
    /// When.
    pub time_us: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that the device has.
    pub total: u64,
    /// Of what: adds up to `used`.
    pub lines: Vec<Line>,
    /// The last line once more.
    pub unexplained: i64,
}

/// One device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Ordinal; −1 is one that no call has named.
    pub device: i64,
    /// PyTorch's peak of allocated bytes.
    pub peak_allocated: u64,
    /// What the process held at most, by whatever call.
    pub peak_held: u64,
    /// By owner, at that moment.
    pub owners_at_peak: Vec<Owner>,
    /// What it holds at the end; of a Python program, when Python began to end.
    pub held: u64,
    /// What was left at the end of the process, if that is another moment.
    pub at_process_end: Option<ProcessEnd>,
    /// By owner, at the end.
    pub owners: Vec<Owner>,
    /// Of NCCL's: by communicator.
    pub communicators: Vec<Owner>,
    /// Managed memory that was taken for the device; part of neither `held` nor `peak_held`.
    pub managed: Option<Managed>,
    /// Of PyTorch's: what its libraries have to work in, by the function that took it.
    pub workspaces: Vec<Workspace>,
    /// Unused memory of PyTorch's at the end.
    pub fragmentation: Option<Fragmentation>,
    /// The largest live sites.
    pub sites: Vec<SiteUse>,
    /// By label, at PyTorch's peak; adds up to it.
    pub labels_at_peak: Vec<Labelled>,
    /// By label, what was taken past a framework's allocator, when that was most.
    pub outside_labels_at_peak: Vec<Labelled>,
    /// Of that, what is held at the end.
    pub outside_labels: Vec<Labelled>,
    /// The table, if the device was asked.
    pub reconcile: Option<Reconcile>,
}

/// Answers for every device of a snapshot.
pub fn report(snapshot: &Snapshot) -> Report {
    report_by(snapshot, By::Line)
}

/// The same, by other lines of code.
pub fn report_by(snapshot: &Snapshot, by: By) -> Report {
    let Summary { estimate, recorded_by, devices, .. } = summary::summary_by(snapshot, by);
    let about = snapshot.memtrace.as_deref();
    let mut unknown = summary::unknown(snapshot);
    unknown.extend(estimate.iter().flat_map(summary::workspaces));
    let sums = about.and_then(|about| about.owners.as_ref());
    let tables = about.and_then(|about| about.reconcile.as_deref()).unwrap_or_default();
    let labels = about.and_then(|about| about.labels.as_ref());
    let mut all: BTreeSet<i64> = devices.iter().map(|d| d.device as i64).collect();
    all.extend(sums.iter().flat_map(|sums| &sums.devices).map(|d| d.device));
    all.extend(tables.iter().map(|d| d.device));
    all.extend(
        about.and_then(|about| about.entered.as_ref()).iter().flat_map(|e| *e).map(|e| e.device),
    );
    let devices: Vec<DeviceReport> = all
        .into_iter()
        .map(|ordinal| {
            let seen = devices.iter().find(|d| d.device as i64 == ordinal);
            let sums = sums.and_then(|sums| sums.devices.iter().find(|d| d.device == ordinal));
            let labels = labels.and_then(|l| l.devices.iter().find(|d| d.device == ordinal));
            let outside = labels.map(|labels| &labels.outside);
            let reserved = seen.map_or(0, |d| d.segments.all.bytes);
            let pytorch = Owner {
                owner: "PyTorch".to_owned(),
                bytes: reserved,
                count: seen.map_or(0, |d| d.segments.all.count),
            };
            let peak = sums.and_then(|sums| sums.peak.as_ref());
            DeviceReport {
                device: ordinal,
                peak_allocated: seen.map_or(0, |d| d.allocated.bytes),
                peak_held: peak
                    .and_then(|peak| peak.held)
                    .or(seen.map(|d| d.reserved.bytes))
                    .unwrap_or(0),
                owners_at_peak: peak.map_or_else(Vec::new, |peak| owners(peak.by.iter().flatten())),
                held: sums.and_then(|sums| sums.held).unwrap_or(reserved),
                at_process_end: ends::process_end(snapshot, ordinal),
                owners: match sums {
                    Some(sums) => owners(&sums.by),
                    None if reserved == 0 => Vec::new(),
                    None => vec![pytorch],
                },
                communicators: sums.map_or_else(Vec::new, |s| communicators(&s.communicators)),
                managed: sums.and_then(|sums| sums.managed.as_ref()).map(managed),
                workspaces: workspaces(snapshot, ordinal),
                fragmentation: seen.map(|d| d.fragmentation),
                sites: seen.map_or_else(Vec::new, |d| d.at_end.clone()),
                labels_at_peak: labels.map_or_else(Vec::new, |labels| labelled(&labels.at_peak)),
                outside_labels_at_peak: outside.map_or_else(Vec::new, |o| labelled(&o.at_peak)),
                outside_labels: outside.map_or_else(Vec::new, |o| labelled(&o.now)),
                reconcile: tables.iter().find(|d| d.device == ordinal).map(reconcile),
            }
        })
        .collect();
    let lines = Lines::new(snapshot);
    let pinned = pinned::pinned(snapshot, &lines);
    let mut warnings = warnings(snapshot, &devices, &lines);
    warnings.extend(pinned.as_ref().and_then(|p| pinned::warning(p, snapshot)));
    let host = sums.map(|sums| &sums.host);
    Report {
        estimate,
        recorded_by,
        host: host.map_or_else(Vec::new, |host| owners(&host.by)),
        host_communicators: host.map_or_else(Vec::new, |host| communicators(&host.communicators)),
        pinned,
        deferred_frees: about.and_then(|about| about.deferred_frees.clone()),
        devices,
        warnings,
        unknown,
    }
}

fn labelled(rows: &[key::Labelled]) -> Vec<Labelled> {
    let row = |row: &key::Labelled| {
        Some(Labelled {
            label: row.label.clone(),
            bytes: row.bytes.try_into().ok()?,
            count: row.count.try_into().ok()?,
        })
    };
    rows.iter().filter_map(row).collect()
}

/// The same memory by labels in which separate numbers are `*`: `layers.7/attention` is
/// `layers.*/attention`, unless it is the only one.
pub fn rolled_up(rows: &[Labelled]) -> Vec<Labelled> {
    let mut sums: BTreeMap<String, (usize, Labelled)> = BTreeMap::new();
    for row in rows {
        let (n, sum) = sums
            .entry(without_numbers(&row.label))
            .or_insert_with(|| (0, Labelled { label: row.label.clone(), bytes: 0, count: 0 }));
        *n += 1;
        sum.bytes = sum.bytes.saturating_add(row.bytes);
        sum.count = sum.count.saturating_add(row.count);
    }
    let named = |(label, (n, sum)): (String, (usize, Labelled))| Labelled {
        label: if n > 1 { label } else { sum.label.clone() },
        ..sum
    };
    let mut all: Vec<Labelled> = sums.into_iter().map(named).collect();
    all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.label.cmp(&b.label)));
    all
}

fn without_numbers(label: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric();
    let mut out = String::new();
    for part in label.split_inclusive(|c| !is_word(c)) {
        let word = part.trim_end_matches(|c| !is_word(c));
        let is_number = !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        out.push_str(if is_number { "*" } else { word });
        out.push_str(&part[word.len()..]);
    }
    out
}

fn owners<'a>(by: impl IntoIterator<Item = &'a key::Owner>) -> Vec<Owner> {
    let one = |o: &key::Owner| Owner { owner: o.owner.clone(), bytes: o.bytes, count: o.count };
    by.into_iter().map(one).collect()
}

fn managed(sums: &key::ManagedOwners) -> Managed {
    Managed {
        held: sums.held,
        owners: owners(&sums.by),
        peak_held: sums.peak.held.unwrap_or_default(),
        owners_at_peak: owners(sums.peak.by.iter().flatten()),
    }
}

/// NCCL's memory by communicator.
fn communicators(by: &[key::Communicator]) -> Vec<Owner> {
    let name = |c: &key::Communicator| match (c.communicator, c.ranks) {
        (0, _) => "NCCL, communicator unknown".to_owned(),
        (n, None) => format!("NCCL, communicator {n}"),
        (n, Some(ranks)) => {
            format!("NCCL, communicator {n}: rank {} of {ranks}", c.rank.unwrap_or(0))
        }
    };
    let one = |c: &key::Communicator| Owner { owner: name(c), bytes: c.bytes, count: c.count };
    by.iter().map(one).collect()
}

fn reconcile(table: &key::Reconciled) -> Reconcile {
    let line = |l: &key::ReconciledLine| Line {
        name: l.name.clone(),
        bytes: l.bytes,
        known: l.known.clone(),
    };
    Reconcile {
        source: table.source.clone(),
        time_us: table.time_us,
        used: table.used,
        total: table.total,
        lines: table.lines.iter().map(line).collect(),
        unexplained: table.unexplained,
    }
}

/// What PyTorch took for a library to work in. It stays when the tensors are gone, or comes and
/// goes with each call, and is no leak.
fn workspaces(snapshot: &Snapshot, device: i64) -> Vec<Workspace> {
    let library = |frames: Option<StackIx>| {
        let stack = frames.and_then(|s| snapshot.stacks.get(s as usize));
        let mut frames =
            stack.into_iter().flatten().filter_map(|f| snapshot.frames.get(*f as usize));
        frames.find_map(workspace_of)
    };
    let mut found: BTreeMap<(&str, u64), Workspace> = BTreeMap::new();
    let of = |library: &'static str, stream| Workspace {
        library: library.to_owned(),
        stream,
        ..Workspace::default()
    };
    for segment in snapshot.segments.iter().filter(|s| s.device == device) {
        for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
            let Some(library) = library(block.frames) else { continue };
            let key = (library, segment.stream);
            let sum = found.entry(key).or_insert_with(|| of(library, segment.stream));
            (sum.bytes, sum.count) = (sum.bytes.saturating_add(block.size), sum.count + 1);
        }
    }
    // What the history shows: how much of it came and went at a time, on
    // top of what was there before.
    let mut there: BTreeMap<u64, ((&str, u64), u64)> = BTreeMap::new();
    let mut sums: BTreeMap<(&str, u64), (u64, u64)> = BTreeMap::new();
    let trace = usize::try_from(device).ok().and_then(|d| snapshot.device_traces.get(d));
    for entry in trace.into_iter().flatten() {
        if entry.action == Action::FreeCompleted
            && let Some((key, bytes)) = there.remove(&entry.addr)
        {
            let (now, _) = sums.entry(key).or_default();
            *now = now.saturating_sub(bytes);
        } else if entry.action == Action::Alloc
            && let Some(library) = library(entry.frames)
        {
            let key = (library, entry.stream);
            found.entry(key).or_insert_with(|| of(library, entry.stream));
            there.insert(entry.addr, (key, entry.size));
            let (now, most) = sums.entry(key).or_default();
            *now = now.saturating_add(entry.size);
            *most = (*most).max(*now);
        }
    }
    for (key, workspace) in &mut found {
        let (now, most) = sums.get(key).copied().unwrap_or_default();
        let before = workspace.bytes.saturating_sub(now);
        workspace.peak = before.saturating_add(most).max(workspace.bytes);
    }
    found.into_values().collect()
}

/// PyTorch's functions that get a library's workspace.
fn workspace_of(frame: &Frame) -> Option<&'static str> {
    const FUNCTIONS: [(&str, &str); 5] = [
        ("allocateCUDABlasWorkspace", "cuBLAS workspace"),
        ("getCurrentCUDABlasHandle", "cuBLAS workspace"),
        ("getCUDABlasLtWorkspace", "cuBLASLt workspace"),
        ("cublasCommonArgs", "cuBLAS workspace"),
        ("getNewWorkspace", "cuBLAS workspace"),
    ];
    FUNCTIONS.iter().find(|(part, _)| frame.name.contains(part)).map(|(_, library)| *library)
}

/// A warning of the `memtrace` key in one line, with the line of code that it is about.
pub fn warning_line(warning: &key::Warning, lines: &Lines) -> String {
    format!("{}, {}", warning.text, lines.of_code_lines(&warning.frames))
}

fn warnings(snapshot: &Snapshot, devices: &[DeviceReport], lines: &Lines) -> Vec<String> {
    let known = Known::of(snapshot);
    let line = known.expandable_line();
    let mut all = Vec::new();
    let warned = snapshot.memtrace.iter().flat_map(|about| about.warnings());
    all.extend(warned.map(|w| warning_line(w, lines)));
    for d in devices {
        match &d.reconcile {
            Some(r) if r.unexplained.unsigned_abs() as f64 > UNEXPLAINED * r.used as f64 => all.push(format!(
                "device {}: {} bytes are unexplained: a library that allocates past all known calls, kernels that were \
                 loaded at their first launch, or a memory pool that keeps more than is in use",
                d.device, r.unexplained
            )),
            None if d.device >= 0 && d.held > 0 => all.push(format!(
                "device {} was never asked how full it is (no NVML, and the program did not ask): owners are known, the rest is not",
                d.device
            )),
            _ => {}
        }
        let reserved = d.owners.iter().find(|o| o.owner == "PyTorch").map_or(0, |o| o.bytes);
        if let Some(f) = d.fragmentation
            && reserved > 0
            && f.in_used_segments as f64 > UNUSED * reserved as f64
        {
            let what = match &line {
                Some(line) => format!("{line} may make use of them"),
                None => "memtrace tune says whether other settings make use of them".to_owned(),
            };
            all.push(format!(
                "device {}: {} bytes are free between live blocks, the largest run {} bytes; {what}",
                d.device, f.in_used_segments, f.largest_free
            ));
        }
    }
    if let Some(failed) = snapshot.memtrace.as_ref().and_then(|about| about.out_of_memory.as_ref())
    {
        let limit = oom::limit(snapshot, &known).zip(failed.free);
        let why =
            limit.map(|(l, free)| format!("; {}", l.sentence(free, |b| format!("{b} bytes"))));
        all.push(format!(
            "out of memory: {} bytes asked, {}{}",
            failed.asked.unwrap_or(0),
            lines.of_code_lines(&failed.frames),
            why.unwrap_or_default()
        ));
    }
    all
}

//! What happened to the memory of each device, in numbers.
//!
//! Bytes are what the program asked for, unless a name says otherwise: that is what a trace holds.
//! The allocator's own count, of rounded blocks, is somewhat larger. It is known for blocks that
//! are alive at the end. For the others it is at least the next multiple of 512. *Allocated* ends
//! when a free is requested, *active* when it is completed, as PyTorch counts.
//!
//! Memory that the device layer shows is added up apart, because no framework's allocator asked for
//! it. It is in no pool, and PyTorch's own numbers don't include it.

mod device;

use std::collections::BTreeMap;

use memtrace_format::key::{self, Memtrace, VirtualGpu};
use memtrace_format::snapshot::{Action, BlockState, Snapshot, TraceEntry};
use serde::Serialize;

use crate::conf::Known;
use crate::ends::ProcessEnd;
use crate::oom::size;
use device::Sites;

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Set if the numbers come from a virtual GPU: they are an estimate.
    pub estimate: Option<Estimate>,
    /// What memtrace wrote about the run; `None` for a file of PyTorch's own.
    pub recorded_by: Option<Box<Memtrace>>,
    /// Devices that have segments or a history.
    pub devices: Vec<DeviceSummary>,
    /// Page-locked host memory, if any was recorded.
    pub host: Option<Host>,
    /// What a reader must know to trust the numbers.
    pub notes: Vec<String>,
}

/// Which virtual GPU stood in for a real one.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    /// The profile, as the user named it: `h100`.
    pub profile: String,
    /// The name that the program saw.
    pub name: Option<String>,
    /// Streams finished as late as they may.
    pub lazy: bool,
    /// Times the program read back a value that nothing had computed, and got zeros.
    pub zero_reads: u64,
    /// What is known of cuDNN's workspaces; `None` in a file of an older version,
    /// or where nothing was asked of cuDNN.
    pub cudnn: Option<Cudnn>,
}

/// What a virtual GPU knew of the workspaces of cuDNN's plans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cudnn {
    /// Different convolutions of which nothing is known: their workspace was taken as 0.
    pub unknown: u64,
    /// Plans of other graphs, whose workspace was taken as 0, too.
    pub other: u64,
    /// Different convolutions whose workspace a table of measurements has.
    pub measured: u64,
    /// Different convolutions whose workspace a model has worked out.
    pub modelled: u64,
    /// Bytes of the modelled ones, one of each.
    pub modelled_bytes: u64,
    /// Bytes of the largest of them: so much may be in use at a time.
    pub modelled_largest: u64,
}

/// A number of things and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Amount {
    /// How many.
    pub count: u64,
    /// How large together.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// A high-water mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// Bytes.
    pub bytes: u64,
    /// The entry that reached it; `None` if it was there before the first.
    pub entry: Option<usize>,
    /// Microseconds since the first entry, where the file has times.
    pub after_us: Option<i64>,
}

/// By which lines of code memory is added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// The user's.
    #[default]
    Line,
    /// The user's, and with it the innermost line outside PyTorch, which may be a library's.
    ModuleLine,
}

/// A line of code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CodeLine {
    /// Source file.
    pub file: String,
    /// Line number, if Python knows it.
    pub line: Option<u64>,
    /// Function.
    pub function: String,
}

/// Memory by the line of code that took it.
#[derive(Clone, Debug, Serialize)]
pub struct SiteUse {
    /// In one line.
    pub site: String,
    /// Source file.
    pub file: Option<String>,
    /// Line number, if it is known.
    pub line: Option<u64>,
    /// Function.
    pub function: Option<String>,
    /// The innermost line outside PyTorch, if it was asked for and there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<CodeLine>,
    /// Blocks.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
    /// Of all bytes, 0 to 1.
    pub share: f64,
}

/// An allocation that failed.
#[derive(Clone, Debug, Serialize)]
pub struct Oom {
    /// Index of the entry.
    pub entry: usize,
    /// Microseconds since the first entry.
    pub after_us: Option<i64>,
    /// Bytes that were asked for (rounded).
    pub asked: u64,
    /// Bytes that the device had free.
    pub device_free: u64,
    /// Bytes allocated at that time: by PyTorch, and, if the driver was
    /// asked past it, of the whole process.
    pub allocated: u64,
    /// Bytes reserved at that time, likewise.
    pub reserved: u64,
    /// A limit of PyTorch's own refused, not the card. What it allows may be known.
    pub limited: bool,
    /// See `limited`.
    pub allowed: Option<u64>,
    /// The API function that failed, if it wasn't PyTorch's allocator.
    pub call: Option<String>,
    /// Who asked.
    pub site: String,
}

/// Segments at the end.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Segments {
    /// All of them; the bytes are what is reserved.
    pub all: Amount,
    /// For requests of at most 1 MiB.
    pub small: Amount,
    /// For the others.
    pub large: Amount,
    /// Mapped ranges of expandable segments, among the above.
    pub expandable: Amount,
}

/// What is reserved and not used, at the end.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Fragmentation {
    /// Reserved less allocated (rounded): cached, waiting to be freed, or unusable.
    pub reserved_not_allocated: u64,
    /// In segments without a live block: `empty_cache()` would give it back.
    pub in_free_segments: u64,
    /// In free blocks of segments that a live block holds: only a request that fits can use it.
    pub in_used_segments: u64,
    /// `in_used_segments` of all that is reserved, 0 to 1.
    pub share: f64,
    /// Lost to rounding inside live blocks.
    pub rounding: u64,
    /// The largest free block: no larger request can be served without a new segment.
    pub largest_free: u64,
}

/// Memory taken by calls that no framework's allocator made.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DriverMemory {
    /// Alive at the end.
    pub now: Amount,
    /// The most at any time.
    pub peak: Peak,
    /// Who held it then, the largest first.
    pub at_peak: Vec<SiteUse>,
    /// By API function: what was allocated in all.
    pub calls: BTreeMap<String, Amount>,
}

/// One GPU.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceSummary {
    /// Ordinal.
    pub device: usize,
    /// Entries in its history.
    pub entries: usize,
    /// Microseconds from the first to the last.
    pub span_us: Option<i64>,
    /// Blocks older than the first entry; they are counted into every total.
    pub before_history: Amount,
    /// Most bytes allocated.
    pub allocated: Peak,
    /// The same moment in rounded blocks, as
    /// `torch.cuda.max_memory_allocated()` counts: at least this.
    pub allocated_rounded: u64,
    /// `allocated_rounded` is exact: the size of every block is known.
    pub rounded_is_exact: bool,
    /// Waiting to be freed at that moment.
    pub waiting_at_peak: u64,
    /// Most bytes active: allocated, or waiting to be freed.
    pub active: Peak,
    /// Most bytes reserved.
    pub reserved: Peak,
    /// Who held the memory at the peak of `allocated`, the largest first.
    pub at_peak: Vec<SiteUse>,
    /// Allocated at the end; of a Python program, when Python began to end.
    pub now: Amount,
    /// What was left at the end of the process, if that is another moment.
    pub at_process_end: Option<ProcessEnd>,
    /// Who holds it, the largest first.
    pub at_end: Vec<SiteUse>,
    /// Segments at the end.
    pub segments: Segments,
    /// Unused memory at the end.
    pub fragmentation: Fragmentation,
    /// Allocations that failed.
    pub ooms: Vec<Oom>,
    /// Blocks handed out.
    pub allocs: u64,
    /// Blocks given back.
    pub frees: u64,
    /// Segments (or mappings) got from the driver and given back.
    pub segment_allocs: u64,
    /// See `segment_allocs`.
    pub segment_frees: u64,
    /// The device layer, if it shows anything that is no framework's.
    pub driver: Option<DriverMemory>,
    /// What the device has, if the file says so (virtual GPUs do).
    pub capacity: Option<Capacity>,
    /// Entries that contradict the segments or each other; the totals then
    /// are what can be made of them.
    pub contradictions: usize,
}

/// Memory of a device as a whole.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Capacity {
    /// Bytes.
    pub total: u64,
    /// Taken by the CUDA context itself.
    pub context: u64,
}

/// Page-locked host memory at the end.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Host {
    /// Taken from the system.
    pub reserved: Amount,
    /// In use by the program.
    pub allocated: Amount,
}

/// Answers for every device of a snapshot.
pub fn summary(snapshot: &Snapshot) -> Summary {
    summary_by(snapshot, By::Line)
}

/// The same, by other lines of code.
pub fn summary_by(snapshot: &Snapshot, by: By) -> Summary {
    let used = snapshot.segments.iter().filter_map(|s| usize::try_from(s.device).ok());
    // A call of `_snapshot()` leaves an entry on every device, used or not.
    let says_something = |t: &[TraceEntry]| t.iter().any(|e| e.action != Action::Snapshot);
    let all = snapshot.device_traces.iter().enumerate();
    let traced = all.filter(|(_, t)| says_something(t)).map(|(d, _)| d);
    let mut numbers: Vec<usize> = used.chain(traced).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let (known, mut sites) = (Known::of(snapshot), Sites::new(snapshot, by));
    let devices: Vec<DeviceSummary> =
        numbers.into_iter().map(|d| device::device((snapshot, &known), d, &mut sites)).collect();
    Summary {
        estimate: estimate(snapshot),
        recorded_by: snapshot.memtrace.clone(),
        host: host(snapshot),
        notes: notes(snapshot, &devices),
        devices,
    }
}

fn virtual_gpu(snapshot: &Snapshot) -> Option<&VirtualGpu> {
    snapshot.memtrace.as_ref()?.virtual_gpu.as_ref()
}

fn estimate(snapshot: &Snapshot) -> Option<Estimate> {
    let gpu = virtual_gpu(snapshot)?;
    let profile = gpu.spec.clone().or_else(|| gpu.profile.clone());
    Some(Estimate {
        profile: profile.unwrap_or_else(|| "unknown".to_owned()),
        name: gpu.name.clone(),
        lazy: gpu.lazy.unwrap_or(false),
        zero_reads: gpu.zero_reads.unwrap_or(0),
        cudnn: gpu.cudnn.as_ref().map(cudnn).filter(|counts| *counts != Cudnn::default()),
    })
}

fn cudnn(counts: &key::Cudnn) -> Cudnn {
    Cudnn {
        unknown: counts.unknown,
        other: counts.other,
        measured: counts.measured,
        modelled: counts.modelled,
        modelled_bytes: counts.modelled_bytes,
        modelled_largest: counts.modelled_largest,
    }
}

/// What a reader must know of cuDNN's workspaces to trust the peaks.
pub(crate) fn workspaces(estimate: &Estimate) -> Vec<String> {
    let Some(counts) = estimate.cudnn else { return Vec::new() };
    let counted = |n: u64, one: &str| format!("{n} {one}{}", if n == 1 { "" } else { "s" });
    let mut missing = Vec::new();
    if counts.unknown > 0 {
        missing.push(counted(counts.unknown, "convolution"));
    }
    if counts.other > 0 {
        missing.push(counted(counts.other, "other cuDNN graph"));
    }
    let mut said = Vec::new();
    if !missing.is_empty() {
        said.push(format!(
            "lower bound: {} without workspace, because what cuDNN would need is not known",
            missing.join(" and ")
        ));
    }
    if counts.modelled > 0 {
        said.push(format!(
            "the workspaces of {} are estimates of a model: the largest {}, one of each together {}",
            counted(counts.modelled, "convolution"),
            size(counts.modelled_largest),
            size(counts.modelled_bytes)
        ));
    }
    said
}

fn capacity(snapshot: &Snapshot, device: usize) -> Option<Capacity> {
    let mut devices = virtual_gpu(snapshot)?.devices.iter();
    let device_key = devices.find(|d| usize::try_from(d.device) == Ok(device))?;
    Some(Capacity { total: device_key.total?, context: device_key.context.unwrap_or(0) })
}

fn host(snapshot: &Snapshot) -> Option<Host> {
    if snapshot.host_segments.is_empty() {
        return None;
    }
    let mut host = Host::default();
    for segment in &snapshot.host_segments {
        host.reserved.add(segment.total_size);
        for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
            host.allocated.add(block.size);
        }
    }
    Some(host)
}

/// What only the process itself could have said, if somebody else wrote the
/// snapshot: it was killed, or was not asked.
pub(crate) fn unknown(snapshot: &Snapshot) -> Vec<String> {
    let mut unknown = Vec::new();
    let bound = snapshot.memtrace.as_ref().and_then(|about| about.bound_elsewhere.as_ref());
    if bound.is_some_and(|bound| bound.0.is_none()) {
        unknown.push(
            "whether calls went past memtrace is not known: its process didn't write this snapshot itself".to_owned(),
        );
    }
    if virtual_gpu(snapshot).is_some_and(|gpu| gpu.zero_reads.is_none()) {
        unknown.push(
            "how many values the program read back that nothing had computed is not known, for the same reason: sizes \
             that depend on them are lower bounds"
                .to_owned(),
        );
        unknown.push(
            "which workspaces of cuDNN's are missing is not known, for the same reason: if any are, peaks are lower \
             bounds"
                .to_owned(),
        );
    }
    unknown
}

fn notes(snapshot: &Snapshot, devices: &[DeviceSummary]) -> Vec<String> {
    let mut notes = unknown(snapshot);
    let counters = snapshot.memtrace.as_ref().and_then(|about| about.counters.clone());
    let counters = counters.unwrap_or_default();
    if let Some(virtual_gpu) = estimate(snapshot).filter(|v| v.zero_reads > 0) {
        notes.push(format!(
            "the program read back {} values that nothing had computed: sizes that depend on them are lower bounds",
            virtual_gpu.zero_reads
        ));
    }
    notes.extend(estimate(snapshot).iter().flat_map(workspaces));
    if counters.events_retired > 0 {
        notes.push(format!(
            "the history keeps the last {} of {} events (MEMTRACE_EVENTS sets how many)",
            counters.events_kept, counters.events
        ));
    }
    for (n, what) in [
        (counters.unpublished, "events were being written and could not be read"),
        (counters.anomalies, "events did not fit what was known of the memory; totals may be off"),
        (
            counters.live_refused,
            "allocations found no room in the record and are missing from it; totals are too low",
        ),
        (
            counters.live_outside,
            "live allocations were kept outside the black box, which had no more room, and are missing here",
        ),
        (
            counters.interrupted,
            "calls about memory came from a signal handler that had interrupted the recorder, and are not recorded",
        ),
    ] {
        if n > 0 {
            notes.push(format!("{n} {what}"));
        }
    }
    for device in devices {
        if device.contradictions > 0 {
            notes.push(format!(
                "{} entries of device {} contradict the segments; `memtrace check` names them",
                device.contradictions, device.device
            ));
        }
        if device.entries == 0 {
            notes.push(format!(
                "device {} has no history: its peaks are what is there at the end",
                device.device
            ));
        }
    }
    notes
}

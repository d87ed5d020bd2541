//! The settings that were in force when a program ran, and which limit refused a request.
//!
//! PyTorch writes the value of each setting into its snapshots. memtrace knows the variable that the user set, by either of its
//! names, and sees what the allocator does: an expandable segment shows that they are on, also where the program itself
//! has set that under way. Advice to set what is set already helps nobody.

use memtrace_caching::Settings;
use memtrace_caching::settings::Backend;
use memtrace_format::snapshot::{Action, Snapshot, Value};

const MIB: u64 = 1 << 20;
/// PyTorch's variable, by its names in the order in which it asks for them.
const NAMES: [&str; 3] =
    ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"];

/// The configuration under which a snapshot was recorded, as far as it says so or shows it.
pub fn own_conf(snapshot: &Snapshot) -> String {
    let told = &snapshot.allocator_settings;
    let known = |key: &str| told[key].as_str().filter(|conf| !conf.is_empty());
    let said = NAMES.iter().find_map(|name| known(name));
    let said = said.or_else(|| snapshot.memtrace["allocator_conf"].as_str()).unwrap_or_default();
    let mut parts = vec![said.to_owned()];
    let Ok(parsed) = Settings::parse(said) else { return said.to_owned() };
    if !parsed.settings.expandable_segments && has_expandable(snapshot) {
        parts.push("expandable_segments:True".to_owned());
    }
    if parsed.settings.max_split_size == u64::MAX
        && let Some(bytes) = told["max_split_size"].as_u64().filter(|b| *b >= MIB)
    {
        parts.push(format!("max_split_size_mb:{}", bytes / MIB));
    }
    if parsed.settings.garbage_collection_threshold == 0.0
        && let Some(threshold) = told["garbage_collection_threshold"].as_f64().filter(|t| *t > 0.0)
    {
        parts.push(format!("garbage_collection_threshold:{threshold}"));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(",")
}

/// Are segments expandable? Told, or seen.
fn has_expandable(snapshot: &Snapshot) -> bool {
    let entries = || snapshot.device_traces.iter().flatten();
    snapshot.allocator_settings["expandable_segments"] == Value::Bool(true)
        || snapshot.segments.iter().any(|s| s.is_expandable)
        || entries().any(|e| matches!(e.action, Action::SegmentMap))
}

/// May expandable segments be news to the program? Not where they are on, nor where another backend allocates.
pub fn may_advise_expandable(snapshot: &Snapshot) -> bool {
    if has_expandable(snapshot) {
        return false;
    }
    match Settings::parse(&own_conf(snapshot)) {
        Ok(parsed) => {
            !parsed.settings.expandable_segments && parsed.settings.backend == Backend::Native
        }
        Err(_) => true,
    }
}

/// A limit of PyTorch's own, below what the card has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes that it allows, where the configuration says so. A limit that the program sets under way has no number here.
    pub allowed: Option<u64>,
}

impl Limit {
    /// In a sentence.
    pub fn sentence(&self, free: u64, size: impl Fn(u64) -> String) -> String {
        let allowed = self.allowed.map_or_else(String::new, |a| format!(" of {}", size(a)));
        format!(
            "PyTorch's own limit{allowed} refused it (set_per_process_memory_fraction, or \
             per_process_memory_fraction), not the card, which had {} free",
            size(free)
        )
    }
}

/// Was a request of PyTorch's refused by such a limit? Then the card had room for its segment, and was not asked.
pub fn limit(
    snapshot: &Snapshot,
    device: i64,
    (asked, free, time_us): (u64, u64, Option<i64>),
) -> Option<Limit> {
    let oom = &snapshot.memtrace["out_of_memory"];
    let is_this = time_us.is_some() && oom["time_us"].as_i64() == time_us;
    if free < segment_for(asked) || is_this && oom["refused_by_driver"] == Value::Bool(true) {
        return None;
    }
    let fraction = Settings::parse(&own_conf(snapshot)).map_or(1.0, |p| p.settings.memory_fraction);
    let total = total(snapshot, device).filter(|_| fraction < 1.0);
    Some(Limit { allowed: total.map(|total| (fraction * total as f64) as u64) })
}

/// What PyTorch asks of the driver for a request, at least.
fn segment_for(asked: u64) -> u64 {
    match asked {
        0..=MIB => 2 * MIB,
        _ if asked < 10 * MIB => 20 * MIB,
        _ => asked.checked_next_multiple_of(2 * MIB).unwrap_or(asked),
    }
}

/// Bytes that a device has.
pub fn total(snapshot: &Snapshot, device: i64) -> Option<u64> {
    let told = &snapshot.memtrace;
    [&told["reconcile"], &told["virtual"]["devices"]].into_iter().find_map(|list| {
        let of_device = list.as_array()?.iter().find(|d| d["device"].as_i64() == Some(device))?;
        of_device["total"].as_u64()
    })
}

//! The settings that were in force when a program ran, and which limit refused a request.
//!
//! PyTorch writes the value of each setting into its snapshots. memtrace knows the variable
//! that the user set, by either of its names. It also sees what the allocator does. An
//! expandable segment shows that they are on, even where the program has set that under way.
//! Advice to set what is set already helps nobody.

use std::collections::{BTreeMap, HashSet};

use memtrace_caching::Settings;
use memtrace_caching::conf::{NAMES, with};
use memtrace_caching::settings::Backend;
use memtrace_caching::sizes;
use memtrace_format::snapshot::{Action, Snapshot, Value};
use memtrace_terminal::shell::quoted;

const MIB: u64 = 1 << 20;
/// A release of PyTorch: 2.11.
pub type Release = (u64, u64);

/// The release that made a snapshot's memory, as far as that is known.
pub fn release(snapshot: &Snapshot) -> Option<Release> {
    if let Some(text) = snapshot.memtrace.as_ref().and_then(|about| about.pytorch.as_ref()) {
        let mut parts = text.split('.').map(|part| part.parse().ok());
        return Some((parts.next()??, parts.next()??));
    }
    // PyTorch's own snapshots have no release; this setting is one of 2.13 and later.
    let is_listed = snapshot.memtrace.is_none()
        && snapshot.allocator_settings.get("max_round_threshold").is_some();
    is_listed.then_some((2, 13))
}

/// The first release that knows all keys of a configuration, where that isn't every one.
pub fn since(conf: &str) -> Option<Release> {
    conf.contains("large_segment_size_mb").then_some((2, 11))
}

/// The configuration under which a snapshot was recorded, as far as it says so or shows it.
pub fn own_conf(snapshot: &Snapshot) -> String {
    let settings = &snapshot.allocator_settings;
    let known = |key: &str| settings[key].as_str().filter(|conf| !conf.is_empty());
    // What memtrace recorded is everything that holds, PyTorch's own list
    // has the words that were said last.
    let about = snapshot.memtrace.as_ref();
    let heard = about.and_then(|about| about.allocator_conf.as_deref());
    let heard = heard.filter(|conf| !conf.is_empty());
    let said = heard.or_else(|| NAMES.iter().find_map(|name| known(name))).unwrap_or_default();
    let mut parts = vec![said.to_owned()];
    let Ok(parsed) = Settings::parse(said) else { return said.to_owned() };
    if !parsed.settings.expandable_segments && has_expandable(snapshot) {
        parts.push("expandable_segments:True".to_owned());
    }
    if parsed.settings.max_split_size == u64::MAX
        && let Some(bytes) = settings["max_split_size"].as_u64().filter(|b| *b >= MIB)
    {
        parts.push(format!("max_split_size_mb:{}", bytes / MIB));
    }
    if parsed.settings.garbage_collection_threshold == 0.0
        && let Some(threshold) =
            settings["garbage_collection_threshold"].as_f64().filter(|t| *t > 0.0)
    {
        parts.push(format!("garbage_collection_threshold:{threshold}"));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(",")
}

/// Are segments expandable? As the snapshot says, or as its segments show.
fn has_expandable(snapshot: &Snapshot) -> bool {
    let entries = || snapshot.device_traces.iter().flatten();
    snapshot.allocator_settings["expandable_segments"] == Value::Bool(true)
        || snapshot.segments.iter().any(|s| s.is_expandable)
        || entries().any(|e| matches!(e.action, Action::SegmentMap))
}

/// A limit of PyTorch's own, below what the card has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes that it allows, where the configuration says so. A limit that the
    /// program sets under way has no number here.
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

/// What a snapshot says of settings, limits and refusals: found out once,
/// whatever is then asked of it.
#[derive(Debug)]
pub struct Known {
    own: String,
    settings: Option<Settings>,
    is_expandable: bool,
    totals: BTreeMap<i64, u64>,
    /// Failures of PyTorch's that the driver refused, by device and time.
    by_driver: HashSet<(i64, i64)>,
}

impl Known {
    /// Finds it out.
    pub fn of(snapshot: &Snapshot) -> Known {
        let own = own_conf(snapshot);
        let about = snapshot.memtrace.as_deref();
        let pairs = about.and_then(|about| about.refused_by_driver.as_deref()).unwrap_or_default();
        let failed = about.and_then(|about| about.out_of_memory.as_ref());
        let newest = failed.filter(|f| f.refused_by_driver).and_then(|f| f.device.zip(f.time_us));
        let signed = |(device, time): (i64, u64)| Some((device, i64::try_from(time).ok()?));
        Known {
            settings: Settings::parse(&own).ok().map(|parsed| parsed.settings),
            own,
            is_expandable: has_expandable(snapshot),
            totals: totals(snapshot),
            by_driver: pairs.iter().copied().chain(newest).filter_map(signed).collect(),
        }
    }

    /// The line that turns expandable segments on and leaves the rest as it is. `None` where they
    /// are on, and where another backend allocates.
    pub fn expandable_line(&self) -> Option<String> {
        let may = |s: &Settings| !s.expandable_segments && s.backend == Backend::Native;
        let may = !self.is_expandable && self.settings.as_ref().is_none_or(may);
        let line = || quoted(with(&self.own, "expandable_segments:True"));
        may.then(|| format!("{}={}", NAMES[0], line()))
    }

    /// Was a request of PyTorch's refused by a limit? Then the card had room
    /// for its segment, and was not asked.
    pub fn limit(
        &self,
        device: i64,
        (asked, free, time_us): (u64, u64, Option<i64>),
    ) -> Option<Limit> {
        let is_by_driver = time_us.is_some_and(|t| self.by_driver.contains(&(device, t)));
        let default = Settings::default();
        let settings = self.settings.as_ref().unwrap_or(&default);
        if is_by_driver || free < segment(settings, asked) {
            return None;
        }
        let fraction = settings.memory_fraction;
        let total = self.totals.get(&device).filter(|_| fraction < 1.0);
        Some(Limit { allowed: total.map(|total| (fraction * *total as f64) as u64) })
    }
}

/// What PyTorch asks of the driver for a request, at least.
fn segment(settings: &Settings, asked: u64) -> u64 {
    if asked < sizes::ABSURD {
        sizes::segment(settings, sizes::round(settings, asked))
    } else {
        asked
    }
}

/// Bytes that each device has.
fn totals(snapshot: &Snapshot) -> BTreeMap<i64, u64> {
    let Some(about) = &snapshot.memtrace else { return BTreeMap::new() };
    let cards = about.virtual_gpu.iter().flat_map(|gpu| &gpu.devices);
    let cards = cards.filter_map(|card| Some((card.device, card.total?)));
    let asked = about.reconcile.iter().flatten().map(|table| (table.device, table.total));
    cards.chain(asked).collect()
}

/// Bytes that a device has.
pub fn total(snapshot: &Snapshot, device: i64) -> Option<u64> {
    totals(snapshot).get(&device).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::key::Memtrace;

    #[test]
    fn a_release_is_known_or_unknown() {
        let of = |memtrace: Value, allocator_settings: Value| {
            let memtrace = Memtrace::read(memtrace);
            release(&Snapshot { memtrace, allocator_settings, ..Snapshot::default() })
        };
        let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let list = || json(r#"{"max_round_threshold": -1}"#);
        assert_eq!(of(json(r#"{"pytorch": "2.6.0+cu124"}"#), list()), Some((2, 6)));
        assert_eq!(of(json(r#"{"pytorch": "2.15.0a0"}"#), Value::Null), Some((2, 15)));
        assert_eq!(of(json(r#"{"pytorch": "main"}"#), list()), None);
        assert_eq!(of(json(r#"{"pytorch": null}"#), list()), None);
        assert_eq!(of(Value::Null, list()), Some((2, 13)));
        assert_eq!(of(Value::Null, json("{}")), None);
        assert!(since("expandable_segments:True").is_none());
        assert_eq!(since("expandable_segments:True,large_segment_size_mb:12"), Some((2, 11)));
    }
}

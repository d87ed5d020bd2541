//! Page-locked host memory of PyTorch's allocator: what was asked for, and
//! where the rest of it went.
//!
//! It rounds requests up to powers of two and keeps what it is given back. So what it holds is what
//! was asked for by those who have it, what rounding adds to that, and what is idle.

use std::collections::BTreeMap;

use memtrace_format::key::{HostOwners, RoundedStack};
use memtrace_format::snapshot::Snapshot;
use serde::Serialize;

use crate::sites::Lines;

/// Rounding that is worth a warning, as a share of what is held.
const ROUNDING: f64 = 0.25;
/// Less than this, bytes, is not worth one.
const SMALL: u64 = 1 << 20;

/// What PyTorch's allocator of pinned memory held, at two moments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pinned {
    /// When the process had the most page-locked memory in the recorded history.
    pub peak: PinnedAt,
    /// At the end.
    pub end: PinnedAt,
}

/// What it held: `requested`, `rounding` and `idle` add up to `held`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PinnedAt {
    /// Bytes that it had taken from the driver.
    pub held: u64,
    /// Bytes that were asked for, of blocks in use.
    pub requested: u64,
    /// Bytes that rounding adds to these.
    pub rounding: u64,
    /// Bytes that nobody used, kept to be used again.
    pub idle: u64,
    /// By line of code, what rounding adds.
    pub sites: Vec<RoundedUp>,
}

/// What rounding adds to the requests of one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoundedUp {
    /// The line.
    pub site: String,
    /// Bytes.
    pub bytes: u64,
    /// Blocks.
    pub count: u64,
}

/// The answer; `None` where nothing is known of what was asked for.
pub(super) fn pinned(snapshot: &Snapshot, lines: &Lines) -> Option<Pinned> {
    let HostOwners { peak, framework, requested, rounding, rounded, .. } =
        &snapshot.memtrace.as_ref()?.owners.as_ref()?.host;
    let of_peak = [peak.framework, peak.requested, peak.rounding];
    let peak = at(of_peak, &peak.rounded, lines);
    let end = at([*framework, *requested, *rounding], rounded, lines);
    (peak.held > 0).then_some(Pinned { peak, end })
}

fn at([held, requested, rounding]: [u64; 3], rounded: &[RoundedStack], lines: &Lines) -> PinnedAt {
    let mut sites: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for one in rounded {
        let sum = sites.entry(lines.of_code_lines(&one.frames).to_string()).or_default();
        *sum = (sum.0.saturating_add(one.bytes), sum.1.saturating_add(one.count));
    }
    let mut sites: Vec<RoundedUp> =
        sites.into_iter().map(|(site, (bytes, count))| RoundedUp { site, bytes, count }).collect();
    sites.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
    let idle = held.saturating_sub(requested).saturating_sub(rounding);
    PinnedAt { held, requested, rounding, idle, sites }
}

/// What to look at.
pub(super) fn warning(pinned: &Pinned, snapshot: &Snapshot) -> Option<String> {
    let at = &pinned.peak;
    let worth = at.rounding >= SMALL && at.rounding as f64 > ROUNDING * at.held as f64;
    let first = at.sites.first().filter(|_| worth)?;
    let is_set =
        snapshot.allocator_settings["max_round_threshold"].as_i64().is_some_and(|b| b >= 0);
    let what = if is_set {
        ""
    } else {
        ". From 2.13 on, pinned_max_round_threshold_mb in PYTORCH_CUDA_ALLOC_CONF says above which size it doesn't"
    };
    Some(format!(
        "page-locked memory: PyTorch held {} bytes for {} that were asked for, because it rounds requests up to powers of \
         two; most of that at {}{what}",
        at.held - at.idle,
        at.requested,
        first.site
    ))
}

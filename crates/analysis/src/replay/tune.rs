//! Settings, tried one after another.
//!
//! Each candidate is one line that somebody could export. They are judged by the smallest card on which the program
//! runs to its end; where that is equal to a hundredth by what they reserve on the card in question, which is lost to
//! everybody else, and then by how often the driver is called. Two lines that say the same are one.

use memtrace_caching::Settings;
use serde::Serialize;

use super::requests::Requests;
use super::run::{Card, Outcome, run, smallest_capacity};
use super::settings;

const MIB: u64 = 1 << 20;

/// A configuration and how it did.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// The line.
    pub conf: String,
    /// The smallest card; `None` if it runs on none.
    pub smallest_capacity: Option<u64>,
    /// How it went on the card in question, or on one that is large enough.
    pub outcome: Outcome,
}

/// Worse is larger. `least` is the smallest card of all.
fn rank(t: &Tried, least: u64) -> (bool, u64, u64, u64, usize) {
    let smallest = t.smallest_capacity.unwrap_or(u64::MAX);
    // Which of those that need no more than a hundredth above it needs least, is no matter.
    let smallest = if smallest <= least.saturating_add(least / 100) { 0 } else { smallest };
    let calls = t.outcome.device_allocs + t.outcome.device_frees;
    (!t.outcome.fits(), smallest, t.outcome.peak_reserved, calls, t.conf.len())
}

fn sort(tried: &mut [Tried]) {
    let fits = tried.iter().filter(|t| t.outcome.fits());
    let least = fits.filter_map(|t| t.smallest_capacity).min().unwrap_or(0);
    tried.sort_by_key(|t| rank(t, least));
}

/// The lines that are worth trying for these requests.
pub fn candidates(requests: &Requests) -> Vec<String> {
    let large = requests.before.iter().chain(&requests.during).filter_map(|r| match r.what {
        super::requests::What::Alloc { size, .. } if size >= 20 * MIB => Some(size),
        _ => None,
    });
    let largest = large.max().unwrap_or(0);
    let mut lines = vec![String::new(), "expandable_segments:True".to_owned()];
    for mb in [32, 64, 128, 256, 512, 1024] {
        if largest >= mb * MIB {
            lines.push(format!("max_split_size_mb:{mb}"));
        }
    }
    for mb in [12, 32, 64, 128, 256] {
        lines.push(format!("large_segment_size_mb:{mb}"));
        lines.push(format!("expandable_segments:True,large_segment_size_mb:{mb}"));
    }
    for n in [2, 4, 8, 16] {
        lines.push(format!("roundup_power2_divisions:{n}"));
        lines.push(format!("expandable_segments:True,roundup_power2_divisions:{n}"));
    }
    lines
}

/// Tries `lines`, and the best of them together; the best comes first.
pub fn tune(requests: &Requests, lines: &[String], card: Card) -> Vec<Tried> {
    let mut known: Vec<Settings> = Vec::new();
    let mut attempt = |line: &str| {
        // Two that are fine alone may not go together (`max_split_size_mb` below a large segment's size).
        let settings = settings(line).ok()?.settings;
        if known.contains(&settings) {
            return None;
        }
        let tried = attempt(requests, line, &settings, card);
        known.push(settings);
        Some(tried)
    };
    let mut tried: Vec<Tried> = lines.iter().filter_map(|line| attempt(line)).collect();
    sort(&mut tried);
    // What helps alone may help more together.
    let single = |t: &&Tried| !t.conf.is_empty() && !t.conf.contains(',');
    let best: Vec<String> = tried.iter().filter(single).take(3).map(|t| t.conf.clone()).collect();
    for (i, a) in best.iter().enumerate() {
        for b in &best[i + 1..] {
            let key = |line: &str| line.split(':').next().unwrap_or("").to_owned();
            let both = format!("{a},{b}");
            if key(a) != key(b) {
                tried.extend(attempt(&both));
            }
        }
    }
    sort(&mut tried);
    tried
}

fn attempt(requests: &Requests, line: &str, settings: &Settings, card: Card) -> Tried {
    let outcome = run(requests, settings, card);
    let smallest_capacity = smallest_capacity(requests, settings, card.overhead);
    Tried { conf: line.to_owned(), smallest_capacity, outcome }
}

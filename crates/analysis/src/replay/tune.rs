//! Settings, tried on all processors.
//!
//! Each candidate is one line that somebody could export: the one that they have, with something
//! changed. They are ordered by the smallest card on which the program runs to its end. Where that
//! is equal to a hundredth, what they reserve on the card in question decides, since others can't
//! use that. Then it is how often the driver is called. Two lines that say the same are one.

use std::collections::HashSet;

use memtrace_caching::Settings;
use memtrace_caching::conf::{pairs, with, without};
use serde::Serialize;

use super::requests::Requests;
use super::run::{Card, Outcome, run, smallest_capacity};
use super::settings;
use crate::conf::{Release, since};

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

/// Keys that are tried with other values. What else somebody has set is theirs:
/// limits, page-locked memory, collection.
const TRIED: [&str; 4] = [
    "expandable_segments",
    "max_split_size_mb",
    "large_segment_size_mb",
    "roundup_power2_divisions",
];

/// The lines that are worth trying for these requests: those of `own` with something changed, each
/// of them whole. A release that is known gets only keys that it knows.
pub fn candidates(requests: &Requests, own: &str, release: Option<Release>) -> Vec<String> {
    let read = |line: &str| settings(line).ok().map(|parsed| parsed.settings);
    let mut lines = Vec::new();
    if read(&without(own, &[])) == read(own) {
        let bare = without(own, &TRIED);
        lines.extend(TRIED.iter().map(|key| without(own, &[key])));
        lines.push(bare.clone());
        let both = |change: String| [with(own, &change), with(&bare, &change)];
        lines.extend(changes(requests).into_iter().flat_map(both));
    } else {
        // Punctuated in a way of its own, which PyTorch takes: all of it stays.
        lines.extend(changes(requests).iter().map(|change| format!("{own},{change}")));
    }
    // Two that are fine alone may not go together (`max_split_size_mb`
    // below a large segment's size).
    let is_fine = |line: &String| {
        read(line).is_some() && release.is_none_or(|release| since(line) <= Some(release))
    };
    lines.retain(is_fine);
    let mut seen = HashSet::new();
    lines.retain(|line| seen.insert(line.clone()));
    lines
}

fn changes(requests: &Requests) -> Vec<String> {
    let large = requests.before.iter().chain(&requests.during).filter_map(|r| match r.what {
        super::requests::RequestKind::Alloc { size, .. } if size >= 20 * MIB => Some(size),
        _ => None,
    });
    let largest = large.max().unwrap_or(0);
    let mut lines = vec!["expandable_segments:True".to_owned()];
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

/// What a line says that `own` doesn't, if that is one thing.
fn change<'a>(line: &'a str, own: &str) -> Option<(&'a str, &'a str)> {
    let mut new = pairs(line).filter(|pair| pairs(own).all(|old| old != *pair));
    new.next().filter(|_| new.next().is_none())
}

/// Tries `lines`, and the best changes of `own` together; the best comes first.
pub fn tune(requests: &Requests, own: &str, lines: &[String], card: Card) -> Vec<Tried> {
    let mut known: Vec<Settings> = Vec::new();
    let mut try_new = |lines: &[String]| {
        let mut new = Vec::new();
        for line in lines {
            let Ok(parsed) = settings(line) else { continue };
            if !known.contains(&parsed.settings) {
                known.push(parsed.settings.clone());
                new.push((line, parsed.settings));
            }
        }
        memtrace_workers::map(new, |(line, settings)| attempt(requests, line, &settings, card))
    };
    let mut tried = try_new(lines);
    sort(&mut tried);
    // What helps alone may help more together.
    let singles = tried.iter().filter(|t| change(&t.conf, own).is_some());
    let best: Vec<String> = singles.take(3).map(|t| t.conf.clone()).collect();
    let mut together = Vec::new();
    for (i, a) in best.iter().enumerate() {
        for b in &best[i + 1..] {
            let (Some((of_a, _)), Some((of_b, value))) = (change(a, own), change(b, own)) else {
                continue;
            };
            if of_a != of_b {
                together.push(with(a, &format!("{of_b}:{value}")));
            }
        }
    }
    tried.extend(try_new(&together));
    sort(&mut tried);
    tried
}

fn attempt(requests: &Requests, line: &str, settings: &Settings, card: Card) -> Tried {
    let outcome = run(requests, settings, card);
    let smallest_capacity = smallest_capacity(requests, settings, card.overhead);
    Tried { conf: line.to_owned(), smallest_capacity, outcome }
}

//! What was planned and how its workspace is known: the numbers by which a
//! reader judges a run's peaks.
//!
//! A plan whose need isn't known is taken to need nothing, so peaks are lower bounds. That is
//! reported once, when the process ends, with the number of such plans. The numbers are in every
//! snapshot (`memtrace.virtual.cudnn`). Of each convolution the first plan counts; a program that
//! had to do with another one later says so by its own allocations.

use super::problem::Problem;
use super::workspace::Source;
use crate::gpu::log;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Different convolutions without a workspace; read as the process ends,
/// when no lock may be waited for.
static UNKNOWN: AtomicU64 = AtomicU64::new(0);
/// Different convolutions whose workspace is known from a table, and from the model, and the bytes
/// of the latter: all together, and the largest.
static MEASURED: AtomicU64 = AtomicU64::new(0);
static MODELLED: AtomicU64 = AtomicU64::new(0);
static MODELLED_BYTES: AtomicU64 = AtomicU64::new(0);
static MODELLED_LARGEST: AtomicU64 = AtomicU64::new(0);
/// Different plans of other graphs (attention, normalization), of which no workspace is known.
static OTHER: AtomicU64 = AtomicU64::new(0);
/// The process that counted: a child forked from it has nothing to say about it.
static COUNTER: AtomicU64 = AtomicU64::new(0);

static SEEN: Mutex<BTreeSet<Problem>> = Mutex::new(BTreeSet::new());

fn own_number() -> u64 {
    u64::from(std::process::id())
}

/// One more plan without a workspace.
fn without(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
    let own = own_number();
    if COUNTER.swap(own, Relaxed) != own {
        // Without room for the handler the line is missing; the snapshot has the number. SAFETY:
        // the handler reads atomics and writes one line, which is allowed as a process ends.
        unsafe { libc::atexit(at_end) };
    }
}

extern "C" fn at_end() {
    if COUNTER.load(Relaxed) == own_number() {
        log::warn(&lower_bound(UNKNOWN.load(Relaxed), OTHER.load(Relaxed)));
    }
}

fn lower_bound(unknown: u64, other: u64) -> String {
    let plural = |n: u64, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    let mut parts = Vec::new();
    if unknown > 0 {
        parts.push(plural(unknown, "convolution", "convolutions"));
    }
    if other > 0 {
        parts.push(plural(other, "other cuDNN graph", "other cuDNN graphs"));
    }
    format!("lower bound: {} without workspace", parts.join(" and "))
}

/// A convolution is planned with a workspace of so many bytes.
pub(super) fn convolution(problem: &Problem, source: Source, bytes: i64) {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !seen.insert(problem.clone()) {
        return;
    }
    log::debug(1, || format!("cuDNN's workspace: {bytes} {problem} ({source:?})"));
    match source {
        Source::Unknown => without(&UNKNOWN),
        Source::Measured => {
            MEASURED.fetch_add(1, Relaxed);
        }
        Source::Modelled => {
            let bytes = u64::try_from(bytes).unwrap_or(0);
            MODELLED.fetch_add(1, Relaxed);
            MODELLED_BYTES.fetch_add(bytes, Relaxed);
            MODELLED_LARGEST.fetch_max(bytes, Relaxed);
        }
    }
}

/// A graph is planned that holds no convolution, or one that can't be made out.
pub(super) fn other() {
    without(&OTHER);
}

/// The numbers as a JSON object.
pub fn json() -> String {
    let numbers = [
        ("unknown", &UNKNOWN),
        ("other", &OTHER),
        ("measured", &MEASURED),
        ("modelled", &MODELLED),
        ("modelled_bytes", &MODELLED_BYTES),
        ("modelled_largest", &MODELLED_LARGEST),
    ];
    let parts: Vec<String> =
        numbers.iter().map(|(key, n)| format!("\"{key}\":{}", n.load(Relaxed))).collect();
    format!("{{{}}}", parts.join(","))
}

#[cfg(test)]
mod tests {
    use super::super::problem::{Operation, tests::square};
    use super::*;

    #[test]
    fn a_problem_counts_once() {
        let problem = square(Operation::Forward, [3, 5, 7, 11, 3, 1]);
        let before = UNKNOWN.load(Relaxed);
        convolution(&problem, Source::Unknown, 0);
        convolution(&problem, Source::Modelled, 5);
        // Other tests plan at the same time, but not so many.
        assert!(UNKNOWN.load(Relaxed) > before);
        assert!(SEEN.lock().expect("sound").contains(&problem));
    }

    #[test]
    fn the_line_names_what_there_is() {
        assert_eq!(lower_bound(1, 0), "lower bound: 1 convolution without workspace");
        assert_eq!(
            lower_bound(53, 2),
            "lower bound: 53 convolutions and 2 other cuDNN graphs without workspace"
        );
        assert_eq!(lower_bound(0, 1), "lower bound: 1 other cuDNN graph without workspace");
    }
}

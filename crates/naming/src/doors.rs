//! What a snapshot says of the recorder itself: which doors were used by whom, and what that cost.

use std::collections::BTreeMap;

use memtrace_format::blackbox::DoorUse;
use memtrace_format::stacks::Words;
use serde_json::{Value, json};

use crate::names::Namer;

/// Each door that was used, with its calls by library; those of libraries that found no place (or are no longer known)
/// have none.
pub fn doors<W: Words, A: Fn(u16) -> S + ?Sized, S: AsRef<str>>(
    used: &[DoorUse],
    api: &A,
    namer: &Namer<W>,
) -> Value {
    let list = used.iter().map(|door| {
        let mut by_library: BTreeMap<Option<&str>, u64> = BTreeMap::new();
        for (address, calls) in door.callers.iter().copied().chain([(0, door.others)]) {
            let sum = by_library.entry(namer.library_at(address)).or_default();
            *sum = sum.saturating_add(calls);
        }
        let calls = by_library.values().fold(0_u64, |sum, n| sum.saturating_add(*n));
        let callers: Vec<Value> = by_library
            .iter()
            .filter(|(_, calls)| **calls > 0)
            .map(|(library, calls)| json!({"library": library, "calls": calls}))
            .collect();
        json!({"door": api(door.api).as_ref(), "calls": calls, "callers": callers})
    });
    list.collect()
}

/// Timed visits to the recorder, and what one took.
pub fn cost(sampled: u64, sampled_ns: u64) -> Value {
    json!({"sampled": sampled, "ns_each": sampled_ns.checked_div(sampled)})
}

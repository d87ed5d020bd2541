//! What a snapshot says of the recorder itself: which entry points were
//! called, by whom, and what that cost.

use std::collections::BTreeMap;

use memtrace_format::blackbox::EntryPointUse;
use memtrace_format::key::{Caller, Cost, EntryPoint, Kept};
use memtrace_format::stacks::Words;
use memtrace_symbols::Namer;

/// Each entry point that was called, with its calls by library; those of libraries that found no
/// place (or are no longer known) have none.
pub fn entry_point_calls<W: Words, A: Fn(u16) -> S + ?Sized, S: AsRef<str>>(
    used: &[EntryPointUse],
    api: &A,
    namer: &Namer<W>,
) -> Vec<EntryPoint> {
    let list = used.iter().map(|one| {
        let mut by_library: BTreeMap<Option<&str>, u64> = BTreeMap::new();
        for (address, calls) in one.callers.iter().copied().chain([(0, one.others)]) {
            let sum = by_library.entry(namer.library_at(address)).or_default();
            *sum = sum.saturating_add(calls);
        }
        let calls = by_library.values().fold(0_u64, |sum, n| sum.saturating_add(*n));
        let callers = by_library.into_iter().filter(|(_, calls)| *calls > 0);
        let caller = |(library, calls): (Option<&str>, u64)| Caller {
            library: library.map(str::to_owned),
            calls,
            kept: Kept::NOTHING,
        };
        EntryPoint {
            door: api(one.api).as_ref().to_owned(),
            calls,
            callers: callers.map(caller).collect(),
            kept: Kept::NOTHING,
        }
    });
    list.collect()
}

/// Timed visits to the recorder, and what one took.
pub fn cost(sampled: u64, sampled_ns: u64) -> Cost {
    Cost { sampled, ns_each: sampled_ns.checked_div(sampled), kept: Kept::NOTHING }
}

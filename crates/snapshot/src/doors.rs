//! What a snapshot says of the recorder itself: which doors were used by whom, and what that cost.

use std::collections::BTreeMap;

use memtrace_format::blackbox::DoorUse;
use memtrace_format::key::{Caller, Cost, Door, Kept};
use memtrace_format::stacks::Words;
use memtrace_symbols::Namer;

/// Each door that was used, with its calls by library; those of libraries that found no place
/// (or are no longer known) have none.
pub fn doors<W: Words, A: Fn(u16) -> S + ?Sized, S: AsRef<str>>(
    used: &[DoorUse],
    api: &A,
    namer: &Namer<W>,
) -> Vec<Door> {
    let list = used.iter().map(|door| {
        let mut by_library: BTreeMap<Option<&str>, u64> = BTreeMap::new();
        for (address, calls) in door.callers.iter().copied().chain([(0, door.others)]) {
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
        Door {
            door: api(door.api).as_ref().to_owned(),
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

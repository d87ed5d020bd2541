//! What the tests of the ring and of the live table share.

use memtrace_format::event::{BlockEvent, Event, Kind};

/// Checks itself: all numbers follow from `n`.
pub fn event(n: u64) -> Event {
    let block = BlockEvent { addr: n, asked: n * 3, size: n * 5, stream: n * 7 };
    Event { time_ns: n, stack: n as u32, thread: 1, ..block.event(Kind::Alloc) }
}

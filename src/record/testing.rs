//! What the tests of the ring and of the live table share.

use memtrace_format::event::{Event, Kind, Layer, Pool, What};

/// Checks itself: all numbers follow from `n`.
pub fn event(n: u64) -> Event {
    Event {
        kind: Kind::Alloc,
        layer: Layer::Framework,
        device: 0,
        flags: 0,
        api: 0,
        what: What::Device,
        pool: Pool::DEFAULT,
        time_ns: n,
        addr: n,
        size: n * 3,
        extra: n * 5,
        stream: n * 7,
        stack: n as u32,
        thread: 1,
        label: 0,
    }
}

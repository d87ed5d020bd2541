//! What the algorithm reports, written into the recorder as it happens.
//!
//! The events are those of the framework's layer, which the hooks write for PyTorch's own
//! allocator, too. So a reader need not know who allocated. A free that does not wait is one event.
//! All events of one request or free have its stack, which was taken before any lock.

use memtrace_caching::{Action, Event as Report, Sink};
use memtrace_format::event::{
    BlockEvent, CompletedEvent, Event, FLAG_PENDING, FLAG_SMALL, Kind, NO_STACK, OomEvent, Pool,
    SegmentEvent, SnapshotEvent, StackId,
};
use memtrace_format::snapshot::PoolId;
use memtrace_state::PAGE;

use crate::gauges;
use crate::pytorch::allocator;
use crate::pytorch::{changes, quick};
use crate::record::guard;
use crate::record::guard::event;

/// Listens to the allocator of one device.
pub struct Recording {
    device: i8,
    /// Of the request or free that is under way.
    pub stack: StackId,
    /// Bytes in blocks that are handed out.
    allocated: u64,
    /// The free that was reported last is complete already.
    completed: bool,
}

impl Recording {
    /// For a device.
    pub fn new(device: i8) -> Recording {
        Recording { device, stack: NO_STACK, allocated: 0, completed: false }
    }

    fn write(&self, pool: PoolId, said: Event) {
        guard::observe(|recorder, local| {
            let (device, pool, stack) = (self.device, Pool::of(pool), self.stack);
            let event = Event { device, pool, stack, ..event(local, said) };
            let ticket = recorder.write(&event);
            if let Some(gauge) = usize::try_from(device).ok().and_then(gauges::of) {
                gauge.change(self.allocated, reserved_by(&event));
            }
            let block = BlockEvent::of(&event);
            let change = match event.kind {
                Kind::Alloc => block.size as i64,
                Kind::FreeRequested => -(block.size as i64),
                _ => 0,
            };
            if change != 0 {
                changes::block(local, block.addr, change, device);
                quick::event(local);
            }
            match event.kind {
                Kind::Alloc => recorder.mailbox.allocated(self.allocated, ticket),
                Kind::Oom => {
                    recorder.mailbox.out_of_memory(ticket);
                    quick::failed(local);
                }
                _ => {}
            }
        });
    }

    /// The program looks at the state: PyTorch notes that in its trace.
    pub fn snapshot(&mut self, active: u64, pool: PoolId) {
        self.stack = NO_STACK;
        self.write(pool, SnapshotEvent { active }.event());
    }
}

/// What this does to the bytes that the allocator has from the driver.
fn reserved_by(event: &Event) -> i64 {
    let size = SegmentEvent::of(event).size as i64;
    match event.kind {
        Kind::SegmentAlloc | Kind::SegmentMap => size,
        Kind::SegmentFree | Kind::SegmentUnmap => -size,
        _ => 0,
    }
}

impl Sink for Recording {
    fn event(&mut self, report: &Report) {
        let &Report { addr, size, stream, .. } = report;
        let segment = SegmentEvent { addr, size, reservation: 0, stream };
        let said = match report.action {
            Action::FreeCompleted if std::mem::take(&mut self.completed) => return,
            Action::FreeCompleted => CompletedEvent { block: addr }.event(),
            Action::SegmentAlloc => comes(segment.event(Kind::SegmentAlloc)),
            Action::SegmentFree => segment.event(Kind::SegmentFree),
            Action::SegmentMap => {
                let reservation = allocator::reservation_of(addr);
                comes(SegmentEvent { reservation, ..segment }.event(Kind::SegmentMap))
            }
            Action::SegmentUnmap => segment.event(Kind::SegmentUnmap),
            Action::Oom => Event { stream, ..OomEvent { asked: size, free: addr }.event() },
            // Recorded by the two functions below.
            Action::Alloc | Action::FreeRequested => return,
        };
        self.write(report.pool, said);
    }

    fn handed_out(&mut self, report: &Report, block: u64) {
        self.allocated += block;
        let &Report { addr, size, stream, .. } = report;
        let said = BlockEvent { addr, asked: size, size: block, stream };
        self.write(report.pool, said.event(Kind::Alloc));
    }

    fn given_back(&mut self, report: &Report, block: u64, waits: bool) {
        self.allocated -= block;
        self.completed = !waits;
        let &Report { addr, stream, .. } = report;
        let said = BlockEvent { addr, asked: block, size: block, stream };
        let flags = if waits { FLAG_PENDING } else { 0 };
        self.write(report.pool, Event { flags, ..said.event(Kind::FreeRequested) });
    }
}

/// A segment, or pages of one. The algorithm asks for exactly one page at a
/// time for its small pools, and never for its large ones.
fn comes(said: Event) -> Event {
    let is_small = SegmentEvent::of(&said).size == PAGE;
    Event { flags: if is_small { FLAG_SMALL } else { 0 }, ..said }
}

//! What the algorithm tells, written into the recorder as it happens.
//!
//! The events are those of the framework's layer, the same that the hooks write when
//! PyTorch's own allocator is in place: so whoever reads them need not know who allocated.
//! A free that does not wait is one event. All events of one request or free have its
//! stack, which was taken before any lock.

use memtrace_caching::{Action, Event as Told, Sink};
use memtrace_format::event::{
    Event, FLAG_PENDING, FLAG_SMALL, Kind, Layer, NO_STACK, Pool, StackId,
};
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
    /// The free that was told last is complete already.
    completed: bool,
}

impl Recording {
    /// For a device.
    pub fn new(device: i8) -> Recording {
        Recording { device, stack: NO_STACK, allocated: 0, completed: false }
    }

    fn write(&self, kind: Kind, told: &Told, set: impl FnOnce(&mut Event)) {
        guard::observe(|recorder, local| {
            let mut event = Event {
                device: self.device,
                pool: Pool::of(told.pool),
                addr: told.addr,
                size: told.size,
                stream: told.stream,
                stack: self.stack,
                ..event(local, Event::new(kind, Layer::Framework))
            };
            set(&mut event);
            let ticket = recorder.write(&event);
            if let Some(gauge) = usize::try_from(self.device).ok().and_then(gauges::of) {
                gauge.change(self.allocated, reserved_by(kind, told.size));
            }
            let change = match kind {
                Kind::Alloc => event.extra as i64,
                Kind::FreeRequested => -(event.extra as i64),
                _ => 0,
            };
            if change != 0 {
                changes::block(local, told.addr, change, self.device);
                quick::event(local);
            }
            match kind {
                Kind::Alloc => recorder.mailbox.allocated(self.allocated, ticket),
                Kind::Oom => {
                    recorder.mailbox.out_of_memory(ticket);
                    quick::failed(local);
                }
                _ => {}
            }
        });
    }

    /// Somebody looks at the state: PyTorch notes that in its trace.
    pub fn snapshot(&mut self, active: u64, pool: (u64, u64)) {
        self.stack = NO_STACK;
        let told = Told {
            action: Action::Oom,
            addr: 0,
            size: active,
            stream: 0,
            pool,
            with_address: false,
        };
        self.write(Kind::Snapshot, &told, |_| ());
    }
}

/// What this does to the bytes that the allocator has from the driver.
fn reserved_by(kind: Kind, size: u64) -> i64 {
    match kind {
        Kind::SegmentAlloc | Kind::SegmentMap => size as i64,
        Kind::SegmentFree | Kind::SegmentUnmap => -(size as i64),
        _ => 0,
    }
}

impl Sink for Recording {
    fn event(&mut self, told: &Told) {
        match told.action {
            Action::FreeCompleted if std::mem::take(&mut self.completed) => {}
            Action::FreeCompleted => self.write(Kind::FreeCompleted, told, |_| ()),
            Action::SegmentAlloc => self.write(Kind::SegmentAlloc, told, flag_small),
            Action::SegmentFree => self.write(Kind::SegmentFree, told, |_| ()),
            Action::SegmentMap => self.write(Kind::SegmentMap, told, |event| {
                event.extra = allocator::reservation_of(told.addr);
                flag_small(event);
            }),
            Action::SegmentUnmap => self.write(Kind::SegmentUnmap, told, |_| ()),
            Action::Oom => self.write(Kind::Oom, told, |event| {
                (event.addr, event.extra) = (0, told.addr);
            }),
            // Told by the two below.
            Action::Alloc | Action::FreeRequested => {}
        }
    }

    fn handed_out(&mut self, told: &Told, block: u64) {
        self.allocated += block;
        self.write(Kind::Alloc, told, |event| event.extra = block);
    }

    fn given_back(&mut self, told: &Told, block: u64, waits: bool) {
        self.allocated -= block;
        self.completed = !waits;
        self.write(Kind::FreeRequested, told, |event| {
            (event.size, event.extra) = (block, block);
            event.flags = if waits { FLAG_PENDING } else { 0 };
        });
    }
}

/// The algorithm asks for exactly one page at a time for its small pools,
/// and never for its large ones.
fn flag_small(event: &mut Event) {
    event.flags = if event.size == PAGE { FLAG_SMALL } else { 0 };
}

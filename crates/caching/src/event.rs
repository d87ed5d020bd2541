//! What happens, reported at the moment and in the order in which PyTorch writes its trace.

use memtrace_format::snapshot::{self, PoolId};

/// What an event says, by PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was handed out; the size is what was asked for.
    Alloc,
    /// A block was given back.
    FreeRequested,
    /// A block is free again.
    FreeCompleted,
    /// A segment from the driver.
    SegmentAlloc,
    /// A segment back to the driver.
    SegmentFree,
    /// Memory mapped into an expandable segment.
    SegmentMap,
    /// Memory unmapped from an expandable segment.
    SegmentUnmap,
    /// Out of memory; the address is what the device had free.
    Oom,
}

impl Action {
    /// The string in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Oom => "oom",
        }
    }
}

impl From<Action> for snapshot::Action {
    fn from(action: Action) -> snapshot::Action {
        match action {
            Action::Alloc => snapshot::Action::Alloc,
            Action::FreeRequested => snapshot::Action::FreeRequested,
            Action::FreeCompleted => snapshot::Action::FreeCompleted,
            Action::SegmentAlloc => snapshot::Action::SegmentAlloc,
            Action::SegmentFree => snapshot::Action::SegmentFree,
            Action::SegmentMap => snapshot::Action::SegmentMap,
            Action::SegmentUnmap => snapshot::Action::SegmentUnmap,
            Action::Oom => snapshot::Action::Oom,
        }
    }
}

/// One line of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// Device address; for [`Action::Oom`] what the device had free.
    pub addr: u64,
    /// Bytes, as PyTorch counts them for this action.
    pub size: u64,
    /// Raw stream handle.
    pub stream: u64,
    /// Which private pool, (0, 0) for none.
    pub pool: PoolId,
    /// It was part of an allocation at a wanted address (`internal_metadata: mallocWithAddress`).
    pub with_address: bool,
}

/// Whoever listens.
pub trait Sink {
    /// Something happened.
    fn event(&mut self, event: &Event);

    /// A block of `block` bytes was handed out.
    fn handed_out(&mut self, event: &Event, block: u64) {
        let _ = block;
        self.event(event);
    }

    /// A block of `block` bytes was given back. Unless its free `waits`,
    /// the next event completes it.
    fn given_back(&mut self, event: &Event, block: u64, waits: bool) {
        let _ = (block, waits);
        self.event(event);
    }
}

/// Nobody listens.
impl Sink for () {
    fn event(&mut self, _: &Event) {}
}

impl Sink for Vec<Event> {
    fn event(&mut self, event: &Event) {
        self.push(*event);
    }
}

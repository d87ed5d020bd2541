//! What comes and what goes, one thing at a time. It is for those who add up memory in
//! another way than the ledger's columns do.
//!
//! It covers what is in the sum `held` of a device, each byte once, and the host's memory. It also
//! covers what may be on the device or not, which is in no sum.

use super::host::is_of_blocks;
use memtrace_format::blackbox::Class;
use memtrace_format::event::{Event, LabelId, Layer, StackId, What};

/// What kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// A framework's allocator holds it.
    Framework,
    /// As it was asked for.
    Plain,
    /// In stream order, from a pool, which keeps more than is in use.
    Pooled,
    /// Managed: here or with the host.
    Managed,
    /// Promised to a graph's node: there while the graph runs, or longer.
    GraphNode,
    /// Of the host's: what was asked for of memory that an allocator holds.
    Requested,
    /// Of the host's: what the allocator adds to that.
    RoundedUp,
}

impl MemoryKind {
    /// Is it in the sum of what the process holds?
    pub fn is_held(self) -> bool {
        use MemoryKind::{GraphNode, Managed, Requested, RoundedUp};
        !matches!(self, Managed | GraphNode | Requested | RoundedUp)
    }
}

/// Memory that came or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The device's ordinal, −1 if it isn't known; `None` is the host.
    pub device: Option<i8>,
    /// What kind.
    pub kind: MemoryKind,
    /// Whose call made it.
    pub stack: StackId,
    /// What its thread said it was doing; of a framework's segments nobody asks.
    pub label: LabelId,
    /// Bytes.
    pub bytes: u64,
    /// It came.
    pub came: bool,
    /// For which of NCCL's communicators, as [`Event::part`].
    pub part: u16,
}

impl Move {
    /// What an entry of the ledger (or of a framework's) holds; `None` if that is in no sum.
    pub fn of(class: Class, e: &Event, came: bool) -> Option<Move> {
        let host = e.layer == Layer::Host;
        let kind = match (class, e.what) {
            (Class::Segment | Class::Page, _) => MemoryKind::Framework,
            (Class::Handle, What::Device) => MemoryKind::Plain,
            (Class::Driver, What::Pinned | What::Registered) if is_of_blocks(e) => {
                MemoryKind::Framework
            }
            (Class::Driver, What::Pinned | What::Registered) if host => MemoryKind::Plain,
            (Class::HostBlock, What::HostBlock) if host => MemoryKind::Requested,
            (Class::Driver, What::Device) | (Class::Array, What::Array) if !host => {
                MemoryKind::Plain
            }
            (Class::Driver, What::Pool) if !host => MemoryKind::Pooled,
            (Class::Driver, What::Managed) if !host => MemoryKind::Managed,
            (Class::Driver, What::GraphNode) if !host => MemoryKind::GraphNode,
            _ => return None,
        };
        let device = (!host).then_some(e.device);
        let (stack, label, bytes, part) = (e.stack, e.label, e.size, e.part());
        Some(Move { device, kind, stack, label, bytes, came, part })
    }
}

/// Moves, if somebody wants them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moves(Option<Vec<Move>>);

impl Moves {
    /// From now on.
    pub fn watch(&mut self) {
        self.0 = Some(Vec::new());
    }

    /// Does somebody?
    pub(crate) fn are_watched(&self) -> bool {
        self.0.is_some()
    }

    /// One more.
    pub(crate) fn push(&mut self, one: Option<Move>) {
        if let (Some(all), Some(one)) = (&mut self.0, one) {
            all.push(one);
        }
    }

    /// All since the last time.
    pub fn take(&mut self) -> Vec<Move> {
        self.0.as_mut().map_or_else(Vec::new, std::mem::take)
    }
}

//! The framework's ledger: what an event means for the blocks and segments of PyTorch's allocator.
//!
//! There is one set of rules ([`apply`]) for the live table of a recording process, for a dump of
//! it, and for the reader of a dead process's file. Each stores what is alive in its own way
//! ([`Waits`]), but they can't disagree. The rules of the driver's layer are [`crate::ledger`]'s.
//!
//! The rules (PyTorch 2.x's native allocator, checked entry for entry against its own recorder):
//!
//! - a free without outstanding CUDA events is complete at once; one that waits is
//!   complete when the last of its events is;
//! - addresses are unique over all devices, so a block is found by its address,
//!   whatever device a thread has selected;
//! - an expandable segment comes and goes by pages.
//!
//! A process may die after its table was changed and before that was counted, and then
//! the event is applied again. So the same event twice must change nothing more. It must
//! never panic on any sequence of events.

use memtrace_format::blackbox::Class;
use memtrace_format::event::{
    Event, FLAG_FAILED, FLAG_PENDING, Kind, Layer, ReadyEvent, WaitEvent,
};

use crate::ledger::LiveEntries;

/// Granularity of the driver's mappings, bytes: pages of an expandable
/// segment are kept in this unit.
pub const PAGE: u64 = 2 << 20;

/// The first addresses of the pages in a mapped range.
pub fn pages(addr: u64, size: u64) -> impl Iterator<Item = u64> {
    let first = addr / PAGE;
    (first..first.saturating_add(size / PAGE)).map(|p| p * PAGE)
}

/// Live entries that know which blocks' frees wait for CUDA events.
///
/// A block that goes takes the events with it for which it waits ([`Class::Wait`]), itself first.
/// One that comes in place of another does so, too. An event whose block isn't there is not kept.
pub trait Waits: LiveEntries {
    /// How many CUDA events the free of this block waits for. Who counts more than two may say two.
    fn waits(&self, block: u64) -> usize;
}

/// Whose rules an event follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// No memory comes or goes with it.
    None,
    /// Those of the framework's allocator ([`apply`]).
    Framework,
    /// Those of the driver ([`crate::ledger::apply`]).
    Driver,
}

impl Rules {
    /// Whose they are.
    pub fn of(event: &Event) -> Rules {
        match (event.layer, event.kind) {
            _ if event.flags & FLAG_FAILED != 0 => Rules::None,
            (_, Kind::Mark | Kind::Oom) | (Layer::Framework, Kind::Snapshot) => Rules::None,
            (Layer::Framework, _) | (_, Kind::EventReady) => Rules::Framework,
            _ => Rules::Driver,
        }
    }
}

/// What an event has changed, for whoever writes the history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// What the event speaks of, as it was before: a block, a segment, the
    /// last of the pages that went.
    pub before: Option<Event>,
    /// With this the block's free is complete.
    pub completed: bool,
    /// How many things contradict what was known: one that came was there
    /// already, or one that went was not.
    pub anomalies: u64,
}

/// Applies one event to which the framework's rules apply ([`Rules::Framework`]).
pub fn apply<B: Waits>(entries: &mut B, event: &Event) -> Change {
    match event.kind {
        Kind::Alloc => comes(entries, Class::Block, event),
        Kind::FreeRequested if event.flags & FLAG_PENDING != 0 => pends(entries, event.addr),
        Kind::FreeRequested | Kind::FreeCompleted => {
            let gone = goes(entries, Class::Block, event.addr);
            Change { completed: true, ..gone }
        }
        Kind::WaitsFor => waits_for(entries, event),
        Kind::EventReady => is_ready(entries, ReadyEvent::of(event).handle),
        // A segment that is there already is not unheard of: its end may have been overwritten.
        Kind::SegmentAlloc => Change { anomalies: 0, ..comes(entries, Class::Segment, event) },
        Kind::SegmentFree => goes(entries, Class::Segment, event.addr),
        Kind::SegmentMap => {
            for addr in pages(event.addr, event.size) {
                comes(entries, Class::Page, &Event { addr, size: PAGE, ..*event });
            }
            Change::default()
        }
        Kind::SegmentUnmap => pages(event.addr, event.size).fold(Change::default(), |all, addr| {
            let one = goes(entries, Class::Page, addr);
            let anomalies = all.anomalies + one.anomalies;
            Change { before: one.before.or(all.before), anomalies, ..all }
        }),
        _ => Change::default(),
    }
}

/// What is on no device belongs to no framework.
fn comes(entries: &mut impl Waits, class: Class, event: &Event) -> Change {
    if event.device < 0 {
        return Change::default();
    }
    let before = entries.put(class, event.addr, event);
    Change { before, anomalies: u64::from(before.is_some()), ..Change::default() }
}

fn goes(entries: &mut impl Waits, class: Class, addr: u64) -> Change {
    found(entries.remove(class, addr))
}

fn pends(entries: &mut impl Waits, block: u64) -> Change {
    let before = entries.get(Class::Block, block);
    entries.update(Class::Block, block, &|block| block.flags |= FLAG_PENDING);
    found(before)
}

fn waits_for(entries: &mut impl Waits, event: &Event) -> Change {
    let WaitEvent { block, handle, .. } = WaitEvent::of(event);
    if entries.get(Class::Wait, handle).is_some() {
        return Change::default();
    }
    let before = entries.get(Class::Block, block);
    if before.is_some() {
        entries.put(Class::Wait, handle, event);
    }
    found(before)
}

fn is_ready(entries: &mut impl Waits, handle: u64) -> Change {
    let Some(wait) = entries.get(Class::Wait, handle) else { return Change::default() };
    let WaitEvent { block, .. } = WaitEvent::of(&wait);
    let before = entries.get(Class::Block, block);
    let completed =
        before.is_some_and(|b| b.flags & FLAG_PENDING != 0) && entries.waits(block) == 1;
    let (class, key) = if completed { (Class::Block, block) } else { (Class::Wait, handle) };
    entries.remove(class, key);
    Change { before, completed, ..Change::default() }
}

/// The change of an event that speaks of something that should be there.
fn found(before: Option<Event>) -> Change {
    Change { before, anomalies: u64::from(before.is_none()), ..Change::default() }
}

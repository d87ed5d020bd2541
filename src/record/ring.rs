//! The ring: the history of the process, written by every thread without a lock.
//!
//! A slot is eight words. A producer claims a ticket (one fetch-add), marks the slot as being written,
//! fills words 1 to 7 and publishes it by storing ticket + 1 into word 0. Nothing is copied afterwards:
//! the slot *is* the history. A reader takes a slot as a sequence lock does: it believes the words only if
//! word 0 names the ticket before and after.
//!
//! *Retirement* makes room: the oldest published events are applied to the table of what is alive (in
//! ticket order, by whoever holds the retiring role) and their slots may be overwritten from then on. So
//! **state = live table + replay of the events from `retired` on**, at any moment. The background thread
//! keeps an eighth of the ring free; if it starves, the producer that finds no room retires a batch itself
//! (counted as a stall). A full ring therefore never loses an event.
//!
//! It must never block on a thread that was stopped between claiming and publishing for the sake of a
//! reader: readers skip what is not published and say how much. Retirement does stop there, in order, since a
//! skipped free would be a leak in the live table for ever.

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, fence, hint};
use std::sync::{PoisonError, TryLockError};

use memtrace_format::event::{Event, WORDS};
use memtrace_format::replay::State;

type Slot = [AtomicU64; WORDS];

/// Word 0 of a slot while it is being filled.
const WRITING: u64 = 0;

/// See the module's essay.
pub struct Ring {
    slots: &'static [Slot],
    /// The next ticket.
    head: AtomicU64,
    /// Every ticket below has been applied to the live table.
    retired: AtomicU64,
    /// The live table. The lock is the retiring role; a hook only ever *tries* it.
    live: Mutex<State>,
}

/// A consistent view: what was alive at ticket `from`, and the events since.
pub struct View {
    /// State before the first event of `events`.
    pub live: State,
    /// Ticket of the first event.
    pub from: u64,
    /// Published events in ticket order.
    pub events: Vec<Event>,
    /// Slots that were claimed but not (yet) published when the view was taken.
    pub torn: u64,
}

impl Ring {
    /// A ring of at least `events` slots (rounded up to a power of two, 16 at the least). The memory is
    /// reserved now and used as it fills.
    pub fn new(events: usize) -> Ring {
        let n = events.next_power_of_two().max(16);
        Ring::over(crate::sync::zeroed_slots(n))
    }

    /// A ring over these slots; their number must be a power of two.
    pub fn over(slots: &'static [Slot]) -> Ring {
        assert!(slots.len().is_power_of_two());
        Ring {
            slots,
            head: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            live: Mutex::new(State::default()),
        }
    }

    /// Slots.
    pub fn capacity(&self) -> u64 {
        self.slots.len() as u64
    }

    /// How many events are retired in one go.
    pub fn batch(&self) -> u64 {
        (self.capacity() / 16).max(1)
    }

    /// Tickets given out so far.
    pub fn written(&self) -> u64 {
        self.head.load(Ordering::Acquire)
    }

    /// Events that only the live table remembers.
    pub fn retired(&self) -> u64 {
        self.retired.load(Ordering::Acquire)
    }

    fn slot(&self, ticket: u64) -> &Slot {
        &self.slots[(ticket & (self.capacity() - 1)) as usize]
    }

    /// Appends an event; returns its ticket and whether it had to make room first.
    pub fn push(
        &self,
        words: [u64; WORDS - 1],
        mut apply: impl FnMut(&mut State, &Event),
    ) -> (u64, bool) {
        let ticket = self.head.fetch_add(1, Ordering::AcqRel);
        let mut stalled = false;
        while ticket - self.retired.load(Ordering::Acquire) >= self.capacity() {
            stalled = true;
            match self.live.try_lock() {
                Ok(mut live) => self.retire(&mut live, self.batch(), &mut apply),
                Err(TryLockError::Poisoned(e)) => {
                    self.retire(&mut e.into_inner(), self.batch(), &mut apply);
                }
                Err(TryLockError::WouldBlock) => {}
            }
            hint::spin_loop(); // the oldest event's producer, or whoever retires, needs a moment
        }
        let slot = self.slot(ticket);
        slot[0].store(WRITING, Ordering::Relaxed);
        fence(Ordering::Release);
        for (cell, word) in slot[1..].iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        slot[0].store(ticket + 1, Ordering::Release);
        (ticket, stalled)
    }

    /// The event with this ticket, if it is published and not overwritten. `Some(None)`: words of another
    /// layout.
    fn read(&self, ticket: u64) -> Option<Option<Event>> {
        let slot = self.slot(ticket);
        if slot[0].load(Ordering::Acquire) != ticket + 1 {
            return None;
        }
        let words = std::array::from_fn(|i| slot[i + 1].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (slot[0].load(Ordering::Relaxed) == ticket + 1).then(|| Event::unpack(words))
    }

    /// Applies up to `n` events to the live table, stopping at one that is not published yet.
    fn retire(&self, live: &mut State, n: u64, apply: &mut impl FnMut(&mut State, &Event)) {
        let from = self.retired.load(Ordering::Relaxed);
        let to = (from + n).min(self.head.load(Ordering::Acquire));
        for ticket in from..to {
            let Some(event) = self.read(ticket) else { break };
            if let Some(event) = event {
                apply(live, &event);
            }
            self.retired.store(ticket + 1, Ordering::Release);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an eighth of the ring free. For the background thread; never in a hook.
    pub fn retire_ahead(&self, mut apply: impl FnMut(&mut State, &Event)) {
        let keep = self.capacity() - self.capacity() / 8;
        loop {
            let used = self.written() - self.retired();
            if used <= keep {
                return;
            }
            let before = self.retired();
            let n = (used - keep).min(self.batch());
            self.retire(&mut self.lock(), n, &mut apply);
            if self.retired() == before {
                return; // its producer is still writing: come back later
            }
        }
    }

    /// Everything up to (not including) ticket `to`. Holds the retiring role while it copies, so nothing
    /// it wants is overwritten; producers go on in the free part. For the background thread and for dumps.
    pub fn view(&self, to: u64) -> View {
        let live = self.lock();
        let from = self.retired();
        let to = to.min(self.written());
        let mut events = Vec::with_capacity(to.saturating_sub(from) as usize);
        let mut torn = 0;
        for ticket in from..to {
            match self.read_patiently(ticket) {
                Some(Some(event)) => events.push(event),
                _ => torn += 1,
            }
        }
        View { live: live.clone(), from, events, torn }
    }

    /// A producer needs a few nanoseconds between ticket and publication unless it was stopped there.
    fn read_patiently(&self, ticket: u64) -> Option<Option<Event>> {
        for _ in 0..1000 {
            if let Some(event) = self.read(ticket) {
                return Some(event);
            }
            hint::spin_loop();
        }
        None
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;

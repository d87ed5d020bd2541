//! The ring: the history of the process, written by every thread without a lock.
//!
//! A slot is eight words. A producer claims a ticket (one fetch-add) and marks the slot as
//! being written. It fills words 1 to 7, and publishes the slot by storing ticket + 1 into
//! word 0. Nothing is copied afterwards: the slot *is* the history, and it lies in the
//! black box. A reader takes a slot as a sequence lock does: it believes the words only if
//! word 0 names the ticket before and after.
//!
//! *Growing.* The ring begins small and doubles while it fills for the first time, so that a short
//! program costs little. A ticket below the old capacity has the same slot under the new one, so
//! nothing moves. Once an event has been retired, or the file has no more room, the capacity stays.
//!
//! *Retirement* makes room. Whoever holds the retiring role applies the oldest published events to
//! the live table, in ticket order. Their slots may be overwritten from then on. So the **state is
//! the live table and the events from `retired` on**, at any moment. The background thread keeps an
//! eighth of the ring free. If it gets no processor, the producer that finds no room retires a
//! batch itself, which is counted as a stall. A full ring therefore never loses an event.
//!
//! *Reading* takes a copy of the live table, for which it holds the role for a moment. Then it
//! takes the events from there on, a batch at a time and without any lock. A slot keeps its event
//! until it is needed for the event that comes a whole ring later, retired or not. A reader that is
//! so slow learns that an event is gone.
//!
//! *A file that somebody else writes into* may say anything. What no producer writes is passed over
//! and counted as lost; nobody waits for it.
//!
//! It must never wait for a reader. Retirement stops at an event whose producer has not published
//! it yet, because a skipped free would be a leak in the live table for ever. But a producer may be
//! gone: its thread was cancelled, or left by `siglongjmp`. So a producer that has waited for room
//! for [`TIMEOUT_NS`], while the others wrote a whole ring, skips that event and counts it. Who
//! retires isn't interrupted by signals, since the role would stay taken.

#![allow(
    clippy::disallowed_types,
    reason = "its lock goes with the recorder, which a forked child has anew"
)]

use std::ops::Range;
use std::sync::{PoisonError, TryLockError};

use memtrace_format::blackbox::at;
use memtrace_format::event::{Event, WORDS};

use crate::os::space::Space;
use crate::os::sync::{AtomicU64, Mutex, MutexGuard, Ordering, fence, hint, prefetch};

type Slot = [AtomicU64; WORDS];

/// Word 0 of a slot while it is being filled.
const WRITING: u64 = 0;
/// Every so many events a producer looks whether the background thread is needed. Waking it costs
/// two system calls and another processor. The ring has eight times as many slots at first.
pub const LOOK_EVERY: u64 = 512;
/// A ring that may still grow does so when no more slots than these are left (half of the first
/// size). So the background thread has time, also on a busy machine.
const AHEAD: u64 = 4 * LOOK_EVERY;
/// How long a producer waits for another one's event, nanoseconds.
const TIMEOUT_NS: u64 = 1_000_000_000;
/// The same while some are known to be gone: longer than a busy machine makes one wait that isn't.
const SHORT_TIMEOUT_NS: u64 = 20_000_000;
/// Of what the file system has left, the history takes at most one part in so many at
/// a time: what is alive matters more.
const SHARE: u64 = 4;

/// How often one reading looks again at slots that are not published, all slots together.
const MAX_RETRIES: u32 = 4000;
/// No process has more threads than that, each of which may have a ticket
/// for which there is no room yet.
const MAX_THREADS: u64 = 1 << 23;

/// See the module's documentation. `L` is the live table.
#[repr(C)]
pub struct Ring<L> {
    slots: &'static [Slot],
    header: &'static [AtomicU64],
    space: Space,
    /// So many slots are in the page table, about: a hint.
    prefaulted: std::sync::atomic::AtomicUsize,
    /// How many producers have left in the middle. Some of them had a ticket.
    gone: std::sync::atomic::AtomicUsize,
    /// The live table. The lock is the retiring role; a hook only ever *tries* it.
    live: Mutex<Role<L>>,
}

struct Role<L> {
    live: L,
    /// The capacity is final.
    grown: bool,
}

/// Since when a producer has been waiting for the same event.
#[derive(Default)]
struct Waiting {
    ticket: u64,
    rounds: u32,
    since: Option<std::time::Instant>,
}

impl Waiting {
    /// Asks the clock seldom, and in a model never.
    fn is_too_long(&mut self, ticket: u64, some_are_gone: bool) -> bool {
        if self.ticket != ticket {
            *self = Waiting { ticket, ..Waiting::default() };
        }
        self.rounds = self.rounds.wrapping_add(1);
        if !self.rounds.is_multiple_of(1024) {
            return false;
        }
        let since = *self.since.get_or_insert_with(std::time::Instant::now);
        let timeout = if some_are_gone { SHORT_TIMEOUT_NS } else { TIMEOUT_NS };
        since.elapsed().as_nanos() > u128::from(timeout)
    }
}

impl<L> Ring<L> {
    /// A ring over these slots, of which the header says how many are in use now.
    ///
    /// # Panics
    /// One of the two numbers is no power of two.
    pub fn new(
        slots: &'static [Slot],
        header: &'static [AtomicU64],
        space: Space,
        live: L,
    ) -> Ring<L> {
        let ring = Ring {
            slots,
            header,
            space,
            prefaulted: 0.into(),
            gone: 0.into(),
            live: Mutex::new(Role { live, grown: false }),
        };
        assert!(slots.len().is_power_of_two() && ring.capacity().is_power_of_two());
        ring
    }

    /// Slots in use.
    pub fn capacity(&self) -> u64 {
        self.header[at::RING_CAPACITY].load(Ordering::Acquire)
    }

    /// Tickets given out so far.
    pub fn written(&self) -> u64 {
        let written = self.header[at::HEAD].load(Ordering::Acquire);
        let most = self.slots.len() as u64 + MAX_THREADS;
        written.min(self.retired().saturating_add(most))
    }

    /// Events that only the live table remembers.
    pub fn retired(&self) -> u64 {
        self.header[at::RETIRED].load(Ordering::Acquire)
    }

    fn batch(&self) -> u64 {
        // No longer than some tenths of a millisecond: a producer may have to wait for it.
        (self.capacity() / 64).clamp(1, 1024)
    }

    fn slot(&self, ticket: u64) -> &Slot {
        let mask = self.capacity().wrapping_sub(1); // 0 once the file is cut short
        &self.slots[(ticket & mask) as usize & (self.slots.len() - 1)]
    }

    /// A thread has left while it wrote an event, or was about to: one
    /// that is missing isn't waited for long.
    pub fn leave(&self) {
        self.gone.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the background thread let the ring run down to half of what it
    /// keeps free, at this ticket?
    pub fn is_short(&self, ticket: u64) -> bool {
        let capacity = self.capacity();
        ticket.saturating_add((capacity / 16).max(AHEAD)) >= self.retired().saturating_add(capacity)
    }

    fn has_room(&self, ticket: u64) -> bool {
        ticket < self.retired().saturating_add(self.capacity())
    }

    /// Was this in the first word of the ticket's slot by nobody of ours? It is that of the ticket,
    /// or of an older or newer one with the same slot.
    fn is_foreign(&self, word: u64, ticket: u64) -> bool {
        word != WRITING && (word ^ (ticket + 1)) & self.capacity().wrapping_sub(1) != 0
    }

    /// Has somebody written into the file so that there will never be room for this ticket?
    fn is_lost(&self, ticket: u64) -> bool {
        self.capacity() == 0
            || ticket.wrapping_sub(self.retired()) > self.slots.len() as u64 + MAX_THREADS
    }

    /// Appends an event; returns its ticket and whether it had to make room first.
    #[inline]
    pub fn push(
        &self,
        words: [u64; WORDS - 1],
        mut apply: impl FnMut(&mut L, &Event),
    ) -> (u64, bool) {
        let ticket = self.header[at::HEAD].fetch_add(1, Ordering::AcqRel);
        (ticket, self.publish(ticket, words, &mut apply))
    }

    /// Appends an event if it gets this ticket, so that nothing comes before it that wasn't there
    /// at that answer of `written`. Returns whether it had to make room first.
    pub fn push_at(
        &self,
        ticket: u64,
        words: [u64; WORDS - 1],
        mut apply: impl FnMut(&mut L, &Event),
    ) -> Option<bool> {
        let (at, done) = (&self.header[at::HEAD], Ordering::AcqRel);
        at.compare_exchange(ticket, ticket + 1, done, Ordering::Relaxed).ok()?;
        Some(self.publish(ticket, words, &mut apply))
    }

    /// Fills the slot of a ticket; returns whether it had to make room first.
    #[inline]
    fn publish(
        &self,
        ticket: u64,
        words: [u64; WORDS - 1],
        apply: &mut impl FnMut(&mut L, &Event),
    ) -> bool {
        let stalled = !self.has_room(ticket);
        if stalled {
            self.wait_for_room(ticket, apply);
        }
        let slot = self.slot(ticket);
        // Released, so that a reader who sees it also sees that the old event was retired.
        slot[0].store(WRITING, Ordering::Release);
        fence(Ordering::Release);
        for (cell, word) in slot[1..].iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        slot[0].store(ticket + 1, Ordering::Release);
        prefetch(self.slot(ticket + 1));
        stalled
    }

    #[cold]
    fn wait_for_room(&self, ticket: u64, apply: &mut impl FnMut(&mut L, &Event)) {
        let _held = crate::os::signals::Held::all();
        let mut waiting = Waiting::default();
        // A file that was cut short reads as zeros (see `truncated`): there will
        // never be room, nor anybody who reads it.
        while !self.has_room(ticket) && !self.is_lost(ticket) {
            let mut role = match self.live.try_lock() {
                Ok(role) => role,
                Err(TryLockError::Poisoned(e)) => e.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    hint::spin_loop(); // the thread that retires needs a moment
                    continue;
                }
            };
            // Another one may have made room meanwhile.
            if self.has_room(ticket) {
                return;
            }
            self.make_room(&mut role, apply);
            let oldest = self.retired();
            if !self.has_room(ticket)
                && waiting.is_too_long(oldest, self.gone.load(Ordering::Relaxed) > 0)
            {
                self.header[at::INTERRUPTED].fetch_add(1, Ordering::Relaxed);
                self.header[at::RETIRED].store(oldest + 1, Ordering::Release);
            }
            hint::spin_loop(); // the oldest event's producer needs a moment
        }
    }

    /// The words of the event with this ticket, if it is published and not overwritten.
    fn read(&self, ticket: u64) -> Option<[u64; WORDS - 1]> {
        let slot = self.slot(ticket);
        if slot[0].load(Ordering::Acquire) != ticket + 1 {
            return None;
        }
        let words = std::array::from_fn(|i| slot[i + 1].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (slot[0].load(Ordering::Relaxed) == ticket + 1).then_some(words)
    }

    fn make_room(&self, role: &mut Role<L>, apply: &mut impl FnMut(&mut L, &Event)) {
        if !self.grow(role) {
            self.retire(role, self.batch(), apply);
        }
    }

    /// Doubles the capacity, if the ring has never wrapped and there is more of it.
    fn grow(&self, role: &mut Role<L>) -> bool {
        let capacity = self.capacity() as usize;
        if role.grown || capacity >= self.slots.len() {
            return false;
        }
        if self.retired() > 0 || !self.space.reserve(&self.slots[capacity..2 * capacity], SHARE) {
            role.grown = true;
            return false;
        }
        self.header[at::RING_CAPACITY].store(2 * capacity as u64, Ordering::Release);
        true
    }

    /// Applies up to `n` events to the live table, stopping at one that is not published yet.
    fn retire(&self, role: &mut Role<L>, n: u64, apply: &mut impl FnMut(&mut L, &Event)) {
        role.grown = true;
        let from = self.retired();
        let to = (from + n).min(self.written());
        for ticket in from..to {
            if let Some(words) = self.read(ticket) {
                if let Some(event) = Event::unpack(words) {
                    apply(&mut role.live, &event);
                }
            } else {
                // Nobody of ours has written a newer one either: that needs the slot to be free.
                let word = self.slot(ticket)[0].load(Ordering::Acquire);
                if word <= ticket + 1 && !self.is_foreign(word, ticket) {
                    break;
                }
            }
            self.header[at::RETIRED].store(ticket + 1, Ordering::Release);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Role<L>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an eighth of the ring free, by growing it as long as that is possible. For the
    /// background thread; never in a hook.
    pub fn retire_ahead(&self, mut apply: impl FnMut(&mut L, &Event)) {
        loop {
            let capacity = self.capacity();
            self.prefault(capacity as usize);
            let keep = capacity - capacity / 8;
            // In this order, because both grow: what has been retired had been written before.
            let retired = self.retired();
            let used = self.written() - retired;
            let early = capacity - (capacity / 8).max(AHEAD).min(capacity / 2);
            if used <= early.min(keep) {
                return;
            }
            let mut role = self.lock();
            // A producer may have made it larger meanwhile: then nothing has to go.
            if self.capacity() != capacity || self.grow(&mut role) {
                continue;
            }
            if used <= keep {
                return;
            }
            let before = self.retired();
            self.retire(&mut role, (used - keep).min(self.batch()), &mut apply);
            drop(role);
            if self.retired() == before {
                return; // its producer is still writing: come back later
            }
        }
    }

    /// Puts the pages of the first `n` slots into the page table, so that
    /// no producer takes the fault.
    fn prefault(&self, n: usize) {
        let prefaulted = self.prefaulted.swap(n, Ordering::Relaxed);
        if let Some(new) = self.slots.get(prefaulted..n).filter(|new| !new.is_empty()) {
            self.space.settle(new);
        }
    }

    /// What `copy` makes of the live table, and the first ticket that is not in
    /// it. Holds the retiring role meanwhile, so producers go on only in the free
    /// part: `copy` must be short. For dumps.
    pub fn live<S>(&self, copy: impl FnOnce(&L) -> S) -> (S, u64) {
        let role = self.lock();
        (copy(&role.live), self.retired())
    }

    /// Appends the events with these tickets in order; the tickets have been given
    /// out. Returns how many are missing because they are not published; `None` if
    /// one has been overwritten. For dumps.
    pub fn read_range(&self, tickets: Range<u64>, events: &mut Vec<Event>) -> Option<u64> {
        let (mut unpublished, mut retries) = (0, MAX_RETRIES);
        for ticket in tickets {
            match self.read_with_retries(ticket, &mut retries) {
                Some(words) => match Event::unpack(words) {
                    Some(event) => events.push(event),
                    None => unpublished += 1,
                },
                None if self.may_be_overwritten(ticket) => return None,
                None => unpublished += 1,
            }
        }
        Some(unpublished)
    }

    fn may_be_overwritten(&self, ticket: u64) -> bool {
        self.retired() > ticket && self.written() > ticket.saturating_add(self.capacity())
    }

    /// Reads again for a while: a producer needs a few nanoseconds between ticket and
    /// publication unless it was stopped there.
    fn read_with_retries(&self, ticket: u64, retries: &mut u32) -> Option<[u64; WORDS - 1]> {
        for _ in 0..1000 {
            if let Some(words) = self.read(ticket) {
                return Some(words);
            }
            let word = self.slot(ticket)[0].load(Ordering::Acquire);
            if *retries == 0 || self.may_be_overwritten(ticket) || self.is_foreign(word, ticket) {
                break;
            }
            *retries -= 1;
            hint::spin_loop();
        }
        None
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;

//! The table of what is alive, for everything that the ring no longer remembers.
//!
//! An entry is the event that made the thing: a block, a segment, a mapped page, or a CUDA event
//! that a free waits for. So a reader rebuilds the state by applying entries as it applies events.
//! Only the holder of the retiring role writes, one word at a time. The order leaves the table
//! right after every single store: an entry's first word is written last when it comes and first
//! when it goes. The same event applied twice changes nothing, because a process may die between
//! the table and the counter of retired events.
//!
//! Where entries lie and how they are found: [`crate::record::places`]. What a block's free
//! waits for is no number in its entry. It is the entries of those events themselves, which are
//! linked in memory of this process. An entry that finds no room at all is counted, because
//! from then on the live set is not exact.

use std::collections::TryReserveError;

use memtrace_format::blackbox::{Class, FREE_AGAIN, LIVE, at, key};
use memtrace_format::event::{Event, WORDS};
use memtrace_state::State;
use memtrace_state::framework::{self, Rules, Waits};
use memtrace_state::ledger::{self, LiveEntries, Move};
use memtrace_state::past::{self, Past};

use crate::os::space::Space;
use crate::os::sync::{AtomicU64, Ordering, fence};
use crate::record::places::{Entry, Place, Places, read};

/// See the module's documentation.
pub struct Live {
    places: Places,
    header: &'static [AtomicU64],
}

impl Live {
    /// An empty table over the live region (all zero) and the header words that describe it.
    pub fn new(entries: &'static [Entry], header: &'static [AtomicU64], space: Space) -> Live {
        Live { places: Places::new(entries, header, space), header }
    }

    /// One with room for a single entry at first and so many in memory,
    /// for a model that tries everything.
    #[cfg(test)]
    pub fn tiny(
        entries: &'static [Entry],
        header: &'static [AtomicU64],
        max_outside: usize,
    ) -> Live {
        let places = Places::new(entries, header, Space::MEMORY).bounded(1, max_outside);
        Live { places, header }
    }

    /// Takes a retired event into account.
    pub fn apply(&mut self, event: &Event) {
        // A reader in another process must not use a table that changes under it.
        let sequence = &self.header[at::LIVE_SEQUENCE];
        let ticket = sequence.fetch_add(1, Ordering::AcqRel) / 2;
        // Who sees any word of the change sees an odd number, too.
        fence(Ordering::Release);
        self.change(event, ticket);
        sequence.fetch_add(1, Ordering::AcqRel);
    }

    fn change(&mut self, event: &Event, ticket: u64) {
        match Rules::of(event) {
            Rules::None => {}
            Rules::Framework => {
                framework::apply(self, event);
            }
            Rules::Driver => {
                ledger::apply(self, event, ticket, &mut |_| ());
            }
        }
    }

    /// Enters something new, or in place of what had this key.
    fn put(&mut self, class: Class, k: u64, event: &Event) -> Option<Event> {
        let before = self.remove(class, k);
        let Some(place) = self.places.add(class, k) else {
            self.add_to(at::LIVE_REFUSED, 1);
            self.add_to(at::LIVE_REFUSED_BYTES, bytes(class, event));
            return before;
        };
        self.note(Move::of(class, event, true));
        if self.places.is_outside(place) {
            self.add_to(at::LIVE_OUTSIDE, 1);
            self.add_to(at::LIVE_OUTSIDE_BYTES, bytes(class, event));
        }
        fill(self.places.entry(place), event);
        self.count();
        if class == Class::Wait
            && let Some(block) = self.places.find(Class::Block, event.addr)
        {
            self.places.wait(block, place);
        }
        before
    }

    /// Takes an entry out, and with a block the events that its free waits for.
    fn remove(&mut self, class: Class, k: u64) -> Option<Event> {
        let place = self.places.find(class, k)?;
        let before = read(self.places.entry(place));
        if class == Class::Wait
            && let Some(wait) = before
            && let Some(block) = self.places.find(Class::Block, wait.addr)
        {
            self.places.ready(block, place);
        }
        // Itself first: a process that dies in between must not leave a
        // block that waits for nothing.
        let mut wait = self.places.take_waits(place);
        self.take_out(class, place);
        while let Some(gone) = wait {
            wait = self.places.take_waits(gone);
            self.take_out(Class::Wait, gone);
        }
        before
    }

    fn take_out(&mut self, class: Class, place: Place) {
        self.gone(class, place);
        self.places.entry(place)[0].store(FREE_AGAIN, Ordering::Release);
        self.places.remove(place, class);
        self.count();
    }

    /// What the header says of an entry is so no more.
    fn gone(&self, class: Class, place: Place) {
        let Some(event) = read(self.places.entry(place)) else { return };
        self.note(Move::of(class, &event, false));
        if self.places.is_outside(place) {
            self.add_to(at::LIVE_OUTSIDE, 1_u64.wrapping_neg());
            self.add_to(at::LIVE_OUTSIDE_BYTES, bytes(class, &event).wrapping_neg());
        }
    }

    fn count(&self) {
        self.header[at::LIVE_USED].store(self.places.used() as u64, Ordering::Relaxed);
    }

    fn add_to(&self, word: usize, n: u64) {
        let word = &self.header[word];
        word.store(word.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// What each device has seen stands in the header (a model's is too short for that).
    fn note(&self, one: Option<Move>) {
        let Some((one, device)) = one.and_then(|m| Some((m, m.device?))) else { return };
        let first = at::PAST + past::WORDS * Past::place(device);
        let Some(words) = self.header.get(first..first + past::WORDS) else { return };
        let mut past = Past::unpack(std::array::from_fn(|i| words[i].load(Ordering::Relaxed)));
        past.note(&one);
        for (cell, word) in words.iter().zip(past.pack()) {
            cell.store(word, Ordering::Relaxed);
        }
    }

    /// What is in the table, copied and nothing else: the thread that retires waits for this.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn copy(&self) -> Result<Copied, TryReserveError> {
        let mut entries = Vec::new();
        entries.try_reserve_exact(self.places.used())?;
        entries.extend(self.places.all().map(words_of));
        let past = at::PAST..at::PAST + past::WORDS * past::DEVICES;
        let past = self.header.get(past).unwrap_or_default();
        Ok(Copied {
            entries,
            anomalies: self.header[at::ANOMALIES].load(Ordering::Relaxed),
            past: past.iter().map(|word| word.load(Ordering::Relaxed)).collect(),
        })
    }
}

/// The live table of a moment.
pub struct Copied {
    entries: Vec<[u64; WORDS]>,
    anomalies: u64,
    past: Vec<u64>,
}

impl Copied {
    /// The state that it stands for.
    pub fn state(&self) -> State {
        let mut state = State::restore(self.entries.iter().filter_map(unpack));
        state.anomalies = self.anomalies;
        state.past = Past::of_all(&self.past);
        state
    }
}

impl LiveEntries for Live {
    fn get(&self, class: Class, k: u64) -> Option<Event> {
        read(self.places.entry(self.places.find(class, k)?))
    }
    fn put(&mut self, class: Class, k: u64, event: &Event) -> Option<Event> {
        Live::put(self, class, k, event)
    }
    fn update(&mut self, class: Class, k: u64, change: &dyn Fn(&mut Event)) {
        let Some(place) = self.places.find(class, k) else { return };
        let entry = self.places.entry(place);
        let Some(mut event) = read(entry) else { return };
        change(&mut event);
        // A rule changes one word; each is right after its own store.
        for (cell, word) in entry[1..].iter().zip(event.pack()) {
            if cell.load(Ordering::Relaxed) != word {
                cell.store(word, Ordering::Release);
            }
        }
    }
    fn remove(&mut self, class: Class, k: u64) -> Option<Event> {
        Live::remove(self, class, k)
    }
    fn select(&self, class: Class, is: &dyn Fn(&Event) -> bool) -> Vec<u64> {
        let all = self.places.of_class(class).filter_map(|place| read(self.places.entry(place)));
        all.filter(is).filter_map(|event| Some(key(&event)?.1)).collect()
    }
}

impl Waits for Live {
    fn waits(&self, block: u64) -> usize {
        let Some(block) = self.places.find(Class::Block, block) else { return 0 };
        self.places.waits(block).take(2).count()
    }
}

fn words_of(entry: &Entry) -> [u64; WORDS] {
    std::array::from_fn(|i| entry[i].load(Ordering::Relaxed))
}

fn unpack(words: &[u64; WORDS]) -> Option<Event> {
    let [_, rest @ ..] = *words;
    Event::unpack(rest)
}

fn fill(entry: &Entry, event: &Event) {
    for (cell, word) in entry[1..].iter().zip(event.pack()) {
        cell.store(word, Ordering::Relaxed);
    }
    entry[0].store(LIVE, Ordering::Release);
}

/// How much memory an entry stands for; a segment and the blocks in it are both counted.
fn bytes(class: Class, event: &Event) -> u64 {
    match class {
        Class::Block => event.extra,
        _ => Move::of(class, event, true).map_or(0, |m| m.bytes),
    }
}

#[cfg(all(test, not(loom)))]
#[path = "live_tests.rs"]
mod tests;

//! The table of what is alive, for everything that the ring no longer remembers.
//!
//! Open addressing in the black box's live region. An entry is the event that made the thing (a block, a
//! segment, a mapped page, a CUDA event that a free waits for), so that a reader rebuilds the state by applying
//! entries as it applies events. Only the holder of the retiring role writes, one word at a time, in an order
//! that leaves the table right after every single store: an entry's first word is written last when it comes
//! and first when it goes. The same event applied twice changes nothing, because a process may die between the
//! table and the counter of retired events.
//!
//! The table doubles when it is half full: the next one is filled beside it, then one word switches over. If
//! the file can't grow any more, the table fills further; an entry that finds no room at all is counted, and
//! said once, because from then on the live set is not exact.

use std::ops::Range;

use memtrace_format::blackbox::{Class, FREE_AGAIN, LIVE, LIVE_TABLES, at, key, live_table};
use memtrace_format::event::{Event, FLAG_FAILED, FLAG_PENDING, Kind, Layer, WORDS};
use memtrace_format::ledger::{self, Books, Move};
use memtrace_format::past::{self, Past};
use memtrace_format::replay::{PAGE, State, pages};

use crate::message;
use crate::record::blackbox::Space;
use crate::sync::{AtomicU64, Ordering, fence};

type Entry = [AtomicU64; WORDS];

/// Where the count of events that a pending block waits for is kept, in the entry's head word.
const WAITS_SHIFT: u32 = 56;

/// See the module's essay.
pub struct Live {
    entries: &'static [Entry],
    header: &'static [AtomicU64],
    space: Space,
    /// Where the n-th table lies.
    place: fn(usize) -> Range<usize>,
    used: usize,
    said_full: bool,
}

impl Live {
    /// An empty table over the live region (all zero) and the header words that describe it.
    pub fn new(entries: &'static [Entry], header: &'static [AtomicU64], space: Space) -> Live {
        Live { entries, header, space, place: live_table, used: 0, said_full: false }
    }

    /// One that begins with a single entry, for a model that tries everything.
    #[cfg(test)]
    pub fn tiny(entries: &'static [Entry], header: &'static [AtomicU64]) -> Live {
        let place = |n: usize| (1 << n) - 1..(2 << n) - 1;
        Live { place, ..Live::new(entries, header, Space::MEMORY) }
    }

    fn table(&self) -> &'static [Entry] {
        let n = self.header[at::LIVE_TABLE].load(Ordering::Relaxed) as usize;
        &self.entries[(self.place)(n)]
    }

    /// Takes a retired event into account.
    pub fn apply(&mut self, event: &Event) {
        // A reader in another process must not believe a table that changes under it.
        let sequence = &self.header[at::LIVE_SEQUENCE];
        let ticket = sequence.fetch_add(1, Ordering::AcqRel) / 2;
        // Who sees any word of the change sees an odd number, too.
        fence(Ordering::Release);
        if event.flags & FLAG_FAILED == 0 {
            self.change(event, ticket);
        }
        sequence.fetch_add(1, Ordering::AcqRel);
    }

    fn change(&mut self, event: &Event, ticket: u64) {
        match (event.layer, event.kind) {
            (_, Kind::Mark) => {} // it changes no memory
            (Layer::Framework, Kind::SegmentMap) => {
                for addr in pages(event.addr, event.size) {
                    self.put(Class::Page, addr, &Event { addr, size: PAGE, ..*event });
                }
            }
            (Layer::Framework, Kind::SegmentUnmap) => {
                for addr in pages(event.addr, event.size) {
                    self.remove(Class::Page, addr);
                }
            }
            (Layer::Framework, Kind::SegmentFree) => self.remove(Class::Segment, event.addr),
            (Layer::Framework, Kind::FreeCompleted) => self.remove_block(event.addr),
            (Layer::Framework, Kind::FreeRequested) if event.flags & FLAG_PENDING == 0 => {
                self.remove_block(event.addr);
            }
            (Layer::Framework, Kind::Alloc) => {
                self.forget_waits(event.addr);
                self.put(Class::Block, event.addr, event);
            }
            (Layer::Framework, Kind::FreeRequested) => {
                if let Some(entry) = self.find(Class::Block, event.addr) {
                    entry[1].fetch_or(u64::from(FLAG_PENDING) << 24, Ordering::Relaxed);
                }
            }
            (Layer::Framework, Kind::WaitsFor) => {
                if let Some(block) = self.find(Class::Block, event.addr)
                    && self.find(Class::Wait, event.extra).is_none()
                {
                    block[1].fetch_add(1 << WAITS_SHIFT, Ordering::Relaxed);
                    self.put(Class::Wait, event.extra, event);
                }
            }
            (_, Kind::EventReady) => self.event_ready(event.extra),
            (Layer::Framework, _) => {
                if let Some((class, k)) = key(event) {
                    self.put(class, k, event);
                }
            }
            (Layer::Device | Layer::Host, _) => {
                ledger::apply(self, event, ticket, &mut |_| ());
            }
        }
    }

    fn remove_block(&mut self, addr: u64) {
        self.forget_waits(addr);
        self.remove(Class::Block, addr);
    }

    /// A block that goes before its events are ready (its history has a hole) leaves none of them behind.
    fn forget_waits(&mut self, addr: u64) {
        let waits =
            self.find(Class::Block, addr).map(|e| e[1].load(Ordering::Relaxed) >> WAITS_SHIFT);
        if waits.unwrap_or(0) == 0 {
            return;
        }
        for entry in self.table() {
            let words = words_of(entry);
            let event = unpack(&words).filter(|_| words[0] == LIVE);
            if let Some((Class::Wait, handle)) = event.as_ref().and_then(key)
                && words[3] == addr
            {
                self.remove(Class::Wait, handle);
            }
        }
    }

    fn event_ready(&mut self, handle: u64) {
        let Some(wait) = self.find(Class::Wait, handle) else { return };
        let addr = wait[3].load(Ordering::Relaxed);
        self.remove(Class::Wait, handle);
        let Some(block) = self.find(Class::Block, addr) else { return };
        let head = block[1].load(Ordering::Relaxed);
        let waits = (head >> WAITS_SHIFT).saturating_sub(1);
        block[1].store(head & !(u64::MAX << WAITS_SHIFT) | waits << WAITS_SHIFT, Ordering::Relaxed);
        if waits == 0 && head & u64::from(FLAG_PENDING) << 24 != 0 {
            self.remove(Class::Block, addr);
        }
    }

    fn find(&self, class: Class, k: u64) -> Option<&'static Entry> {
        probe(self.table(), class, k)
            .take_while(|e| e[0].load(Ordering::Relaxed) != 0)
            .find(|e| e[0].load(Ordering::Relaxed) == LIVE && is(e, class, k))
    }

    fn put(&mut self, class: Class, k: u64, event: &Event) {
        let known = self.find(class, k);
        self.note(known.and_then(|e| Move::of(class, &unpack(&words_of(e))?, false)));
        self.note(Move::of(class, event, true));
        if let Some(entry) = known {
            entry[0].store(FREE_AGAIN, Ordering::Release);
            fill(entry, event);
            return;
        }
        if self.used * 2 >= self.table().len() {
            self.grow();
        }
        let free = probe(self.table(), class, k).find(|e| e[0].load(Ordering::Relaxed) != LIVE);
        let Some(entry) = free else {
            self.refuse();
            return;
        };
        fill(entry, event);
        self.count(1);
    }

    fn remove(&mut self, class: Class, k: u64) {
        if let Some(entry) = self.find(class, k) {
            self.note(unpack(&words_of(entry)).and_then(|e| Move::of(class, &e, false)));
            entry[0].store(FREE_AGAIN, Ordering::Release);
            self.tidy(entry);
            self.count(-1);
        }
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

    /// Entries that are free again lengthen every search that passes them. Where a run of them ends at an
    /// entry never used, they may become never used, too.
    fn tidy(&self, entry: &'static Entry) {
        let table = self.table();
        let mask = table.len() - 1;
        let here =
            (std::ptr::from_ref(entry) as usize - table.as_ptr() as usize) / size_of::<Entry>();
        if table[(here + 1) & mask][0].load(Ordering::Relaxed) != 0 {
            return;
        }
        let mut i = here;
        while table[i][0].load(Ordering::Relaxed) == FREE_AGAIN {
            table[i][0].store(0, Ordering::Release);
            i = i.wrapping_sub(1) & mask;
        }
    }

    fn count(&mut self, by: isize) {
        self.used = self.used.saturating_add_signed(by);
        self.header[at::LIVE_USED].store(self.used as u64, Ordering::Relaxed);
    }

    fn grow(&mut self) {
        let n = self.header[at::LIVE_TABLE].load(Ordering::Relaxed) as usize;
        if n + 1 >= LIVE_TABLES || self.entries.len() < (self.place)(n + 1).end {
            return;
        }
        let next = &self.entries[(self.place)(n + 1)];
        if !self.space.reserve(next) {
            return;
        }
        for entry in self.table().iter().filter(|e| e[0].load(Ordering::Relaxed) == LIVE) {
            let words = words_of(entry);
            let Some((class, k)) = unpack(&words).as_ref().and_then(key) else { continue };
            let mut free = probe(next, class, k).filter(|e| e[0].load(Ordering::Relaxed) != LIVE);
            if let Some(to) = free.next() {
                for (cell, word) in to[1..].iter().zip(&words[1..]) {
                    cell.store(*word, Ordering::Relaxed);
                }
                to[0].store(LIVE, Ordering::Release);
            }
        }
        self.header[at::LIVE_TABLE].store(n as u64 + 1, Ordering::Release);
    }

    fn refuse(&mut self) {
        self.header[at::LIVE_REFUSED].fetch_add(1, Ordering::Relaxed);
        if !std::mem::replace(&mut self.said_full, true) {
            message!(
                "no room for more live blocks in the black box: older blocks will be missing from snapshots; \
                 set MEMTRACE_BLACKBOX to a folder with more room, or MEMTRACE_EVENTS higher"
            );
        }
    }

    /// What is in the table, copied and nothing else: whoever retires waits for this.
    pub fn copy(&self) -> Copied {
        let mut entries = Vec::with_capacity(self.used);
        for entry in self.table().iter().filter(|e| e[0].load(Ordering::Relaxed) == LIVE) {
            entries.push(words_of(entry));
        }
        let past = at::PAST..at::PAST + past::WORDS * past::DEVICES;
        let past = self.header.get(past).unwrap_or_default();
        Copied {
            entries,
            anomalies: self.header[at::ANOMALIES].load(Ordering::Relaxed),
            past: past.iter().map(|word| word.load(Ordering::Relaxed)).collect(),
        }
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

impl Books for Live {
    fn get(&self, class: Class, k: u64) -> Option<Event> {
        unpack(&words_of(self.find(class, k)?))
    }
    fn put(&mut self, class: Class, k: u64, event: &Event) {
        Live::put(self, class, k, event);
    }
    fn update(&mut self, class: Class, k: u64, change: &dyn Fn(&mut Event)) {
        let Some(entry) = self.find(class, k) else { return };
        let Some(mut event) = unpack(&words_of(entry)) else { return };
        change(&mut event);
        // A rule changes one word; each is right after its own store.
        for (cell, word) in entry[1..].iter().zip(event.pack()) {
            if cell.load(Ordering::Relaxed) != word {
                cell.store(word, Ordering::Release);
            }
        }
    }
    fn remove(&mut self, class: Class, k: u64) {
        Live::remove(self, class, k);
    }
    fn select(&self, is: &dyn Fn(Class, &Event) -> bool) -> Vec<(Class, u64)> {
        let live = self.table().iter().filter(|e| e[0].load(Ordering::Relaxed) == LIVE);
        live.filter_map(|entry| {
            let event = unpack(&words_of(entry))?;
            key(&event).filter(|(class, _)| is(*class, &event))
        })
        .collect()
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

fn is(entry: &Entry, class: Class, k: u64) -> bool {
    unpack(&words_of(entry)).as_ref().and_then(key) == Some((class, k))
}

/// The entries of a table in the order in which a key looks at them.
fn probe(table: &'static [Entry], class: Class, k: u64) -> impl Iterator<Item = &'static Entry> {
    let mask = table.len() - 1;
    let hash = (k ^ (class as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let first = (hash >> 32) as usize;
    (0..table.len()).map(move |i| &table[(first + i) & mask])
}

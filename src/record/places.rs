//! Where the entries of the live table lie, and how one is found again.
//!
//! An entry has a place in the file's live region, any place: a reader takes all that are there,
//! in whatever order. Places that are free again are used first. So the region is as large as what
//! was ever alive at a time, and entries that are gone make no search longer. Once the file has no
//! more room, new entries go into plain memory, until places in the file become free. Once there
//! is no memory either, they are refused.
//!
//! The index is this process's own and in no file: chains of places, by a hash of class and
//! key. The number of chains grows by one with the number of entries (*linear hashing*), so
//! nobody ever waits for a table to be filled anew. Adding, finding and removing take the same
//! few steps however many entries there are, and whether or not there is room. All of it is
//! memory that the kernel gives page by page as it is touched. Nothing here calls an
//! allocator, since it may run in a hook.
//!
//! Only the holder of the retiring role is here. It must never wait, nor look
//! at all entries for the sake of one.

use std::num::NonZeroU32;

use memtrace_format::blackbox::{Class, LIVE, LIVE_FIRST, LIVE_MOST, at, key};
use memtrace_format::event::{Event, WORDS};

use crate::os::space::Space;
use crate::os::sync::{AtomicU64, Ordering, Plain, zeroed_records, zeroed_words};

/// An entry: its first word says whether it counts, the others are an event's.
pub type Entry = [AtomicU64; WORDS];

/// The number of a place, from 1 on: first those in the file, then those in memory.
pub type Place = NonZeroU32;

/// The file is asked for no less than this at a time: a page.
const STEP: usize = 4096 / size_of::<Entry>();
/// So many entries go elsewhere before room is looked for again.
const PAUSE: u32 = 4096;
/// Of what the file system has left, growing takes at most one part in so
/// many: others need room there, too.
const SHARE: u64 = 2;

/// What is known of a place beside its entry.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Link {
    /// The next one in the same chain, or among the free ones.
    next: Option<Place>,
    hash: u32,
    /// Of a block: the last event that its free waits for. Of such an event: the one before.
    wait: Option<Place>,
    /// Its neighbours among those of its class.
    before: Option<Place>,
    after: Option<Place>,
}

// SAFETY: numbers, of which 0 is one and no place.
unsafe impl Plain for Link {}

/// Places in the file, or in memory.
#[derive(Default)]
struct Part {
    entries: &'static [Entry],
    links: &'static mut [Link],
    /// Entries that may be written.
    room: usize,
    /// Entries that have ever been.
    fresh: usize,
    free: Option<Place>,
}

/// See the module's documentation.
pub struct Places {
    inside: Part,
    outside: Part,
    /// Where each chain begins.
    chains: &'static mut [Option<Place>],
    /// How many of them are in use.
    split: usize,
    used: usize,
    /// Where the list of each class begins.
    classes: [Option<Place>; CLASSES],
    header: &'static [AtomicU64],
    space: Space,
    /// Entries until room is looked for again.
    pause: u32,
    max_outside: usize,
}

/// More than there are.
const CLASSES: usize = 16;

impl Places {
    /// Over the live region (all zero), of which `first` entries may be written now.
    pub fn new(entries: &'static [Entry], header: &'static [AtomicU64], space: Space) -> Places {
        let most = entries.len().min(LIVE_MOST);
        let links: &mut [Link] = zeroed_records(most);
        let entries = &entries[..links.len()];
        let room = LIVE_FIRST.min(entries.len());
        Places {
            inside: Part { entries, links, room, ..Part::default() },
            outside: Part::default(),
            chains: zeroed_records(2 * most),
            split: 1,
            used: 0,
            classes: [None; CLASSES],
            header,
            space,
            pause: 0,
            max_outside: most,
        }
    }

    /// With room for this many at first, and no more in memory than that.
    #[cfg(test)]
    #[must_use]
    pub fn bounded(self, room: usize, max_outside: usize) -> Places {
        let inside = Part { room, ..self.inside };
        let chains = zeroed_records(inside.entries.len() + max_outside);
        Places { inside, chains, max_outside, ..self }
    }

    /// How many entries the longest chain has.
    #[cfg(test)]
    pub fn longest_chain(&self) -> usize {
        let length = |first: &Option<Place>| {
            std::iter::successors(*first, |place| self.link(*place).next).count()
        };
        self.chains.iter().map(length).max().unwrap_or(0)
    }

    /// How many entries there are.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Does a reader of the file lack this one?
    pub fn is_outside(&self, place: Place) -> bool {
        place.get() as usize > self.inside.entries.len()
    }

    fn part(&self, place: Place) -> (&Part, usize) {
        let at = place.get() as usize - 1;
        match at.checked_sub(self.inside.entries.len()) {
            None => (&self.inside, at),
            Some(at) => (&self.outside, at),
        }
    }

    fn link(&self, place: Place) -> &Link {
        let (part, at) = self.part(place);
        &part.links[at]
    }

    fn link_mut(&mut self, place: Place) -> &mut Link {
        let at = place.get() as usize - 1;
        match at.checked_sub(self.inside.entries.len()) {
            None => &mut self.inside.links[at],
            Some(at) => &mut self.outside.links[at],
        }
    }

    /// The entry at a place.
    pub fn entry(&self, place: Place) -> &'static Entry {
        let (part, at) = self.part(place);
        &part.entries[at]
    }

    /// All entries that count.
    pub fn all(&self) -> impl Iterator<Item = &'static Entry> {
        let ever = |part: &Part| &part.entries[..part.fresh];
        let all = ever(&self.inside).iter().chain(ever(&self.outside));
        all.filter(|e| e[0].load(Ordering::Relaxed) == LIVE)
    }

    /// Where the entry with this key is.
    pub fn find(&self, class: Class, k: u64) -> Option<Place> {
        let hash = hash(class, k);
        let mut at = *self.chains.get(self.chain(hash))?;
        while let Some(place) = at {
            let link = self.link(place);
            if link.hash == hash
                && read(self.entry(place)).as_ref().and_then(key) == Some((class, k))
            {
                break;
            }
            at = link.next;
        }
        at
    }

    fn chain(&self, hash: u32) -> usize {
        let mask = self.split.next_power_of_two() - 1;
        let chain = hash as usize & mask;
        if chain < self.split { chain } else { chain & (mask >> 1) }
    }

    /// One more chain, and what belongs into it.
    fn split(&mut self) {
        if self.split >= self.chains.len() {
            return;
        }
        let from = self.split & !(1 << self.split.ilog2());
        self.split += 1;
        let mut at = self.chains[from].take();
        while let Some(place) = at {
            let chain = self.chain(self.link(place).hash);
            let before = self.chains[chain].replace(place);
            at = std::mem::replace(&mut self.link_mut(place).next, before);
        }
    }

    /// A place for a new entry with this key, which the caller fills. `None`: there is no room.
    pub fn add(&mut self, class: Class, k: u64) -> Option<Place> {
        if self.used >= self.split {
            self.split();
        }
        let hash = hash(class, k);
        let chain = self.chain(hash);
        self.chains.get(chain)?;
        let place = self.take()?;
        let next = self.chains[chain].replace(place);
        let after = self.classes[class as usize].replace(place);
        *self.link_mut(place) = Link { next, hash, after, ..Link::default() };
        if let Some(after) = after {
            self.link_mut(after).before = Some(place);
        }
        self.used += 1;
        Some(place)
    }

    /// Takes an entry out, which the caller has made one that doesn't count.
    pub fn remove(&mut self, place: Place, class: Class) {
        let Link { next, hash, before, after, .. } = *self.link(place);
        let chain = self.chain(hash);
        let mut at = self.chains[chain];
        if at == Some(place) {
            self.chains[chain] = next;
        } else {
            while let Some(other) = at {
                at = self.link(other).next;
                if at == Some(place) {
                    self.link_mut(other).next = next;
                }
            }
        }
        match before {
            Some(before) => self.link_mut(before).after = after,
            None => self.classes[class as usize] = after,
        }
        if let Some(after) = after {
            self.link_mut(after).before = before;
        }
        let outside = self.is_outside(place);
        let free = if outside { &mut self.outside.free } else { &mut self.inside.free };
        let next = free.replace(place);
        *self.link_mut(place) = Link { next, ..Link::default() };
        self.used -= 1;
    }

    /// The places of a class's entries.
    pub fn of_class(&self, class: Class) -> impl Iterator<Item = Place> {
        let first = self.classes[class as usize];
        std::iter::successors(first, |place| self.link(*place).after)
    }

    /// The events that a block's free waits for.
    pub fn waits(&self, block: Place) -> impl Iterator<Item = Place> {
        std::iter::successors(self.link(block).wait, |event| self.link(*event).wait)
    }

    /// The first of the events that a block's free waits for, which then waits for none; of
    /// an event, the one that hangs on it.
    pub fn take_waits(&mut self, place: Place) -> Option<Place> {
        self.link_mut(place).wait.take()
    }

    /// A block's free waits for this event, too.
    pub fn wait(&mut self, block: Place, event: Place) {
        let before = self.link_mut(block).wait.replace(event);
        self.link_mut(event).wait = before;
    }

    /// A block's free waits for this event no more.
    pub fn ready(&mut self, block: Place, event: Place) {
        let rest = self.link_mut(event).wait.take();
        let mut at = block;
        while let Some(next) = self.link(at).wait {
            if next == event {
                self.link_mut(at).wait = rest;
                return;
            }
            at = next;
        }
    }

    fn take(&mut self) -> Option<Place> {
        let inside = self.take_inside();
        if inside.is_some() {
            return inside;
        }
        match self.pause.checked_sub(1) {
            Some(rest) => self.pause = rest,
            None if self.grow() => return self.take_inside(),
            None => {
                self.go_outside();
                self.pause = PAUSE;
            }
        }
        self.outside.take(self.inside.entries.len())
    }

    fn take_inside(&mut self) -> Option<Place> {
        let place = self.inside.take(0);
        self.header[at::LIVE_ROOM].store(self.inside.fresh as u64, Ordering::Relaxed);
        place
    }

    /// More room in the file: twice as much as there is, or whatever there is room for.
    fn grow(&mut self) -> bool {
        let Part { entries, room, .. } = &mut self.inside;
        let mut step = (*room).max(STEP).min(entries.len() - *room);
        let least = step.clamp(1, STEP);
        while step >= least {
            if self.space.reserve(&entries[*room..*room + step], SHARE) {
                *room += step;
                return true;
            }
            step = step / 2 / STEP * STEP; // whole pages: a failure takes back all of one
        }
        false
    }

    /// Room in memory, once.
    fn go_outside(&mut self) {
        if !self.outside.entries.is_empty() {
            return;
        }
        let links: &mut [Link] = zeroed_records(self.max_outside);
        let mut count = links.len();
        while count >= STEP {
            let words = zeroed_words(count * WORDS);
            if !words.is_empty() {
                let entries = words.as_chunks().0;
                let room = entries.len();
                self.outside = Part { entries, links, room, ..Part::default() };
                return;
            }
            count /= 2;
        }
    }
}

impl Part {
    fn take(&mut self, before: usize) -> Option<Place> {
        if let Some(place) = self.free {
            self.free = self.links[place.get() as usize - 1 - before].next.take();
            return Some(place);
        }
        let at = Some(self.fresh).filter(|at| *at < self.room)?;
        self.fresh += 1;
        Place::new((before + at) as u32 + 1)
    }
}

/// The event of an entry.
pub fn read(entry: &Entry) -> Option<Event> {
    Event::unpack(std::array::from_fn(|i| entry[i + 1].load(Ordering::Relaxed)))
}

fn hash(class: Class, k: u64) -> u32 {
    ((k ^ (class as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

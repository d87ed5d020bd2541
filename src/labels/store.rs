//! The tree of labels: each (parent, kind, name) once, made by all threads
//! at the same time without a lock.
//!
//! It lives in memory of the process's own, for two reasons. A program names what it does
//! before its first CUDA call, when there is no black box yet. And a forked child goes on
//! inside the ranges that its parent was in.
//!
//! A black box has a copy, at the same positions. A new label is written into both, and a
//! new box takes over all labels that are there. Whichever of the two comes second sees what
//! the other did, so no label is missed.
//!
//! A label is never forgotten. When there is no room, a range has no label of its own. It then
//! counts as a part of the range around it, and the miss is counted.

use memtrace_format::blackbox::Region;
use memtrace_format::event::{LabelId, NO_LABEL};
use memtrace_format::labels::{
    DEEPEST, LABEL_FIXED, LABEL_MAGIC, LABEL_WORDS, LabelKind, pack_parent,
};
use memtrace_format::stacks::{HEAD_CAPACITY, HEAD_NEXT, HEAD_REFUSED, HEADER, RECORD_READY};

use crate::os::locks::SetOnce;
use crate::os::space::{Room, Space};
use crate::os::sync::{AtomicU64, Ordering, Real, fence, of_file, to_file, zeroed_words};
use crate::record::Recorder;
use crate::record::switch::recorder;
use crate::stack::arena::Arena;

/// Names are cut to this many bytes.
const LONGEST: usize = 240;
/// Slots of the hash table.
const SLOTS: usize = 1 << 15;
/// The longest run of taken slots that is searched.
const MAX_PROBES: usize = 256;
/// Where a record's second word has its depth, above parent and kind.
const DEPTH_AT: u32 = 40;

/// See the module's documentation.
pub struct Store {
    words: &'static [AtomicU64],
    arena: Arena,
    /// Ids by hash.
    slots: &'static [AtomicU64],
}

/// The phase in which gradients are computed.
pub const BACKWARD: &[u8] = b"backward";
/// The phase of a model's call.
pub const FORWARD: &[u8] = b"forward";
/// The phase of an optimizer's step.
pub const OPTIMIZER_STEP: &[u8] = b"optimizer_step";

static STORE: SetOnce<Store> = SetOnce::new();

/// The one of this process, if anything has been named yet.
pub fn existing() -> Option<&'static Store> {
    STORE.get()
}

/// The one of this process; `None` if there is no memory for it.
pub fn store() -> Option<&'static Store> {
    existing().or_else(make)
}

/// Who comes second leaves a mapping behind, untouched, which costs addresses alone.
#[cold]
fn make() -> Option<&'static Store> {
    Some(STORE.set(Store::new()?))
}

/// Where the copy in a black box is.
#[derive(Clone, Copy)]
struct Copied {
    region: &'static [AtomicU64],
    room: &'static Room,
}

impl Copied {
    fn into(recorder: &'static Recorder) -> Copied {
        let region = of_file(recorder.blackbox.region(Region::Labels));
        Copied { region, room: &recorder.labels }
    }
}

impl Store {
    fn new() -> Option<Store> {
        let slots = zeroed_words(SLOTS);
        if slots.len() < SLOTS {
            return None;
        }
        Store::over(zeroed_words(LABEL_WORDS), slots)
    }

    /// In these words, with so many slots as a power of two.
    fn over(words: &'static [AtomicU64], slots: &'static [AtomicU64]) -> Option<Store> {
        Some(Store { words, arena: Arena::new(words, LABEL_MAGIC, HEADER, Space::MEMORY)?, slots })
    }

    /// The label of this name inside `parent`; `None` if there is no room for it.
    pub fn intern(&self, parent: LabelId, kind: LabelKind, name: &[u8]) -> Option<LabelId> {
        self.intern_and_copy(parent, kind, name, || recorder().map(Copied::into))
    }

    /// `now` says where the black box is, if there is one.
    fn intern_and_copy(
        &self,
        parent: LabelId,
        kind: LabelKind,
        name: &[u8],
        now: impl Fn() -> Option<Copied>,
    ) -> Option<LabelId> {
        let name = cut(name);
        let link = pack_parent(parent, kind);
        let last = self.slots.len() - 1;
        let first = hash(link, name) as usize & last;
        let mut made = None;
        for slot in first..first + MAX_PROBES.min(self.slots.len()) {
            let cell = &self.slots[slot & last];
            let mut seen = cell.load(Ordering::Acquire);
            if seen == 0 {
                let new = match made {
                    Some(new) => new,
                    None => *made.insert(self.write(link, name)?),
                };
                match cell.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        self.mirror(new as usize, now);
                        return Some(new as LabelId);
                    }
                    Err(other) => seen = other, // who lost a race leaves a few words behind
                }
            }
            if self.is(seen as usize, link, name) {
                return Some(seen as LabelId);
            }
        }
        self.refuse();
        None
    }

    fn write(&self, link: u64, name: &[u8]) -> Option<u64> {
        let depth = self.depth(link as LabelId) + 1;
        if depth as usize > DEEPEST {
            self.refuse();
            return None;
        }
        let mut record = self.arena.reserve(LABEL_FIXED, name.len())?;
        record.set(1, link | u64::from(depth) << DEPTH_AT);
        record.set(2, name.len() as u64);
        record.bytes(name);
        Some(record.finish(0) as u64)
    }

    /// How many names found no room.
    pub fn refused(&self) -> u64 {
        self.words[HEAD_REFUSED].load(Ordering::Relaxed)
    }

    fn refuse(&self) {
        self.words[HEAD_REFUSED].fetch_add(1, Ordering::Relaxed);
    }

    fn word(&self, label: LabelId, i: usize) -> u64 {
        self.words.get(label as usize + i).map_or(0, |w| w.load(Ordering::Acquire))
    }

    fn depth(&self, label: LabelId) -> u32 {
        if label == NO_LABEL { 0 } else { (self.word(label, 1) >> DEPTH_AT) as u32 }
    }

    fn is(&self, at: usize, link: u64, name: &[u8]) -> bool {
        let label = at as LabelId;
        let same_place = self.word(label, 1) & ((1 << DEPTH_AT) - 1) == link;
        same_place && self.word(label, 2) as u32 as usize == name.len() && {
            let chunks = name.chunks(8).zip(LABEL_FIXED..);
            chunks.into_iter().all(|(bytes, i)| self.word(label, i) == word_of(bytes))
        }
    }

    /// Is this the id of a label?
    pub fn has(&self, label: LabelId) -> bool {
        let at = label as usize;
        let next = self.words[HEAD_NEXT].load(Ordering::Acquire) as usize;
        (HEADER..next).contains(&at) && self.word(label, 0) & RECORD_READY != 0
    }

    /// What it is inside of.
    pub fn parent(&self, label: LabelId) -> LabelId {
        self.word(label, 1) as LabelId
    }

    /// What it is the name of.
    pub fn kind(&self, label: LabelId) -> LabelKind {
        LabelKind::from_u8((self.word(label, 1) >> 32) as u8).unwrap_or_default()
    }

    /// Is this label, or one around it, the phase of this name?
    pub fn is_inside(&self, label: LabelId, phase: &[u8]) -> bool {
        self.find(label, phase).is_some()
    }

    /// What is around the phase of this name, if `label` is inside it; else `label` itself.
    pub fn around(&self, label: LabelId, phase: &[u8]) -> LabelId {
        self.find(label, phase).map_or(label, |found| self.parent(found))
    }

    /// The innermost phase of this name: the label itself, or one around it.
    fn find(&self, label: LabelId, phase: &[u8]) -> Option<LabelId> {
        let outwards = std::iter::successors(Some(label), |l| Some(self.parent(*l)));
        outwards
            .take_while(|l| *l != NO_LABEL)
            .take(DEEPEST)
            .find(|l| self.kind(*l) == LabelKind::Phase && self.name(*l) == phase)
    }

    /// Its name.
    pub fn name(&self, label: LabelId) -> Vec<u8> {
        let length = (self.word(label, 2) as u32 as usize).min(LONGEST);
        let words = (0..length.div_ceil(8)).map(|i| self.word(label, LABEL_FIXED + i));
        let mut name: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        name.truncate(length);
        name
    }

    /// The label of the backward work for what was done under `label`: the same label,
    /// with the phase `backward` in place of the one it was in. Remembered beside the
    /// label, so that it is worked out once.
    pub fn backward_of(&self, label: LabelId) -> LabelId {
        let inside = |parent| self.intern(parent, LabelKind::Phase, BACKWARD).unwrap_or(parent);
        if label == NO_LABEL {
            return inside(NO_LABEL);
        }
        let known = (self.word(label, 2) >> 32) as LabelId;
        if known != NO_LABEL {
            return known;
        }
        let found = match self.kind(label) {
            LabelKind::Phase if self.name(label) == FORWARD => inside(self.parent(label)),
            LabelKind::Phase => label,
            kind => {
                let parent = self.backward_of(self.parent(label));
                self.intern(parent, kind, &self.name(label)).unwrap_or(parent)
            }
        };
        let Some(word) = self.words.get(label as usize + 2) else { return found };
        // Two threads may find different ones, if the last room went in between. The first counts.
        let note = |word: u64| (word >> 32 == 0).then_some(word | u64::from(found) << 32);
        match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, note) {
            Ok(_) => found,
            Err(known) => (known >> 32) as LabelId,
        }
    }

    /// The label of a module that is called under the label `current`. It lies
    /// inside what the program named itself, and beside the module around it: its
    /// full name says that it is inside that.
    pub fn module(&self, current: LabelId, name: &[u8]) -> LabelId {
        let mut parent = current;
        while parent != NO_LABEL
            && matches!(self.kind(parent), LabelKind::Module | LabelKind::Operator)
        {
            parent = self.parent(parent);
        }
        self.intern(parent, LabelKind::Module, name).unwrap_or(current)
    }

    /// Writes a new label into the black box, too, if there is one.
    fn mirror(&self, at: usize, now: impl Fn() -> Option<Copied>) {
        fence(Ordering::SeqCst);
        if let Some(to) = now() {
            self.copy(to, at);
        }
    }

    /// Writes everything into a black box that has just come into use.
    pub fn mirror_all(&self, recorder: &'static Recorder) {
        self.copy_all(Copied::into(recorder));
    }

    /// All that can be found. A record that is being written can't, and its thread sees that there
    /// is a black box.
    fn copy_all(&self, to: Copied) {
        fence(Ordering::SeqCst);
        for slot in self.slots {
            match slot.load(Ordering::Acquire) {
                0 => {}
                at => self.copy(to, at as usize),
            }
        }
    }

    fn copy(&self, Copied { region, room }: Copied, at: usize) {
        let head = self.words[at].load(Ordering::Acquire);
        let end = at + head as u32 as usize;
        let (Some(from), Some(to)) = (self.words.get(at + 1..end), region.get(at + 1..end)) else {
            return;
        };
        if !room.reaches(end) {
            return; // in the file the label has no name
        }
        for (from, to) in from.iter().zip(to) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        region[HEAD_CAPACITY].store(HEADER as u64, Ordering::Relaxed);
        region[HEAD_NEXT].fetch_max(end as u64, Ordering::Relaxed);
        let refused = self.words[HEAD_REFUSED].load(Ordering::Relaxed);
        region[HEAD_REFUSED].store(refused, Ordering::Relaxed);
        region[at].store(head, Ordering::Release);
        region[0].store(LABEL_MAGIC, Ordering::Release);
    }

    /// The words, for a reader.
    pub fn words(&self) -> &'static [Real] {
        to_file(self.words)
    }
}

/// At most [`LONGEST`] bytes, whole characters, nothing after a zero or a line's end.
fn cut(name: &[u8]) -> &[u8] {
    let end = name.iter().position(|b| *b < b' ').unwrap_or(name.len()).min(LONGEST);
    let mut end = end;
    while end < name.len() && end > 0 && name[end] & 0xc0 == 0x80 {
        end -= 1;
    }
    &name[..end]
}

fn word_of(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

fn hash(link: u64, name: &[u8]) -> u64 {
    let folded = name.chunks(8).fold(link ^ name.len() as u64, |hash, bytes| {
        (hash ^ word_of(bytes)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    let product = u128::from(folded) * 0xd1b5_4a32_d192_ed03;
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::labels::{label, path};

    /// Each was seen red. With `Relaxed` at a slot, equal names are two labels, or what is found
    /// can't be read yet. Without the look at the name, different ones are one. Without either
    /// fence, a label is missing in the box. A number that is added to what another thread has
    /// noted beside a label is neither's.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        /// Words of the smallest store.
        const WORDS: usize = HEADER + 64;

        fn check(model: impl Fn(Arc<Store>) + Sync + Send + 'static) {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(move || {
                let store = Store::over(zeroed_words(WORDS), zeroed_words(8));
                model(Arc::new(store.expect("large enough and empty")));
            });
        }

        fn range(store: &Store, name: &[u8]) -> LabelId {
            let id = store.intern(NO_LABEL, LabelKind::Range, name).expect("room");
            assert_eq!(store.name(id), name, "whoever made it");
            id
        }

        /// Two threads name something at the same time.
        fn two(store: &Arc<Store>, names: [&'static [u8]; 2]) -> [LabelId; 2] {
            let other = store.clone();
            let other = thread::spawn(move || range(&other, names[1]));
            [range(store, names[0]), other.join().unwrap()]
        }

        #[test]
        fn equal_names_are_one_label() {
            check(|store| {
                let [here, there] = two(&store, [b"a", b"a"]);
                assert_eq!(here, there);
            });
        }

        #[test]
        fn names_that_meet_in_the_table_are_two_labels() {
            let place = |n: u8| hash(pack_parent(NO_LABEL, LabelKind::Range), &[n]) & 7;
            let other = (b'b'..).find(|n| place(*n) == place(b'a')).expect("one in eight");
            let other: &'static [u8] = Vec::leak(vec![other]);
            check(move |store| {
                let [here, there] = two(&store, [b"a", other]);
                assert_ne!(here, there);
                assert_eq!([range(&store, b"a"), range(&store, other)], [here, there]);
            });
        }

        /// Its own thread writes it there, or the one that makes the box, or both.
        #[test]
        fn a_label_that_is_named_while_a_box_begins_is_in_it() {
            check(|store| {
                let region = zeroed_words(WORDS);
                let room: &'static Room = Box::leak(Box::new(Room::new(region, Space::MEMORY)));
                let to = Copied { region, room };
                let is_there = Arc::new(AtomicU64::new(0));
                let namer = (store.clone(), is_there.clone());
                let namer = thread::spawn(move || {
                    let now = || (namer.1.load(Ordering::Acquire) != 0).then_some(to);
                    namer.0.intern_and_copy(NO_LABEL, LabelKind::Range, b"a", now).expect("room")
                });
                is_there.store(1, Ordering::Release);
                store.copy_all(to);
                let label = namer.join().unwrap() as usize;
                let words =
                    |of: &[AtomicU64]| [0, 1, 2, 3].map(|i| of[label + i].load(Ordering::Relaxed));
                assert_eq!(words(region), words(store.words));
            });
        }

        /// One of them finds room for a label of its own, the other one doesn't.
        #[test]
        fn two_who_look_for_what_undoes_a_label_find_one() {
            check(|store| {
                let module = store.intern(NO_LABEL, LabelKind::Module, b"m").expect("room");
                let backward = store.backward_of(NO_LABEL);
                for long in [30, 16] {
                    let long = [b'x'; 240].split_at(8 * long).0;
                    store.intern(NO_LABEL, LabelKind::Range, long).expect("room");
                }
                let other = store.clone();
                let other = thread::spawn(move || other.backward_of(module));
                store.backward_of(module);
                other.join().unwrap();
                let found = store.backward_of(module);
                assert!(found == backward || store.name(found) == b"m", "{found}");
            });
        }
    }

    #[test]
    fn a_name_is_kept_once_inside_each_parent() {
        let store = Store::new().expect("memory");
        let step = store.intern(NO_LABEL, LabelKind::Range, b"step").expect("room");
        let inner = store
            .intern(step, LabelKind::Range, b"a rather long name, of more than one word")
            .expect("room");
        assert_eq!(store.intern(NO_LABEL, LabelKind::Range, b"step"), Some(step));
        assert_ne!(store.intern(step, LabelKind::Range, b"step"), Some(step));
        assert_ne!(store.intern(NO_LABEL, LabelKind::Phase, b"step"), Some(step), "another kind");
        assert_eq!(
            path(store.words(), inner).as_deref(),
            Some("step/a rather long name, of more than one word")
        );
        assert_eq!(label(store.words(), inner + 1), None, "not the position of a record");
        assert!(store.has(inner) && !store.has(0) && !store.has(inner + 1000));
    }

    #[test]
    fn threads_that_name_the_same_get_the_same() {
        let store: &'static Store = Box::leak(Box::new(Store::new().expect("memory")));
        let names: Vec<String> = (0..500).map(|i| format!("range {i}")).collect();
        let all: Vec<Vec<LabelId>> = std::thread::scope(|scope| {
            let intern =
                |n: &String| store.intern(0, LabelKind::Range, n.as_bytes()).expect("room");
            let names = &names;
            let thread = |_| scope.spawn(move || names.iter().map(intern).collect());
            let threads: Vec<_> = (0..4).map(thread).collect();
            threads.into_iter().map(|t| t.join().expect("ends")).collect()
        });
        for ids in &all {
            assert_eq!(ids, &all[0]);
        }
        for (name, id) in names.iter().zip(&all[0]) {
            assert_eq!(path(store.words(), *id).as_ref(), Some(name));
        }
    }

    #[test]
    fn without_room_there_is_no_label_and_it_is_counted() {
        let store = Store::new().expect("memory");
        let made = (0..40_000)
            .filter_map(|i| store.intern(0, LabelKind::Range, format!("{i:0>40}").as_bytes()))
            .count();
        assert!((10_000..40_000).contains(&made), "{made}");
        let refused = store.words[HEAD_REFUSED].load(Ordering::Relaxed);
        assert_eq!(refused as usize + made, 40_000);
        assert_eq!(
            store
                .intern(0, LabelKind::Range, format!("{:0>40}", 1).as_bytes())
                .map(|id| store.has(id)),
            Some(true)
        );
    }

    #[test]
    fn no_range_is_too_deep_for_a_reader() {
        let store = Store::new().expect("memory");
        let mut deepest = NO_LABEL;
        while let Some(next) = store.intern(deepest, LabelKind::Range, b"in") {
            deepest = next;
        }
        assert_eq!(path(store.words(), deepest).map(|p| p.split('/').count()), Some(DEEPEST));
    }

    #[test]
    fn backward_stands_where_forward_stood() {
        let store = Store::new().expect("memory");
        let name =
            |parent, kind, name: &str| store.intern(parent, kind, name.as_bytes()).expect("room");
        let said = |id| path(store.words(), id).unwrap_or_default();
        let batch = name(0, LabelKind::Range, "micro-batch 1");
        let forward = name(batch, LabelKind::Phase, "forward");
        let layer = store.module(forward, b"layers.0");
        let inner = store.module(layer, b"layers.0.attention");
        assert_eq!(said(inner), "micro-batch 1/forward/layers.0.attention");
        let mine = name(inner, LabelKind::Range, "softmax");
        assert_eq!(
            said(store.backward_of(mine)),
            "micro-batch 1/backward/layers.0.attention/softmax"
        );
        assert_eq!(store.backward_of(mine), store.backward_of(mine));
        assert_eq!(said(store.backward_of(NO_LABEL)), "backward");
        assert_eq!(said(store.backward_of(batch)), "backward/micro-batch 1");
        let step = name(0, LabelKind::Phase, "optimizer step");
        assert_eq!(store.backward_of(step), step);
    }

    #[test]
    fn names_are_cut_between_characters() {
        assert_eq!(cut(b"two\nlines"), b"two");
        let long = "ä".repeat(200);
        let short = cut(long.as_bytes());
        assert!(short.len() <= LONGEST && std::str::from_utf8(short).is_ok());
    }
}

//! The free blocks of a pool, in the order in which they are looked for.
//!
//! Every request looks for the first block that is large enough. Every free takes neighbours out
//! and puts one block in. That makes five searches for a request and its free. So each stream has
//! its blocks in *bins* by size, 32 for each doubling, and a bit for each bin that has some. The
//! first bin that can hold what is wanted follows from the size, the next one that does from the
//! bits. Inside a bin the order is exact, by the whole key. A bin is a short list, and a tree where
//! a program has many blocks of one size.

use std::collections::BTreeSet;

use crate::blocks::BlockIndex;
use crate::sizes::MIN_BLOCK;

/// The order of free blocks: streams apart, small before large, older
/// segments first, low addresses first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FreeKey {
    pub stream: u64,
    pub size: u64,
    /// The number of its segment.
    pub birth: u64,
    pub addr: u64,
    pub ix: BlockIndex,
}

impl FreeKey {
    /// Before every block of the stream of at least this size.
    pub fn least(stream: u64, size: u64) -> FreeKey {
        FreeKey { stream, size, birth: 0, addr: 0, ix: 0 }
    }

    /// Right behind this one.
    fn next(self) -> FreeKey {
        FreeKey { ix: self.ix + 1, ..self }
    }
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeBlocks {
    /// By stream; one stays when its last block has gone.
    streams: Vec<Bins>,
    len: usize,
}

impl FreeBlocks {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    fn find(&self, stream: u64) -> Result<usize, usize> {
        match &self.streams[..] {
            [only] if only.stream == stream => Ok(0),
            all => all.binary_search_by_key(&stream, |bins| bins.stream),
        }
    }

    #[inline]
    fn of(&self, stream: u64) -> Option<&Bins> {
        self.find(stream).ok().map(|at| &self.streams[at])
    }

    /// One more.
    pub fn insert(&mut self, key: FreeKey) {
        let at = self.find(key.stream).unwrap_or_else(|at| {
            self.streams.insert(at, Bins::of(key.stream));
            at
        });
        self.len += usize::from(self.streams[at].insert(key));
    }

    /// One less; says whether it was there.
    pub fn remove(&mut self, key: &FreeKey) -> bool {
        let removed = self.find(key.stream).is_ok_and(|at| self.streams[at].remove(key));
        self.len -= usize::from(removed);
        removed
    }

    /// Is it there?
    pub fn contains(&self, key: &FreeKey) -> bool {
        self.of(key.stream).and_then(|bins| bins.first_from(key)).is_some_and(|found| found == *key)
    }

    /// The first one of its stream that is not before `key`.
    pub fn first_from(&self, key: &FreeKey) -> Option<FreeKey> {
        self.of(key.stream)?.first_from(key)
    }

    /// Those of its stream that are not before `key`, in order.
    pub fn from(&self, key: FreeKey) -> impl Iterator<Item = FreeKey> {
        let bins = self.of(key.stream);
        let next = move |from: &FreeKey| bins.and_then(|bins| bins.first_from(from));
        std::iter::successors(next(&key), move |key| next(&key.next()))
    }

    /// Those of its stream before `key`, the last one first.
    pub fn before(&self, key: FreeKey) -> impl Iterator<Item = FreeKey> {
        let bins = self.of(key.stream);
        let last = move |key: &FreeKey| bins.and_then(|bins| bins.last_before(key));
        std::iter::successors(last(&key), last)
    }

    /// The one behind `key`, of any stream; the first of all behind
    /// nothing. For walks during which blocks go.
    pub fn after(&self, key: Option<&FreeKey>) -> Option<FreeKey> {
        let from = key.map_or(FreeKey::least(0, 0), |key| key.next());
        let (Ok(at) | Err(at)) = self.find(from.stream);
        self.streams[at..].iter().find_map(|bins| {
            let from =
                if bins.stream == from.stream { from } else { FreeKey::least(bins.stream, 0) };
            bins.first_from(&from)
        })
    }

    /// All.
    pub fn iter(&self) -> impl Iterator<Item = FreeKey> {
        std::iter::successors(self.after(None), |key| self.after(Some(key)))
    }
}

/// Bins for each doubling of the size: 2 to this.
const STEPS: u32 = 5;
/// Bins of all sizes there are.
const BINS: usize = bin_of(u64::MAX) + 1;
/// Words with a bit for each.
const WORDS: usize = BINS.div_ceil(64);
const _: () = assert!(WORDS <= u64::BITS as usize, "a bit for each word");

/// The bin for a size; larger sizes are in no lower one.
const fn bin_of(size: u64) -> usize {
    let units = size / MIN_BLOCK;
    // Below 2 × 32 units each size has its own.
    let shift = (units | 1).ilog2().saturating_sub(STEPS);
    ((shift as usize) << STEPS) + (units >> shift) as usize
}

/// The free blocks of one stream.
#[derive(Clone, Debug)]
struct Bins {
    stream: u64,
    /// A bit for each word that is not 0.
    words: u64,
    /// A bit for each bin that is not empty.
    bits: [u64; WORDS],
    /// As far as any was ever used.
    by_size: Vec<Bin>,
}

impl Bins {
    fn of(stream: u64) -> Bins {
        Bins { stream, words: 0, bits: [0; WORDS], by_size: Vec::new() }
    }

    fn insert(&mut self, key: FreeKey) -> bool {
        let at = bin_of(key.size);
        if at >= self.by_size.len() {
            self.by_size.resize_with(at + 1, Bin::default);
        }
        self.bits[at / 64] |= 1 << (at % 64);
        self.words |= 1 << (at / 64);
        self.by_size[at].insert(key)
    }

    fn remove(&mut self, key: &FreeKey) -> bool {
        let at = bin_of(key.size);
        let Some(bin) = self.by_size.get_mut(at) else { return false };
        let removed = bin.remove(key);
        if bin.is_empty() {
            self.bits[at / 64] &= !(1 << (at % 64));
            self.words &= !(u64::from(self.bits[at / 64] == 0) << (at / 64));
        }
        removed
    }

    fn first_from(&self, key: &FreeKey) -> Option<FreeKey> {
        let at = bin_of(key.size);
        let here = self.by_size.get(at).and_then(|bin| bin.first_from(key));
        here.or_else(|| self.by_size[self.next_bin(at)?].first())
    }

    fn last_before(&self, key: &FreeKey) -> Option<FreeKey> {
        let at = bin_of(key.size);
        let here = self.by_size.get(at).and_then(|bin| bin.last_before(key));
        here.or_else(|| self.by_size[self.last_bin(at)?].last())
    }

    /// The next bin behind this one that is not empty.
    fn next_bin(&self, at: usize) -> Option<usize> {
        let (word, bit) = ((at + 1) / 64, (at + 1) % 64);
        let here = self.bits.get(word)? & (!0 << bit);
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let words = self.words.checked_shr(word as u32 + 1)?;
        let word = (words != 0).then(|| word + 1 + words.trailing_zeros() as usize)?;
        Some(word * 64 + self.bits[word].trailing_zeros() as usize)
    }

    /// The last bin before this one that is not empty.
    fn last_bin(&self, at: usize) -> Option<usize> {
        let (word, bit) = (at / 64, at % 64);
        let highest = |bits: u64| 63 - bits.leading_zeros() as usize;
        let here = self.bits[word] & !(!0 << bit);
        if here != 0 {
            return Some(word * 64 + highest(here));
        }
        let words = self.words & !(!0 << word);
        let word = (words != 0).then(|| highest(words))?;
        Some(word * 64 + highest(self.bits[word]))
    }
}

/// Blocks of about one size, in order.
#[derive(Clone, Debug)]
enum Bin {
    /// The first one last: it is taken most often, and comes back.
    Few(Vec<FreeKey>),
    Many(BTreeSet<FreeKey>),
}

/// The longest list.
const FEW: usize = 64;

impl Default for Bin {
    fn default() -> Self {
        Bin::Few(Vec::new())
    }
}

impl Bin {
    fn is_empty(&self) -> bool {
        matches!(self, Bin::Few(list) if list.is_empty())
    }

    fn insert(&mut self, key: FreeKey) -> bool {
        match self {
            Bin::Few(list) => {
                let later = list.iter().rposition(|other| *other >= key);
                if later.is_some_and(|at| list[at] == key) {
                    return false;
                }
                list.insert(later.map_or(0, |at| at + 1), key);
                if list.len() > FEW {
                    *self = Bin::Many(list.drain(..).collect());
                }
                true
            }
            Bin::Many(tree) => tree.insert(key),
        }
    }

    fn remove(&mut self, key: &FreeKey) -> bool {
        match self {
            Bin::Few(list) => {
                if list.last() == Some(key) {
                    return list.pop().is_some();
                }
                let at = list.iter().rposition(|other| other == key);
                at.map(|at| list.remove(at)).is_some()
            }
            Bin::Many(tree) => {
                let removed = tree.remove(key);
                if tree.len() <= FEW / 2 {
                    *self = Bin::Few(tree.iter().rev().copied().collect());
                }
                removed
            }
        }
    }

    fn first(&self) -> Option<FreeKey> {
        match self {
            Bin::Few(list) => list.last().copied(),
            Bin::Many(tree) => tree.first().copied(),
        }
    }

    fn last(&self) -> Option<FreeKey> {
        match self {
            Bin::Few(list) => list.first().copied(),
            Bin::Many(tree) => tree.last().copied(),
        }
    }

    fn first_from(&self, key: &FreeKey) -> Option<FreeKey> {
        match self {
            Bin::Few(list) => list.iter().rfind(|other| *other >= key).copied(),
            Bin::Many(tree) => tree.range(key..).next().copied(),
        }
    }

    fn last_before(&self, key: &FreeKey) -> Option<FreeKey> {
        match self {
            Bin::Few(list) => list.iter().find(|other| *other < key).copied(),
            Bin::Many(tree) => tree.range(..key).next_back().copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn larger_sizes_are_in_no_lower_bin() {
        let mut last = 0;
        for units in (0..5000).chain((13..55).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1])) {
            let bin = bin_of(units * MIN_BLOCK);
            assert!(bin == last || bin == last + 1 || units > 5000, "{units}");
            assert!(bin >= last);
            last = bin;
        }
        assert_eq!((BINS, WORDS), (1632, 26));
    }

    /// Few streams and sizes, so that bins get full; and sizes far apart.
    fn keys() -> impl Strategy<Value = FreeKey> {
        let size = prop_oneof![4 => Just(512), 2 => 1..200_u64, 1 => any::<u64>()];
        (prop_oneof![Just(0), Just(7), Just(u64::MAX)], size, 0..3_u64, 0..40_u64).prop_map(
            |(stream, size, birth, addr)| FreeKey {
                stream,
                size,
                birth,
                addr,
                ix: addr as BlockIndex,
            },
        )
    }

    proptest! {
        #[test]
        fn it_is_an_ordered_set(ops in proptest::collection::vec((keys(), 0..4), 0..600)) {
            let mut free = FreeBlocks::default();
            let mut model = BTreeSet::new();
            for (key, op) in ops {
                // A while of filling, a while of emptying.
                if (op > 0) == (model.len() < 150) {
                    free.insert(key);
                    model.insert(key);
                } else {
                    let key = model.range(key..).next().copied().unwrap_or(key);
                    prop_assert_eq!(free.remove(&key), model.remove(&key));
                }
                prop_assert_eq!(free.len(), model.len());
                prop_assert_eq!(free.contains(&key), model.contains(&key));
                let same = |k: &FreeKey| k.stream == key.stream;
                let from: Vec<_> = model.range(key..).copied().take_while(same).collect();
                prop_assert_eq!(free.first_from(&key), from.first().copied());
                prop_assert_eq!(free.from(key).collect::<Vec<_>>(), from);
                let before: Vec<_> = model.range(..key).rev().copied().take_while(same).collect();
                prop_assert_eq!(free.before(key).collect::<Vec<_>>(), before);
                let after = model.range(key.next()..).next().copied();
                prop_assert_eq!(free.after(Some(&key)), after);
            }
            prop_assert!(free.iter().eq(model.iter().copied()));
        }
    }
}

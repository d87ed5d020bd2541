//! The order in which PyTorch visits streams and pools.
//!
//! PyTorch keeps waiting events by stream, and pools that nobody holds any more, in hash tables,
//! and walks them slot by slot. Which free completes first, and which pool gives its segments back
//! first, follows from that. So the table here places its keys the same way. It has open addressing
//! over a power of two of slots, with the slot from Fibonacci hashing. A richer entry makes room
//! for a poorer one (Robin Hood), and removal shifts back what follows. The table grows before it
//! is more than half full. That the order is the same is checked against PyTorch, in
//! `tests/e2e/allocator_differential.py`.

/// 2^64 divided by the golden ratio.
const FIBONACCI: u64 = 11_400_714_819_323_198_485;
const MIN_LOOKUPS: u32 = 4;

#[derive(Clone, Debug)]
struct Entry<V> {
    hash: u64,
    key: u64,
    value: V,
    /// Slots between where it wants to be and where it is.
    distance: u32,
}

/// A map that is visited in PyTorch's order.
#[derive(Clone, Debug)]
pub(crate) struct PyTorchMap<V> {
    slots: Vec<Option<Entry<V>>>,
    /// Slots that a hash can name; behind them is room for the longest walk.
    capacity: usize,
    len: usize,
}

impl<V> Default for PyTorchMap<V> {
    fn default() -> Self {
        PyTorchMap { slots: Vec::new(), capacity: 0, len: 0 }
    }
}

impl<V> PyTorchMap<V> {
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn lookups(&self) -> u32 {
        MIN_LOOKUPS.max(self.capacity.ilog2())
    }

    fn slot(&self, hash: u64) -> usize {
        (FIBONACCI.wrapping_mul(hash) >> (64 - self.capacity.ilog2())) as usize
    }

    fn position(&self, hash: u64, key: u64) -> Option<usize> {
        if self.capacity == 0 {
            return None;
        }
        let from = self.slot(hash);
        for (distance, at) in (from..self.slots.len()).enumerate() {
            match &self.slots[at] {
                Some(e) if e.distance as usize >= distance => {
                    if e.hash == hash && e.key == key {
                        return Some(at);
                    }
                }
                _ => return None,
            }
        }
        None
    }

    /// The value of a key.
    pub(crate) fn get_mut(&mut self, hash: u64, key: u64) -> Option<&mut V> {
        let at = self.position(hash, key)?;
        self.slots[at].as_mut().map(|e| &mut e.value)
    }

    /// Whether the key is there.
    pub(crate) fn contains(&self, hash: u64, key: u64) -> bool {
        self.position(hash, key).is_some()
    }

    /// The value of a key, which is put there if it is not yet.
    pub(crate) fn entry(&mut self, hash: u64, key: u64) -> &mut V
    where
        V: Default,
    {
        if !self.contains(hash, key) {
            self.insert(Entry { hash, key, value: V::default(), distance: 0 });
        }
        self.get_mut(hash, key).expect("it was just put there")
    }

    fn insert(&mut self, mut new: Entry<V>) {
        // Where it wants to go, and as far as those there are not poorer.
        loop {
            if self.capacity == 0 {
                self.grow();
            }
            let mut at = self.slot(new.hash);
            new.distance = 0;
            while self.slots[at].as_ref().is_some_and(|e| e.distance >= new.distance) {
                at += 1;
                new.distance += 1;
            }
            if new.distance < self.lookups() && (self.len + 1) * 2 <= self.capacity {
                match self.place(at, new) {
                    None => return,
                    // Somebody has been pushed too far: more room, and again.
                    Some(left_over) => new = left_over,
                }
            }
            self.grow();
        }
    }

    /// Puts the entry at a slot; whoever was there moves on. Gives back
    /// the one for whom there is no place.
    fn place(&mut self, first: usize, mut new: Entry<V>) -> Option<Entry<V>> {
        let lookups = self.lookups();
        let mut at = first;
        loop {
            match &mut self.slots[at] {
                empty @ None => {
                    *empty = Some(new);
                    self.len += 1;
                    return None;
                }
                Some(other) => {
                    if other.distance < new.distance || at == first {
                        std::mem::swap(other, &mut new);
                    }
                    new.distance += 1;
                    if new.distance == lookups {
                        // Undone: the new one waits in our hands, the one
                        // that found no place is where it began.
                        if let Some(there) = &mut self.slots[first] {
                            std::mem::swap(there, &mut new);
                        }
                        return Some(new);
                    }
                    at += 1;
                }
            }
        }
    }

    fn grow(&mut self) {
        let capacity = (self.capacity * 2).max(4);
        let old = std::mem::take(&mut self.slots);
        self.capacity = capacity;
        self.len = 0;
        let slots = capacity + self.lookups() as usize;
        self.slots = std::iter::repeat_with(|| None).take(slots).collect();
        for entry in old.into_iter().flatten() {
            self.insert(entry);
        }
    }

    /// Removes a key.
    pub(crate) fn remove(&mut self, hash: u64, key: u64) -> Option<V> {
        let mut at = self.position(hash, key)?;
        let removed = self.slots[at].take().map(|e| e.value);
        self.len -= 1;
        // Those behind that are not where they want to be come one nearer.
        while let Some(next) = self.slots.get_mut(at + 1)
            && next.as_ref().is_some_and(|e| e.distance > 0)
        {
            let mut entry = next.take();
            if let Some(e) = &mut entry {
                e.distance -= 1;
            }
            self.slots[at] = entry;
            at += 1;
        }
        removed
    }

    /// Keys with their hashes, in order.
    pub(crate) fn keys(&self) -> Vec<(u64, u64)> {
        self.slots.iter().flatten().map(|e| (e.hash, e.key)).collect()
    }

    /// The first key at or behind a slot, with the slot: for walks during which things are removed.
    pub(crate) fn next_from(&self, slot: usize) -> Option<(usize, u64, u64)> {
        let found =
            self.slots.iter().enumerate().skip(slot).find_map(|(at, e)| Some((at, e.as_ref()?)));
        found.map(|(at, e)| (at, e.hash, e.key))
    }

    /// All values, in order; the map is empty afterwards and keeps its size.
    pub(crate) fn drain(&mut self) -> Vec<V> {
        self.len = 0;
        self.slots.iter_mut().filter_map(Option::take).map(|e| e.value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn it_is_a_map(ops in proptest::collection::vec((0..40_u64, any::<bool>()), 0..300)) {
            let mut visit: PyTorchMap<u64> = PyTorchMap::default();
            let mut model = BTreeMap::new();
            for (n, (key, put)) in ops.into_iter().enumerate() {
                // Few hashes, so that they collide.
                let hash = key / 3;
                if put {
                    *visit.entry(hash, key) = n as u64;
                    model.insert(key, n as u64);
                } else {
                    prop_assert_eq!(visit.remove(hash, key), model.remove(&key));
                }
                prop_assert_eq!(visit.len, model.len());
                let mut keys: Vec<u64> = visit.keys().into_iter().map(|(_, k)| k).collect();
                keys.sort_unstable();
                prop_assert_eq!(keys, model.keys().copied().collect::<Vec<_>>());
                for key in 0..40 {
                    prop_assert_eq!(visit.get_mut(key / 3, key).copied(), model.get(&key).copied());
                }
            }
        }
    }
}

//! A list of fixed size that keeps its two ends: the first `HALF` items and the last `HALF`.
//!
//! Stacks can be deeper than anybody wants to read or store. Both ends matter: the innermost frames
//! say where, the outermost say who. The middle of a recursion says nothing.

/// The list.
#[repr(C)]
pub struct Deep<T, const HALF: usize> {
    pushed: usize,
    first: [T; HALF],
    last: [T; HALF],
}

impl<T: Copy, const HALF: usize> Deep<T, HALF> {
    /// Forgets all items.
    #[inline]
    pub fn clear(&mut self) {
        self.pushed = 0;
    }

    /// Adds an item.
    #[inline]
    pub fn push(&mut self, item: T) {
        match self.first.get_mut(self.pushed) {
            Some(place) => *place = item,
            None => self.last[self.pushed % HALF] = item,
        }
        self.pushed += 1;
    }

    /// Nothing was pushed.
    pub fn is_empty(&self) -> bool {
        self.pushed == 0
    }

    /// How many items were kept.
    #[inline]
    pub fn len(&self) -> usize {
        self.pushed.min(2 * HALF)
    }

    /// Items are missing before this index.
    #[inline]
    pub fn gap(&self) -> Option<usize> {
        (self.pushed > 2 * HALF).then_some(HALF)
    }

    /// The `i`-th item that was kept.
    #[inline]
    pub fn get(&self, i: usize) -> T {
        match self.first.get(i) {
            Some(item) => *item,
            None if self.pushed > 2 * HALF => self.last[(self.pushed + i) % HALF],
            None => self.last[i % HALF],
        }
    }

    /// The item that was added last, to be changed.
    #[inline]
    pub fn last_mut(&mut self) -> Option<&mut T> {
        let last = self.pushed.checked_sub(1)?;
        Some(if last < HALF { &mut self.first[last] } else { &mut self.last[last % HALF] })
    }

    /// The `i`-th item that was kept, to be changed.
    #[inline]
    pub fn get_mut(&mut self, i: usize) -> &mut T {
        if i < HALF {
            &mut self.first[i]
        } else if self.pushed > 2 * HALF {
            &mut self.last[(self.pushed + i) % HALF]
        } else {
            &mut self.last[i % HALF]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn both_ends_stay_in_order(n in 0_usize..40) {
            let mut deep = Deep { first: [0; 8], last: [0; 8], pushed: 0 };
            for i in 0..n {
                deep.push(i);
            }
            let kept: Vec<usize> = (0..deep.len()).map(|i| deep.get(i)).collect();
            let expect: Vec<usize> = if n <= 16 { (0..n).collect() } else { (0..8).chain(n - 8..n).collect() };
            prop_assert_eq!(&kept, &expect);
            prop_assert_eq!(deep.gap(), (n > 16).then_some(8));
            prop_assert_eq!(deep.last_mut().copied(), n.checked_sub(1));
            for i in 0..deep.len() {
                let item = deep.get(i);
                prop_assert_eq!(*deep.get_mut(i), item);
            }
        }
    }
}

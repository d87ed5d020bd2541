//! Memory outside a framework's pool that grows with every step.
//!
//! What a step is can't be seen from outside. But a program that works in steps takes about as many
//! blocks from PyTorch's allocator in each. So the number of PyTorch's allocations is used as a
//! clock. The second half of the recorded history is cut into [`WINDOWS`] windows of equally many
//! of them. Memory outside the pool grows step by step if more of it was held at the end of each
//! window than at the end of the one before. PyTorch's own reserved memory must not have grown
//! meanwhile. Then the owner that grew most is named.
//!
//! In doubt nothing is said. A program that still builds itself up reserves more. A library that
//! takes its share once, or takes and gives back, is flat in most windows. A program of fewer than
//! [`WINDOWS`] steps in half its history looks like one that is starting.
//!
//! Samples are taken every so many allocations; when there are too many, every second one is
//! dropped and the distance doubles. So this needs the same little memory for any history.

use memtrace_format::event::StackId;

/// Into how many windows the second half is cut.
pub(crate) const WINDOWS: usize = 8;
/// Allocations between two samples, at first.
const DISTANCE: u64 = 16;
/// Samples that are kept; half of them after a thinning.
const SAMPLES: usize = 8 * WINDOWS;
/// Growth over all windows that is worth a word, bytes.
const LEAST: u64 = 1 << 20;

/// What one owner holds outside the pool.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    bytes: u64,
    /// Where it last took some.
    last: StackId,
}

/// A moment.
#[derive(Clone, Debug)]
struct Sample {
    pool: u64,
    outside: u64,
    shares: Vec<Share>,
}

/// One device.
#[derive(Clone, Debug)]
pub(crate) struct Growth {
    pool: u64,
    outside: u64,
    /// By the owner's number.
    shares: Vec<Share>,
    samples: Vec<Sample>,
    distance: u64,
    next: u64,
}

impl Default for Growth {
    fn default() -> Growth {
        Growth {
            pool: 0,
            outside: 0,
            shares: Vec::new(),
            samples: Vec::new(),
            distance: DISTANCE,
            next: DISTANCE,
        }
    }
}

/// What grew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grown {
    /// By how much over all windows, bytes.
    pub bytes: u64,
    /// The owner who grew most.
    pub owner: usize,
    /// By how much he did.
    pub of_owner: u64,
    /// Where he last took some.
    pub last: StackId,
}

fn change(n: &mut u64, bytes: u64, came: bool) {
    *n = if came { n.saturating_add(bytes) } else { n.saturating_sub(bytes) };
}

impl Growth {
    /// Memory of the pool's came or went.
    pub(crate) fn in_pool(&mut self, bytes: u64, came: bool) {
        change(&mut self.pool, bytes, came);
    }

    /// Memory outside the pool came or went.
    pub(crate) fn outside(&mut self, owner: usize, bytes: u64, came: bool, stack: StackId) {
        change(&mut self.outside, bytes, came);
        if self.shares.len() <= owner {
            self.shares.resize(owner + 1, Share::default());
        }
        if let Some(share) = self.shares.get_mut(owner) {
            change(&mut share.bytes, bytes, came);
            if came {
                share.last = stack;
            }
        }
    }

    /// PyTorch's allocator handed out a block.
    pub(crate) fn tick(&mut self) {
        self.next -= 1;
        if self.next > 0 {
            return;
        }
        let Growth { pool, outside, .. } = *self;
        self.samples.push(Sample { pool, outside, shares: self.shares.clone() });
        if self.samples.len() == SAMPLES {
            let mut n = 0;
            self.samples.retain(|_| {
                n += 1;
                n % 2 == 0
            });
            self.distance *= 2;
        }
        self.next = self.distance;
    }

    /// What grew in every window, if anything did.
    pub(crate) fn grown(&self) -> Option<Grown> {
        if self.samples.len() < SAMPLES / 2 {
            return None;
        }
        let half = &self.samples[self.samples.len() / 2..];
        let at = |window: usize| &half[window * (half.len() - 1) / WINDOWS];
        let ends: Vec<&Sample> = (0..=WINDOWS).map(at).collect();
        let (first, last) = (ends.first()?, ends.last()?);
        let rises = ends.windows(2).all(|pair| pair[1].outside > pair[0].outside);
        let steady = ends.iter().all(|end| end.pool <= first.pool);
        let bytes = last.outside - first.outside.min(last.outside);
        if !rises || !steady || bytes < LEAST {
            return None;
        }
        let before = |owner: usize| first.shares.get(owner).map_or(0, |s| s.bytes);
        let grew = last.shares.iter().enumerate();
        let grew = grew.map(|(owner, s)| (s.bytes.saturating_sub(before(owner)), owner, s.last));
        let (of_owner, owner, last) =
            grew.max_by_key(|(bytes, owner, _)| (*bytes, usize::MAX - owner))?;
        Some(Grown { bytes, owner, of_owner, last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// `steps` steps of a program that takes `blocks` blocks of PyTorch's in each.
    fn run(steps: u64, blocks: u64, mut step: impl FnMut(u64, &mut Growth)) -> Option<Grown> {
        let mut growth = Growth::default();
        growth.in_pool(64 * MIB, true);
        for n in 0..steps {
            step(n, &mut growth);
            (0..blocks).for_each(|_| growth.tick());
        }
        growth.grown()
    }

    #[test]
    fn a_little_more_in_each_step_is_growth() {
        let leak = |n: u64, g: &mut Growth| g.outside(1, MIB, true, 7 + n as u32);
        let found = run(100, 30, leak).expect("it grew");
        assert_eq!((found.owner, found.bytes), (1, found.of_owner));
        assert!(found.bytes >= 40 * MIB && found.bytes <= 50 * MIB, "the second half: {found:?}");
        assert!(found.last > 100, "the last place");
        assert!(run(40_000, 3, leak).is_some(), "however long it runs");
        let mixed = |n: u64, g: &mut Growth| {
            g.outside(0, 3 * MIB, n.is_multiple_of(2), 1);
            g.outside(1, 5 * MIB, true, 2);
        };
        assert_eq!(run(200, 30, mixed).map(|g| g.owner), Some(1), "beside one who comes and goes");
    }

    #[test]
    fn what_does_not_grow_in_every_window_is_none() {
        assert_eq!(run(100, 30, |n, g| g.outside(1, MIB, n < 40, 7)), None, "in the first half");
        assert_eq!(
            run(100, 30, |n, g| g.outside(1, MIB, n.is_multiple_of(2), 7)),
            None,
            "and back"
        );
        assert_eq!(run(100, 30, |_, g| g.outside(1, 1024, true, 7)), None, "next to nothing");
        assert_eq!(run(10, 300, |_, g| g.outside(1, MIB, true, 7)), None, "too few steps");
        assert_eq!(run(20, 3, |_, g| g.outside(1, MIB, true, 7)), None, "too short");
        let loads = |_, g: &mut Growth| {
            g.outside(1, MIB, true, 7);
            g.in_pool(MIB, true);
        };
        assert_eq!(run(100, 30, loads), None, "a program that builds itself up");
    }
}

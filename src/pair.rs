//! A key and what it stands for: a place in a table that all threads share and nobody locks.
//!
//! Who puts something in takes the place, fills it and then shows the key. So of two who want a
//! place one gets it, and whoever finds a key reads what was put there with it: neither what the
//! place stood for before nor what it stands for next.
//!
//! A place that a thread was filling as its process forked is nobody's in the child, for ever.

use crate::os::sync::{AtomicU64, Ordering, constant, fence};

/// The key of a place that nobody has.
pub const FREE: u64 = 0;
/// That of one which somebody fills.
const TAKEN: u64 = 1;

/// See the module's documentation. Keys are above 1.
pub struct Pair([AtomicU64; 2]);

impl Pair {
    constant! {
        /// A free place.
        #[allow(clippy::new_without_default, reason = "made in statics alone")]
        pub fn new() -> Pair {
            Pair([AtomicU64::new(FREE), AtomicU64::new(0)])
        }
    }

    /// The key that is here at this moment, or [`FREE`].
    #[inline]
    pub fn key(&self) -> u64 {
        self.0[0].load(Ordering::Acquire)
    }

    /// Puts these in, where the key was that one; not if another thread does so.
    pub fn put(&self, was: u64, key: u64, value: u64) -> bool {
        let [place, stands_for] = &self.0;
        let taken = || place.compare_exchange(was, TAKEN, Ordering::AcqRel, Ordering::Relaxed);
        if was == TAKEN || key <= TAKEN || taken().is_err() {
            return false;
        }
        fence(Ordering::Release); // whoever reads the new value sees that the old key has gone
        stands_for.store(value, Ordering::Relaxed);
        place.store(key, Ordering::Release);
        true
    }

    /// What this key stands for, if it is here.
    #[inline]
    pub fn get(&self, key: u64) -> Option<u64> {
        self.both().filter(|(found, _)| *found == key).map(|(_, value)| value)
    }

    /// The key that is here, and what it stands for.
    #[inline]
    pub fn both(&self) -> Option<(u64, u64)> {
        let [place, stands_for] = &self.0;
        let key = place.load(Ordering::Acquire);
        if key <= TAKEN {
            return None;
        }
        let value = stands_for.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        (place.load(Ordering::Relaxed) == key).then_some((key, value))
    }

    /// The place is free again, if this key is here. Of several who do that, one hears so.
    pub fn remove(&self, key: u64) -> bool {
        let [place, _] = &self.0;
        place.compare_exchange(key, FREE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: without the fence in `put`, where it takes the place without an exchange, and
    /// where `both` doesn't look at the key again.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        fn check(model: impl Fn(Arc<Pair>) + Sync + Send + 'static) {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(move || model(Arc::new(Pair::new())));
        }

        #[test]
        fn a_key_has_its_own_value_while_others_take_its_place() {
            check(|pair| {
                assert!(pair.put(FREE, 5, 50));
                let other = pair.clone();
                let other = thread::spawn(move || other.put(5, 6, 60) && other.put(6, 7, 70));
                for key in [5, 6, 7] {
                    assert!(pair.get(key).is_none_or(|value| value == 10 * key));
                }
                assert!(other.join().unwrap());
                assert_eq!((pair.both(), pair.get(5)), (Some((7, 70)), None));
            });
        }

        #[test]
        fn of_two_who_want_a_place_one_gets_it_and_gives_it_back_once() {
            check(|pair| {
                let put = |pair: &Pair, key: u64| {
                    pair.put(FREE, key, 10 * key).then(|| {
                        assert_eq!(pair.get(key), Some(10 * key));
                        assert!(pair.remove(key) && !pair.remove(key));
                    })
                };
                let other = pair.clone();
                let other = thread::spawn(move || put(&other, 5));
                let here = put(&pair, 6);
                assert!(other.join().unwrap().is_some() || here.is_some());
                assert_eq!((pair.key(), pair.both()), (FREE, None));
            });
        }
    }

    #[test]
    fn a_place_is_the_keys_that_took_it() {
        let pair = Pair::new();
        assert!(pair.both().is_none() && !pair.put(FREE, 1, 5) && pair.get(FREE).is_none());
        assert!(pair.put(FREE, 7, 70) && !pair.put(FREE, 8, 80) && !pair.remove(8));
        assert_eq!((pair.key(), pair.get(7), pair.get(8)), (7, Some(70), None));
        assert!(pair.put(7, 8, 80) && pair.remove(8) && pair.key() == FREE);
    }
}

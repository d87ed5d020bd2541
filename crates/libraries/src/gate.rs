//! Who may be in the loader's list, which nobody of ours shall be as the
//! process forks ([`super::list`]).
//!
//! Who wants to go in waits for a fork, and a fork waits for those who are in. Neither for ever:
//! they may wait for each other in some other way, too.

use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_os::sync::Word;
use memtrace_os::{clock, futex};

/// So many threads are inside, or are about to be; above [`FORK`], so many
/// are forking. A futex word.
pub struct Gate<W = AtomicU32>(W);

const FORK: u32 = 1 << 16;
/// How long a fork waits for those, and they for a fork. On a busy machine
/// a thread may not run for a while.
const PATIENCE_NS: u64 = 3_000_000_000;

/// This thread is inside. Not any more when dropped.
pub struct Inside<'a, W: Sleeper>(&'a Gate<W>);

/// A word that threads sleep on.
pub trait Sleeper: Word<Value = u32> {
    /// Until it is another one, or a nap has passed.
    fn sleep_on(&self, seen: u32);
    /// All who do.
    fn wake_all(&self);
}

impl Sleeper for AtomicU32 {
    fn sleep_on(&self, seen: u32) {
        futex::sleep_on(self, seen);
    }

    fn wake_all(&self) {
        futex::wake_all(self);
    }
}

impl Gate {
    /// Nobody is inside.
    pub const fn new() -> Gate {
        Gate(AtomicU32::new(0))
    }
}

impl<W: Sleeper> Gate<W> {
    /// Goes in, where no fork is under way.
    pub fn enter(&self) -> Inside<'_, W> {
        if self.0.fetch_add(1, Ordering::SeqCst) >= FORK {
            self.enter_later();
        }
        Inside(self)
    }

    #[cold]
    fn enter_later(&self) {
        let end = clock::now_ns() + PATIENCE_NS;
        loop {
            drop(Inside(self));
            self.wait(end, |now| now < FORK);
            // The next fork may be under way.
            if self.0.fetch_add(1, Ordering::SeqCst) < FORK || clock::now_ns() > end {
                return;
            }
        }
    }

    fn wait(&self, end: u64, is_it: impl Fn(u32) -> bool) {
        loop {
            let now = self.0.load(Ordering::SeqCst);
            if is_it(now) || clock::now_ns() > end {
                return;
            }
            self.0.sleep_on(now);
        }
    }

    /// The process is about to fork: nobody is inside from here on.
    pub fn close(&self) {
        let before = self.0.fetch_add(FORK, Ordering::SeqCst);
        if !before.is_multiple_of(FORK) {
            self.wait(clock::now_ns() + PATIENCE_NS, |now| now.is_multiple_of(FORK));
        }
    }

    /// It has forked, or could not. Those who wait outside are counted nowhere.
    pub fn open(&self) {
        let less = |now: u32| now.checked_sub(FORK);
        if self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            self.0.wake_all();
        }
    }

    /// In a child, nobody else is inside.
    pub fn forget_others(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    /// Is nobody inside, and no fork under way?
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }
}

impl<W: Sleeper> Drop for Inside<'_, W> {
    fn drop(&mut self) {
        // The child of a fork from within has forgotten it.
        let less = |now: u32| (!now.is_multiple_of(FORK)).then(|| now - 1);
        let word = &self.0.0;
        let before = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        if before.is_ok_and(|before| before > FORK) {
            word.wake_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: where a fork waits for nobody, and where who has waited goes in without looking
    /// whether the next one is under way.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::cell::UnsafeCell;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicU32 as Modelled;
        use loom::thread;
        use memtrace_os::sync;

        impl Sleeper for Modelled {
            fn sleep_on(&self, seen: u32) {
                sync::sleep_on(self, seen);
            }

            fn wake_all(&self) {
                sync::wake_all(self);
            }
        }

        #[test]
        fn nobody_is_in_the_list_as_the_process_forks_twice() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let all = Arc::new((Gate(Modelled::new(0)), UnsafeCell::new(0)));
                all.0.close();
                let forks = all.clone();
                let forks = thread::spawn(move || {
                    forks.0.open();
                    forks.0.close();
                    // SAFETY: loom looks whether another thread is inside.
                    forks.1.with_mut(|list| unsafe { *list += 1 });
                    forks.0.open();
                });
                let inside = all.0.enter();
                all.1.with(|_| ());
                drop(inside);
                forks.join().unwrap();
                assert!(all.0.is_empty());
            });
        }
    }

    /// Who is not woken sleeps for a nap.
    #[cfg(not(loom))]
    #[test]
    fn who_waits_for_a_fork_is_woken_when_it_is_over() {
        use std::time::{Duration, Instant};
        let waits = || {
            let gate = Gate::new();
            gate.close();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    drop(gate.enter());
                    Instant::now()
                });
                std::thread::sleep(Duration::from_millis(10));
                let opened = Instant::now();
                gate.open();
                waits.join().expect("no panic").saturating_duration_since(opened)
            })
        };
        let soonest = (0..10).map(|_| waits()).min();
        assert!(soonest < Some(Duration::from_millis(20)), "{soonest:?}");
    }
}

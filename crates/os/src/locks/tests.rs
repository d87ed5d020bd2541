//! Locks among threads, and in children.

#[cfg(loom)]
mod model {
    //! Every interleaving of threads at one lock's word.

    use super::super::state::{self, OfAnother, Taken, Word};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::thread;

    impl Word for AtomicU32 {
        fn look(&self) -> u32 {
            self.load(Ordering::Relaxed)
        }

        fn change(&self, from: u32, to: u32) -> Result<u32, u32> {
            self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
        }
    }

    const AGE: u32 = 2;

    struct Lock {
        word: AtomicU32,
        /// Loom fails where one thread changes it while another one has it.
        value: UnsafeCell<u32>,
        /// What nobody may read: a change that was not finished.
        half: u32,
    }

    impl Lock {
        /// As a child of age 2 finds it, whose parent's thread left this word and this value.
        fn found(word: u32, value: u32) -> Arc<Lock> {
            let (word, half) = (AtomicU32::new(word), u32::MAX);
            Arc::new(Lock { word, value: UnsafeCell::new(value), half })
        }

        fn add(&self) -> bool {
            let Some(taken) = state::take(&self.word, AGE, 0, || false) else { return false };
            self.value.with_mut(|value| {
                // SAFETY: loom looks whether another thread has it.
                let value = unsafe { &mut *value };
                if taken == Taken::Abandoned {
                    *value = 0;
                }
                assert_ne!(*value, self.half);
                *value += 1;
            });
            state::give_back(&self.word, AGE);
            true
        }

        fn read(&self) -> Option<u32> {
            loop {
                match state::read(&self.word, AGE) {
                    Ok(false) => return None,
                    Ok(true) => break,
                    Err(OfAnother) => {
                        let taken = state::take(&self.word, AGE, 0, || false)?;
                        if taken == Taken::Abandoned {
                            // SAFETY: loom looks whether another thread has it.
                            self.value.with_mut(|value| unsafe { *value = 0 });
                        }
                        state::give_back(&self.word, AGE);
                    }
                }
            }
            // SAFETY: loom looks whether another thread changes it.
            let value = self.value.with(|value| unsafe { *value });
            state::has_read(&self.word, AGE);
            assert_ne!(value, self.half);
            Some(value)
        }
    }

    /// Two threads change it and one reads.
    fn explore(word: u32, value: u32) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let lock = Lock::found(word, value);
            let other = lock.clone();
            let other = thread::spawn(move || u32::from(other.add()));
            let reader = lock.clone();
            let reader = thread::spawn(move || reader.read());
            let added = u32::from(lock.add()) + other.join().unwrap();
            let read = reader.join().unwrap();
            let begun = if value == u32::MAX { 0 } else { value };
            assert!(read.is_none_or(|read| (begun..=begun + added).contains(&read)));
            assert_eq!(lock.read(), Some(begun + added), "free in the end");
        });
    }

    #[test]
    fn a_lock_of_this_process() {
        explore(AGE << 16, 5);
    }

    #[test]
    fn a_lock_that_was_free_in_the_parent() {
        explore(1 << 16, 5);
    }

    #[test]
    fn a_lock_that_was_read_in_the_parent() {
        explore(1 << 16 | 3, 5);
    }

    #[test]
    fn a_lock_that_a_thread_held_that_is_not_here() {
        explore(1 << 16 | 1 << 15 | 1 << 14, u32::MAX);
    }
}

#[cfg(not(loom))]
mod real {
    use super::super::*;
    use crate::age;
    use crate::testing::{held_elsewhere, in_child};

    #[test]
    fn one_thread_at_a_time_changes_it_and_none_is_left_waiting() {
        static SUM: ForkLock<u64> = ForkLock::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for i in 0..20_000 {
                        let before = *SUM.lock();
                        assert!(before <= 8 * 20_000);
                        let mut sum = SUM.lock();
                        *sum += 1;
                        if i % 1000 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(*SUM.lock(), 8 * 20_000);
    }

    #[test]
    fn readers_read_together_and_keep_writers_out() {
        static VALUE: ForkLock<u32> = ForkLock::new(7);
        let (one, two) = (VALUE.try_read().expect("free"), VALUE.try_read().expect("read"));
        assert!(*one + *two == 14 && VALUE.try_lock().is_none());
        let writer = std::thread::spawn(|| *VALUE.lock() = 8);
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop((one, two));
        writer.join().expect("no panic");
        let guard = VALUE.lock();
        assert!(*guard == 8 && VALUE.try_read().is_none() && VALUE.try_lock().is_none());
        drop(guard);
        assert_eq!(VALUE.try_read().map(|v| *v), Some(8));
    }

    #[test]
    fn a_child_has_what_another_thread_held_and_begins_anew() {
        static HELD: ForkLock<u32> = ForkLock::new(7);
        static FREE: ForkLock<u32> = ForkLock::new(7);
        static READ: ForkLock<u32> = ForkLock::new(7);
        static TURN: Turn = Turn::new(());
        *FREE.lock() = 8;
        held_elsewhere(&HELD, || {
            assert!(HELD.try_lock().is_none() && HELD.try_read().is_none());
            held_elsewhere(&TURN, || {
                let reading = READ.try_read();
                assert!(in_child(age::forget, || *HELD.lock() == 0 && *HELD.lock() == 0));
                assert!(in_child(age::forget, || HELD.try_read().is_some_and(|v| *v == 0)));
                assert!(in_child(age::forget, || *FREE.lock() == 8 && TURN.try_lock().is_some()));
                assert!(in_child(age::forget, || *READ.lock() == 7));
                // Also the child of a child.
                assert!(in_child(age::forget, || {
                    drop(HELD.lock());
                    let _mine = TURN.lock();
                    in_child(age::forget, || *HELD.lock() == 0) && TURN.try_lock().is_none()
                }));
                drop(reading);
            });
        });
        assert!(*HELD.lock() == 7 && *READ.lock() == 7, "the parent's is the parent's");
    }

    #[test]
    fn a_thread_that_forks_while_it_holds_one_holds_it_on_both_sides() {
        static MINE: ForkLock<u32> = ForkLock::new(7);
        let mut guard = Some(MINE.lock());
        assert!(in_child(age::forget, || {
            let is_held = MINE.try_lock().is_none() && MINE.try_read().is_none();
            drop(guard.take());
            is_held && *MINE.lock() == 7
        }));
        assert!(MINE.try_lock().is_none());
        drop(guard);
        assert_eq!(*MINE.lock(), 7);
    }

    /// By system call: no handler runs.
    #[test]
    fn a_child_that_runs_no_handlers_has_it_too() {
        static HELD: ForkLock<u32> = ForkLock::new(7);
        held_elsewhere(&HELD, || {
            // SAFETY: the child does nothing but take a lock and end.
            let child = unsafe { libc::syscall(libc::SYS_fork) } as libc::pid_t;
            if child == 0 {
                let is_free = HELD.try_lock().is_some_and(|v| *v == 0);
                // SAFETY: ends the child.
                unsafe { libc::syscall(libc::SYS_exit_group, i32::from(is_free)) };
            }
            let mut status = 0;
            // SAFETY: plain system call.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(libc::WEXITSTATUS(status), 1);
        });
    }

    #[test]
    fn what_is_set_once_stays() {
        static ONCE: SetOnce<u32> = SetOnce::new();
        assert_eq!(ONCE.get(), None);
        assert_eq!((ONCE.set(1), ONCE.set(2), ONCE.get()), (&1, &1, Some(&1)));
    }
}

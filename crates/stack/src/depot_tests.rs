//! The depot's promises: equal stacks have one id, different ones have different ids,
//! and a node that can be found is whole.
//!
//! With `--cfg loom` threads intern at the same time in a depot of eight nodes. Every interleaving
//! is tried, up to a bounded number of preemptions. Without it, there are real threads and a model
//! in plain Rust.
//!
//! Each model has been seen red. With `Relaxed` for any of the three orderings in `intern`, a
//! thread finds a node whose words it can't see yet. Equal stacks get two ids. Without the look at
//! a node's words, different stacks get one. Without the second look at the end of the depot, an id
//! has no node.

use super::*;

fn native(pc: u64) -> u64 {
    RawFrame::Native { pc, epoch: 0 }.pack()
}

#[cfg(loom)]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use memtrace_format::stacks::HEADER;

    /// The smallest depot that there is: ids up to 7, of which 0 and 1 are
    /// taken, and 16 places in its table.
    fn check(bound: usize, model: impl Fn(&Arc<Depot>) + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(bound);
        builder.check(move || {
            let words = zeroed_words(HEADER + 32);
            model(&Arc::new(Depot::new(words, Space::MEMORY).expect("large enough and empty")));
        });
    }

    /// A stack as whoever is handed its id sees it, innermost first.
    fn read(depot: &Depot, mut id: StackId) -> Vec<u64> {
        let mut frames = Vec::new();
        while let Some([frame, link]) = depot.node(id) {
            frames.push(frame.load(Ordering::Relaxed));
            let link = link.load(Ordering::Relaxed);
            assert!(link >> 32 > 0, "a node that is found is whole");
            id = link as u32;
        }
        frames
    }

    fn two(depot: &Arc<Depot>, other: &'static [u64], here: &'static [u64]) -> [StackId; 2] {
        let intern = |depot: &Depot, stack: &[u64]| {
            let id = depot.intern_all(stack.iter().map(|pc| native(*pc)));
            let expect: Vec<_> = stack.iter().rev().map(|pc| native(*pc)).collect();
            assert_eq!(read(depot, id), expect, "whoever made the nodes");
            id
        };
        let thread = {
            let depot = depot.clone();
            thread::spawn(move || intern(&depot, other))
        };
        let id = intern(depot, here);
        [thread.join().unwrap(), id]
    }

    #[test]
    fn equal_stacks_are_one() {
        check(3, |depot| {
            let [a, b] = two(depot, &[1, 2], &[1, 2]);
            assert_eq!(a, b);
            assert_eq!(depot.refused(), 0);
        });
    }

    #[test]
    fn stacks_that_part_share_what_they_have_in_common() {
        check(3, |depot| {
            let [a, b] = two(depot, &[1, 2], &[1, 3]);
            assert_ne!(a, b);
            let parent = |id| depot.node(id).unwrap()[1].load(Ordering::Relaxed) as u32;
            assert_eq!(parent(a), parent(b));
        });
    }

    #[test]
    fn three_threads_agree() {
        check(2, |depot| {
            let third = {
                let depot = depot.clone();
                thread::spawn(move || depot.intern(0, native(1)))
            };
            let [a, b] = two(depot, &[1], &[1]);
            assert_eq!([a, b], [third.join().unwrap(); 2]);
        });
    }

    /// Two frames that want the same place in the table.
    #[test]
    fn frames_that_meet_in_the_table_are_two() {
        let place = |pc: u64| hash(0, native(pc)) & 15;
        let pc = (2..1000).find(|pc| place(*pc) == place(1)).unwrap();
        let stacks: &'static [[u64; 1]; 2] = Box::leak(Box::new([[1], [pc]]));
        check(3, move |depot| {
            let [a, b] = two(depot, &stacks[0], &stacks[1]);
            assert_ne!(a, b);
            assert_eq!([1, pc].map(|pc| depot.intern(0, native(pc))), [a, b]);
        });
    }

    #[test]
    fn threads_that_find_it_full_say_so() {
        check(2, |depot| {
            for pc in 1..=5 {
                depot.intern(0, native(pc));
            }
            let intern = |depot: &Depot, pc| depot.intern(0, native(pc));
            let thread = {
                let depot = depot.clone();
                thread::spawn(move || intern(&depot, 6))
            };
            let ids = [intern(depot, 7), thread.join().unwrap()];
            assert!(ids.contains(&DEPOT_FULL) && ids.contains(&7), "{ids:?}");
            assert_eq!(depot.refused(), 1);
        });
    }
}

#[cfg(not(loom))]
mod threads {
    use super::*;
    use memtrace_format::stacks::frames;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn depot(words: usize) -> Depot {
        let words: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
        Depot::new(words.leak(), Space::MEMORY).expect("large enough and empty")
    }

    proptest! {
        /// Few distinct frames, so that prefixes are shared and the depot runs full.
        #[test]
        fn a_stack_comes_back_and_equal_stacks_are_one(
            stacks in prop::collection::vec(prop::collection::vec(1_u64..4, 1..12), 1..200),
            words in 64_usize..2000,
        ) {
            let depot = depot(words);
            let mut model: HashMap<Vec<u64>, StackId> = HashMap::new();
            let mut full = 0;
            for stack in stacks {
                let id = depot.intern_all(stack.iter().map(|f| native(*f)));
                if id == DEPOT_FULL {
                    full += 1;
                    continue;
                }
                let mut back = frames(depot.words(), id).expect("an interned stack is readable");
                back.reverse();
                prop_assert_eq!(&back, &stack.iter().map(|f| native(*f)).collect::<Vec<_>>());
                prop_assert_eq!(*model.entry(stack).or_insert(id), id);
            }
            let mut ids: Vec<_> = model.values().collect();
            ids.sort_unstable();
            ids.dedup();
            prop_assert_eq!(ids.len(), model.len(), "different stacks have different ids");
            prop_assert_eq!(full > 0, depot.refused() > 0);
            let (used, capacity) = depot.usage();
            prop_assert!(used <= capacity);
        }
    }

    #[test]
    fn a_full_depot_says_so_and_still_knows_what_it_has() {
        let depot = depot(200);
        let mut ids = Vec::new();
        loop {
            match depot.intern(0, native(ids.len() as u64 + 1)) {
                DEPOT_FULL => break,
                id => ids.push(id),
            }
        }
        let (used, capacity) = depot.usage();
        assert_eq!(used, capacity);
        assert_eq!(ids.len() as u64, capacity - 2, "all but the two ids that are taken");
        assert_eq!(depot.refused(), 1);
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(depot.intern(0, native(i as u64 + 1)), *id);
        }
        assert_eq!(depot.intern(DEPOT_FULL, native(1)), DEPOT_FULL);
        assert_eq!(depot.refused(), 2);
        let why = RawFrame::Missing(Reason::DepotFull).pack();
        assert_eq!(frames(depot.words(), DEPOT_FULL), Some(vec![why]));
    }

    #[test]
    fn a_region_that_is_in_use_or_too_small_is_refused() {
        let used: &'static [AtomicU64] = depot(500).words();
        assert!(Depot::new(used, Space::MEMORY).is_none());
        assert!(Depot::new(&[], Space::MEMORY).is_none());
        assert!(
            Depot::new(
                (0..20).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak(),
                Space::MEMORY
            )
            .is_none()
        );
    }

    #[test]
    fn threads_agree_on_every_id() {
        const THREADS: u64 = 4;
        for round in 0..20 {
            let depot: &'static Depot = Box::leak(Box::new(depot(40_000)));
            let stack = move |s: u64| (1..=12).map(move |d| native(1 + (s >> (d / 4)) * 64 + d));
            let barrier: &'static std::sync::Barrier =
                Box::leak(Box::new(std::sync::Barrier::new(THREADS as usize)));
            let threads: Vec<_> = (0..THREADS)
                .map(|t| {
                    std::thread::spawn(move || {
                        barrier.wait();
                        // Half of them run the other way, so that they meet.
                        (0..300)
                            .map(|i| if t % 2 == 0 { i } else { 299 - i })
                            .map(|s| (s, depot.intern_all(stack(s + round))))
                            .collect::<HashMap<_, _>>()
                    })
                })
                .collect();
            let results: Vec<_> =
                threads.into_iter().map(|t| t.join().expect("no panic")).collect();
            for r in &results {
                assert_eq!(*r, results[0]);
            }
            for (s, id) in &results[0] {
                let mut back = frames(depot.words(), *id).expect("readable");
                back.reverse();
                assert_eq!(back, stack(s + round).collect::<Vec<_>>());
            }
            assert_eq!(depot.refused(), 0);
        }
    }
}

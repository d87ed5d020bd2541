//! The ring's promises: nothing lost, nothing torn, each thread's order kept, state = live table + replay.
//!
//! With `--cfg loom` every interleaving (up to a bounded number of preemptions) of two or three threads on
//! two to four slots is tried; without it, real threads and a model in plain Rust.

use super::*;
use memtrace_format::event::{Kind, Layer};

/// Checks itself: all numbers follow from `n`.
fn event(n: u64) -> Event {
    Event {
        kind: Kind::Alloc,
        layer: Layer::Framework,
        device: 0,
        flags: 0,
        api: 0,
        time_ns: n,
        addr: n,
        size: n * 3,
        extra: n * 5,
        stream: n * 7,
        stack: n as u32,
        thread: 1,
    }
}

fn assert_whole(e: &Event) {
    assert_eq!(*e, event(e.addr), "a torn event");
}

#[cfg(loom)]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use std::sync::Mutex as Std;

    fn ring(slots: usize) -> Arc<Ring> {
        Arc::new(Ring::over(crate::sync::zeroed_slots(slots)))
    }

    /// Everything that was pushed is in the live table or in the view, whole and in each thread's order.
    fn producers(slots: usize, threads: u64, each: u64) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let ring = ring(slots);
            let applied = std::sync::Arc::new(Std::new(Vec::new()));
            let push = move |thread: u64, ring: Arc<Ring>, applied: std::sync::Arc<Std<Vec<u64>>>| {
                for i in 0..each {
                    ring.push(event(thread * 100 + i).pack(), |_, e| {
                        assert_whole(e);
                        applied.lock().unwrap().push(e.addr);
                    });
                }
            };
            let handles: Vec<_> = (1..threads)
                .map(|t| {
                    let (ring, applied) = (ring.clone(), applied.clone());
                    thread::spawn(move || push(t, ring, applied))
                })
                .collect();
            push(0, ring.clone(), applied.clone());
            for h in handles {
                h.join().unwrap();
            }
            let view = ring.view(u64::MAX);
            let mut all = applied.lock().unwrap().clone();
            assert_eq!(view.from, all.len() as u64, "retired but not applied, or the reverse");
            assert_eq!(view.torn, 0);
            all.extend(view.events.iter().map(|e| e.addr));
            for t in 0..threads {
                let own: Vec<_> = all.iter().copied().filter(|a| a / 100 == t).collect();
                let expected: Vec<_> = (0..each).map(|i| t * 100 + i).collect();
                assert_eq!(own, expected, "thread {t} lost events or their order");
            }
        });
    }

    #[test]
    fn two_producers_on_two_slots() {
        producers(2, 2, 2);
    }

    #[test]
    fn two_producers_on_four_slots() {
        producers(4, 2, 3);
    }

    #[test]
    fn three_producers_on_two_slots() {
        producers(2, 3, 1);
    }

    #[test]
    fn a_reader_beside_a_producer_sees_whole_events() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let ring = ring(2);
            let writer = {
                let ring = ring.clone();
                thread::spawn(move || {
                    for i in 0..3 {
                        ring.push(event(i).pack(), |_, e| assert_whole(e));
                    }
                })
            };
            for ticket in 0..2 {
                if let Some(e) = ring.read(ticket) {
                    assert_whole(&e.unwrap());
                    assert_eq!(e.unwrap().addr, ticket, "a slot answered for another ticket");
                }
            }
            writer.join().unwrap();
        });
    }
}

#[cfg(not(loom))]
mod threads {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn eight_threads_lose_nothing_and_keep_their_order() {
        const EACH: u64 = 3_000;
        let ring = Ring::new(1024);
        let applied = Mutex::new(Vec::new());
        let stop = AtomicBool::new(false);
        let apply = |_: &mut State, e: &Event| {
            assert_whole(e);
            applied.lock().unwrap().push(e.addr);
        };
        std::thread::scope(|s| {
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ring.retire_ahead(apply);
                    for e in ring.view(u64::MAX).events {
                        assert_whole(&e);
                    }
                }
            });
            let producers: Vec<_> = (0..8_u64)
                .map(|t| {
                    let (ring, apply) = (&ring, &apply);
                    s.spawn(move || {
                        for i in 0..EACH {
                            ring.push(event(t << 32 | i).pack(), apply);
                        }
                    })
                })
                .collect();
            for p in producers {
                p.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut all = applied.into_inner().unwrap();
        let view = ring.view(u64::MAX);
        assert_eq!(view.torn, 0);
        all.extend(view.events.iter().map(|e| e.addr));
        assert_eq!(all.len() as u64, 8 * EACH);
        let mut next = [0; 8];
        for addr in all {
            let t = (addr >> 32) as usize;
            assert_eq!(addr & 0xffff_ffff, next[t]);
            next[t] += 1;
        }
    }

    proptest! {
        /// Whatever the mix of pushing, retiring and looking, state is the live table plus the replay.
        #[test]
        fn state_is_live_table_plus_replay(steps in prop::collection::vec((0_u8..4, 0_u64..12), 0..400)) {
            let ring = Ring::new(16);
            let mut model = State::default();
            let apply = |s: &mut State, e: &Event| s.apply(e, &|_| "", &mut |_, _| ());
            for (what, n) in steps {
                match what {
                    0 | 1 => {
                        let kind = if what == 0 { Kind::Alloc } else { Kind::FreeRequested };
                        let e = Event { kind, ..event(n) };
                        model.apply(&e, &|_| "", &mut |_, _| ());
                        ring.push(e.pack(), apply);
                    }
                    2 => ring.retire_ahead(apply),
                    _ => {
                        let view = ring.view(u64::MAX);
                        prop_assert_eq!(view.events.len() as u64, ring.written() - view.from);
                        let mut state = view.live;
                        for e in &view.events {
                            apply(&mut state, e);
                        }
                        prop_assert_eq!(&state, &model);
                    }
                }
            }
        }
    }

    #[test]
    fn a_view_up_to_a_ticket_leaves_out_what_came_later() {
        let ring = Ring::new(16);
        for i in 0..5 {
            ring.push(event(i).pack(), |_, _| ());
        }
        let addrs: Vec<_> = ring.view(3).events.iter().map(|e| e.addr).collect();
        assert_eq!(addrs, [0, 1, 2]);
    }
}

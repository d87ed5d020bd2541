//! The ring's promises: nothing lost, nothing torn, each thread's order
//! kept, state = live table + events.
//!
//! With `--cfg loom` every interleaving (up to a bounded number of preemptions) of two or three
//! threads on two to four slots is tried. The live table is behind them, and a reader in another
//! process beside them. Without it, there are real threads and a model in plain Rust.
//!
//! Each model has been seen red. With `Relaxed` where an event is published, or
//! retirement that skips an event which isn't yet, addresses lose the order of their
//! lives. Without the fence behind the live table's odd number, or with `Relaxed` for its
//! even one, a reader believes what was never so.

use super::*;
use crate::record::testing::event;

/// A ring that starts with `first` slots and may grow to `slots`.
fn ring_of<L>(slots: usize, first: usize, live: L) -> Ring<L> {
    let header = crate::os::sync::zeroed_words(128);
    header[at::RING_CAPACITY].store(first as u64, Ordering::Relaxed);
    let words = crate::os::sync::zeroed_words(slots * WORDS);
    Ring::new(words.as_chunks().0, header, Space::MEMORY, live)
}

/// The events from the live table on, how many are not published, and where they begin.
fn rest<L>(ring: &Ring<L>, to: u64) -> (Vec<Event>, u64, u64) {
    let ((), from) = ring.live(|_| ());
    let mut events = Vec::new();
    let unpublished = ring.read_range(from..to.min(ring.written()), &mut events);
    (events, unpublished.expect("nobody writes"), from)
}

fn assert_whole(e: &Event) {
    assert_eq!(*e, event(e.addr), "a torn event");
}

#[cfg(loom)]
mod model {
    use super::*;
    use crate::record::live::Live;
    use loom::sync::Arc;
    use loom::thread;
    use memtrace_format::blackbox::LIVE;
    use memtrace_format::event::Kind;
    use memtrace_state::State;
    use std::sync::Mutex as Std;

    fn ring(slots: usize, first: usize) -> Arc<Ring<()>> {
        Arc::new(ring_of(slots, first, ()))
    }

    /// Everything that was pushed is in the live table or in the view,
    /// whole and in each thread's order.
    fn producers(slots: usize, first: usize, threads: u64, each: u64) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let ring = ring(slots, first);
            let applied = std::sync::Arc::new(Std::new(Vec::new()));
            let push =
                move |thread: u64, ring: Arc<Ring<()>>, applied: std::sync::Arc<Std<Vec<u64>>>| {
                    for i in 0..each {
                        ring.push(event(thread * 100 + i).pack(), |(), e| {
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
            let (events, unpublished, from) = rest(&ring, u64::MAX);
            let mut all = applied.lock().unwrap().clone();
            assert_eq!(from, all.len() as u64, "retired but not applied, or the reverse");
            assert_eq!(unpublished, 0);
            all.extend(events.iter().map(|e| e.addr));
            for t in 0..threads {
                let own: Vec<_> = all.iter().copied().filter(|a| a / 100 == t).collect();
                let expected: Vec<_> = (0..each).map(|i| t * 100 + i).collect();
                assert_eq!(own, expected, "thread {t} lost events or their order");
            }
        });
    }

    #[test]
    fn two_producers_on_two_slots() {
        producers(2, 2, 2, 2);
    }

    #[test]
    fn two_producers_on_four_slots() {
        producers(4, 4, 2, 3);
    }

    #[test]
    fn two_producers_on_two_slots_that_become_four() {
        producers(4, 2, 2, 3);
    }

    /// Nothing goes as long as everything fits into what the ring may become.
    #[test]
    fn what_fits_stays_however_the_ring_grows() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(|| {
            let ring = ring(4, 2);
            let push = |ring: &Ring<()>, n| ring.push(event(n).pack(), |(), _| panic!("it went"));
            let producer = {
                let ring = ring.clone();
                thread::spawn(move || (1..3).for_each(|n| _ = push(&ring, n)))
            };
            push(&ring, 0);
            ring.retire_ahead(|(), _| panic!("it went"));
            producer.join().unwrap();
            assert_eq!((ring.written(), ring.retired()), (3, 0));
        });
    }

    #[test]
    fn three_producers_on_two_slots() {
        producers(2, 2, 3, 1);
    }

    /// A slot that was needed again is never taken for the event that it
    /// held, nor for one that never came.
    #[test]
    fn a_reader_that_is_overtaken_is_told() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let ring = ring(2, 2);
            let push = |ring: &Ring<()>, n: u64| ring.push(event(n).pack(), |_, e| assert_whole(e));
            push(&ring, 0);
            push(&ring, 1);
            let writer = {
                let ring = ring.clone();
                thread::spawn(move || push(&ring, 2))
            };
            let mut events = Vec::new();
            if let Some(unpublished) = ring.read_range(0..2, &mut events) {
                assert_eq!(unpublished, 0);
                assert_eq!(events, [event(0), event(1)]);
            }
            writer.join().unwrap();
            assert_eq!(ring.read_range(0..2, &mut events), None);
        });
    }

    fn header(capacity: usize) -> &'static [AtomicU64] {
        let header = crate::os::sync::zeroed_words(128);
        header[at::RING_CAPACITY].store(capacity as u64, Ordering::Relaxed);
        header
    }

    fn table() -> &'static [[AtomicU64; WORDS]] {
        crate::os::sync::zeroed_words(4 * WORDS).as_chunks().0
    }

    /// The block at `addr`, of its `n`-th life.
    fn alloc(addr: u64, n: u64) -> Event {
        Event { addr, ..event(n) }
    }

    fn free(addr: u64) -> Event {
        Event { kind: Kind::FreeRequested, ..alloc(addr, 0) }
    }

    /// What is alive: address and life.
    fn blocks(state: &State) -> Vec<(u64, u64)> {
        let blocks = state.devices.iter().flat_map(|d| &d.blocks);
        blocks.map(|(addr, block)| (*addr, block.size / 5)).collect()
    }

    fn small_ring(slots: usize) -> Arc<Ring<Live>> {
        let header = header(slots);
        let words = crate::os::sync::zeroed_words(slots * WORDS).as_chunks().0;
        Arc::new(Ring::new(words, header, Space::MEMORY, Live::tiny(table(), header, 0)))
    }

    fn state(ring: &Ring<Live>) -> Vec<(u64, u64)> {
        let mut state = ring.live(Live::copy).0.expect("memory").state();
        let (events, unpublished, _) = rest(ring, u64::MAX);
        assert_eq!(unpublished, 0);
        for e in &events {
            state.apply(e, &|_| "", &mut |_, _| ());
        }
        assert_eq!(state.anomalies, 0, "a free before its allocation, or two allocations in a row");
        blocks(&state)
    }

    /// The live table behind a ring that is always full: an address that
    /// is used again has its lives in order.
    #[test]
    fn each_address_keeps_its_order_through_retirement() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(|| {
            let ring = small_ring(2);
            let live = |thread: u64, ring: &Ring<Live>| {
                ring.push(alloc(thread, 1).pack(), Live::apply);
                ring.push(free(thread).pack(), Live::apply);
                ring.push(alloc(thread, 2).pack(), Live::apply);
            };
            let other = {
                let ring = ring.clone();
                thread::spawn(move || live(512, &ring))
            };
            live(1024, &ring);
            other.join().unwrap();
            assert_eq!(state(&ring), [(512, 2), (1024, 2)]);
        });
    }

    /// One thread allocates, another one that learns of it frees: never the other way round.
    #[test]
    fn a_block_that_changes_hands_is_freed_after_it_was_allocated() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let ring = small_ring(2);
            let allocated = Arc::new(AtomicU64::new(0));
            let other = {
                let (ring, allocated) = (ring.clone(), allocated.clone());
                thread::spawn(move || {
                    let had = allocated.load(Ordering::Acquire);
                    if had != 0 {
                        ring.push(free(had).pack(), Live::apply);
                    }
                    ring.push(alloc(512, 1).pack(), Live::apply);
                    had
                })
            };
            ring.push(alloc(1024, 1).pack(), Live::apply);
            allocated.store(1024, Ordering::Release);
            ring.push(alloc(1536, 1).pack(), Live::apply);
            let freed = other.join().unwrap();
            let all = [(512, 1), (1024, 1), (1536, 1)];
            let expect: Vec<_> = all.into_iter().filter(|(addr, _)| *addr != freed).collect();
            assert_eq!(state(&ring), expect);
        });
    }

    /// Another process reads the table while it changes: by the sequence number
    /// it knows when not to believe it. What it believes is the state after
    /// exactly as many events as the number says.
    fn a_reader_believes_only_what_is_so(events: &'static [(bool, u64, u64)]) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let (header, entries) = (header(2), table());
            let mut live = Live::tiny(entries, header, 0);
            let event = |(allocates, addr, n): (bool, u64, u64)| {
                if allocates { alloc(addr, n) } else { free(addr) }
            };
            let writer = thread::spawn(move || {
                for e in events {
                    live.apply(&event(*e));
                }
            });
            let before = header[at::LIVE_SEQUENCE].load(Ordering::Acquire);
            if before.is_multiple_of(2) {
                let n = header[at::LIVE_ROOM].load(Ordering::Relaxed) as usize;
                // Of each entry only its first word, its address and its
                // size, or there are too many ways.
                let words = entries[..n].iter();
                let words = words.map(|e| [0, 3, 5].map(|i| e[i].load(Ordering::Relaxed)));
                let mut read: Vec<_> = words.collect();
                fence(Ordering::Acquire);
                if header[at::LIVE_SEQUENCE].load(Ordering::Relaxed) == before {
                    read.retain(|[first, ..]| *first == LIVE);
                    read.sort_unstable();
                    let mut expect = State::default();
                    for e in &events[..before as usize / 2] {
                        expect.apply(&event(*e), &|_| "", &mut |_, _| ());
                    }
                    let expect = blocks(&expect).into_iter().map(|(addr, n)| [LIVE, addr, n * 5]);
                    assert_eq!(read, expect.collect::<Vec<_>>(), "after {} events", before / 2);
                }
            }
            writer.join().unwrap();
        });
    }

    #[test]
    fn a_reader_of_a_table_in_which_a_place_is_used_again() {
        a_reader_believes_only_what_is_so(&[(true, 512, 1), (false, 512, 0), (true, 512, 2)]);
    }

    #[test]
    fn a_reader_of_a_table_in_which_an_entry_is_replaced() {
        a_reader_believes_only_what_is_so(&[(true, 512, 1), (true, 512, 2)]);
    }

    #[test]
    fn a_reader_of_a_table_that_grows() {
        a_reader_believes_only_what_is_so(&[(true, 512, 1), (true, 1024, 2)]);
    }

    #[test]
    fn a_reader_beside_a_producer_sees_whole_events() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let ring = ring(2, 2);
            let writer = {
                let ring = ring.clone();
                thread::spawn(move || {
                    for i in 0..3 {
                        ring.push(event(i).pack(), |(), e| assert_whole(e));
                    }
                })
            };
            for ticket in 0..2 {
                if let Some(e) = ring.read(ticket) {
                    let e = Event::unpack(e).unwrap();
                    assert_whole(&e);
                    assert_eq!(e.addr, ticket, "a slot answered for another ticket");
                }
            }
            writer.join().unwrap();
        });
    }
}

#[cfg(not(loom))]
mod threads {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn eight_threads_lose_nothing_and_keep_their_order() {
        const EACH: u64 = 3_000;
        let ring = ring_of(1024, 64, ());
        let applied = Mutex::new(Vec::new());
        let stop = AtomicBool::new(false);
        let apply = |(): &mut (), e: &Event| {
            assert_whole(e);
            applied.lock().unwrap().push(e.addr);
        };
        std::thread::scope(|s| {
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ring.retire_ahead(apply);
                    let ((), from) = ring.live(|()| ());
                    let mut events = Vec::new();
                    let _ = ring.read_range(from..ring.written(), &mut events);
                    for e in events {
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
        let (events, unpublished, _) = rest(&ring, u64::MAX);
        assert_eq!(unpublished, 0);
        all.extend(events.iter().map(|e| e.addr));
        assert_eq!(all.len() as u64, 8 * EACH);
        let mut next = [0; 8];
        for addr in all {
            let t = (addr >> 32) as usize;
            assert_eq!(addr & 0xffff_ffff, next[t]);
            next[t] += 1;
        }
    }

    /// Whoever waited for the reader would wait for ever: all this is one thread.
    #[test]
    fn a_reader_holds_nobody_up() {
        let ring = ring_of(64, 64, ());
        let push = |numbers: Range<u64>| {
            for n in numbers {
                ring.push(event(n).pack(), |(), _| ());
            }
        };
        push(0..64);
        let ((), from) = ring.live(|()| ());
        let mut events = Vec::new();
        assert_eq!(ring.read_range(from..8, &mut events), Some(0));
        // It stops in the middle, and half a ring is written.
        push(64..96);
        assert!(ring.retired() >= 32);
        assert_eq!(ring.read_range(8..16, &mut events), None, "these slots were needed");
        assert_eq!(ring.read_range(32..64, &mut events), Some(0), "retired or not, these were not");
        let addrs: Vec<_> = events.iter().map(|e| e.addr).collect();
        assert_eq!(addrs, (0..8).chain(32..64).collect::<Vec<_>>());
    }

    /// Somebody writes into the file: what no producer has written is lost, and
    /// nobody waits for it, reader or producer.
    #[test]
    fn words_of_somebody_else_are_lost() {
        let text = u64::from_le_bytes(*b"line 173");
        let ring = ring_of(64, 64, ());
        let applied = std::cell::Cell::new(0);
        let push = |numbers: Range<u64>| {
            for n in numbers {
                ring.push(event(n).pack(), |(), _| applied.set(applied.get() + 1));
            }
        };
        push(0..60);
        ring.slots[7][0].store(text, Ordering::Relaxed);
        let mut events = Vec::new();
        assert_eq!(ring.read_range(0..60, &mut events), Some(1));
        push(60..128);
        assert_eq!(applied.get(), ring.retired() - 1);
        // So is a history that begins or ends where it can't.
        for word in [at::HEAD, at::RETIRED, at::RING_CAPACITY] {
            ring.header[word].store(text, Ordering::Relaxed);
            push(0..100);
            assert!(ring.written() <= ring.retired() + (1 << 24));
            ring.read_range(
                ring.retired()..ring.written().min(ring.retired() + 10_000),
                &mut events,
            );
        }
    }

    #[test]
    fn an_event_that_must_be_the_next_one_is_it_or_is_not_there() {
        let ring = ring_of(8, 8, ());
        let written = ring.written();
        assert_eq!(ring.push_at(written, event(1).pack(), |(), _| {}), Some(false));
        let written = ring.written();
        ring.push(event(2).pack(), |(), _| {});
        assert_eq!(ring.push_at(written, event(3).pack(), |(), _| {}), None);
        let (events, unpublished, _) = rest(&ring, u64::MAX);
        assert_eq!((events, unpublished), (vec![event(1), event(2)], 0));
    }

    #[test]
    fn reading_up_to_a_ticket_leaves_out_what_came_later() {
        let ring = ring_of(16, 16, ());
        for i in 0..5 {
            ring.push(event(i).pack(), |(), _| ());
        }
        let addrs: Vec<_> = rest(&ring, 3).0.iter().map(|e| e.addr).collect();
        assert_eq!(addrs, [0, 1, 2]);
    }
}

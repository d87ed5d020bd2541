//! The live table's promises: it says what a reader of all events says, at any split of the
//! two, with room in the file or without.
//!
//! Each has been seen red: with deferred frees that never complete in pools from 128 on; with
//! entries that are dropped when the file is full; with one chain for all.

use super::*;
use crate::record::ring::Ring;
use crate::record::testing::event;
use memtrace_format::blackbox::LIVE_FIRST;
use memtrace_format::event::{FLAG_FAILED, FLAG_PENDING, Kind, Layer, Pool, What};
use memtrace_state::LiveBlock;
use memtrace_state::PAGE;
use memtrace_state::ledger::Totals;
use proptest::prelude::*;

/// What may happen, in a small space so that addresses and handles meet again.
fn any_event() -> impl Strategy<Value = Event> {
    let kinds = prop_oneof![
        4 => Just((Layer::Framework, Kind::Alloc)),
        3 => Just((Layer::Framework, Kind::FreeRequested)),
        1 => Just((Layer::Framework, Kind::WaitsFor)),
        1 => Just((Layer::Framework, Kind::EventReady)),
        1 => Just((Layer::Framework, Kind::FreeCompleted)),
        1 => Just((Layer::Framework, Kind::SegmentAlloc)),
        1 => Just((Layer::Framework, Kind::SegmentFree)),
        1 => Just((Layer::Framework, Kind::SegmentMap)),
        1 => Just((Layer::Framework, Kind::SegmentUnmap)),
        1 => Just((Layer::Device, Kind::Alloc)),
        1 => Just((Layer::Device, Kind::FreeRequested)),
        1 => Just((Layer::Host, Kind::Alloc)),
        2 => Just((Layer::Device, Kind::HandleCreate)),
        1 => Just((Layer::Device, Kind::HandleRetain)),
        3 => Just((Layer::Device, Kind::HandleRelease)),
        3 => Just((Layer::Device, Kind::Map)),
        2 => Just((Layer::Device, Kind::Unmap)),
        1 => Just((Layer::Device, Kind::Reserve)),
        1 => Just((Layer::Device, Kind::Unreserve)),
        1 => Just((Layer::Device, Kind::Create)),
        1 => Just((Layer::Device, Kind::Destroy)),
        1 => Just((Layer::Device, Kind::PoolReserved)),
        1 => Just((Layer::Device, Kind::Reset)),
        1 => Just((Layer::Framework, Kind::Snapshot)),
        1 => Just((Layer::Framework, Kind::Oom)),
        1 => Just((Layer::Framework, Kind::Mark)),
    ];
    let whats = prop::sample::select((0..15).filter_map(What::from_u8).collect::<Vec<_>>());
    // Most on one device; a call may have failed, and what a damaged file says may lie on none.
    let wheres = (prop::sample::select(vec![0, 0, 0, 0, 1, 1, -1]), 0..12);
    (kinds, whats, any_pool(), 0_u64..24, 1_u64..5, (any::<bool>(), wheres)).prop_map(
        |((layer, kind), what, pool, n, handle, (odd, (device, failed)))| {
            let (mut what, mut size, mut stream) = (what, PAGE, n);
            // The layers' addresses are apart, as the driver's are, and so are handles.
            let mut addr = (n + if layer == Layer::Framework { 0 } else { 100 }) * PAGE;
            match kind {
                _ if layer == Layer::Framework => what = What::Device,
                Kind::HandleCreate | Kind::HandleRetain | Kind::HandleRelease => {
                    (addr, stream) = (handle, 1);
                    what = if odd { What::Device } else { What::Imported };
                }
                Kind::Map => stream = n % 3 * PAGE,
                Kind::Unmap | Kind::Unreserve if odd => size *= 2,
                Kind::FreeRequested if odd => what = What::Device,
                _ => {}
            }
            let pending = if odd && kind == Kind::FreeRequested { FLAG_PENDING } else { 0 };
            let flags = pending | if failed == 0 { FLAG_FAILED } else { 0 };
            let event = Event { device, flags, ..event(n) };
            Event { kind, layer, what, pool, addr, size, stream, extra: handle, ..event }
        },
    )
}

/// A few of PyTorch's pools, up to the last one that has a number of its own.
fn any_pool() -> impl Strategy<Value = Pool> {
    prop::sample::select(vec![0, 1, 127, 128, 129, 255, 256, 0x7fff, 0x8000, 0xfffe, 0xffff])
        .prop_map(Pool)
}

/// Blocks of any pool whose frees wait for events: little else, and few of each, so that they meet.
fn any_deferred() -> impl Strategy<Value = Event> {
    let kinds = prop::sample::select(vec![
        Kind::Alloc,
        Kind::Alloc,
        Kind::FreeRequested,
        Kind::FreeRequested,
        Kind::WaitsFor,
        Kind::WaitsFor,
        Kind::WaitsFor,
        Kind::EventReady,
        Kind::EventReady,
        Kind::FreeCompleted,
        Kind::SegmentAlloc,
    ]);
    (kinds, any_pool(), 0_u64..4, 1_u64..9, 0..8).prop_map(|(kind, pool, n, extra, odds)| {
        let flags = if kind == Kind::FreeRequested && odds != 0 { FLAG_PENDING } else { 0 };
        Event { kind, pool, addr: n * PAGE, size: PAGE, extra, flags, ..event(n) }
    })
}

/// The events from the live table on, how many are not published, and where they begin.
fn rest(ring: &Ring<Live>) -> (Vec<Event>, u64, u64) {
    let ((), from) = ring.live(|_| ());
    let mut events = Vec::new();
    let unpublished = ring.read_range(from..ring.written(), &mut events);
    (events, unpublished.expect("nobody writes"), from)
}

fn applied(mut state: State, events: &[Event]) -> State {
    for e in events {
        state.apply(e, &|_| "", &mut |_, _| ());
    }
    state
}

/// What a reader sees: segments with their blocks, and what the frees wait for.
fn visible(state: &State) -> (Vec<memtrace_format::snapshot::Segment>, usize, Totals) {
    let waits =
        state.devices.iter().flat_map(|d| d.blocks.values()).map(|b| b.waits as usize).sum();
    (state.segments(&mut |_| None), waits, state.ledger.totals())
}

fn words(count: usize) -> &'static [AtomicU64] {
    crate::os::sync::zeroed_words(count)
}

/// A table with room for so many entries in the file and so many in memory.
fn live(inside: usize, outside: usize) -> (Live, &'static [AtomicU64]) {
    let header = words(128);
    (Live::tiny(words(inside * WORDS).as_chunks().0, header, outside), header)
}

/// What each block of a framework's is and waits for.
fn blocks(state: &State) -> Vec<(u64, LiveBlock)> {
    let blocks = state.devices.iter().flat_map(|d| &d.blocks);
    blocks.map(|(addr, block)| (*addr, *block)).collect()
}

/// The state by any split: the table up to there, and the rest applied to it. The event at the
/// split is in both where a process may have died between the two.
fn at_any_split(events: &[Event], inside: usize, outside: usize) -> Result<(), TestCaseError> {
    let whole = applied(State::default(), events);
    let (mut live, header) = live(inside, outside);
    for split in 0..=events.len() {
        let state = applied(live.copy().expect("memory").state(), &events[split..]);
        prop_assert_eq!(visible(&state), visible(&whole), "split at {}", split);
        prop_assert_eq!(blocks(&state), blocks(&whole), "split at {}", split);
        if let Some(twice) = split.checked_sub(1)
            && !live.copy().expect("memory").state().ledger.counted(&events[twice], twice as u64)
        {
            let state = applied(live.copy().expect("memory").state(), &events[twice..]);
            prop_assert_eq!(blocks(&state), blocks(&whole), "{} twice", twice);
        }
        if let Some(event) = events.get(split) {
            live.apply(event);
        }
    }
    prop_assert_eq!(header[at::LIVE_REFUSED].load(Ordering::Relaxed), 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Deferred frees on any pools: the same by the table, by a reader and by
    /// any split of the two (issue F, B8).
    #[test]
    fn deferred_frees_are_the_same_at_any_split(
        events in prop::collection::vec(any_deferred(), 0..50)
    ) {
        at_any_split(&events, 64, 0)?;
    }

    /// The same for everything, and where most entries have no room in the file (issue F, A2).
    #[test]
    fn everything_is_the_same_at_any_split(
        events in prop::collection::vec(any_event(), 0..50),
        inside in 1_usize..16,
    ) {
        at_any_split(&events, inside, 256)?;
    }
}

proptest! {
    /// Whatever the mix of pushing, retiring and looking, state is the live table plus the events,
    /// in the process and for a reader of its memory.
    #[test]
    fn state_is_live_table_plus_events(
        steps in prop::collection::vec((0_u8..8, any_event()), 0..600)
    ) {
        let entries = crate::os::sync::zeroed_words(8 * LIVE_FIRST * WORDS).as_chunks().0;
        let header = crate::os::sync::zeroed_words(128);
        header[at::RING_CAPACITY].store(16, Ordering::Relaxed);
        let words = crate::os::sync::zeroed_words(64 * WORDS).as_chunks().0;
        let live = Live::new(entries, header, Space::MEMORY);
        let ring = Ring::new(words, header, Space::MEMORY, live);
        let mut all = Vec::new();
        for (what, e) in steps {
            match what {
                0 => { ring.retire_ahead(Live::apply); }
                1 => {
                    let (events, unpublished, from) = rest(&ring);
                    prop_assert_eq!((events.len() as u64, unpublished), (ring.written() - from, 0));
                    let state = applied(ring.live(Live::copy).0.expect("memory").state(), &events);
                    prop_assert_eq!(visible(&state), visible(&applied(State::default(), &all)));
                }
                _ => {
                    all.push(e);
                    ring.push(e.pack(), Live::apply);
                }
            }
        }
    }
}

/// What the header says.
fn says(header: &[AtomicU64], word: usize) -> u64 {
    header[word].load(Ordering::Relaxed)
}

fn alloc(i: u64) -> Event {
    Event { addr: i * 512, ..event(i) }
}

fn free(i: u64) -> Event {
    Event { kind: Kind::FreeRequested, ..alloc(i) }
}

fn numbers(state: &State) -> Vec<u64> {
    blocks(state).iter().map(|(addr, _)| addr / 512).collect()
}

#[test]
fn the_live_table_grows_and_stays_exact() {
    let entries = crate::os::sync::zeroed_words(4 * LIVE_FIRST * WORDS).as_chunks().0;
    let header = words(128);
    let mut live = Live::new(entries, header, Space::MEMORY);
    let n = 3 * LIVE_FIRST as u64;
    (0..n).for_each(|i| live.apply(&alloc(i)));
    (0..n).filter(|i| i % 3 != 0).for_each(|i| live.apply(&free(i)));
    let left = numbers(&live.copy().expect("memory").state());
    assert_eq!(left, (0..n).filter(|i| i % 3 == 0).collect::<Vec<_>>());
    assert_eq!((says(header, at::LIVE_USED), says(header, at::LIVE_ROOM)), (n / 3, n));
    // What is free again is used before anything else.
    (0..2 * n / 3).for_each(|i| live.apply(&alloc(n + i)));
    assert_eq!((says(header, at::LIVE_USED), says(header, at::LIVE_ROOM)), (n, n));
    assert_eq!(says(header, at::LIVE_REFUSED), 0);
}

#[test]
fn what_the_file_has_no_room_for_is_in_memory_and_what_that_has_none_for_is_counted() {
    let (mut live, header) = live(100, 128);
    (1..=240).for_each(|i| live.apply(&alloc(i)));
    assert_eq!(numbers(&live.copy().expect("memory").state()), (1..=228).collect::<Vec<_>>());
    let lacking = || {
        let words =
            [at::LIVE_OUTSIDE, at::LIVE_OUTSIDE_BYTES, at::LIVE_REFUSED, at::LIVE_REFUSED_BYTES];
        words.map(|word| says(header, word))
    };
    let bytes = |range: std::ops::RangeInclusive<u64>| range.map(|i| i * 5).sum::<u64>();
    assert_eq!(lacking(), [128, bytes(101..=228), 12, bytes(229..=240)]);
    // The end of what was refused changes nothing; what is free in the file is used first.
    (229..=240).chain(1..=50).chain(101..=150).for_each(|i| live.apply(&free(i)));
    assert_eq!(lacking()[..2], [78, bytes(151..=228)]);
    (301..=350).for_each(|i| live.apply(&alloc(i)));
    assert_eq!(lacking(), [78, bytes(151..=228), 12, bytes(229..=240)]);
    let left: Vec<_> = (51..=100).chain(151..=228).chain(301..=350).collect();
    assert_eq!(numbers(&live.copy().expect("memory").state()), left);
}

/// However much came and went, and whether or not there is room: an entry is
/// found in a few steps (issue F, A2).
#[test]
fn no_chain_is_long() {
    for (inside, outside) in [(1 << 14, 0), (64, 1 << 14), (1 << 13, 1 << 13)] {
        let (mut live, header) = live(inside, outside);
        for round in 0..10 {
            let first = round * 100_000;
            (first..first + 15_000).for_each(|i| live.apply(&alloc(i)));
            assert!(live.places.longest_chain() < 16, "{}", live.places.longest_chain());
            (first..first + 15_000).for_each(|i| live.apply(&free(i)));
        }
        assert_eq!((says(header, at::LIVE_USED), says(header, at::LIVE_REFUSED)), (0, 0));
    }
}

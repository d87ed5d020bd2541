//! Whatever a program does, right or wrong, the allocator stays whole.

use memtrace_caching::{
    Allocator, BlockId, Counter, FailureCause, Misuse, Pointers, Route, Settings,
};
use proptest::prelude::*;

const CONFS: [&str; 10] = [
    "",
    "expandable_segments:True",
    "large_segment_size_mb:18446744073709551615",
    "large_segment_size_mb:17592186044416,expandable_segments:True,expandable_segments_reserve:9999999G",
    "expandable_segments:True,large_segment_size_mb:11",
    "max_split_size_mb:20,max_non_split_rounding_mb:20",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.6",
    "roundup_power2_divisions:4,max_split_size_mb:32",
    "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5,max_split_size_mb:21,expandable_segments:True",
];

#[derive(Clone, Debug)]
enum Op {
    Malloc { size: u64, stream: u64 },
    MallocAt { size: u64, near: usize, steps: u64 },
    Free(usize),
    FreeAgain(usize),
    FreeWaiting(usize),
    Complete(usize),
    RecordStream(usize, u64),
    EmptyCache,
    Begin(u64, bool),
    End(u64),
    Release(u64),
    EmptyPool(u64),
    OnOom(u64, bool),
    NoSplit(u64),
    OwnAllocator(u64),
    Captures(bool),
    Conf(usize),
    Fraction(f64),
    Wait,
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![
        4 => 0..4096_u64,
        4 => 0..(3_u64 << 20),
        3 => 0..(60_u64 << 20),
        1 => any::<u64>(),
        1 => ((1_u64 << 63) - 1024)..((1_u64 << 63) + 1024),
        1 => ((1_u64 << 60) - 2)..((1_u64 << 60) + 2),
    ];
    let stream = prop_oneof![4 => Just(0_u64), 2 => 1..4_u64, 1 => any::<u64>()];
    let pool = 0..3_u64;
    prop_oneof![
        20 => (size, stream.clone()).prop_map(|(size, stream)| Op::Malloc { size, stream }),
        3 => (0..(4_u64 << 20), any::<usize>(), 0..5000_u64)
            .prop_map(|(size, near, steps)| Op::MallocAt { size, near, steps }),
        14 => any::<usize>().prop_map(Op::Free),
        1 => any::<usize>().prop_map(Op::FreeAgain),
        2 => any::<usize>().prop_map(Op::FreeWaiting),
        2 => any::<usize>().prop_map(Op::Complete),
        3 => (any::<usize>(), stream).prop_map(|(n, s)| Op::RecordStream(n, s)),
        1 => Just(Op::EmptyCache),
        1 => (pool.clone(), any::<bool>()).prop_map(|(p, all)| Op::Begin(p, all)),
        1 => pool.clone().prop_map(Op::End),
        1 => pool.clone().prop_map(Op::Release),
        1 => pool.clone().prop_map(Op::EmptyPool),
        1 => (pool.clone(), any::<bool>()).prop_map(|(p, on)| Op::OnOom(p, on)),
        1 => pool.clone().prop_map(Op::NoSplit),
        1 => pool.prop_map(Op::OwnAllocator),
        1 => any::<bool>().prop_map(Op::Captures),
        1 => (0..CONFS.len()).prop_map(Op::Conf),
        1 => (-0.5..1.5).prop_map(Op::Fraction),
        1 => Just(Op::Wait),
    ]
}

fn settings(n: usize) -> Settings {
    Settings::parse(CONFS[n]).expect("valid").settings
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// One arm for each operation, however many there are.
    #[test]
    fn any_sequence_leaves_it_whole(
        conf in 0..CONFS.len(),
        lazy in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..200),
    ) {
        let counter = Counter::new(256 << 20, 3 << 20);
        let counter = if lazy { counter.lazy() } else { counter };
        let mut a = Allocator::new(counter, settings(conf), ());
        let mut live: Vec<BlockId> = Vec::new();
        let mut gone: Vec<BlockId> = Vec::new();
        let mut pending = Vec::new();
        for op in ops {
            match op.clone() {
                Op::Malloc { size, stream } => match a.malloc(size, stream) {
                    Ok(got) => {
                        prop_assert!(got.size >= size.max(512) && got.addr % 512 == 0);
                        live.push(got.id);
                    }
                    Err(e) => prop_assert!(e.requested == size && !e.to_string().is_empty()),
                },
                Op::MallocAt { size, near, steps } if !live.is_empty() => {
                    let there = a.allocation(live[near % live.len()]).expect("allocated");
                    let addr = there.addr + there.size + steps * 512;
                    if let Ok(got) = a.malloc_at(size, 0, addr) {
                        prop_assert_eq!(got.addr, addr);
                        live.push(got.id);
                    }
                    prop_assert_eq!(a.malloc_at(size, 0, addr + 1), Err(Misuse::Unaligned(addr + 1)));
                }
                Op::Free(n) if !live.is_empty() => {
                    let id = live.swap_remove(n % live.len());
                    prop_assert_eq!(a.free(id), Ok(()));
                    gone.push(id);
                }
                Op::FreeAgain(n) if !gone.is_empty() => {
                    let id = gone[n % gone.len()];
                    prop_assert_eq!(a.free(id), Err(Misuse::NotAllocated));
                    prop_assert_eq!(a.record_stream(id, 9), Err(Misuse::NotAllocated));
                }
                Op::FreeWaiting(n) if !live.is_empty() => {
                    let id = live.swap_remove(n % live.len());
                    pending.push(a.free_waiting(id).expect("allocated"));
                    gone.push(id);
                }
                Op::Complete(n) if !pending.is_empty() => {
                    let n = n % pending.len();
                    a.complete_free(pending[n]);
                }
                Op::RecordStream(n, stream) if !live.is_empty() => {
                    prop_assert_eq!(a.record_stream(live[n % live.len()], stream), Ok(()));
                }
                Op::EmptyCache => a.empty_cache(),
                Op::Begin(p, all) => {
                    let route = if all { Route::All } else { Route::Stream(p) };
                    let _ = a.begin_allocate_to_pool((0, p), route);
                }
                Op::End(p) => drop(a.end_allocate_to_pool((0, p))),
                Op::Release(p) => drop(a.release_pool((0, p))),
                Op::EmptyPool(p) => a.empty_pool((0, p)),
                Op::OnOom(p, on) => drop(a.set_use_on_oom((0, p), on)),
                Op::NoSplit(p) => drop(a.set_no_split((0, p))),
                Op::OwnAllocator(p) => drop(a.set_own_allocator((0, p))),
                Op::Captures(true) => a.capture_begins(),
                Op::Captures(false) => a.capture_ends(),
                Op::Conf(n) => a.set_settings(settings(n)),
                Op::Fraction(f) => {
                    prop_assert_eq!(a.set_memory_fraction(f).is_ok(), (0.0..=1.0).contains(&f));
                }
                Op::Wait => {
                    let event = memtrace_caching::Driver::record(a.device_mut(), 0);
                    memtrace_caching::Driver::synchronize(a.device_mut(), event);
                }
                _ => {}
            }
            if let Err(e) = a.check() {
                prop_assert!(false, "after {:?}: {}", op, e);
            }
        }
        for id in live {
            prop_assert_eq!(a.free(id), Ok(()));
        }
        prop_assert_eq!(a.check(), Ok(()));
    }
}

#[test]
fn wrong_pointers_have_clear_errors() {
    let mut a = Allocator::new(Counter::new(1 << 30, 0), Settings::default(), ());
    let mut pointers = Pointers::default();
    assert_eq!(pointers.malloc(&mut a, 0, 0), Ok(None));
    assert_eq!(pointers.free(&mut a, 0), Ok(0));
    let block = pointers.malloc(&mut a, 1000, 0).expect("there is room").expect("some bytes");
    let addr = block.addr;
    assert_eq!(pointers.free(&mut a, addr + 512), Err(Misuse::UnknownAddress(addr + 512)));
    assert_eq!(pointers.free(&mut a, addr), Ok(1024));
    let again = pointers.free(&mut a, addr).expect_err("it is gone");
    assert_eq!(again.to_string(), format!("invalid device pointer: {addr:#x}"));
    pointers.record_stream(&mut a, 0xdead_0000, 7);
    let absurd = a.malloc(1 << 63, 0).expect_err("there is no such card");
    assert_eq!(absurd.why, FailureCause::Absurd);
    assert_eq!(absurd.to_string(), "CUDA out of memory. Tried to allocate more than 1EB memory.");
    let large = a.malloc((1 << 60) - 1, 0).expect_err("there is no such card");
    assert_eq!(large.why, FailureCause::Exhausted);
    assert_eq!(a.stats().num_ooms, 1);
    assert_eq!(a.check(), Ok(()));
}

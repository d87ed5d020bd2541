//! Snapshots made up here: damage is named with its place and its value, a valid history of any
//! length passes, and nonsense causes no panic.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

use memtrace_analysis::check::{self, Level, check};
use memtrace_analysis::report::report;
use memtrace_analysis::{history, summary};
use memtrace_format::key::Memtrace;
use memtrace_format::pickle;
use memtrace_format::snapshot::{
    Action, Block, BlockState, Frame, Other, Place, Segment, Snapshot, TraceEntry,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const BASE: u64 = 0x7f00_0000_0000;

fn entry(action: Action, addr: u64, size: u64) -> TraceEntry {
    TraceEntry {
        action,
        addr,
        size,
        stream: 0,
        time_us: Some(1_000_000),
        compile_context: Some("N/A".into()),
        user_metadata: Some("".into()),
        pool_id: Some((0, 0)),
        frames: Some(0),
    }
}

fn block(address: u64, size: u64, state: BlockState) -> Block {
    let requested_size = if state == BlockState::Inactive { 0 } else { size };
    Block { address, size, requested_size, state, frames: None }
}

fn segment(address: u64, blocks: Vec<Block>) -> Segment {
    let sum = |pick: fn(&Block) -> bool| blocks.iter().filter(|b| pick(b)).map(|b| b.size).sum();
    Segment {
        device: 0,
        address,
        total_size: sum(|_| true),
        allocated_size: sum(|b| b.state == BlockState::ActiveAllocated),
        active_size: sum(|b| b.state != BlockState::Inactive),
        requested_size: sum(|b| b.state != BlockState::Inactive),
        stream: 0,
        small: false,
        pool_id: (0, 0),
        is_expandable: false,
        frames: None,
        blocks,
    }
}

/// A failure of PyTorch's: what was asked, what was free, and when.
fn failed(asked: u64, free: u64, time_us: i64) -> TraceEntry {
    TraceEntry { time_us: Some(time_us), ..entry(Action::Oom, free, asked) }
}

/// No limit refused what the driver did, or what comes in a segment that didn't fit.
#[test]
fn a_limit_refused_only_where_there_is_one() {
    let limited = |memtrace: Value, trace: Vec<TraceEntry>| -> Vec<bool> {
        let memtrace = Memtrace::read(memtrace);
        let snapshot = Snapshot { device_traces: vec![trace], memtrace, ..Snapshot::default() };
        summary(&snapshot).devices[0].ooms.iter().map(|oom| oom.limited).collect()
    };
    let conf = |conf: &str| json!({"allocator_conf": conf});
    // 5 MiB come in a segment of 20, or of what is set.
    for (set, free, is_limit) in [
        ("", 19, false),
        ("", 20, true),
        ("large_segment_size_mb:256", 100, false),
        ("large_segment_size_mb:256", 256, true),
        ("large_segment_size_mb:12", 15, true),
    ] {
        let trace = vec![failed(5 * MIB, free * MIB, 1)];
        assert_eq!(limited(conf(set), trace), [is_limit], "{set}, {free} MiB free");
    }
    // 33 MiB are a block of 40.
    let trace = vec![failed(33 * MIB, 36 * MIB, 1)];
    assert_eq!(limited(conf("roundup_power2_divisions:4"), trace), [false]);
    // The driver refused the first and the last.
    let three = || [7, 8, 9].map(|t| failed(64 * MIB, 80 * MIB, t)).to_vec();
    let mut about = json!({"refused_by_driver": [[0, 7], [1, 8], [0, 9]]});
    assert_eq!(limited(about.take(), three()), [false, true, false]);
    // A file of an older memtrace's, which knew it of the last one.
    let last = json!({"out_of_memory": {"device": 0, "time_us": 9, "refused_by_driver": true}});
    assert_eq!(limited(last, three()), [true, true, false]);
    // What can't be.
    assert_eq!(limited(json!({}), vec![failed(u64::MAX, 5, 1)]), [false]);
}

/// Settings are found out once, and not for each failure.
#[test]
fn many_failures_take_time_by_their_number() {
    let time = |n: i64| {
        let trace = (0..n).map(|t| failed(64 * MIB, 80 * MIB, t)).collect();
        let snapshot = Snapshot { device_traces: vec![trace], ..Snapshot::default() };
        let once = || {
            let start = std::time::Instant::now();
            assert_eq!(summary(&snapshot).devices[0].ooms.len(), n as usize);
            start.elapsed()
        };
        (0..10).map(|_| once()).min().expect("ten")
    };
    let (few, many) = (time(1000), time(16_000));
    assert!(many < few * 90, "16 times as many: {few:?}, {many:?}");
}

/// Two segments, one block in each, one more that came and went.
fn small() -> Snapshot {
    use BlockState::{ActiveAllocated, Inactive};
    let first =
        vec![block(BASE, 4 * MIB, ActiveAllocated), block(BASE + 4 * MIB, 16 * MIB, Inactive)];
    let second = vec![block(BASE + 32 * MIB, 20 * MIB, ActiveAllocated)];
    Snapshot {
        frames: vec![Frame {
            name: "main".to_owned(),
            filename: "/home/user/a.py".to_owned(),
            line: 3,
        }],
        stacks: vec![vec![0]],
        segments: vec![segment(BASE, first), segment(BASE + 32 * MIB, second)],
        device_traces: vec![vec![
            entry(Action::SegmentAlloc, BASE, 20 * MIB),
            entry(Action::Alloc, BASE, 4 * MIB),
            entry(Action::Alloc, BASE + 4 * MIB, 8 * MIB),
            entry(Action::FreeRequested, BASE + 4 * MIB, 8 * MIB),
            entry(Action::FreeCompleted, BASE + 4 * MIB, 8 * MIB),
            entry(Action::SegmentAlloc, BASE + 32 * MIB, 20 * MIB),
            entry(Action::Alloc, BASE + 32 * MIB, 20 * MIB),
        ]],
        ..Snapshot::default()
    }
}

fn errors(snapshot: &Snapshot) -> Vec<String> {
    let problems = check(snapshot).into_iter().filter(|p| p.level == Level::Error);
    problems.map(|p| p.to_string()).collect()
}

/// Applies damage and expects one of the errors to say this.
#[track_caller]
fn damaged(damage: impl Fn(&mut Snapshot), reason: &str) {
    let mut snapshot = small();
    damage(&mut snapshot);
    let errors = errors(&snapshot);
    assert!(errors.iter().any(|e| e.contains(reason)), "{errors:#?} should say {reason:?}");
}

#[test]
fn the_sound_one_is_sound() {
    assert_eq!(errors(&small()), Vec::<String>::new());
}

#[test]
fn damage_to_segments_is_named() {
    damaged(
        |s| s.segments[1].total_size += 512,
        "segments[1].total_size: 20972032, but its blocks add up to 20971520",
    );
    damaged(
        |s| s.segments[0].allocated_size = 0,
        "segments[0].allocated_size: 0, but its allocated blocks add up to 4194304",
    );
    damaged(
        |s| s.segments[0].active_size = 7,
        "segments[0].active_size: 7, but its active blocks add up to 4194304",
    );
    damaged(
        |s| s.segments[0].requested_size = 7,
        "segments[0].requested_size: 7, but the requests of its active blocks",
    );
    damaged(
        |s| s.segments.swap(0, 1),
        "segments[1].address: 0x7f0000000000, below that of segments[0]",
    );
    damaged(
        |s| s.segments[1].address = BASE + 8 * MIB,
        "segments[1].address: 0x7f0000800000, inside segments[0]",
    );
    damaged(
        |s| s.segments[0].device = 1,
        "segments[0].device: 1, but there are traces of 1 devices",
    );
    damaged(
        |s| s.segments[0].device = -1,
        "segments[0].device: -1, but there are traces of 1 devices",
    );
    damaged(
        |s| s.segments[0].blocks[1].address += 512,
        "segments[0].blocks[1].address: 0x7f0000400200, but the block before it ends at 0x7f0000400000",
    );
    damaged(|s| s.segments[0].blocks[1].size = 0, "segments[0].blocks[1].size: 0");
    damaged(
        |s| s.segments[0].blocks[0].requested_size = 5 * MIB,
        "segments[0].blocks[0].requested_size: 5242880, more than the block's 4194304 bytes",
    );
    damaged(
        |s| s.segments[1].stream = 1 << 63,
        "segments[1].stream: 9223372036854775808 is 2^63 or more",
    );
    damaged(
        |s| s.host_segments = vec![segment(4096, vec![])],
        "host_segments[0].device: 0, not -1",
    );
    damaged(
        |s| s.frames[0].line = 1 << 63,
        "line of the frame main in \"/home/user/a.py\": 9223372036854775808 is 2^63",
    );
}

/// PyTorch leaves the last request in the segment of a pinned block that is free.
#[test]
fn free_pinned_memory_is_no_damage() {
    let mut snapshot = small();
    let free = segment(4096, vec![block(4096, 4096, BlockState::Inactive)]);
    snapshot.host_segments = vec![Segment { device: -1, requested_size: 4096, ..free }];
    assert_eq!(errors(&snapshot), Vec::<String>::new());
}

#[test]
fn damage_to_the_history_is_named() {
    damaged(
        |s| s.device_traces[0][2].addr += 512,
        "device_traces[0][2]: alloc at 0x7f0000400200 is not freed later",
    );
    damaged(
        |s| drop(s.device_traces[0].remove(4)),
        "device_traces[0][3]: free_requested at 0x7f0000400000, but the block is neither",
    );
    damaged(
        |s| s.device_traces[0][0].size = MIB,
        "device_traces[0][0]: segment_alloc at 0x7f0000000000 of 1048576 bytes, but no such segment",
    );
    damaged(
        |s| s.device_traces[0][4].addr = BASE + MIB,
        "device_traces[0][4]: block at 0x7f0000100000 overlaps the block at 0x7f0000000000",
    );
    damaged(|s| s.device_traces[0][4].addr = BASE - MIB, "device_traces[0][4]: block at 0x7effff");
    damaged(|s| s.device_traces[0][4].size = 1 << 40, "lies in no segment of that time");
    damaged(
        |s| s.device_traces[0].swap(0, 1),
        "device_traces[0][1]: segment at 0x7f0000000000 is new, yet the block at 0x7f0000000000 lay in it before",
    );
    damaged(
        |s| s.device_traces[0].push(entry(Action::SegmentFree, BASE + MIB, MIB)),
        "segment at 0x7f0000100000 goes, yet it overlaps the segment at 0x7f0000000000",
    );
    damaged(
        |s| s.device_traces[0].push(entry(Action::SegmentMap, BASE + MIB, 64 * MIB)),
        "segment_map at 0x7f0000100000 of 67108864 bytes, but no such segment",
    );
    damaged(
        |s| s.device_traces[0][3].stream = u64::MAX,
        "device_traces[0][3].stream: 18446744073709551615 is 2^63",
    );
    damaged(
        |s| {
            s.other.push(Other {
                place: Place::Entry(0, 1),
                key: "category".to_owned(),
                value: json!("weights"),
            });
        },
        "none is \"unknown\"",
    );
}

#[test]
fn many_contradictions_are_counted() {
    let mut snapshot = small();
    let wrong = (0..500).map(|n| entry(Action::Alloc, BASE + 512 * n, 512));
    snapshot.device_traces[0].extend(wrong);
    let errors = errors(&snapshot);
    assert_eq!(errors.len(), 11, "{errors:#?}");
    // The first of them takes back the live block at that address; then its own entry finds none.
    assert!(errors[10].contains("490 more entries"), "{}", errors[10]);
}

#[test]
fn what_is_no_damage_is_a_note() {
    let mut late = small();
    late.device_traces[0].drain(..4);
    let problems = check(&late);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!(
        problems[0].to_string(),
        "note: device_traces[0]: the history begins late: 2 blocks of 12582912 bytes are older than its first entry"
    );
    let mut tomorrow = small();
    tomorrow.device_traces[0].push(entry(Action::Other("teleport".to_owned()), 0, 0));
    assert_eq!(
        check(&tomorrow)[0].to_string(),
        "note: action \"teleport\" is not one that the viewer draws"
    );
}

#[test]
fn how_the_pickle_is_written_counts_too() {
    let mut bytes = Vec::new();
    pickle::write(&small(), &mut bytes).expect("written");
    assert_eq!(check::file(&bytes), []);

    let mut five = bytes.clone();
    five[1] = 5;
    assert!(
        check::file(&five)[0]
            .to_string()
            .starts_with("error: pickle protocol 5; the viewer reads 2 to 4")
    );

    let batch = |n: usize| {
        let mut bytes = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]\x8c\x01x](".to_vec();
        bytes.extend(b"K\x01".repeat(n));
        bytes.extend(b"eu.");
        check::file(&bytes)
    };
    assert_eq!(batch(1000)[0].level, Level::Note);
    assert!(
        batch(1001)[0].to_string().starts_with("warning: byte 2038: 1001 items in one APPENDS"),
        "{:?}",
        batch(1001)
    );
    assert_eq!(batch(100_000)[0].level, Level::Error);

    let mixed = b"\x80\x04}\x94q\x05(\x8c\x08segments]\x8c\x0ddevice_traces]u.";
    assert!(check::file(mixed)[0].to_string().contains("MEMOIZE and BINPUT are mixed"));
    let dup = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]u20.";
    assert!(check::file(dup)[0].to_string().contains("does not know pickle opcode 0x32"));

    let problem = &check::file(&bytes[..bytes.len() - 9])[0];
    assert_eq!(problem.level, Level::Error);
    assert!(problem.what.contains("the file ends here, too early"), "{problem}");
    let state = br#"{"segments": [{"device": 0, "address": 0, "blocks": [{"size": 1, "requested_size": 1, "state": "actve"}]}], "device_traces": []}"#;
    assert_eq!(
        check::file(state)[0].to_string(),
        "error: segments[0].blocks[0].state: \"actve\", not a block's state"
    );
}

#[test]
fn a_virtual_gpu_is_an_estimate() {
    let mut snapshot = small();
    assert!(summary(&snapshot).estimate.is_none());
    snapshot.memtrace = Memtrace::read(json!({"virtual": {
        "spec": "h100*2", "name": "NVIDIA H100 80GB HBM3", "lazy": true, "zero_reads": 3,
        "devices": [{"device": 0, "used": 5, "total": 85_000_000_000_u64, "context": 500_000_000}],
    }, "counters": {"events": 9, "events_kept": 7, "events_retired": 2}}));
    let summary = summary(&snapshot);
    let estimate = summary.estimate.expect("virtual");
    assert_eq!(
        (estimate.profile.as_str(), estimate.lazy, estimate.zero_reads),
        ("h100*2", true, 3)
    );
    assert_eq!(
        summary.devices[0].capacity.map(|c| (c.total, c.context)),
        Some((85_000_000_000, 500_000_000))
    );
    assert!(summary.notes[0].contains("3 values that nothing had computed"));
    assert!(summary.notes[1].contains("the last 7 of 9 events"));
}

/// Issue F, B17: a peak without cuDNN's workspaces says that it is a lower
/// bound, and by how many plans.
#[test]
fn convolutions_without_workspace_are_said() {
    let mut snapshot = small();
    let about = |cudnn: Value| json!({"virtual": {"spec": "t4", "zero_reads": 0, "cudnn": cudnn}});
    for (unknown, other, said) in [
        (53, 0, Some("lower bound: 53 convolutions without workspace")),
        (1, 2, Some("lower bound: 1 convolution and 2 other cuDNN graphs without workspace")),
        (0, 0, None),
    ] {
        snapshot.memtrace = Memtrace::read(about(json!({"unknown": unknown, "other": other})));
        let lines = [summary(&snapshot).notes, report(&snapshot).unknown];
        for lines in lines {
            let found: Vec<&String> = lines.iter().filter(|l| l.contains("workspace")).collect();
            assert_eq!(found.len(), usize::from(said.is_some()), "{lines:?}");
            assert!(said.is_none_or(|said| found[0].starts_with(said)), "{lines:?}");
        }
    }
    // An estimate is said to be one, with its sum.
    snapshot.memtrace = Memtrace::read(about(
        json!({"modelled": 2, "modelled_bytes": 3 << 20, "modelled_largest": 2 << 20}),
    ));
    let said = "the workspaces of 2 convolutions are estimates of a model: the largest 2.0 MiB, one of each together 3.0 MiB";
    for lines in [summary(&snapshot).notes, report(&snapshot).unknown] {
        assert!(lines.iter().any(|line| line == said), "{lines:?}");
    }
    // Written by somebody else: nobody counted.
    snapshot.memtrace = Memtrace::read(json!({"virtual": {"spec": "t4"}}));
    assert!(summary(&snapshot).notes.iter().any(|note| note.contains("workspaces of cuDNN's")));
}

#[test]
fn the_device_layer_is_added_up_apart() {
    let driver = |action, addr, size| TraceEntry {
        user_metadata: Some("driver: cuMemAlloc_v2".into()),
        ..entry(action, addr, size)
    };
    let mut snapshot = small();
    let framework = summary(&snapshot).devices[0].clone();
    assert!(framework.driver.is_none());
    let at = BASE + 64 * MIB;
    let live =
        segment(at + 4 * MIB, vec![block(at + 4 * MIB, 3 * MIB, BlockState::ActiveAllocated)]);
    snapshot.segments.push(live);
    for (addr, size, freed) in [(at, 2 * MIB, true), (at + 4 * MIB, 3 * MIB, false)] {
        snapshot.device_traces[0].push(driver(Action::SegmentAlloc, addr, size));
        snapshot.device_traces[0].push(driver(Action::Alloc, addr, size));
        if freed {
            snapshot.device_traces[0].push(driver(Action::FreeRequested, addr, size));
            snapshot.device_traces[0].push(driver(Action::FreeCompleted, addr, size));
            snapshot.device_traces[0].push(driver(Action::SegmentFree, addr, size));
        }
    }
    assert_eq!(errors(&snapshot), Vec::<String>::new());
    let device = &summary(&snapshot).devices[0];
    let apart = device.driver.as_ref().expect("shown");
    assert_eq!((apart.now.count, apart.now.bytes, apart.peak.bytes), (1, 3 * MIB, 3 * MIB));
    assert_eq!(apart.calls["cuMemAlloc_v2"].bytes, 5 * MIB);
    assert_eq!(device.allocated, framework.allocated);
    assert_eq!(device.reserved, framework.reserved);
    assert_eq!(device.now, framework.now);
    assert_eq!(device.segments.all, framework.segments.all);
    assert_eq!((device.allocs, device.frees), (framework.allocs, framework.frees));
}

/// A toy allocator: one segment a slot, blocks at fixed offsets, frees that may wait.
fn honest(steps: &[(u8, bool)]) -> (Snapshot, u64) {
    let at = |slot: u8| BASE + u64::from(slot) * 4 * MIB;
    let size = |slot: u8| 512 * (1 + u64::from(slot));
    let mut trace = Vec::new();
    let mut state = [None; 16];
    let (mut now, mut peak) = (0, 0);
    for &(slot, wait) in steps {
        let slot = slot % 16;
        let live = &mut state[slot as usize];
        *live = match *live {
            None => {
                trace.push(entry(Action::SegmentAlloc, at(slot), 2 * MIB));
                trace.push(entry(Action::Alloc, at(slot), size(slot)));
                now += size(slot);
                Some(BlockState::ActiveAllocated)
            }
            Some(BlockState::ActiveAllocated) => {
                trace.push(entry(Action::FreeRequested, at(slot), size(slot)));
                now -= size(slot);
                if wait {
                    Some(BlockState::ActivePendingFree)
                } else {
                    trace.push(entry(Action::FreeCompleted, at(slot), size(slot)));
                    Some(BlockState::Inactive)
                }
            }
            Some(BlockState::ActivePendingFree) => {
                trace.push(entry(Action::FreeCompleted, at(slot), size(slot)));
                Some(BlockState::Inactive)
            }
            Some(BlockState::Inactive) => {
                trace.push(entry(Action::SegmentFree, at(slot), 2 * MIB));
                None
            }
        };
        peak = peak.max(now);
    }
    let segments = (0..16_u8).filter_map(|slot| {
        let state = state[slot as usize]?;
        let rest = block(at(slot) + size(slot), 2 * MIB - size(slot), BlockState::Inactive);
        Some(segment(at(slot), vec![block(at(slot), size(slot), state), rest]))
    });
    let snapshot = Snapshot {
        frames: vec![Frame::default()],
        stacks: vec![vec![0]],
        segments: segments.collect(),
        device_traces: vec![trace],
        ..Snapshot::default()
    };
    (snapshot, peak)
}

fn action() -> impl Strategy<Value = Action> {
    prop::sample::select(vec![
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::Oom,
        Action::Snapshot,
    ])
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..8_u64, 1 => any::<u64>(), 1 => u64::MAX - 4..=u64::MAX]
}

prop_compose! {
    fn nonsense()(
        trace in prop::collection::vec((action(), number(), number(), any::<bool>()), 0..40),
        segments in prop::collection::vec(
            (-1..3_i64, number(), number(), prop::collection::vec((number(), number(), 0..3_u8), 0..4)), 0..6),
    ) -> Snapshot {
        let states = [BlockState::ActiveAllocated, BlockState::ActivePendingFree, BlockState::Inactive];
        Snapshot {
            segments: segments.into_iter().map(|(device, address, total_size, blocks)| {
                let blocks = blocks.into_iter()
                    .map(|(address, size, state)| block(address, size, states[state as usize])).collect();
                Segment { device, total_size, blocks, ..segment(address, vec![]) }
            }).collect(),
            device_traces: vec![trace.into_iter().map(|(action, addr, size, driver)| TraceEntry {
                frames: Some(7),
                user_metadata: driver.then(|| "driver: x".into()),
                ..entry(action, addr, size)
            }).collect()],
            ..Snapshot::default()
        }
    }
}

proptest! {
    #[test]
    fn an_honest_history_passes_wherever_it_begins(
        steps in prop::collection::vec(any::<(u8, bool)>(), 0..200),
        cut in any::<prop::sample::Index>(),
    ) {
        let (mut snapshot, peak) = honest(&steps);
        prop_assert_eq!(errors(&snapshot), Vec::<String>::new());
        let whole = summary(&snapshot).devices.first().map_or(0, |d| d.allocated.bytes);
        prop_assert_eq!(whole, peak);

        let length = snapshot.device_traces[0].len();
        let before = snapshot.device_traces[0].drain(..cut.index(length + 1)).count();
        prop_assert_eq!(errors(&snapshot), Vec::<String>::new());
        // What was live at the cut is what the whole history says.
        let (all, _) = honest(&steps);
        let start = history::rewind(&snapshot, 0, &mut |_, _| {});
        let whole_start = history::rewind(&all, 0, &mut |_, _| {});
        prop_assert!(whole_start.blocks.is_empty());
        let mut forward = history::Forward::new(&whole_start);
        for (i, entry) in all.device_traces[0][..before].iter().enumerate() {
            forward.apply(i, entry);
        }
        let sizes = |blocks: &std::collections::BTreeMap<u64, history::Live>| -> Vec<(u64, u64, bool)> {
            blocks.iter().map(|(a, b)| (*a, b.requested, b.pending)).collect()
        };
        prop_assert_eq!(sizes(&start.blocks), sizes(&forward.blocks));
    }

    #[test]
    fn nonsense_makes_nobody_panic(snapshot in nonsense()) {
        check(&snapshot);
        summary(&snapshot);
    }
}

//! Snapshots made up here: what is refused, how long a file gets, and that
//! nothing is lost on the way.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

use std::io;

use memtrace_format::json::Stacks;
use memtrace_format::key::Memtrace;
use memtrace_format::snapshot::{
    Action, Block, BlockState, Frame, NO_LINE, Segment, Snapshot, TraceEntry, Value,
};
use memtrace_format::{json, pickle};
use proptest::prelude::*;

fn entry(action: Action, addr: u64, size: u64, frames: Option<u32>) -> TraceEntry {
    TraceEntry {
        action,
        addr,
        size,
        stream: 0,
        time_us: Some(1_795_812_485_906_378),
        compile_context: Some("N/A".into()),
        user_metadata: Some("".into()),
        pool_id: Some((0, 0)),
        frames,
    }
}

fn segment() -> Segment {
    Segment {
        device: 0,
        address: 0x7f00_0000_0000,
        total_size: 2 << 20,
        allocated_size: 2 << 20,
        active_size: 2 << 20,
        requested_size: 2 << 20,
        stream: 0,
        small: true,
        pool_id: (0, 0),
        is_expandable: false,
        frames: None,
        blocks: vec![Block {
            address: 0x7f00_0000_0000,
            size: 2 << 20,
            requested_size: 2 << 20,
            state: BlockState::ActiveAllocated,
            frames: None,
        }],
    }
}

/// `stacks` different stacks of 20 frames, all met before the first entry,
/// as live blocks' stacks are.
fn training(entries: u32, stacks: u32) -> Snapshot {
    let block = |s: u32| Block {
        address: 0x7f00_0000_0000 + 512 * u64::from(s),
        size: 512,
        requested_size: 512,
        state: BlockState::ActiveAllocated,
        frames: Some(s),
    };
    Snapshot {
        frames: (0..20 * stacks)
            .map(|n| Frame {
                name: format!("function_{n}"),
                filename: "/home/user/train.py".to_owned(),
                line: 7,
            })
            .collect(),
        stacks: (0..stacks).map(|s| (20 * s..20 * s + 20).collect()).collect(),
        segments: vec![Segment { blocks: (0..stacks).map(block).collect(), ..segment() }],
        device_traces: vec![
            (0..entries)
                .map(|n| {
                    entry(
                        Action::Alloc,
                        0x7f12_3456_7800 + u64::from(n) * 512,
                        3 << 20,
                        Some(n % stacks),
                    )
                })
                .collect(),
        ],
        ..Snapshot::default()
    }
}

fn pickled(snapshot: &Snapshot) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pickle::write(snapshot, &mut bytes).map(|()| bytes)
}

fn as_json(snapshot: &Snapshot) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    json::write(snapshot, Stacks::Expanded, &mut bytes).map(|()| bytes)
}

#[test]
fn an_entry_takes_58_bytes_however_many_stacks_there_are() {
    let without = pickled(&training(0, 2000)).expect("written").len();
    let with = pickled(&training(10_000, 2000)).expect("written").len();
    assert!(with - without <= 10_000 * 58 + 100, "{} bytes an entry", (with - without) / 10_000);
}

#[test]
fn an_integer_of_2_to_the_63_is_refused_by_name() {
    let max = u64::try_from(i64::MAX).expect("positive");
    for bad in [max + 1, u64::MAX] {
        for (what, snapshot) in [
            ("addr", {
                let e = entry(Action::Alloc, bad, 1, None);
                Snapshot { device_traces: vec![vec![e]], ..Snapshot::default() }
            }),
            ("device_free", {
                let e = entry(Action::Oom, bad, 1, None);
                Snapshot { device_traces: vec![vec![e]], ..Snapshot::default() }
            }),
            ("total_size", {
                let s = Segment { total_size: bad, ..segment() };
                Snapshot { segments: vec![s], ..Snapshot::default() }
            }),
            ("pool id", {
                let s = Segment { pool_id: (0, bad), ..segment() };
                Snapshot { segments: vec![s], ..Snapshot::default() }
            }),
            ("a value", {
                let memtrace = Memtrace::read(serde_json::json!({"pid": bad}));
                Snapshot { memtrace, ..Snapshot::default() }
            }),
        ] {
            for error in [pickled(&snapshot), as_json(&snapshot)].map(|r| r.expect_err("refused")) {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                let text = error.to_string();
                assert!(text.contains(what) && text.contains(&bad.to_string()), "{text}");
            }
        }
    }
    let e = entry(Action::Alloc, max, max, None);
    let fits = Snapshot { device_traces: vec![vec![e]], ..Snapshot::default() };
    assert_eq!(Snapshot::read(&pickled(&fits).expect("written")), Ok(fits));
}

#[test]
fn an_index_that_names_nothing_is_an_error() {
    let mut snapshot = training(1, 1);
    snapshot.device_traces[0][0].frames = Some(9);
    assert_eq!(pickled(&snapshot).expect_err("no such stack").to_string(), "stack 9 of 1");
    snapshot.device_traces[0][0].frames = Some(0);
    snapshot.stacks[0][3] = 1000;
    assert_eq!(pickled(&snapshot).expect_err("no such frame").to_string(), "frame 1000 of 20");
    assert_eq!(as_json(&snapshot).expect_err("no such frame").to_string(), "frame 1000 of 20");
}

#[test]
fn the_extra_key_is_last_and_absent_in_files_of_others() {
    let mut snapshot = training(1, 1);
    let keys = |s: &Snapshot| -> Vec<String> {
        let value: Value = serde_json::from_slice(&as_json(s).expect("written")).expect("JSON");
        value.as_object().expect("an object").keys().cloned().collect()
    };
    assert_eq!(keys(&snapshot).last().map(String::as_str), Some("host_traces"));
    snapshot.memtrace =
        Memtrace::read(serde_json::json!({"version": "0.1.0", "virtual": {"spec": "h100"}}));
    assert_eq!(keys(&snapshot).last().map(String::as_str), Some("memtrace"));
}

#[test]
fn an_error_of_the_disk_comes_through() {
    struct Full;
    impl io::Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let snapshot = training(100_000, 3);
    for error in [pickle::write(&snapshot, Full), json::write(&snapshot, Stacks::Shared, Full)] {
        assert_eq!(error.expect_err("the disk is full").kind(), io::ErrorKind::StorageFull);
    }
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e300..1e300).prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(".{0,4}", inner, 0..4)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

prop_compose! {
    fn an_entry(stacks: u32)(
        action in prop_oneof![
            Just(Action::Alloc), Just(Action::FreeRequested), Just(Action::FreeCompleted),
            Just(Action::SegmentMap), Just(Action::Snapshot), Just(Action::Oom),
            "[a-z]{3}".prop_map(|s| Action::from_name(&s)),
        ],
        addr in 0..=i64::MAX as u64,
        size in any::<u32>(),
        stream in any::<u8>(),
        time_us in any::<Option<i64>>(),
        compile_context in prop::option::of(".{0,300}"),
        user_metadata in prop::option::of(".{0,3}"),
        pool_id in prop::option::of((0..3u64, 0..3u64)),
        frames in prop::option::of(0..stacks),
    ) -> TraceEntry {
        TraceEntry {
            action, addr, size: size.into(), stream: stream.into(), time_us,
            compile_context: compile_context.map(Into::into), user_metadata: user_metadata.map(Into::into),
            pool_id, frames,
        }
    }
}

proptest! {
    #[test]
    fn both_encodings_keep_everything(
        names in prop::collection::vec(".{0,20}", 1..5),
        trace in prop::collection::vec(an_entry(3), 0..40),
        memtrace in value(),
        annotations in prop::collection::vec(value(), 0..3),
    ) {
        // Frames and stacks in the order of their first use, as a reader numbers them.
        let frames = names.iter().enumerate().map(|(n, name)| {
            Frame { name: name.clone(), filename: "x".to_owned(), line: n as u64 }
        });
        let snapshot = Snapshot {
            frames: frames.collect(),
            stacks: vec![(0..names.len() as u32).collect(), vec![], vec![0, 0]],
            segments: vec![Segment { frames: Some(0), ..segment() }],
            device_traces: vec![vec![
                entry(Action::Alloc, 1, 1, Some(1)),
                entry(Action::Alloc, 1, 1, Some(2)),
            ], trace],
            memtrace: Memtrace::read(memtrace),
            external_annotations: annotations,
            ..Snapshot::default()
        };
        prop_assert_eq!(&Snapshot::read(&pickled(&snapshot)?).expect("read"), &snapshot);
        prop_assert_eq!(&Snapshot::read(&as_json(&snapshot)?).expect("read"), &snapshot);
    }
}

/// PyTorch writes −1 for a line that Python doesn't know, and so does whoever passes it on.
#[test]
fn a_line_that_is_not_known_stays_so() {
    let mut snapshot = training(2, 1);
    let place = snapshot.frames[0].filename.clone();
    snapshot.frames[0].line = NO_LINE;
    let mut pickled = Vec::new();
    pickle::write(&snapshot, &mut pickled).expect("written");
    assert_eq!(Snapshot::read(&pickled).expect("read").frames, snapshot.frames);
    for stacks in [Stacks::Shared, Stacks::Expanded] {
        let mut text = Vec::new();
        json::write(&snapshot, stacks, &mut text).expect("written");
        let lines = Snapshot::read(&text).expect("read").frames;
        assert_eq!(lines, snapshot.frames);
        let text = String::from_utf8(text).expect("text");
        assert!(text.contains("-1") && !text.contains(&NO_LINE.to_string()), "{place}");
    }
}

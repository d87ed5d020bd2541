//! The recorded runs of PyTorch 2.15 in `tests/data/allocator`, repeated: every address,
//! size, order, refusal and statistic.

use std::fs::File;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use memtrace_caching::{Action, Allocator, BlockId, Event, Script, Settings, Step};
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/allocator")
}

fn action(name: &str) -> Action {
    [
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::Oom,
    ]
    .into_iter()
    .find(|a| a.name() == name)
    .unwrap_or_else(|| panic!("an action {name}"))
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

/// action, address, size, stream
type Line = (Action, u64, u64, u64);

fn lines(events: &Value) -> Vec<Line> {
    let list = events.as_array().expect("a list").iter();
    list.map(|e| {
        (action(e[0].as_str().expect("a name")), number(&e[1]), number(&e[2]), number(&e[3]))
    })
    .collect()
}

fn repeat(name: &str) {
    let file = File::open(folder().join(name)).expect("there");
    let run: Value = serde_json::from_reader(GzDecoder::new(file)).expect("JSON");
    let expected = lines(&run["events"]);
    let segment_action =
        |a: Action| !matches!(a, Action::Alloc | Action::FreeRequested | Action::FreeCompleted);
    let steps = expected.iter().filter(|l| segment_action(l.0));
    let steps = steps.map(|&(action, addr, size, stream)| Step {
        action,
        addr,
        size,
        stream,
        pool: (0, 0),
    });
    let total = number(&run["total_memory"]);
    let device = Script::new(total, steps).with_capacity(total);
    let settings = Settings::parse(run["conf"].as_str().expect("text")).expect("valid").settings;
    let mut allocator = Allocator::new(device, settings, Vec::<Event>::new());

    let mut ids: Vec<Option<BlockId>> = Vec::new();
    for (n, op) in run["ops"].as_array().expect("a list").iter().enumerate() {
        match op[0].as_str() {
            Some("a") => {
                let slot = number(&op[1]) as usize;
                ids.resize(ids.len().max(slot + 1), None);
                let got = allocator.malloc(number(&op[2]), number(&op[3])).ok();
                assert_eq!(got.map(|a| a.addr), op[4].as_u64(), "{name}: operation {n}, {op}");
                ids[slot] = got.map(|a| a.id);
            }
            Some("f") => {
                let id = ids[number(&op[1]) as usize].take().expect("allocated");
                allocator.free(id).expect("allocated");
            }
            Some("e") => allocator.empty_cache(),
            other => panic!("an operation {other:?}"),
        }
        if n % 97 == 0 {
            allocator.check().unwrap_or_else(|e| panic!("{name}: after operation {n}: {e}"));
        }
    }

    let got: Vec<Line> =
        allocator.sink_mut().iter().map(|e| (e.action, e.addr, e.size, e.stream)).collect();
    for (n, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert_eq!(got, expected, "{name}: event {n}");
    }
    assert_eq!(got.len(), expected.len(), "{name}");
    assert_eq!(allocator.device_mut().problem(), None, "{name}");
    assert_eq!(allocator.device_mut().left(), 0, "{name}");

    let stats = allocator.stats().flat();
    let expected = run["stats"].as_object().expect("an object");
    for (key, value) in expected {
        assert_eq!(stats.get(key).copied(), value.as_i64(), "{name}: {key}");
    }
    assert_eq!(stats.len(), expected.len(), "{name}");

    let segments: Vec<Value> = allocator
        .segments(0)
        .iter()
        .map(|s| {
            let blocks = s.blocks.iter();
            let blocks: Vec<Value> = blocks
                .map(|b| serde_json::json!([b.address, b.size, b.requested_size, b.state.name()]))
                .collect();
            let kind = if s.small { "small" } else { "large" };
            serde_json::json!([s.address, s.total_size, s.stream, kind, s.is_expandable, blocks])
        })
        .collect();
    let expected = run["segments"].as_array().expect("a list");
    for (got, expected) in segments.iter().zip(expected) {
        assert_eq!(got, expected, "{name}");
    }
    assert_eq!(segments.len(), expected.len(), "{name}");
    allocator.check().unwrap_or_else(|e| panic!("{name}: {e}"));
}

macro_rules! vectors {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            repeat(concat!(stringify!($name), ".json.gz"));
        })*

        #[test]
        fn none_is_left_out() {
            let here = [$(concat!(stringify!($name), ".json.gz")),*];
            for file in std::fs::read_dir(folder()).expect("there") {
                let name = file.expect("readable").file_name();
                let name = name.to_str().expect("text");
                assert!(!name.ends_with(".json.gz") || here.contains(&name), "{name} is not tested");
            }
        }
    };
}

vectors! {
    default default_small expandable expandable_large fraction gc gc_split largeseg max_split max_split_round roundup
    roundup8
}

//! The real snapshots in `tests/data`: every one passes the check, and the totals are those that
//! were measured when they were recorded.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

use std::fs;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use memtrace_analysis::check::{self, Level};
use memtrace_analysis::summary;
use memtrace_format::pickle;
use memtrace_format::snapshot::{Action, BlockState, Snapshot};

const MIB: f64 = 1_048_576.0;

fn files() -> Vec<(String, Vec<u8>)> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let mut files = Vec::new();
    for folder in ["golden", "snapshots"] {
        for entry in fs::read_dir(data.join(folder)).expect("tests/data is in the repository") {
            let path = entry.expect("readable").path();
            let mut bytes = Vec::new();
            let file = fs::File::open(&path).expect("readable");
            GzDecoder::new(file).read_to_end(&mut bytes).expect("intact");
            files.push((path.display().to_string(), bytes));
        }
    }
    files
}

fn file(part: &str) -> Vec<u8> {
    files().into_iter().find(|(name, _)| name.contains(part)).expect("a file of that name").1
}

fn read(part: &str) -> Snapshot {
    Snapshot::read(&file(part)).expect("real")
}

#[test]
fn all_pass_the_check() {
    let files = files();
    assert!(files.len() >= 13);
    for (name, bytes) in files {
        let problems = check::file(&bytes);
        assert!(problems.iter().all(|p| p.level == Level::Note), "{name}: {problems:#?}");
        let mut again = Vec::new();
        pickle::write(&Snapshot::read(&bytes).expect("real"), &mut again).expect("written");
        let problems = check::file(&again);
        assert!(
            problems.iter().all(|p| p.level == Level::Note),
            "{name}, our writing: {problems:#?}"
        );
    }
}

/// Peak of requested bytes and of reserved bytes, MiB, as the person who
/// recorded them on a card published.
#[test]
fn peaks_are_those_of_the_card() {
    for (part, peak, reserved) in [
        ("lm24_ctx128_train", 6688.4375, 6900.0),
        ("lm24_ctx512_train_bf16", 11850.9570, 12074.0),
        ("lm24_ctx1024_infer", 2744.1367, 3056.0),
    ] {
        let summary = summary(&read(part));
        let device = &summary.devices[0];
        let mib = |bytes: u64| bytes as f64 / MIB;
        assert!(
            (mib(device.allocated.bytes) - peak).abs() < 5e-5,
            "{part}: {:?}",
            device.allocated
        );
        assert!(
            (mib(device.reserved.bytes) - reserved).abs() < 1e-9,
            "{part}: {:?}",
            device.reserved
        );
        assert!(device.allocated_rounded >= device.allocated.bytes);
        assert!(device.reserved.bytes >= device.allocated_rounded);
    }
}

/// What PyTorch's own counters said in the process that wrote the file:
/// `max_memory_allocated`, `max_memory_reserved` and the peak of requested bytes, which
/// PyTorch counts until a free is complete.
#[test]
fn peaks_are_those_of_pytorchs_counters() {
    for (part, rounded, reserved, requested) in [
        ("golden/cuda_graph", 41_554_944, 75_497_472, 41_554_432),
        ("golden/streams_lazy", 84_584_448, 180_355_072, 96_077_561),
        ("golden/streams_expandable", 84_139_520, 180_355_072, 96_077_561),
        ("golden/anomaly_mode", 33_717_248, 35_651_584, 33_714_440),
        ("golden/mem_pool", 62_331_904, 73_400_320, 60_000_000),
    ] {
        let device = &summary(&read(part)).devices[0];
        assert_eq!(device.active.bytes, requested, "{part}");
        assert_eq!(device.reserved.bytes, reserved, "{part}");
        assert!(device.allocated_rounded <= rounded, "{part}: at least, not more");
        assert!(device.allocated.bytes <= device.allocated_rounded, "{part}");
    }
}

#[test]
fn what_is_live_adds_up() {
    for (name, bytes) in files() {
        let snapshot = Snapshot::read(&bytes).expect("real");
        for device in summary(&snapshot).devices {
            let segments = snapshot.segments.iter().filter(|s| s.device == device.device as i64);
            let live = segments.clone().flat_map(|s| &s.blocks);
            let live = live.filter(|b| b.state == BlockState::ActiveAllocated);
            assert_eq!(device.now.bytes, live.map(|b| b.requested_size).sum::<u64>(), "{name}");
            assert_eq!(
                device.segments.all.bytes,
                segments.map(|s| s.total_size).sum::<u64>(),
                "{name}"
            );
            for (sites, total) in
                [(&device.at_peak, device.allocated.bytes), (&device.at_end, device.now.bytes)]
            {
                assert_eq!(sites.iter().map(|s| s.bytes).sum::<u64>(), total, "{name}");
                assert!(sites.is_sorted_by(|a, b| a.bytes >= b.bytes), "{name}");
            }
            let f = device.fragmentation;
            assert!(f.in_free_segments + f.in_used_segments <= f.reserved_not_allocated, "{name}");
            assert!(f.largest_free <= f.in_free_segments.max(f.in_used_segments), "{name}");
        }
    }
}

/// What a bounded ring drops is still counted: the totals of a cut history
/// are those of the whole one.
#[test]
fn a_history_that_begins_late_loses_nothing_of_the_live_memory() {
    let whole = read("lm24_ctx512_train_bf16");
    let peak = summary(&whole).devices[0].allocated;
    let at = peak.entry.expect("within the history");
    let mut cut = whole.clone();
    cut.device_traces[0].drain(..at - 100);
    assert!(check::check(&cut).iter().all(|p| p.level == Level::Note));
    let late = summary(&cut);
    assert_eq!(late.devices[0].allocated.bytes, peak.bytes);
    assert_eq!(late.devices[0].allocated.entry, Some(100));
    assert_eq!(late.devices[0].now, summary(&whole).devices[0].now);

    // Nothing but the segments: the peak is what is there.
    cut.device_traces[0].clear();
    let none = summary(&cut);
    assert_eq!(none.devices[0].allocated.bytes, none.devices[0].now.bytes);
    assert!(none.notes[0].contains("has no history"));
}

/// Blocks taken before recording and never freed are in the total from the first entry on.
#[test]
fn memory_older_than_the_recording_is_counted() {
    let mut snapshot = read("golden/context_none");
    let trace = &mut snapshot.device_traces[0];
    let before: u64 = snapshot.segments[0].requested_size;
    trace.retain(|e| e.action == Action::Oom);
    let device = &summary(&snapshot).devices[0];
    assert_eq!(device.before_history.bytes, before);
    assert_eq!(device.at_peak[0].site, "(allocated before the history begins)");
}

#[test]
fn ooms_say_what_was_asked_and_free() {
    let device = &summary(&read("golden/basic_python")).devices[0];
    let [oom] = &device.ooms[..] else { panic!("one oom: {:?}", device.ooms) };
    assert!(oom.asked > oom.device_free);
    assert!(oom.site.contains(".py:"), "{}", oom.site);
    assert_eq!(device.allocs, 21);
    assert_eq!(device.frees, 11);
}

#[test]
fn a_pending_free_is_waiting_not_allocated() {
    let device = &summary(&read("golden/stream_pending_free")).devices[0];
    assert_eq!(device.active.bytes - device.now.bytes, 20_000);
    assert_eq!(device.frees, 1);
}

#[test]
fn expandable_segments_are_reserved_as_they_are_mapped() {
    let device = &summary(&read("golden/expandable")).devices[0];
    assert_eq!((device.segment_allocs, device.segment_frees), (4, 1));
    assert_eq!(device.segments.expandable, device.segments.all);
    assert!(device.reserved.bytes > device.segments.all.bytes, "an unmapped range was there once");
}

//! Real snapshots, replayed: under their own settings they come out as
//! they were recorded, event for event.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;
use memtrace_analysis::check::{self, Level};
use memtrace_analysis::replay::exact::exact;
use memtrace_analysis::replay::picture::picture;
use memtrace_analysis::replay::requests::{RequestKind, Requests, requests};
use memtrace_analysis::replay::run::{Card, run, smallest_capacity};
use memtrace_analysis::replay::tune::{candidates, tune};
use memtrace_analysis::replay::{own_conf, settings};
use memtrace_caching::Settings;
use memtrace_format::pickle;
use memtrace_format::snapshot::{Action, Segment, Snapshot, TraceEntry};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn load(name: &str) -> Snapshot {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data")
        .join(format!("{name}.pickle.gz"));
    let mut bytes = Vec::new();
    GzDecoder::new(File::open(&path).expect("there")).read_to_end(&mut bytes).expect("intact");
    Snapshot::read(&bytes).expect("a snapshot")
}

fn conf(text: &str) -> Settings {
    settings(text).expect("valid").settings
}

/// All recorded on real cards, by PyTorch 2.1 to 2.11, but for the golden ones. There is no
/// difference to explain: every event of the window comes out, the segments among them.
#[test]
fn real_snapshots_come_out_as_they_were_recorded() {
    for (name, events, segment_events) in [
        ("snapshots/finetune_torch21", 10_307, 152),
        ("snapshots/lm24_ctx1024_infer", 3840, 0),
        ("snapshots/lm24_ctx128_train", 19_136, 0),
        ("snapshots/lm24_ctx512_train_bf16", 22_332, 1),
        ("snapshots/lm_ctx256_fullstep_freed", 20_128, 1571),
        ("golden/basic_python_stacks", 45, 1),
        ("golden/basic_second_snapshot", 45, 1),
        ("golden/context_none", 13, 1),
        ("golden/expandable", 13, 5),
        ("golden/stream_pending_free", 6, 2),
        ("golden/stream_completed", 8, 2),
        ("golden/all_features_cpp_stacks", 5, 2),
    ] {
        let snapshot = load(name);
        let asked = requests(&snapshot, 0);
        let result = exact(&snapshot, &asked, &conf(&own_conf(&snapshot)))
            .expect("no expandable segments before");
        assert_eq!(result.difference, None, "{name}");
        assert_eq!((result.events, result.equal), (events, events), "{name}");
        assert_eq!(
            (result.segment_events, result.segment_events_equal),
            (segment_events, segment_events),
            "{name}"
        );
        assert_eq!(result.allocs, result.allocs_equal, "{name}");
    }
}

#[test]
fn another_setting_does_not_come_out_as_recorded() {
    let snapshot = load("snapshots/finetune_torch21");
    let asked = requests(&snapshot, 0);
    let result = exact(&snapshot, &asked, &conf("max_split_size_mb:32")).expect("plain");
    assert!(result.difference.is_some() && result.equal < result.events, "{result:?}");
}

#[test]
fn a_smaller_card_runs_out_of_memory_and_a_large_enough_one_does_not() {
    let snapshot = load("snapshots/lm_ctx256_fullstep_freed");
    let asked = requests(&snapshot, 0);
    for text in ["", "expandable_segments:True", "max_split_size_mb:128"] {
        let settings = conf(text);
        let overhead = 500 * MIB;
        let free = run(&asked, &settings, Card { capacity: None, overhead });
        assert!(free.fits() && free.peak_active <= free.peak_reserved, "{text}");
        let smallest = smallest_capacity(&asked, &settings, overhead).expect("some card");
        assert!(smallest >= free.peak_active + overhead, "{text}");
        assert!(smallest <= free.peak_reserved + overhead + 4 * MIB, "{text}");
        let on = |capacity| run(&asked, &settings, Card { capacity: Some(capacity), overhead });
        assert!(on(smallest).fits(), "{text}");
        let failed = on(smallest - 2 * MIB).oom.expect("too small");
        assert!((failed.entry as usize) < snapshot.device_traces[0].len(), "{text}");
        assert!(
            on(16 * GIB).oom.expect("too small").device_free < failed.segment.max(64 * MIB),
            "{text}"
        );
        assert!(!free.curve.is_empty() && free.curve.iter().all(|p| p.active <= p.reserved));
    }
    let waste = |text| run(&asked, &conf(text), Card::default()).overhead();
    assert!(
        waste("expandable_segments:True") < waste("") / 2.0,
        "what expandable segments are for"
    );
}

#[test]
fn a_failed_request_is_asked_again() {
    let snapshot = load("golden/basic_python_stacks");
    let asked = requests(&snapshot, 0);
    let failed = asked.during.iter().find_map(|r| match r.what {
        RequestKind::Failed { size, .. } => Some(size),
        _ => None,
    });
    let failed = failed.expect("the file has an oom");
    let small = run(&asked, &conf(""), Card { capacity: Some(GIB), overhead: 0 });
    assert_eq!((small.failed_again, small.failed_no_more, small.fits()), (1, 0, false));
    let large = run(&asked, &conf(""), Card { capacity: Some(80 * GIB), overhead: 0 });
    assert_eq!((large.failed_again, large.failed_no_more, large.fits()), (0, 1, true));
    assert!(smallest_capacity(&asked, &conf(""), 0).expect("some card") > failed);
}

#[test]
fn what_comes_out_is_a_snapshot() {
    for name in [
        "snapshots/lm24_ctx128_train",
        "golden/stream_completed",
        "snapshots/lm_ctx256_fullstep_freed",
    ] {
        let snapshot = load(name);
        let asked: Vec<Requests> = vec![requests(&snapshot, 0)];
        for text in ["", "expandable_segments:True"] {
            let (new, outcomes) =
                picture(&snapshot, &asked, text, &conf(text), |_| Card::default());
            assert_eq!(outcomes.len(), 1);
            let mut bytes = Vec::new();
            pickle::write(&new, &mut bytes).expect("memory");
            let bad = check::file(&bytes);
            let bad: Vec<_> = bad.iter().filter(|p| p.level == Level::Error).collect();
            assert!(bad.is_empty(), "{name} {text}: {bad:?}");
            let stacks = |s: &Snapshot| {
                s.device_traces[0]
                    .iter()
                    .filter(|e| e.action == Action::Alloc && e.frames.is_some())
                    .count()
            };
            assert_eq!(stacks(&new), stacks(&snapshot), "{name} {text}");
            // Replayed again it is the same.
            let again = requests(&new, 0);
            let exactly = exact(&new, &again, &conf(text)).expect("its own settings");
            assert_eq!(exactly.difference, None, "{name} {text}");
        }
    }
}

#[test]
fn tuning_finds_the_line_that_helps() {
    let snapshot = load("snapshots/lm_ctx256_fullstep_freed");
    let asked = requests(&snapshot, 0);
    let mut lines = vec![String::new()];
    lines.extend(candidates(&asked, "", None));
    assert!(lines.len() > 15 && lines.iter().all(|l| settings(l).is_ok()));
    lines.retain(|l| {
        l.is_empty() || l == "expandable_segments:True" || l == "roundup_power2_divisions:2"
    });
    let tried = tune(&asked, "", &lines, Card::default());
    assert!(tried[0].conf.contains("expandable_segments:True"), "{}", tried[0].conf);
    let plain = tried.iter().find(|t| t.conf.is_empty()).expect("tried");
    assert!(tried[0].smallest_capacity < plain.smallest_capacity);
}

/// What somebody has set, limits above all, stays; and a release gets only keys that it knows.
#[test]
fn candidates_are_the_own_line_with_something_changed() {
    let asked = requests(&load("snapshots/lm_ctx256_fullstep_freed"), 0);
    let kept = ["per_process_memory_fraction:0.5", "pinned_num_register_threads:2"];
    let own = format!("{},max_split_size_mb:64,{}", kept[0], kept[1]);
    for (release, has_large) in [(None, true), (Some((2, 11)), true), (Some((2, 6)), false)] {
        let lines = candidates(&asked, &own, release);
        assert!(lines.len() > 15 && lines.iter().all(|l| settings(l).is_ok()), "{lines:?}");
        for line in &lines {
            assert!(kept.iter().all(|k| line.contains(k)), "{line}");
            assert!(line.matches("max_split_size_mb").count() <= 1, "{line}");
            let read = conf(line);
            assert!((read.memory_fraction - 0.5).abs() < 1e-9, "{line}");
        }
        assert_eq!(lines.iter().any(|l| l.contains("large_segment_size_mb")), has_large);
        assert!(lines.iter().any(|l| !l.contains("max_split_size_mb")));
        let both = "max_split_size_mb:64,expandable_segments:True";
        assert!(lines.iter().any(|l| conf(l) == conf(&format!("{},{both}", kept[0]))));
    }
    // PyTorch takes other punctuation, too.
    let odd = "per_process_memory_fraction,0.5";
    assert!(candidates(&asked, odd, None).iter().all(|l| l.starts_with(odd)));
    let lines: Vec<String> = [own.clone(), format!("{own},expandable_segments:True")].to_vec();
    let tried = tune(&asked, &own, &lines, Card::default());
    assert!(tried.iter().all(|t| kept.iter().all(|k| t.conf.contains(k))));
}

fn entry(action: Action, addr: u64, size: u64) -> TraceEntry {
    TraceEntry {
        action,
        addr,
        size,
        stream: 0,
        time_us: None,
        compile_context: None,
        user_metadata: None,
        pool_id: None,
        frames: None,
    }
}

/// Segments that go for no reason were sent away by the program; before a
/// new one the allocator did it itself.
#[test]
fn empty_cache_and_making_room_differ() {
    let base = 0x7000_0000_0000;
    let two = [
        entry(Action::SegmentAlloc, base, 20 * MIB),
        entry(Action::Alloc, base, 20 * MIB),
        entry(Action::FreeRequested, base, 20 * MIB),
        entry(Action::FreeCompleted, base, 20 * MIB),
        entry(Action::SegmentFree, base, 20 * MIB),
    ];
    let asks = |after: &[TraceEntry], segments: Vec<Segment>| {
        let trace = two.iter().chain(after).cloned().collect();
        let snapshot = Snapshot { segments, device_traces: vec![trace], ..Snapshot::default() };
        let asked = requests(&snapshot, 0);
        asked.during.iter().any(|r| r.what == RequestKind::EmptyCache)
    };
    assert!(asks(&[], vec![]));
    assert!(!asks(&[entry(Action::Oom, 0, 40 * MIB)], vec![]));
}

#[test]
fn nonsense_is_replayed_without_a_panic() {
    let mut snapshot = load("golden/stream_completed");
    let trace = &mut snapshot.device_traces[0];
    for (n, entry) in trace.iter_mut().enumerate() {
        entry.addr = entry.addr.wrapping_mul(n as u64 + 3);
        entry.size = entry.size.wrapping_mul(u64::MAX / 7);
    }
    trace.reverse();
    let asked = requests(&snapshot, 0);
    let _ = exact(&snapshot, &asked, &conf(""));
    let _ = run(&asked, &conf(""), Card { capacity: Some(GIB), overhead: 2 * GIB });
}

//! A snapshot written entry by entry is the snapshot written at once.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs::File;
use std::io;

use common::{file, files, python};
use memtrace_format::json::{self, Stacks};
use memtrace_format::key::Memtrace;
use memtrace_format::pickle;
use memtrace_format::snapshot::{Snapshot, Trace, TraceEntry};
use memtrace_format::stream::Stream;
use proptest::prelude::*;

/// The entries of all traces, in turn: some of this one, some of that one. A turn may be empty, a
/// round may not: whatever `some` says, this ends.
fn in_turn(snapshot: &Snapshot, mut some: impl FnMut() -> usize) -> Vec<(Trace, TraceEntry)> {
    let devices = snapshot.device_traces.iter().enumerate().map(|(d, t)| (Trace::Device(d), t));
    let mut traces: Vec<_> = devices
        .chain([(Trace::Host, &snapshot.host_traces)])
        .map(|(place, trace)| (place, trace.iter()))
        .collect();
    let mut all = Vec::new();
    while traces.iter().any(|(_, rest)| rest.len() > 0) {
        let before = all.len();
        for (place, rest) in &mut traces {
            all.extend(rest.by_ref().take(some()).map(|e| (*place, e.clone())));
        }
        if all.len() == before {
            all.extend(traces.iter_mut().filter_map(|(p, rest)| Some((*p, rest.next()?.clone()))));
        }
    }
    all
}

fn scratch() -> io::Result<File> {
    tempfile::tempfile()
}

fn streamed(snapshot: &Snapshot, as_json: bool, some: impl FnMut() -> usize) -> Vec<u8> {
    let mut out = Vec::new();
    let mut stream = if as_json {
        Stream::json(&mut out, Stacks::Shared, Box::new(scratch))
    } else {
        Stream::pickle(&mut out).expect("memory")
    };
    for (place, entry) in in_turn(snapshot, some) {
        stream.entry(place, entry, snapshot.tables()).expect("written");
    }
    let rest = Snapshot {
        device_traces: vec![Vec::new(); snapshot.device_traces.len()],
        host_traces: Vec::new(),
        ..snapshot.clone()
    };
    stream.finish(&rest, snapshot.tables()).expect("written");
    out
}

fn at_once(snapshot: &Snapshot, as_json: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let written = if as_json {
        json::write(snapshot, Stacks::Shared, &mut out)
    } else {
        pickle::write(snapshot, &mut out)
    };
    written.expect("written");
    out
}

/// A stream has no place for keys that are in no field of an entry.
fn ours(bytes: &[u8]) -> Snapshot {
    Snapshot { other: Vec::new(), ..Snapshot::read(bytes).expect("a real snapshot") }
}

#[test]
fn real_files_come_out_the_same() {
    for (name, original) in files() {
        let snapshot = ours(&original);
        let bytes = streamed(&snapshot, false, || 777);
        assert_eq!(Snapshot::read(&bytes).as_ref(), Ok(&snapshot), "{name}");
        let facts = pickle::read(&bytes).expect("our own").facts;
        assert!(facts.largest_batch.0 <= 1000, "{name}: {facts:?}");
        assert_eq!(facts.unknown_to_viewer, None, "{name}");
        assert!(!facts.mixed_memo, "{name}");
        // Seven bytes for each batch, and its list's and dictionary's names.
        let whole = at_once(&snapshot, false).len();
        assert!(bytes.len() <= whole + whole / 100 + 100, "{name}: {} {whole}", bytes.len());
    }
}

#[test]
fn python_finds_the_same_object_with_the_keys_in_the_same_order() {
    for part in ["golden/basic_second", "golden/all_features", "golden/expandable"] {
        let snapshot = ours(&file(part));
        python(
            "def keys(x):\n\
             \x20   if isinstance(x, dict): return [(k, keys(v)) for k, v in x.items()]\n\
             \x20   if isinstance(x, (list, tuple)): return [keys(v) for v in x]\n\
             a, b = pickle.loads(blobs[0]), pickle.loads(blobs[1])\n\
             assert a == b and keys(a) == keys(b)\n",
            &[&at_once(&snapshot, false), &streamed(&snapshot, false, || 3)],
        );
        assert!(
            at_once(&snapshot, true) == streamed(&snapshot, true, || 3),
            "the same text, since JSON has no other order"
        );
    }
}

#[test]
fn a_device_without_entries_has_an_empty_trace() {
    let snapshot = Snapshot {
        device_traces: vec![
            Vec::new(),
            ours(&file("golden/basic_second")).device_traces[0].clone(),
        ],
        memtrace: Memtrace::read(serde_json::json!({"version": "1"})),
        ..ours(&file("golden/basic_second"))
    };
    let (mut bare, mut entries) = (snapshot.clone(), 0);
    for entry in &mut bare.device_traces[1] {
        entry.frames = None;
        entries += 1;
    }
    assert!(entries > 0);
    for as_json in [false, true] {
        let bytes = streamed(&snapshot, as_json, || 2);
        let read = Snapshot::read(&bytes).expect("our own");
        assert_eq!(read.device_traces.iter().map(Vec::len).collect::<Vec<_>>(), [0, entries]);
        // Frames and stacks are numbered as they are met, which here is the same.
        assert_eq!(read.memtrace, snapshot.memtrace);
        assert_eq!(
            read.segments,
            Snapshot::read(&at_once(&snapshot, as_json)).expect("our own").segments
        );
    }
    // Without its frames the rest is the same, too; the two devices that nobody named are there.
    let read = Snapshot::read(&streamed(&bare, false, || 1)).expect("our own");
    assert_eq!(read.device_traces, bare.device_traces);
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
    let snapshot = ours(&file("golden/basic_second"));
    let (place, entry) = in_turn(&snapshot, || 1).swap_remove(0);
    let mut stream = Stream::pickle(Full).expect("nothing is written yet");
    let failed = (0..1_000_000).find_map(|_| {
        stream.entry(place, entry.clone(), snapshot.tables()).err().map(|e| e.kind())
    });
    assert_eq!(failed, Some(io::ErrorKind::StorageFull));
    let mut stream =
        Stream::json(Full, Stacks::Expanded, Box::new(|| Err(io::ErrorKind::StorageFull.into())));
    let failed = stream.entry(place, entry, snapshot.tables());
    assert_eq!(failed.expect_err("no scratch").kind(), io::ErrorKind::StorageFull);
}

/// Where all the turns are empty, too (`any_turns` meets that once in a thousand runs).
#[test]
fn empty_turns_do_not_stop_a_stream() {
    let snapshot = ours(&file("golden/basic_second"));
    let entries = in_turn(&snapshot, || 0).len();
    assert_eq!(entries, snapshot.device_traces.iter().map(Vec::len).sum::<usize>());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// However the traces' entries come in turn, and however many there are.
    #[test]
    fn any_turns(
        lengths in prop::collection::vec(0_usize..2500, 1..4),
        host in 0_usize..1100,
        turns in prop::collection::vec(0_usize..600, 1..20),
        as_json in any::<bool>(),
    ) {
        let like = ours(&file("golden/basic_second"));
        let trace = |n: usize| -> Vec<TraceEntry> {
            let one = &like.device_traces[0];
            (0..n).map(|i| TraceEntry { addr: i as u64, ..one[i % one.len()].clone() }).collect()
        };
        let snapshot = Snapshot {
            device_traces: lengths.into_iter().map(trace).collect(),
            host_traces: trace(host),
            memtrace: None,
            ..like.clone()
        };
        let mut turns = turns.into_iter().cycle();
        let bytes = streamed(&snapshot, as_json, || turns.next().unwrap_or(0));
        prop_assert_eq!(Snapshot::read(&bytes), Snapshot::read(&at_once(&snapshot, as_json)));
    }
}

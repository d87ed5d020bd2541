//! Real snapshots, from PyTorch 2.1 to 2.15 and from its C++ pickler: what is read is written
//! again, and Python finds the same object.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use common::{files, python};
use memtrace_format::json::Stacks;
use memtrace_format::snapshot::{Action, Snapshot};
use memtrace_format::{ReadError, json, pickle};

fn read(bytes: &[u8]) -> Snapshot {
    Snapshot::read(bytes).expect("a real snapshot is read")
}

fn pickled(snapshot: &Snapshot) -> Vec<u8> {
    let mut bytes = Vec::new();
    pickle::write(snapshot, &mut bytes).expect("a real snapshot is written");
    bytes
}

fn as_json(snapshot: &Snapshot, stacks: Stacks) -> Vec<u8> {
    let mut bytes = Vec::new();
    json::write(snapshot, stacks, &mut bytes).expect("a real snapshot is written");
    bytes
}

/// With every stack spelled out JSON of a long history is a gigabyte.
fn small(pickle: &[u8]) -> bool {
    pickle.len() < 380_000
}

#[test]
fn python_reads_back_what_was_read() {
    for (name, original) in files() {
        let snapshot = read(&original);
        python(
            "a, b = pickle.loads(blobs[0]), pickle.loads(blobs[1])\n\
             assert a == b and list(a) == list(b)\n",
            &[&original, &pickled(&snapshot)],
        );
        if small(&original) {
            python(
                "a, b = pickle.loads(blobs[0]), json.loads(blobs[1])\n\
                 assert json.loads(json.dumps(a)) == b and list(a) == list(b)\n",
                &[&original, &as_json(&snapshot, Stacks::Expanded)],
            );
        }
        println!("{name}: {} entries", snapshot.device_traces.iter().map(Vec::len).sum::<usize>());
    }
}

/// What docs/files.md says to people who read JSON themselves.
#[test]
fn tables_say_what_python_reads() {
    let whole = common::file("golden/all_features");
    python(
        "a, b = pickle.loads(blobs[0]), json.loads(blobs[1])\n\
         stacks, frames = b.pop('stacks'), b.pop('frames')\n\
         def expand(x):\n\
         \x20   if isinstance(x, dict): return {k: [frames[f] for f in stacks[v]] if k == 'frames' and isinstance(v, int) else expand(v) for k, v in x.items()}\n\
         \x20   return [expand(v) for v in x] if isinstance(x, list) else x\n\
         assert json.loads(json.dumps(a)) == expand(b)\n",
        &[&whole, &as_json(&read(&whole), Stacks::Shared)],
    );
}

#[test]
fn keys_come_in_pytorchs_order() {
    for part in
        ["golden/basic_second", "golden/all_features", "golden/expandable", "fullstep_freed"]
    {
        let original = common::file(part);
        python(
            "def keys(x):\n\
             \x20   if isinstance(x, dict): return [(k, keys(v)) for k, v in x.items()]\n\
             \x20   if isinstance(x, (list, tuple)): return [keys(v) for v in x]\n\
             a, b = pickle.loads(blobs[0]), pickle.loads(blobs[1])\n\
             assert keys(a) == keys(b)\n",
            &[&original, &pickled(&read(&original))],
        );
    }
}

#[test]
fn what_is_written_is_read_back_the_same() {
    for (name, original) in files() {
        let snapshot = read(&original);
        assert_eq!(read(&pickled(&snapshot)), snapshot, "{name} as a pickle");
        if small(&original) {
            assert_eq!(read(&as_json(&snapshot, Stacks::Expanded)), snapshot, "{name} as JSON");
        }
        let shared = as_json(&snapshot, Stacks::Shared);
        assert_eq!(read(&shared), snapshot, "{name} as JSON with tables");
        // Its keys are words, a pickle's are numbers.
        assert!(shared.len() < 6 * original.len() + 4096, "{name}: {} bytes", shared.len());
    }
}

#[test]
fn the_viewer_can_read_what_is_written() {
    for (name, original) in files() {
        let bytes = pickled(&read(&original));
        let facts = pickle::read(&bytes).expect("our own").facts;
        assert_eq!(facts.protocol, 4, "{name}");
        assert!(facts.largest_batch.0 <= 1000, "{name}: {facts:?}");
        assert_eq!(facts.unknown_to_viewer, None, "{name}");
        assert!(!facts.mixed_memo, "{name}");
        let ops = String::from_utf8(python(
            "print(*sorted({op.name for op, _, _ in pickletools.genops(blobs[0])}))",
            &[&bytes],
        ));
        let ops = ops.expect("names");
        let known = "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT \
                     SHORT_BINUNICODE BINUNICODE EMPTY_LIST APPENDS EMPTY_DICT SETITEM SETITEMS TUPLE2 TUPLE \
                     MEMOIZE BINGET LONG_BINGET";
        for op in ops.split_whitespace() {
            assert!(known.split_whitespace().any(|k| k == op), "{name} holds {op}");
        }
        // Apart from the words at its beginning the file is never longer
        // than Python's, and mostly shorter.
        assert!(bytes.len() <= original.len() + 600, "{name}: {} bytes", bytes.len());
        println!("{name}: {} bytes, {} of Python's", bytes.len(), original.len());
    }
}

#[test]
fn every_protocol_is_read() {
    for part in ["golden/basic_second", "golden/all_features", "finetune_torch21"] {
        let original = common::file(part);
        let snapshot = read(&original);
        for protocol in 2..=5 {
            let program = format!(
                "sys.stdout.buffer.write(pickle.dumps(pickle.loads(blobs[0]), protocol={protocol}))"
            );
            let bytes = python(&program, &[&original]);
            assert_eq!(pickle::read(&bytes).expect("read").facts.protocol, protocol);
            assert_eq!(read(&bytes), snapshot, "{part}, protocol {protocol}");
        }
    }
}

#[test]
fn a_bare_list_of_segments_is_a_snapshot_without_history() {
    let original = common::file("golden/basic_python");
    let bytes = python(
        "sys.stdout.buffer.write(pickle.dumps(pickle.loads(blobs[0])['segments'], protocol=4))",
        &[&original],
    );
    let snapshot = read(&bytes);
    assert_eq!(snapshot.segments.len(), read(&original).segments.len());
    assert!(snapshot.device_traces.is_empty());
}

#[test]
fn pytorch_2_0_is_refused_by_name() {
    for block in [
        "{'size': 512, 'state': 'active_allocated', 'history': [{'addr': 4096, 'real_size': 4, 'frames': []}]}",
        "{'size': 512, 'state': 'inactive'}",
    ] {
        let program = format!(
            "segment = {{'device': 0, 'address': 4096, 'total_size': 512, 'allocated_size': 512,\n\
             \x20 'active_size': 512, 'stream': 0, 'segment_type': 'small', 'blocks': [{block}]}}\n\
             s = {{'segments': [segment], 'device_traces': [[]]}}\n\
             sys.stdout.buffer.write(pickle.dumps(s, protocol=4))"
        );
        let error = Snapshot::read(&python(&program, &[])).expect_err("another layout");
        assert_eq!(error, ReadError::PyTorch20);
        assert!(error.to_string().starts_with("PyTorch 2.0 format"), "{error}");
    }
}

#[test]
fn what_the_model_has_no_field_for_is_kept() {
    let bytes = python(
        "s = pickle.loads(blobs[0])\n\
         e = s['device_traces'][0][3]\n\
         e['internal_metadata'] = 'mallocWithAddress'\n\
         e['forward_frames'] = ['one', 'two']\n\
         e['frames'][0]['fx_node_op'] = 'call_function'\n\
         s['segments'][0]['of_tomorrow'] = {'a': [1, 2.5, None, True]}\n\
         s['segments'][0]['blocks'][1]['x'] = -1\n\
         s['also_new'] = (1, 2)\n\
         s['device_traces'][0][4]['action'] = 'annotate'\n\
         sys.stdout.buffer.write(pickle.dumps(s, protocol=4))",
        &[&common::file("golden/basic_python")],
    );
    let snapshot = read(&bytes);
    assert_eq!(snapshot.other.len(), 6);
    assert_eq!(snapshot.device_traces[0][4].action, Action::Other("annotate".to_owned()));
    let again = pickled(&snapshot);
    assert_eq!(read(&again), snapshot);
    python(
        "a, b = pickle.loads(blobs[0]), pickle.loads(blobs[1])\n\
         a['also_new'] = list(a['also_new'])\n\
         assert a == b\n",
        &[&bytes, &again],
    );
}

//! Hostile files, and files that are only broken: each is refused with a reason, quickly,
//! in little memory, and nothing panics.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use memtrace_format::json::Stacks;
use memtrace_format::snapshot::Snapshot;
use memtrace_format::{ReadError, json, pickle};
use proptest::prelude::*;

fn refused(bytes: &[u8]) -> String {
    Snapshot::read(bytes).expect_err("refused").to_string()
}

#[test]
fn reasons_name_the_byte() {
    let whole = common::file("golden/basic_python");
    for (bytes, reason) in [
        (&b""[..], "not a memory snapshot: the file begins neither as a pickle"),
        (b"\x7fELF", "not a memory snapshot: the file begins neither as a pickle"),
        (b"\x80\x01N.", "byte 0 of the pickle: pickle protocol 1; 2 to 5 are known"),
        (b"\x80\x04N.", "not a memory snapshot: the file holds None"),
        (
            b"\x80\x04}.",
            "not a memory snapshot: a dictionary without `segments` and `device_traces`",
        ),
        (b"\x80\x04", "byte 2 of the pickle: the file ends here, too early"),
        (
            &whole[..whole.len() / 2],
            "byte 2 of the pickle: a frame is longer than the rest of the file",
        ),
        (b"\x80\x04h\x05.", "byte 2 of the pickle: memo number 5 was never set"),
        (b"\x80\x04e.", "byte 2 of the pickle: a batch ends that never began"),
        (b"\x80\x04(}e.", "byte 4 of the pickle: the stack is empty"),
        (b"\x80\x04.", "byte 2 of the pickle: the stack is empty"),
        (b"\x80\x04](K\x01u.", "byte 6 of the pickle: keys are set in what is no dictionary"),
        (b"\x80\x04}(K\x01u.", "byte 6 of the pickle: a key without a value"),
        (
            b"\x80\x02cos\nsystem\n.",
            "byte 2 of the pickle: it asks for os.system; a snapshot is plain data",
        ),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "byte 14 of the pickle: it asks for os.system;"),
        (b"\x80\x04R.", "byte 2 of the pickle: opcode 0x52 builds no plain data"),
        (b"\x80\x04\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x7f.", "does not fit 64 bits"),
        (b"\x80\x04\x8a\x20aaaabbbbccccddddaaaabbbbccccdddd.", "an integer of 32 bytes"),
        (b"{\"segments\": [}", "the JSON text is damaged: "),
        (
            b"{\"segments\": [], \"device_traces\": []} x",
            "the JSON text is damaged: trailing characters",
        ),
        (b"{\"segments\": 5, \"device_traces\": []}", "segments: 5, not a list"),
        (b"{\"segments\": [5], \"device_traces\": []}", "segments[0]: 5, not a dictionary"),
        (
            b"{\"segments\": [], \"device_traces\": [[{\"action\": \"alloc\"}]]}",
            "device_traces[0][0].addr: missing",
        ),
        (
            b"{\"segments\": [], \"device_traces\": [[{\"action\": \"alloc\", \"addr\": -4}]]}",
            "device_traces[0][0].addr: -4, not a number of 0 or more",
        ),
        (
            b"{\"segments\": [], \"device_traces\": [[{\"action\": \"alloc\", \"addr\": 2, \"size\": \
              18446744073709551614, \"stream\": 0}]]}",
            "device_traces[0][0].size: 18446744073709551614 bytes, which end behind the last address",
        ),
    ] {
        let text = refused(bytes);
        assert!(text.contains(reason), "{text:?} should say {reason:?}");
    }
}

#[test]
fn a_number_of_nine_bytes_is_read_as_what_it_is() {
    // PyTorch writes such a line for a frame without one.
    let bytes = b"\x80\x04\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00.";
    let pickle = pickle::read(bytes).expect("plain data");
    assert_eq!(pickle.tree.describe(pickle.tree.root()), u64::MAX.to_string());
}

#[test]
fn towers_need_no_stack() {
    let mut bytes = b"\x80\x04".to_vec();
    bytes.extend(vec![b'('; 1_000_000]);
    bytes.extend(vec![b'l'; 1_000_000]);
    bytes.push(b'.');
    assert!(matches!(pickle::read(&bytes), Err(ReadError::Pickle { .. }) | Ok(_)));
    assert!(refused(&vec![b'['; 1_000_000]).contains("recursion limit"));
}

#[test]
fn a_list_may_contain_itself() {
    let bytes = b"\x80\x04}\x94(\x8c\x08segments]\x8c\x0ddevice_traces]\x8c\x01x]\x94h\x01au.";
    assert!(refused(bytes).contains("x: nests too deep"), "{}", refused(bytes));
    assert!(
        refused(b"\x80\x04]\x94h\x00a.").contains("segments[0]: a list of 1, not a dictionary")
    );
}

#[test]
fn sharing_can_not_be_used_to_fill_memory() {
    // A thousand references to a list of a thousand references to one entry.
    let mut bytes = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces](](}".to_vec();
    bytes.extend(
        b"(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeK\x01\x8c\x06streamK\x00u\x94",
    );
    bytes.extend(b"h\x00".repeat(100_000));
    bytes.extend(b"e\x94");
    bytes.extend(b"h\x01".repeat(100_000));
    bytes.extend(b"eu.");
    assert!(refused(&bytes).contains("over and over"), "{}", refused(&bytes));

    // Ten levels of lists, each ten times the one before: ten thousand million strings.
    let mut laughs =
        b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]\x8c\x01x\x8c\x02ha\x94".to_vec();
    for level in 0..10 {
        laughs.extend([0x8c, 2, b'k', b'0' + level, b']', b'(']);
        laughs.extend([b'h', level].repeat(10));
        laughs.extend(b"e\x94");
    }
    laughs.extend(b"u.");
    assert!(refused(&laughs).contains("shares too much"), "{}", refused(&laughs));
}

#[test]
fn many_keys_that_nobody_knows_take_no_longer_each() {
    let keys: Vec<String> = (0..400_000).map(|i| format!("\"k{i}\": {i}, ")).collect();
    let last = "\"k7\": 8, \"segments\": [], \"device_traces\": []";
    let text = format!("{{{}{last}}}", keys.concat());
    let begun = std::time::Instant::now();
    let snapshot = Snapshot::read(text.as_bytes()).expect("a snapshot");
    assert_eq!(snapshot.other.len(), 400_000);
    assert_eq!(snapshot.other[7].value, 8, "of one that comes twice the last");
    // Compared each with each they took a quarter of an hour.
    assert!(begun.elapsed().as_secs() < 120);
}

#[test]
fn lengths_are_not_believed() {
    for bytes in [
        &b"\x80\x04X\xff\xff\xff\xff."[..],
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x04Nr\xff\xff\xff\xff.",
    ] {
        assert!(matches!(pickle::read(bytes), Err(ReadError::Pickle { .. })), "{bytes:x?}");
    }
    assert!(
        refused(b"\x80\x04Nr\xff\xff\xff\xff.")
            .contains("memo number 4294967295 in a file this short")
    );
    let pushes = [b"\x80\x04", &vec![b'N'; 1_000_000][..], b"."].concat();
    assert!(
        refused(&pushes).contains("far more than a file of its length"),
        "{}",
        refused(&pushes)
    );
    let numbers = [b"\x80\x04N", &vec![0x94; 1_000_000][..], b"."].concat();
    assert!(refused(&numbers).contains("in a file this short"), "{}", refused(&numbers));
    let many_empty = [b"\x80\x04", &vec![b']'; 1_000_000][..], b"."].concat();
    assert!(refused(&many_empty).contains("far more than a file of its length"));
}

/// Reads in every way there is. Whatever the bytes, this returns.
fn read_all_ways(bytes: &[u8]) {
    let snapshot = Snapshot::read(bytes);
    let _ = pickle::read(bytes);
    let _ = json::read(bytes);
    if let Ok(snapshot) = snapshot {
        let mut sink = Vec::new();
        // A snapshot that was read can be written, unless a number of it
        // is too large for the viewer.
        if let Err(error) = pickle::write(&snapshot, &mut sink) {
            assert!(
                error.to_string().contains("2^63") || error.to_string().contains("deeper"),
                "{error}"
            );
            return;
        }
        assert_eq!(Snapshot::read(&sink).expect("our own"), snapshot);
    }
}

/// Opcodes that mean something, so that random programs get somewhere.
fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let ops: &[&[u8]] = &[
        b"(",
        b"0",
        b"1",
        b"2",
        b"N",
        b"\x88",
        b"\x89",
        b"K\x07",
        b"M\x01\x02",
        b"J\xff\xff\xff\xff",
        b"\x8a\x00",
        b"\x8a\x01\x80",
        b"G\x7f\xf8\0\0\0\0\0\0",
        b"\x8c\x08segments",
        b"\x8c\x0ddevice_traces",
        b"\x8c\x06blocks",
        b"\x8c\x06frames",
        b"]",
        b"a",
        b"e",
        b"l",
        b"}",
        b"s",
        b"u",
        b"d",
        b")",
        b"\x85",
        b"\x86",
        b"\x87",
        b"t",
        b"\x94",
        b"q\x00",
        b"q\x09",
        b"h\x00",
        b"h\x01",
        b"h\x09",
        b"j\x02\0\0\0",
        b".",
    ];
    prop::collection::vec(prop::sample::select(ops.to_vec()), 0..60)
        .prop_map(|ops| [b"\x80\x04", ops.concat().as_slice(), b"."].concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        read_all_ways(&bytes);
        read_all_ways(&[b"\x80\x04", bytes.as_slice()].concat());
        read_all_ways(&[b"{\"", bytes.as_slice()].concat());
    }

    #[test]
    fn any_program(bytes in opcodes()) {
        read_all_ways(&bytes);
    }

    #[test]
    fn a_real_file_with_bytes_changed(
        which in 0..8usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<Option<prop::sample::Index>>(),
        as_json in any::<bool>(),
    ) {
        let (_, mut bytes) = GOLDEN.with(|g| g[which % g.len()].clone());
        if as_json {
            let snapshot = Snapshot::read(&bytes).expect("golden");
            bytes.clear();
            let stacks = if which % 2 == 0 { Stacks::Shared } else { Stacks::Expanded };
            json::write(&snapshot, stacks, &mut bytes)?;
        }
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        read_all_ways(&bytes);
    }
}

thread_local! {
    static GOLDEN: Vec<(String, Vec<u8>)> =
        common::files().into_iter().filter(|(name, _)| name.contains("golden")).collect();
}

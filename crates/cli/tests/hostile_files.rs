//! Hostile files, in every command that reads them: what they take is bounded,
//! and their names reach no terminal raw.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use flate2::Compression;
use flate2::write::GzEncoder;
use memtrace_format::json::{self, Stacks};
use memtrace_format::pickle;
use memtrace_format::snapshot::{Action, Snapshot};

/// An escape sequence, ends of lines, C0 and C1, marks of direction, characters of no width.
const EVIL: &str = "x\x1b[2J\x1b]0;owned\x07\nmemtrace: all is well\r\t\x08\x7f\u{85}\u{9b}31m\u{202e}\u{2066}\u{200b}\u{200d}\u{feff}\u{ad}\u{2028}\u{61c}\u{e0041}y";

/// May this be printed? Ends of lines are of the page's own.
fn is_safe(text: &str) -> bool {
    let unsafe_char = |c: char| EVIL.contains(c) && !c.is_ascii_graphic() && c != '\n' && c != ' ';
    !text.chars().any(unsafe_char) && !text.contains("\nmemtrace: all is well")
}

fn real(name: &str) -> Snapshot {
    let file = fs::File::open(common::data().join(format!("golden/{name}.pickle.gz")));
    let mut bytes = Vec::new();
    let mut unpacked = flate2::read::GzDecoder::new(file.expect("there"));
    unpacked.read_to_end(&mut bytes).expect("intact");
    Snapshot::read(&bytes).expect("real")
}

/// A snapshot in which every text is evil.
fn evil() -> Snapshot {
    let mut snapshot = real("basic_python_stacks");
    for (i, frame) in snapshot.frames.iter_mut().enumerate() {
        frame.name = format!("{EVIL}{i}");
        frame.filename = format!("/{EVIL}/{i}.py");
    }
    let trace = &mut snapshot.device_traces[0];
    for entry in trace.iter_mut() {
        entry.user_metadata = Some(EVIL.to_owned().into());
        entry.compile_context = Some(EVIL.to_owned().into());
    }
    let mut driver = trace[0].clone();
    driver.user_metadata = Some(format!("driver: {EVIL}").into());
    for action in ["segment_alloc", "alloc"] {
        driver.action = Action::from_name(action);
        driver.addr = 0x7fff_0000_0000;
        trace.push(driver.clone());
    }
    driver.action = Action::Oom;
    trace.push(driver.clone());
    driver.action = Action::Other(EVIL.to_owned());
    trace.push(driver);
    let owner = serde_json::json!({"owner": EVIL, "bytes": 5, "count": 1});
    snapshot.memtrace = memtrace_format::key::Memtrace::read(serde_json::json!({
        "version": EVIL, "command": [EVIL, EVIL], "host": EVIL, "pid": 7, "rank": 1,
        "virtual": {"spec": EVIL, "name": EVIL, "devices": []},
        "owners": {"devices": [{"device": 0, "by": [owner]}], "host": {"by": [owner]}},
        "labels": [{"device": 0, "by": [{"label": EVIL, "bytes": 5, "count": 1}]}],
        "warnings": [{"kind": EVIL, "text": EVIL}],
        "allocator_conf": EVIL,
        EVIL: EVIL,
    }));
    snapshot.allocator_settings = serde_json::json!({"PYTORCH_CUDA_ALLOC_CONF": EVIL, EVIL: EVIL});
    snapshot
}

fn run(folder: &Path, args: &[&str]) -> (Output, String) {
    let output = common::memtrace().current_dir(folder).args(args).output().expect("started");
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8(text).expect("UTF-8");
    (output, text)
}

const COMMANDS: [&[&str]; 11] = [
    &["summary"],
    &["summary", "--json"],
    &["report"],
    &["report", "--json"],
    &["check"],
    &["check", "--json"],
    &["replay"],
    &["replay", "--json"],
    &["tune"],
    &["tune", "--json"],
    &["symbolize", "--out", "out.json"],
];

#[test]
fn names_in_files_are_shown_and_not_obeyed() {
    let folder = tempfile::tempdir().expect("a folder");
    let snapshot = evil();
    let mut bytes = Vec::new();
    json::write(&snapshot, Stacks::Shared, &mut bytes).expect("written");
    fs::write(folder.path().join("a.json"), &bytes).expect("written");
    bytes.clear();
    pickle::write(&snapshot, &mut bytes).expect("written");
    fs::write(folder.path().join("a.pickle"), &bytes).expect("written");
    let mut shown = 0;
    for file in ["a.json", "a.pickle"] {
        for command in COMMANDS {
            let (output, text) = run(folder.path(), &[command, &[file]].concat());
            assert!(is_safe(&text), "{command:?} {text}");
            shown += usize::from(text.contains(if command.contains(&"--json") {
                "\\u202e"
            } else {
                "\\u{202e}"
            }));
            if command.contains(&"--json") && output.status.code() != Some(2) {
                let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
                assert!(
                    command[0] != "summary"
                        || said
                            .to_string()
                            .contains(EVIL.split('\n').next().map_or("", |_| "owned"))
                );
            }
        }
    }
    assert!(shown >= 8, "only {shown} of them show a name, so little is tested");
    // What a script gets says the same as the file.
    let (output, _) = run(folder.path(), &["summary", "--json", "a.pickle"]);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(said["recorded_by"]["host"], EVIL);
}

#[test]
fn names_of_files_and_in_errors_are_shown_and_not_obeyed() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = EVIL.replace('/', "");
    let in_json = serde_json::json!({ EVIL: 1 }).to_string();
    let class = |name: &str| {
        let text = |t: &str| [b"X", &(t.len() as u32).to_le_bytes()[..], t.as_bytes()].concat();
        [b"\x80\x04", &text(name)[..], &text(name), b"\x93."].concat()
    };
    for (ending, bytes) in [
        (".json", in_json.clone().into_bytes()),
        (".pickle", class(EVIL)),
        (".pkl", b"\x80\x04".to_vec()),
        (".blackbox", b"nothing".to_vec()),
        (".txt", b"text".to_vec()),
        (".json.gz", b"\x1f\x8bno".to_vec()),
    ] {
        let file = format!("{name}{ending}");
        fs::write(folder.path().join(&file), bytes).expect("written");
        for command in COMMANDS {
            for files in [&[file.as_str()][..], &[".", &file]] {
                let (_, text) = run(folder.path(), &[command, files].concat());
                assert!(is_safe(&text) && !text.is_empty(), "{command:?} {ending} {text}");
            }
        }
        let (_, text) = run(folder.path(), &["recover", &file, "."]);
        assert!(is_safe(&text) && text.contains("\\u{1b}"), "{text}");
    }
    let dict = format!("{{\"segments\": [], \"device_traces\": [[{{\"action\": {in_json}}}]]}}");
    fs::write(folder.path().join("bad.json"), dict).expect("written");
    let (_, text) = run(folder.path(), &["summary", "bad.json"]);
    assert!(is_safe(&text) && text.contains("action"), "{text}");
}

/// Runs in so many KiB of address space, which is what a bomb would fill.
fn bounded(folder: &Path, kib: u64, args: &[&str]) -> (Option<i32>, String) {
    let command = format!("ulimit -v {kib}; exec \"$0\" \"$@\"");
    let output = Command::new("sh")
        .args(["-c", &command, env!("CARGO_BIN_EXE_memtrace")])
        .args(args)
        .current_dir(folder)
        .output()
        .expect("sh is there");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::best());
    out.write_all(bytes).expect("room");
    out.finish().expect("room")
}

#[test]
fn bombs_go_off_in_little_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).expect("written");
    };
    // More than a GiB each: of zeros, of nested lists, of empty lists behind a
    // pickle's beginning, of blanks before JSON.
    let packed = |begin: &[u8], with: u8, members: usize| {
        let member = gzip(&vec![with; 16 << 20]);
        [gzip(begin), member.repeat(members)].concat()
    };
    let many = |begin: &[u8], with: u8| packed(begin, with, 80);
    // These unpack to less than is allowed, and what they would build is more.
    file("few_lists.pickle.gz", &packed(b"\x80\x04", b']', 3));
    file("few_nones.pickle.gz", &packed(b"\x80\x04", b'N', 3));
    file(
        "few_numbers.json.gz",
        &packed(b"[1", b' ', 0)
            .into_iter()
            .chain(gzip(&b",1".repeat(24 << 20)))
            .collect::<Vec<u8>>(),
    );
    file("zeros.gz", &many(b"", 0));
    file("nested.json.gz", &many(b"", b'['));
    file("lists.pickle.gz", &many(b"\x80\x04", b']'));
    file("marks.pickle.gz", &many(b"\x80\x04", b'('));
    file("blanks.gz", &many(b"", b' '));
    let zstd = ruzstd::encoding::compress_to_vec(
        &vec![b']'; 32 << 20][..],
        ruzstd::encoding::CompressionLevel::Fastest,
    );
    file(
        "lists.zst",
        &[
            &ruzstd::encoding::compress_to_vec(
                &b"\x80\x04"[..],
                ruzstd::encoding::CompressionLevel::Fastest,
            )[..],
            &zstd.repeat(40),
        ]
        .concat(),
    );
    for name in [
        "zeros.gz",
        "nested.json.gz",
        "lists.pickle.gz",
        "marks.pickle.gz",
        "few_lists.pickle.gz",
        "few_nones.pickle.gz",
        "few_numbers.json.gz",
        "blanks.gz",
        "lists.zst",
    ] {
        for command in if name == "zeros.gz" { &["summary", "check"][..] } else { &["summary"] } {
            let (code, text) =
                bounded(folder.path(), 900_000, &[command, "--max-memory", "64MiB", name]);
            let bad = if *command == "check" && name == "zeros.gz" { 1 } else { 2 };
            assert_eq!(code, Some(bad), "{command} {name}: {text}");
            let says = if name == "zeros.gz" { "zeros" } else { "--max-memory 128MiB" };
            assert!(text.contains(says), "{command} {name}: {text}");
        }
    }
    // Nobody has to say anything.
    let (code, text) = bounded(folder.path(), 2_600_000, &["summary", "lists.pickle.gz"]);
    assert!(code == Some(2) && text.contains("--max-memory 2048MiB"), "{text}");
}

#[test]
fn small_files_that_refer_to_large_things_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    // A text of a mebibyte, and two hundred thousand frames, entries or
    // keys that have it for a name.
    let long = "n".repeat(1 << 20);
    let text = |t: &str| [b"X", &(t.len() as u32).to_le_bytes()[..], t.as_bytes()].concat();
    let begin =
        [b"\x80\x04", &text(&long)[..], b"\x940}(\x8c\x08segments]\x8c\x0ddevice_traces](]("]
            .concat();
    let entry = |middle: &[u8]| {
        [
            b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x01\x8c\x04sizeK\x01\x8c\x06streamK\x00",
            middle,
            b"u",
        ]
        .concat()
    };
    let metadata = entry(b"\x8c\x0duser_metadatah\x00").repeat(200_000);
    let frames: Vec<u8> = (0..200_000_u32)
        .flat_map(|line| {
            [
                b"}(\x8c\x04nameh\x00\x8c\x08filenameh\x00\x8c\x04lineJ",
                &line.to_le_bytes()[..],
                b"u",
            ]
            .concat()
        })
        .collect();
    let frames = entry(&[b"\x8c\x06frames](", &frames[..], b"e"].concat());
    let keys = entry(b"h\x00N").repeat(200_000);
    let actions = b"}(\x8c\x06actionh\x00\x8c\x04addrK\x01\x8c\x04sizeK\x01\x8c\x06streamK\x00u"
        .repeat(200_000);
    for (name, middle) in
        [("metadata", metadata), ("frames", frames), ("keys", keys), ("actions", actions)]
    {
        let bytes = [&begin[..], &middle, b"eeu."].concat();
        fs::write(folder.path().join(name), bytes).expect("written");
        let (code, text) = bounded(folder.path(), 2_600_000, &["summary", name]);
        assert_eq!(code, Some(2), "{name}: {text}");
        assert!(text.contains("over and over") || text.contains("--max-memory"), "{name}: {text}");
    }
}

#[test]
fn what_has_no_end_is_not_read_to_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, text) = bounded(folder.path(), 900_000, &["summary", "/dev/zero"]);
    assert!(code == Some(2) && text.contains("zeros"), "{text}");
    let mut child = common::memtrace()
        .args(["summary", "--max-memory", "64MiB", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || {
        let blanks = vec![b' '; 1 << 16];
        let _ = stdin.write_all(b"{\"segments\": [");
        while stdin.write_all(&blanks).is_ok() {}
    });
    let output = child.wait_with_output().expect("it ends, though its input doesn't");
    writer.join().expect("ended");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--max-memory 128MiB"));
}

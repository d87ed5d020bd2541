//! Several files, folders, several snapshots in a file, and files that are something else, in
//! every command that reads snapshots.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Output;

use common::memtrace;
use flate2::Compression;
use flate2::write::GzEncoder;
use memtrace_format::json::Stacks;
use tempfile::TempDir;

/// Commands that answer a question about each snapshot.
const QUESTIONS: [&[&str]; 4] = [&["summary"], &["report"], &["replay"], &["tune"]];

fn golden(name: &str) -> Vec<u8> {
    let file = fs::File::open(common::data().join(format!("golden/{name}.pickle.gz")));
    let mut bytes = Vec::new();
    let mut unpacked = flate2::read::GzDecoder::new(file.expect("there"));
    unpacked.read_to_end(&mut bytes).expect("intact");
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::new(), Compression::fast());
    out.write_all(bytes).expect("room");
    out.finish().expect("room")
}

struct Scratch(TempDir);

impl Scratch {
    fn new() -> Scratch {
        Scratch(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> &Scratch {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, bytes).expect("written");
        self
    }

    fn run(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let output = memtrace().current_dir(self.path()).args(args).output().expect("started");
        let Output { status, stdout, stderr } = output;
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (status.code(), text(stdout), text(stderr))
    }
}

fn headings(out: &str) -> Vec<&str> {
    let heading = |line: &str| line.starts_with("==> ") && line.ends_with(" <==");
    out.lines().filter(|line| heading(line)).map(|l| &l[4..l.len() - 4]).collect()
}

#[test]
fn ranks_come_in_order_each_under_its_name() {
    let here = Scratch::new();
    let bytes = golden("basic_python_stacks");
    let name = |rank: u32, n: u32| format!("memtrace-host-{}-rank{rank}-{n}.pickle", 100 + rank);
    for (rank, n) in [(10, 0), (2, 0), (2, 10), (2, 9), (0, 0)] {
        here.file(&name(rank, n), &bytes);
    }
    let expect = [name(0, 0), name(2, 0), name(2, 9), name(2, 10), name(10, 0)];
    // As a shell's pattern gives them.
    let mut sorted = expect.to_vec();
    sorted.sort();
    assert_ne!(sorted, expect);
    for question in QUESTIONS {
        let args: Vec<&str> =
            question.iter().copied().chain(sorted.iter().map(String::as_str)).collect();
        let (code, out, err) = here.run(&args);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{question:?}");
        assert_eq!(headings(&out), expect, "{question:?}");
        let (_, of_folder, _) = here.run(&[question[0], "."]);
        let expect: Vec<String> = expect.iter().map(|name| format!("./{name}")).collect();
        assert_eq!(headings(&of_folder), expect, "{question:?}");
    }
    let (code, out, _) = here.run(&["check", "."]);
    assert_eq!((code, out.matches(": ok\n").count()), (Some(0), 5), "{out}");
}

#[test]
fn json_of_one_file_is_an_object_and_of_several_a_list() {
    let here = Scratch::new();
    here.file("a.pickle", &golden("basic_python_stacks")).file("b.pickle", &golden("expandable"));
    here.file("bad.pickle", b"").file("one/a.pickle", &golden("expandable"));
    for question in QUESTIONS {
        let json = |args: &[&str]| {
            let (code, out, _) = here.run(&[question, &["--json"], args].concat());
            (code, serde_json::from_str::<serde_json::Value>(&out).expect("JSON"))
        };
        let (code, one) = json(&["a.pickle"]);
        assert!(code == Some(0) && one.is_object() && one.get("file").is_none(), "{one}");
        let (code, two) = json(&["b.pickle", "bad.pickle", "a.pickle"]);
        assert_eq!(code, Some(2));
        let files: Vec<_> = two.as_array().expect("a list").iter().map(|o| &o["file"]).collect();
        assert_eq!(files, ["b.pickle", "bad.pickle", "a.pickle"], "the order given");
        assert!(two[1]["error"].as_str().is_some_and(|e| e.contains("an empty file")), "{two}");
        let mut with_name = serde_json::json!({"file": "a.pickle"});
        with_name.as_object_mut().expect("one").extend(one.as_object().expect("one").clone());
        assert_eq!(two[2], with_name);
        let (_, folder) = json(&["one"]);
        assert_eq!(folder.as_array().map(Vec::len), Some(1), "a folder is a list, always");
    }
}

#[test]
fn the_worst_exit_code_is_the_answer_and_the_others_are_answered() {
    let here = Scratch::new();
    here.file("a.pickle", &golden("basic_python_stacks")).file("b.pickle", b"\x80\x04}(");
    for question in QUESTIONS {
        let (code, out, err) = here.run(&[question[0], "b.pickle", "a.pickle", "none.pickle"]);
        assert_eq!((code, headings(&out)), (Some(2), vec!["a.pickle"]), "{question:?}");
        let lines: Vec<&str> = err.lines().collect();
        assert_eq!(lines.len(), 2, "{err}");
        assert!(lines[0].starts_with("memtrace: b.pickle: byte "), "{err}");
        assert!(
            lines[1].starts_with("memtrace: none.pickle: cannot be read: No such file"),
            "{err}"
        );
    }
    let too_small = ["--capacity", "1MiB"];
    let (code, ..) = here.run(&[&["replay", "a.pickle", "a.pickle"][..], &too_small].concat());
    assert_eq!(code, Some(1), "no is the worst of no and yes");
}

#[test]
fn several_snapshots_in_one_file_are_each_answered() {
    let here = Scratch::new();
    let [a, b] = ["basic_python_stacks", "expandable"].map(golden);
    here.file("behind.pickle", &[&a[..], &b, &a].concat());
    // Pickles without their end, in a list and in a dictionary by number and by name.
    let body = |bytes: &[u8]| {
        let snapshot = memtrace_format::snapshot::Snapshot::read(bytes).expect("real");
        let mut json = Vec::new();
        memtrace_format::json::write(&snapshot, Stacks::Shared, &mut json).expect("room");
        String::from_utf8(json).expect("JSON").trim().to_owned()
    };
    let (ja, jb) = (body(&a), body(&b));
    here.file("list.json", format!("[{ja}, {jb}]").as_bytes());
    here.file("ranks.json", format!("{{\"0\": {ja}, \"1\": {jb}}}").as_bytes());
    here.file("lines.json", format!("{ja}\n{jb}\n").as_bytes());
    for (file, names) in [
        ("behind.pickle", &["1 of 3", "2 of 3", "3 of 3"][..]),
        ("list.json", &["1 of 2", "2 of 2"]),
        ("ranks.json", &["1 of 2, key 0", "2 of 2, key 1"]),
        ("lines.json", &["1 of 2", "2 of 2"]),
    ] {
        for question in QUESTIONS {
            let (code, out, err) = here.run(&[question[0], file]);
            assert_eq!((code, err.as_str()), (Some(0), ""), "{question:?}");
            let expect: Vec<String> =
                names.iter().map(|name| format!("{file}: snapshot {name}")).collect();
            assert_eq!(headings(&out), expect, "{question:?}");
        }
        let (code, out, _) = here.run(&["check", file]);
        let says = format!("{} snapshots in one file", names.len());
        assert!(code == Some(1) && out.contains(&says), "{out}");
        let (code, _, err) = here.run(&["symbolize", file]);
        assert!(code == Some(2) && err.contains(&format!("it holds {} snapshots", names.len())));
    }
}

#[test]
fn gzip_and_zstd_are_read() {
    let here = Scratch::new();
    let bytes = golden("basic_python_stacks");
    let packed = gzip(&bytes);
    let halves = [gzip(&bytes[..100]), gzip(&bytes[100..])].concat();
    let zstd =
        ruzstd::encoding::compress_to_vec(&bytes[..], ruzstd::encoding::CompressionLevel::Fastest);
    // Frames that say nothing, as pzstd writes them.
    let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 7, 7][..], &zstd].concat();
    here.file("plain", &bytes);
    let (_, expect, _) = here.run(&["summary", "plain"]);
    for (name, packed) in [
        ("a.pickle.gz", &packed),
        ("b.pickle", &halves),
        ("a.pickle.zst", &zstd),
        ("c.pickle.zst", &skipped),
    ] {
        here.file(name, packed);
        let (code, out, err) = here.run(&["summary", name]);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{name}");
        assert_eq!(out.replace(name, "plain"), expect);
        assert!(
            here.run(&["check", name]).1.ends_with("") && here.run(&["check", name]).0 == Some(0)
        );
    }
    let cut = &packed[..packed.len() / 2];
    here.file("cut.gz", cut).file("cut.zst", &zstd[..zstd.len() / 2]);
    for name in ["cut.gz", "cut.zst"] {
        let (code, _, err) = here.run(&["summary", name]);
        assert!(code == Some(2) && err.lines().count() == 1, "{err}");
        assert!(err.contains("ends too early") || err.contains("damaged zstd"), "{err}");
    }
}

#[test]
fn what_is_no_snapshot_is_named_as_what_it_is() {
    let here = Scratch::new();
    let mut black_box = b"memtrace".to_vec();
    black_box.resize(8192, 0);
    let zip =
        |name: &str| [b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0", &[0; 16][..], name.as_bytes()].concat();
    let files: &[(&str, Vec<u8>, &str)] = &[
        ("empty.pickle", vec![], "an empty file"),
        ("x.blackbox", black_box, "memtrace recover x.blackbox"),
        ("renamed.pickle", b"memtrace\0\0\0\0".to_vec(), "memtrace recover renamed.pickle"),
        (".memtrace-h-7.run", b"7 box /tmp/a.blackbox\n".to_vec(), "the list of a run"),
        ("m-0-oom.txt", b"OUT OF MEMORY on device 0: 2 GiB asked\n".to_vec(), "m-0.pickle"),
        ("saved.pt", zip("archive/data.pkl"), "torch.save"),
        (
            "old.pt",
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.".to_vec(),
            "torch.save",
        ),
        ("some.zip", zip("snapshot.pickle"), "a zip archive"),
        ("a.xz", b"\xfd7zXZ\0\0\x04".to_vec(), "xz -d"),
        ("a.bz2", b"BZh91AY&SY".to_vec(), "bzip2 -d"),
        ("a.lz4", b"\x04\x22\x4d\x18\x64".to_vec(), "lz4 -d"),
        ("a.zlib", b"\x78\x9c\xcb\x48".to_vec(), "pigz -d a.zlib"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c\0\x04".to_vec(), "an archive (7z)"),
        ("twice.gz", gzip(&gzip(b"x")), "gzip, twice"),
        ("notes.txt", b"remember the milk".to_vec(), "a text file"),
        ("page.html", b"<!DOCTYPE html><html>".to_vec(), "a web page"),
        ("lib.so", [b"\x7fELF\x02\x01\x01", &[0; 60][..]].concat(), "another kind"),
        ("old.pickle", b"(dp0\nS'a'\np1\nI1\ns.".to_vec(), "protocol 0"),
        ("zeros.pickle", vec![0; 5000], "zeros"),
        ("wide.json", b"\xff\xfe{\0}\0".to_vec(), "UTF-16"),
        (
            "trace.json",
            br#"{"traceEvents": [], "schemaVersion": 1}"#.to_vec(),
            "it has traceEvents",
        ),
        ("number.pickle", b"\x80\x04K\x05.".to_vec(), "the file holds 5"),
        ("cut.pickle", golden("expandable")[..900].to_vec(), "cut off?"),
    ];
    here.file("m-0.pickle", b"there");
    for (name, bytes, says) in files {
        here.file(name, bytes);
        for command in ["summary", "report", "replay", "tune", "symbolize"] {
            let (code, out, err) = here.run(&[command, name]);
            assert_eq!((code, out.as_str()), (Some(2), ""), "{command} {name}");
            assert!(err.contains(says) && err.lines().count() == 1, "{name}: {err}");
        }
        let (code, out, _) = here.run(&["check", name]);
        assert!(code == Some(1) && out.contains(says), "{name}: {out}");
    }
}

#[test]
fn a_folder_without_snapshots_says_what_is_in_it() {
    let here = Scratch::new();
    here.file("empty/notes.txt", b"").file("killed/m.blackbox", b"");
    here.file("both/m.blackbox", b"").file("both/memtrace-h-1-0.pickle", &golden("expandable"));
    here.file("both/config.json", b"{}");
    let (code, _, err) = here.run(&["summary", "empty"]);
    assert!(code == Some(2) && err.contains("no snapshot is in this folder"), "{err}");
    let (code, _, err) = here.run(&["summary", "killed"]);
    assert!(code == Some(2) && err.contains("`memtrace recover killed`"), "{err}");
    let (code, out, err) = here.run(&["summary", "both"]);
    assert_eq!((code, headings(&out)), (Some(0), vec!["both/memtrace-h-1-0.pickle"]));
    assert!(err.contains("a black box") && err.contains("`memtrace recover both`"), "{err}");
}

#[test]
fn symbolize_writes_each_file() {
    let here = Scratch::new();
    let bytes = golden("basic_python_stacks");
    here.file("a.pickle", &bytes).file("b.pickle.gz", &gzip(&bytes)).file("out/keep", b"");
    let (code, _, err) = here.run(&["symbolize", "a.pickle", "b.pickle.gz", "--out", "one.pickle"]);
    assert!(code == Some(2) && err.contains("name the folder to write into"), "{err}");
    let (code, out, _) = here.run(&["symbolize", "a.pickle", "b.pickle.gz", "--out", "out"]);
    assert_eq!((code, headings(&out)), (Some(0), vec!["a.pickle", "b.pickle.gz"]));
    assert_eq!(here.run(&["check", "out/a.pickle", "out/b.pickle"]).0, Some(0));
}

#[test]
fn recover_takes_several() {
    let here = Scratch::new();
    here.file("a.blackbox", b"").file("folder/b.blackbox", b"not one");
    let (code, _, err) = here.run(&["recover", "a.blackbox", "folder", "none"]);
    assert_eq!(code, Some(2), "{err}");
    for says in
        ["a.blackbox: the black box is empty", "folder/b.blackbox: not a", "cannot read none"]
    {
        assert!(err.contains(says), "{err}");
    }
}

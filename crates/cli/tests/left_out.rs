//! What can't be read is said, and the rest is answered. That holds for files of a folder that are
//! passed by, things among the snapshots of a file, pipes, names that are commands, and padding.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use common::memtrace;
use flate2::Compression;
use flate2::write::GzEncoder;
use memtrace_format::json::Stacks;
use memtrace_format::made::{Made, black_box};
use memtrace_format::snapshot::Snapshot;
use tempfile::TempDir;

/// Commands that read snapshots.
const READERS: [&str; 6] = ["summary", "report", "replay", "tune", "check", "symbolize"];
const QUESTIONS: [&str; 4] = ["summary", "report", "replay", "tune"];

fn golden(name: &str) -> Vec<u8> {
    let file = fs::File::open(common::data().join(format!("golden/{name}.pickle.gz")));
    let mut bytes = Vec::new();
    let mut unpacked = flate2::read::GzDecoder::new(file.expect("there"));
    unpacked.read_to_end(&mut bytes).expect("intact");
    bytes
}

fn json(pickle: &[u8]) -> String {
    let mut json = Vec::new();
    let snapshot = Snapshot::read(pickle).expect("real");
    memtrace_format::json::write(&snapshot, Stacks::Expanded, &mut json).expect("room");
    String::from_utf8(json).expect("JSON").trim().to_owned()
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

    fn fifo(&self, name: &str) -> &Scratch {
        let made = Command::new("mkfifo").arg(self.path().join(name)).status();
        assert!(made.expect("mkfifo is there").success());
        self
    }

    /// In a minute at the most; what waits longer is ended with the exit code 124.
    fn run(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let program = memtrace().get_program().to_owned();
        let mut command = Command::new("timeout");
        let output = command.arg("60").arg(program).current_dir(self.path()).args(args).output();
        let Output { status, stdout, stderr } = output.expect("started");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (status.code(), text(stdout), text(stderr))
    }

    /// In bash.
    fn script(&self, script: &str) -> Output {
        let program = memtrace().get_program().to_owned();
        let mut command = Command::new("bash");
        command.args(["-c", script]).current_dir(self.path()).env("MEMTRACE", program);
        command.output().expect("bash is there")
    }
}

fn headings(out: &str) -> Vec<&str> {
    let heading = |line: &str| line.starts_with("==> ") && line.ends_with(" <==");
    out.lines().filter(|line| heading(line)).map(|l| &l[4..l.len() - 4]).collect()
}

#[test]
fn a_folder_says_what_it_leaves_out() {
    let here = Scratch::new();
    let bytes = golden("expandable");
    here.file("run/memtrace-a-1-0.pickle", &bytes).file("run/oom_snapshot.pickle", &bytes);
    here.file("run/memtrace-a-2-0.pickle.xz", b"\xfd7zXZ\0").file("run/b.pkl.xz", b"\xfd7zXZ\0");
    here.file("run/memtrace-a-3-0.pickle.zip", b"PK").file("run/memtrace-a-4-0.tar.gz", b"");
    here.file("run/c.pickle.gz.gz", b"").file("run/d.json.bak", b"").file("run/.e.json.swp", b"");
    here.file("run/memtrace-a-1-0-oom.txt", b"").file("run/notes.txt.xz", b"");
    here.fifo("run/memtrace-a-5-0.pickle");
    let _socket = UnixListener::bind(here.path().join("run/socket.pickle")).expect("made");
    symlink("loop.pickle", here.path().join("run/loop.pickle")).expect("made");
    fs::create_dir(here.path().join("run/folder.pickle")).expect("made");
    for reader in QUESTIONS.iter().copied().chain(["check"]) {
        let (code, out, err) = here.run(&[reader, "run"]);
        assert!(code.is_some_and(|code| code < 2) && err.lines().count() == 1, "{reader}: {err}");
        assert!(out.contains("memtrace-a-1-0.pickle") && !out.contains("oom_snapshot"), "{out}");
        for says in [
            "run: 11 more left out: ",
            "b.pkl.xz, memtrace-a-2-0.pickle.xz (compressed with xz: unpack it first, xz -d)",
            "memtrace-a-3-0.pickle.zip (a zip archive",
            "c.pickle.gz.gz, memtrace-a-4-0.tar.gz (compressed with gzip",
            "d.json.bak (of another ending",
            "oom_snapshot.pickle (not named by memtrace",
            "memtrace-a-5-0.pickle (a pipe (FIFO))",
            "socket.pickle (a socket)",
            "loop.pickle (a link that leads nowhere)",
            "folder.pickle (a folder",
        ] {
            assert!(err.contains(says), "{reader}: {says}: {err}");
        }
        for passes in ["notes", ".swp", "oom.txt"] {
            assert!(!err.contains(passes), "{err}");
        }
    }
    here.file("packed/memtrace-a-2-0.pickle.xz", b"");
    let (code, _, err) = here.run(&["summary", "packed"]);
    assert_eq!((code, err.lines().count()), (Some(2), 1), "{err}");
    assert!(err.contains("no snapshot that can be read is in this folder"), "{err}");
    assert!(err.contains("1 left out: memtrace-a-2-0.pickle.xz (compressed with xz"), "{err}");
    // Folders in a folder are not looked into.
    here.file("above/rank0/a.pickle", &bytes).file("above/rank1/a.pickle", &bytes);
    let (code, _, err) = here.run(&["summary", "above"]);
    assert!(
        code == Some(2) && err.contains("2 left out: rank0, rank1 (a folder: name it"),
        "{err}"
    );
    // Many of a kind are one kind.
    for n in 0..50 {
        here.file(&format!("many/memtrace-a-{n}-0.pickle.bz2"), b"");
    }
    let (_, _, err) = here.run(&["summary", "many"]);
    assert!(
        err.contains("50 left out: ") && err.contains(" and 47 more (compressed with bzip2"),
        "{err}"
    );
}

#[test]
fn a_folder_without_snapshots_among_several_arguments_costs_the_others_nothing() {
    let here = Scratch::new();
    here.file("a.pickle", &golden("expandable")).file("empty/notes.txt", b"");
    for question in QUESTIONS {
        let (code, out, err) = here.run(&[question, "empty", "a.pickle"]);
        assert_eq!((code, headings(&out)), (Some(2), vec!["a.pickle"]), "{question}: {err}");
        assert!(err.starts_with("memtrace: empty: no snapshot is in this folder"), "{err}");
    }
    for reader in ["summary", "check"] {
        let (code, out, _) = here.run(&[reader, "--json", "empty", "a.pickle"]);
        let list: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!((code, list.as_array().map(Vec::len)), (Some(2), Some(2)), "{out}");
        assert!(list[0]["error"].is_string() && list[1]["file"] == "a.pickle", "{out}");
    }
}

#[test]
fn what_stands_among_snapshots_is_named() {
    let here = Scratch::new();
    let a = json(&golden("expandable"));
    let bare = serde_json::from_str::<serde_json::Value>(&a).expect("JSON")["segments"].to_string();
    here.file(
        "ranks.json",
        format!(r#"{{"r0": {a}, "r1": {{"segments": [{{}}], "device_traces": []}}, "r2": null}}"#)
            .as_bytes(),
    );
    here.file("list.json", format!("[{a}, {bare}, 5, {{\"x\": 1}}]").as_bytes());
    here.file("one.json", format!("{{\"snapshot\": {a}}}").as_bytes());
    here.file("bare.json", format!("[{bare}, {bare}]").as_bytes());
    let nones = "null,".repeat(1000);
    here.file("many.json", format!("[{nones}{a}]").as_bytes());
    for question in ["summary", "report"] {
        let (code, out, err) = here.run(&[question, "ranks.json"]);
        assert_eq!((code, headings(&out)), (Some(2), vec!["ranks.json: snapshot 1 of 3, key r0"]));
        let lines: Vec<&str> = err.lines().collect();
        assert!(
            lines[0].starts_with("memtrace: ranks.json: snapshot 2 of 3, key r1: segments[0]"),
            "{err}"
        );
        assert!(lines[1].contains("snapshot 3 of 3, key r2: not a memory snapshot: None"), "{err}");
        assert_eq!(lines.len(), 2, "{err}");
        let (code, out, _) = here.run(&[question, "--json", "ranks.json"]);
        let list: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!((code, list.as_array().map(Vec::len)), (Some(2), Some(3)), "{out}");
        assert_eq!(list[2]["file"], "ranks.json: snapshot 3 of 3, key r2");
        assert!(list[1]["error"].is_string() && list[0]["error"].is_null());
        let (code, out, err) = here.run(&[question, "list.json"]);
        let expect = ["list.json: snapshot 1 of 4", "list.json: snapshot 2 of 4"];
        assert_eq!((code, headings(&out)), (Some(2), expect.to_vec()), "{err}");
        assert!(err.contains("snapshot 3 of 4: not a memory snapshot: 5\n"), "{err}");
        assert!(
            err.contains("snapshot 4 of 4: not a memory snapshot: a dictionary without"),
            "{err}"
        );
        assert_eq!(here.run(&[question, "one.json"]).0, Some(0));
        let (code, out, _) = here.run(&[question, "bare.json"]);
        assert_eq!((code, headings(&out).len()), (Some(0), 2));
        let (code, out, err) = here.run(&[question, "many.json"]);
        assert_eq!(
            (code, headings(&out), err.lines().count()),
            (Some(2), vec!["many.json: snapshot 1001 of 1001"], 11)
        );
        assert!(err.ends_with("many.json: and 990 more in it that are no snapshots\n"), "{err}");
    }
    for (file, says) in [
        (
            "ranks.json",
            &[
                "3 things in one file of which 1 can be read",
                "snapshot 2 (key r1), segments[0]",
                "snapshot 3 (key r2): not a memory",
            ][..],
        ),
        ("one.json", &["a snapshot inside of another value"]),
        ("many.json", &["snapshot 10: not a", "and 990 more that are no"]),
    ] {
        let (code, out, _) = here.run(&["check", file]);
        assert!(code == Some(1) && says.iter().all(|says| out.contains(says)), "{out}");
        assert!(out.lines().count() < 30, "{out}");
    }
    let (code, _, err) = here.run(&["symbolize", "ranks.json"]);
    assert!(
        code == Some(2) && err.contains("it holds 3 snapshots, 2 of which can't be read"),
        "{err}"
    );
}

#[test]
fn what_was_read_before_a_cut_is_answered() {
    let here = Scratch::new();
    let (a, b) = (golden("expandable"), golden("basic_python_stacks"));
    here.file("cut.pickle", &[&a[..], &b[..b.len() / 2]].concat());
    let (ja, jb) = (json(&a), json(&b));
    here.file("cut.json", format!("{ja}\n{}", &jb[..jb.len() / 2]).as_bytes());
    here.file("more.json", format!("{ja}\nand more").as_bytes());
    for (file, says) in [
        ("cut.pickle", "cut off?"),
        ("cut.json", "the JSON text is damaged: EOF"),
        ("more.json", "the JSON text is damaged: trailing characters at line 2"),
    ] {
        for question in QUESTIONS {
            let (code, out, err) = here.run(&[question, file]);
            let expect = format!("{file}: snapshot 1 of 2");
            assert_eq!((code, headings(&out)), (Some(2), vec![&*expect]), "{question} {err}");
            assert!(
                err.lines().count() == 1 && err.contains("snapshot 2 of 2") && err.contains(says),
                "{err}"
            );
        }
        let (code, out, _) = here.run(&["check", file]);
        assert!(code == Some(1) && out.contains(says) && out.contains("snapshot 2"), "{out}");
    }
    let (_, out, _) = here.run(&["check", "cut.pickle"]);
    assert!(
        out.contains("the viewer shows only the first") && !out.contains("follow the pickle"),
        "{out}"
    );
}

/// The command in a message, up to the text behind it.
fn suggested<'e>(err: &'e str, begin: &str, behind: &str) -> &'e str {
    let command = &err[err.find(begin).unwrap_or_else(|| panic!("{begin}: {err}"))..];
    command.rsplit_once(behind).map_or(command.trim_end(), |(command, _)| command)
}

#[test]
fn a_name_in_a_command_is_one_word() {
    let here = Scratch::new();
    let names = [
        "$(touch PWNED)",
        "a');open('PWNED','w')#",
        "x;touch PWNED",
        "-rf x",
        "`touch PWNED`",
        "new\nline",
        "it's",
    ];
    // They print their last argument instead of doing harm.
    let fake = "memtrace() { printf '%s' \"${@: -1}\"; }; xz() { memtrace \"$@\"; }; python() { memtrace \"$@\"; }; ";
    let zip = [b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0", &[0; 16][..], b"archive/data.pkl"].concat();
    for name in names {
        let inside = |ending: &str| format!("{name}{ending}");
        for (file, bytes, begin, behind) in [
            (inside(".pickle"), &b"\xfd7zXZ\0\0\x04"[..], "xz -d", ")"),
            (inside(".blackbox"), b"memtrace", "memtrace recover", "` makes"),
            (inside(".pt"), &zip, "python -c", "never"),
        ] {
            here.file(&file, bytes);
            let (code, _, err) = here.run(&["summary", "--", &file]);
            assert_eq!(code, Some(2), "{err}");
            let command = suggested(&err, begin, behind);
            let said = here.script(&format!("{fake}{command}"));
            let said = String::from_utf8(said.stdout).expect("UTF-8");
            assert_eq!(said.trim_start_matches("./"), file, "{command}");
            if begin == "python -c" {
                assert!(err.contains("torch.load(sys.argv[1], weights_only=True)"), "{err}");
            }
        }
        let folder = inside("dir");
        here.file(&format!("{folder}/m.blackbox"), b"");
        let (_, _, err) = here.run(&["summary", "--", &folder]);
        let command = suggested(&err, "memtrace recover", "` makes");
        let said = here.script(&format!("{fake}{command}"));
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim_start_matches("./"), folder);
    }
    assert!(!here.path().join("PWNED").exists());
}

#[test]
fn a_pipe_to_which_nobody_writes_is_not_waited_for() {
    let here = Scratch::new();
    let bytes = golden("expandable");
    here.fifo("x.pickle").file("a.pickle", &bytes).file("b.pickle", &bytes);
    // All at once: each waits for some seconds.
    thread::scope(|scope| {
        for reader in READERS {
            let here = &here;
            scope.spawn(move || {
                let began = Instant::now();
                let (code, out, err) = here.run(&[reader, "x.pickle"]);
                assert_eq!(
                    (code, out.as_str(), err.lines().count()),
                    (Some(2), "", 1),
                    "{reader}: {err}"
                );
                assert!(
                    err.starts_with(
                        "memtrace: x.pickle: a pipe (FIFO) to which nobody has written for 5 s"
                    ),
                    "{err}"
                );
                assert!(began.elapsed() < Duration::from_secs(40));
            });
        }
    });
    let (code, out, err) = here.run(&["summary", "a.pickle", "x.pickle", "b.pickle"]);
    assert_eq!((code, headings(&out)), (Some(2), vec!["a.pickle", "b.pickle"]), "{err}");
    assert!(err.contains("x.pickle: a pipe (FIFO)") && err.lines().count() == 1, "{err}");
    // Somebody has it open and writes nothing: the others have their answers.
    let output = here
        .script(r#"exec 3<>x.pickle; timeout 60 "$MEMTRACE" summary a.pickle x.pickle b.pickle"#);
    assert_eq!(headings(&String::from_utf8_lossy(&output.stdout)), ["a.pickle", "b.pickle"]);
    let _socket = UnixListener::bind(here.path().join("s.pickle")).expect("made");
    let (code, _, err) = here.run(&["summary", "s.pickle"]);
    assert!(code == Some(2) && err.contains("s.pickle: a socket, where a file is wanted"), "{err}");
}

#[test]
fn a_pipe_to_which_somebody_writes_is_read() {
    let here = Scratch::new();
    here.fifo("x.pickle").file("a.pickle", &golden("expandable"));
    for script in [
        r#"timeout 60 "$MEMTRACE" summary <(cat a.pickle)"#,
        r#"timeout 60 "$MEMTRACE" summary <(sleep 3; cat a.pickle) <(cat a.pickle)"#,
        r#"cat a.pickle | timeout 60 "$MEMTRACE" summary -"#,
        r#"cat a.pickle | timeout 60 "$MEMTRACE" summary /dev/stdin"#,
        r#"timeout 60 "$MEMTRACE" summary /dev/stdin < a.pickle"#,
        // The writer comes late.
        r#"(sleep 3; cat a.pickle > x.pickle) & timeout 60 "$MEMTRACE" summary x.pickle"#,
    ] {
        let output = here.script(script);
        let out = String::from_utf8_lossy(&output.stdout);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*err), (Some(0), ""), "{script}");
        assert!(out.contains("device 0: 13 entries"), "{script}: {out}");
    }
    // Silent from the beginning, or after the first part: who waits says so, once.
    let still = "memtrace: x.pickle: still waiting for a writer of this pipe (FIFO): whoever has it open writes \
                 nothing (Ctrl-C ends)\n";
    for script in [
        r#"(sleep 1; exec > x.pickle; sleep 6; cat a.pickle) & timeout 60 "$MEMTRACE" summary x.pickle"#,
        r#"(exec > x.pickle; head -c 1000 a.pickle; sleep 3; tail -c +1001 a.pickle | head -c 1000; sleep 3
            tail -c +2001 a.pickle) & timeout 60 "$MEMTRACE" check x.pickle"#,
    ] {
        let output = here.script(script);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*err), (Some(0), still), "{script}");
    }
    // Nobody can come any more.
    let began = Instant::now();
    let output = here.script(r#""$MEMTRACE" summary <(true) a.pickle"#);
    assert!(String::from_utf8_lossy(&output.stderr).contains("an empty file"));
    assert!(began.elapsed() < Duration::from_secs(40));
    // Alone it is no name.
    fs::create_dir(here.path().join("-")).expect("made");
    let output = here.script(r#""$MEMTRACE" summary - < a.pickle"#);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn zeros_behind_gzip_are_padding() {
    let here = Scratch::new();
    let bytes = golden("expandable");
    let packed = gzip(&bytes);
    let two = [gzip(&bytes[..100]), gzip(&bytes[100..])].concat();
    for (name, packed) in [("one", &packed), ("two", &two)] {
        for zeros in [1, 511, 100_000] {
            here.file(name, &[&packed[..], &vec![0; zeros]].concat());
            let (code, out, err) = here.run(&["check", name]);
            assert_eq!((code, &*out, &*err), (Some(0), &*format!("{name}: ok\n"), ""), "{zeros}");
        }
    }
    // What is behind the zeros is damage; so is what is missing.
    here.file("rest", &[&packed[..], &[0; 100], b"x"].concat());
    here.file("cut", &packed[..packed.len() - 3]);
    here.file("zeros_inside", &[&packed[..packed.len() / 2], &[0; 4096]].concat());
    for name in ["rest", "cut", "zeros_inside"] {
        let (code, out, err) = here.run(&["summary", name]);
        assert_eq!((code, &*out), (Some(2), ""), "{name}");
        assert!(err.contains("gzip file"), "{name}: {err}");
    }
}

#[test]
fn a_file_of_holes_takes_what_it_has_on_the_disk() {
    let here = Scratch::new();
    let file = fs::File::create(here.path().join("holes.pickle")).expect("made");
    (&file).write_all(b"\x80\x04").expect("written");
    file.set_len(1 << 40).expect("a file system with sparse files");
    let script = r#"ulimit -v 900000; timeout 60 "$MEMTRACE" summary holes.pickle"#;
    let output = here.script(script);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("--max-memory 2048MiB"), "{err}");
}

#[test]
fn a_black_box_in_a_folder_of_any_name_is_recovered_by_what_is_suggested() {
    let here = Scratch::new();
    let words = black_box(&[], &[], &Made::of_words(64), "{}");
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let name = "x;touch PWNED $(id)/memtrace-h-7-1.blackbox";
    here.file(name, &bytes);
    let script =
        r#"XDG_RUNTIME_DIR="$PWD/x;touch PWNED \$(id)" MEMTRACE_BLACKBOX= "$MEMTRACE" recover"#;
    let out = here.script(script).stdout;
    let out = String::from_utf8(out).expect("UTF-8");
    let commands = out.lines().filter(|line| line.starts_with("  ") && line.contains("PWNED"));
    let commands: Vec<&str> =
        commands.map(str::trim).filter(|c| c.starts_with(['m', 'r'])).collect();
    assert_eq!(commands.len(), 2, "{out}");
    for command in commands {
        let fake = "memtrace() { printf '%s' \"${@: -1}\"; }; rm() { memtrace \"$@\"; }; ";
        let said = here.script(&format!("{fake}{command}")).stdout;
        assert!(String::from_utf8_lossy(&said).ends_with(name), "{command}");
    }
    assert!(!here.path().join("PWNED").exists());
}

#[test]
fn symbolize_writes_over_nothing_but_the_file_itself() {
    let here = Scratch::new();
    let (a, b) = (golden("expandable"), golden("basic_python_stacks"));
    here.file("r0/a.pickle", &a).file("r1/a.pickle", &b).file("a.pickle.gz", &gzip(&b));
    here.file("out/keep", b"").fifo("x.pickle");
    let (code, out, err) =
        here.run(&["symbolize", "r0/a.pickle", "r1/a.pickle", "a.pickle.gz", "--out", "out"]);
    assert_eq!((code, headings(&out)), (Some(2), vec!["r0/a.pickle"]), "{err}");
    assert!(err.contains("r1/a.pickle: out/a.pickle has been written for r0/a.pickle"), "{err}");
    assert_eq!(err.lines().count(), 2, "{err}");
    let (_, expect, _) = here.run(&["summary", "r0/a.pickle"]);
    let (_, written, _) = here.run(&["summary", "out/a.pickle"]);
    assert_eq!(written.replace("out/", "r0/"), expect);
    // What is no file stays what it is.
    for script in [
        r#"cat r0/a.pickle > x.pickle & timeout 60 "$MEMTRACE" symbolize x.pickle"#,
        r#"timeout 60 "$MEMTRACE" symbolize <(cat r0/a.pickle)"#,
        r#"timeout 60 "$MEMTRACE" symbolize /proc/self/fd/0 < r0/a.pickle"#,
    ] {
        let output = here.script(script);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{script}");
        assert!(err.contains("name the file to write with --out FILE"), "{script}: {err}");
    }
    assert!(!here.path().join("x.pickle").is_file());
}

#[test]
fn little_memory_is_printed_in_its_unit() {
    let here = Scratch::new();
    here.file("a.pickle", &golden("expandable"));
    let (code, _, err) = here.run(&["summary", "a.pickle", "--max-memory", "1KiB"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("more than 1 KiB of memory: --max-memory 2KiB allows"), "{err}");
}

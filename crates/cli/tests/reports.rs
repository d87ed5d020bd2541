//! What is printed, as text: the help is the reference of the command
//! line, the reports are what users read.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::io::Write;
use std::process::Stdio;

use common::{memtrace, ok};
use insta::assert_snapshot;

/// What one invocation prints; the exit code first if it is not 0.
fn prints(args: &[&str]) -> String {
    let output = memtrace().args(args).output().expect("started");
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text += &String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => text,
        code => format!("exit {code:?}\n{text}"),
    }
}

#[test]
fn help() {
    let whole = memtrace_cli::command();
    for command in whole.get_subcommands().map(clap::Command::get_name).chain([""]) {
        let args: Vec<&str> = [command, "--help"].into_iter().filter(|a| !a.is_empty()).collect();
        assert_snapshot!(format!("help_{command}"), prints(&args));
    }
    assert_snapshot!("help_short", prints(&["run", "-h"]));
}

#[test]
fn version() {
    assert_eq!(prints(&["--version"]), concat!("memtrace ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn summaries() {
    for name in [
        "golden/basic_second_snapshot",
        "golden/expandable",
        "golden/stream_pending_free",
        "golden/all_features_cpp_stacks",
        "snapshots/finetune_torch21",
        "snapshots/lm24_ctx128_train",
        "snapshots/lm24_ctx1024_infer",
    ] {
        let text = prints(&["summary", "--top", "5", &format!("{name}.pickle.gz")]);
        assert_snapshot!(format!("summary_{}", name.replace('/', "_")), text);
    }
    let json = prints(&["summary", "--json", "golden/basic_python_stacks.pickle.gz"]);
    assert_snapshot!("summary_json", json);
}

#[test]
fn a_snapshot_of_memtraces_own() {
    // Made here: a real one with what memtrace adds.
    let real = std::fs::File::open(common::data().join("golden/basic_python_stacks.pickle.gz"));
    let mut bytes = Vec::new();
    let mut unpacked = flate2::read::GzDecoder::new(real.expect("there"));
    std::io::Read::read_to_end(&mut unpacked, &mut bytes).expect("intact");
    let mut snapshot = memtrace_format::snapshot::Snapshot::read(&bytes).expect("real");
    snapshot.memtrace = memtrace_format::key::Memtrace::read(serde_json::json!({
        "version": "0.1.0",
        "command": ["python", "train.py", "--steps", "3"],
        "pid": 4711,
        "host": "node7",
        "rank": 3,
        "counters": {"events": 70, "events_kept": 45, "events_retired": 25},
        "virtual": {
            "spec": "l4*2,lazy", "name": "NVIDIA L4", "lazy": true, "zero_reads": 2,
            "devices": [{"device": 0, "used": 1, "total": 23_600_000_000_u64, "context": 209_715_200}],
        },
    }));
    let trace = &mut snapshot.device_traces[0];
    let mut driver = trace[0].clone();
    driver.user_metadata = Some("driver: cuMemAlloc_v2".into());
    driver.addr = 0x7fff_0000_0000;
    driver.size = 33 << 20;
    for action in ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"] {
        driver.action = memtrace_format::snapshot::Action::from_name(action);
        trace.push(driver.clone());
    }
    let mut text = Vec::new();
    memtrace_format::json::write(&snapshot, memtrace_format::json::Stacks::Expanded, &mut text)
        .expect("written");
    for (name, args) in [("virtual", &["summary", "-"][..]), ("virtual_check", &["check", "-"])] {
        let mut child = memtrace()
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        child.stdin.take().expect("piped").write_all(&text).expect("it reads");
        assert_snapshot!(name, ok(&child.wait_with_output().expect("ended")));
    }
}

#[test]
fn checks() {
    let sound =
        prints(&["check", "golden/basic_python_stacks.pickle.gz", "golden/expandable.pickle.gz"]);
    assert_snapshot!("check_sound", sound);
    let folder = tempfile::tempdir().expect("made");
    let file = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).expect("written");
        name.to_owned()
    };
    file("cut.pickle", b"\x80\x04}(\x8c\x08segments](");
    file("notes.txt", b"remember the milk");
    file("five.pickle", b"\x80\x05}(\x8c\x08segments]\x8c\x0ddevice_traces]u.");
    file("wrong.json", br#"{"segments": [{"device": 0, "address": 4096, "total_size": 512, "allocated_size": 0, "active_size": 0, "requested_size": 0, "stream": 0, "segment_type": "small", "blocks": []}], "device_traces": [[]]}"#);
    file("fine.json", br#"{"segments": [], "device_traces": []}"#);
    file("broken.gz", b"\x1f\x8b\x08 nonsense");
    let run = |args: &[&str]| {
        let output = memtrace().current_dir(folder.path()).args(args).output().expect("started");
        let text = [output.stdout, output.stderr].concat();
        format!("exit {:?}\n{}", output.status.code(), String::from_utf8_lossy(&text))
    };
    let bad = run(&["check", "cut.pickle", "notes.txt", "five.pickle", "wrong.json", "fine.json"]);
    assert_snapshot!("check_bad", bad);
    assert_snapshot!("check_json", run(&["check", "--json", "wrong.json", "fine.json"]));
    assert_snapshot!("check_unreadable", run(&["check", "none.pickle", "fine.json", "broken.gz"]));
    assert_snapshot!("summary_bad", run(&["summary", "notes.txt"]));
    assert_snapshot!("summary_cut", run(&["summary", "cut.pickle"]));
    assert_snapshot!("summary_empty", run(&["summary", "fine.json"]));
}

#[test]
fn devices() {
    // Those of this machine come first, if it has any.
    let text = prints(&["devices"]);
    let begin = text.find("--virtual").expect("the table of virtual ones");
    assert_snapshot!("devices", &text[begin..]);
    let json: serde_json::Value =
        serde_json::from_str(&prints(&["devices", "--json"])).expect("JSON");
    let list = json.as_array().expect("a list");
    assert!(list.len() >= 13);
    for device in list {
        for key in ["key", "name", "memory_source", "context_source"] {
            assert!(device[key].as_str().is_some_and(|s| !s.is_empty()), "{key} of {device}");
        }
        assert!(device["memory_bytes"].as_u64() > Some(1 << 33));
    }
}

#[test]
fn a_closed_pipe_is_quiet() {
    for args in [&["summary", "--json", "snapshots/finetune_torch21.pickle.gz"][..], &["devices"]] {
        let mut child = memtrace()
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("ended");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

/// What a table leaves out is counted and added up: the rows of a cut one are the same in all.
#[test]
fn no_table_is_cut_without_what_is_left() {
    let file = "snapshots/finetune_torch21.pickle.gz";
    let rows = |text: &str| -> Vec<u64> {
        let table = text.lines().skip_while(|l| !l.contains("live at the end, by line")).skip(1);
        let number = |l: &str| l.split_whitespace().next()?.replace(',', "").parse().ok();
        table.map_while(|l| number(l).filter(|_| l.contains(" x  "))).collect()
    };
    let [all, cut] = ["1000", "2"].map(|top| prints(&["report", "--top", top, file]));
    assert!(rows(&all).len() > 3, "{all}");
    assert_eq!(rows(&cut).len(), 3, "{cut}");
    assert_eq!(rows(&cut).iter().sum::<u64>(), rows(&all).iter().sum::<u64>());
    assert!(cut.contains(&format!("({} more lines, --top", rows(&all).len() - 2)), "{cut}");
    let json = prints(&["report", "--json", "--by", "module-line", file]);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let modules = json["devices"][0]["sites"].as_array().expect("a list");
    let module = |s: &serde_json::Value| s["module"]["file"].as_str().map(str::to_owned);
    assert!(modules.iter().filter_map(module).any(|f| f.ends_with("modeling_llama.py")));
}

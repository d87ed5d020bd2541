//! `memtrace replay` and `memtrace tune`, as they are used.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::io::Read;
use std::process::Output;

use common::memtrace;
use memtrace_format::pickle;
use memtrace_format::snapshot::Snapshot;
use serde_json::Value;

const FINETUNE: &str = "snapshots/finetune_torch21.pickle.gz";
const STEP: &str = "snapshots/lm_ctx256_fullstep_freed.pickle.gz";

fn output(args: &[&str]) -> Output {
    memtrace().args(args).output().expect("started")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn it_fits_or_it_does_not() {
    let fits = output(&["replay", STEP, "--capacity", "80GiB", "--device-overhead", "500MiB"]);
    let said = text(&fits.stdout);
    assert_eq!(fits.status.code(), Some(0), "{said}");
    for part in [
        "recorded with (no settings): repeated, 20,128 of 20,128 events equal, 1,571 of 1,571 of segments",
        "replayed on 80.0 GiB, 500.0 MiB of it taken by others:",
        "already there when the trace begins: 326 blocks in 1010 segments",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    let small = output(&["replay", STEP, "--capacity", "40GiB"]);
    let said = text(&small.stdout);
    assert_eq!(small.status.code(), Some(1), "{said}");
    assert!(said.contains("out of memory at entry ") && said.contains(" NO\n"), "{said}");
}

#[test]
fn expandable_segments_make_the_difference_on_the_card_between() {
    let run = |conf: &str| {
        output(&["replay", STEP, "--capacity", "53.5GiB", "--conf", conf]).status.code()
    };
    assert_eq!((run(""), run("expandable_segments:True")), (Some(1), Some(0)));
}

#[test]
fn json_has_everything() {
    let done =
        output(&["replay", "--json", "--conf", "", "--conf", "max_split_size_mb:64", FINETUNE]);
    let json: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    let device = &json["devices"][0];
    assert_eq!(device["repeated"]["equal"], 10_307);
    assert_eq!(device["blocks_before"], 622);
    let rows = device["replayed"].as_array().expect("a list");
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!(row["fits"], true);
        assert!(row["smallest_capacity"].as_u64() >= row["peak_active"].as_u64());
        assert!(row["curve"].as_array().is_some_and(|c| c.len() > 100));
    }
    assert_ne!(rows[0]["device_allocs"], rows[1]["device_allocs"]);
}

#[test]
fn new_snapshots_are_sound() {
    let folder = tempfile::tempdir().expect("made");
    let out = folder.path().to_str().expect("text");
    let done = output(&[
        "replay",
        "--out",
        out,
        "--conf",
        "",
        "--conf",
        "expandable_segments:True",
        FINETUNE,
    ]);
    assert_eq!(done.status.code(), Some(0));
    let files: Vec<_> = std::fs::read_dir(folder.path()).expect("there").collect();
    assert_eq!(files.len(), 2);
    for file in files {
        let path = file.expect("readable").path();
        let path = path.to_str().expect("text");
        let check = output(&["check", path]);
        assert_eq!(check.status.code(), Some(0), "{}", text(&check.stdout));
        assert!(text(&done.stdout).contains(&format!("wrote {path}")));
    }
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    for (args, words) in [
        (
            &["--conf", "foo:1", FINETUNE][..],
            "--conf 'foo:1': Unrecognized key 'foo' in Accelerator allocator config.",
        ),
        (
            &["--conf", "max_split_size_mb:abc", FINETUNE],
            "stoull (a number is expected, not 'abc')",
        ),
        (
            &["--conf", "backend:cudaMallocAsync", FINETUNE],
            "backend:cudaMallocAsync can't be replayed",
        ),
        (&["--capacity", "40X", FINETUNE], "'x' is no unit of size"),
        (&["no-such-file"], "no-such-file: cannot be read"),
    ] {
        let done = output(&[&["replay"][..], args].concat());
        assert_eq!(done.status.code(), Some(2), "{args:?}");
        assert!(text(&done.stderr).contains(words), "{}", text(&done.stderr));
    }
    let folder = tempfile::tempdir().expect("made");
    let empty = folder.path().join("empty.json");
    std::fs::write(&empty, br#"{"segments": [], "device_traces": []}"#).expect("written");
    let done = output(&["replay", empty.to_str().expect("text")]);
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("nothing to replay"), "{}", text(&done.stderr));
}

#[test]
fn settings_without_effect_are_named() {
    let conf = "garbage_collection_threshold:0.8,pinned_num_register_threads:8";
    let said = text(&output(&["replay", "--conf", conf, FINETUNE]).stdout);
    assert!(said.contains("pinned_num_register_threads changes nothing here"), "{said}");
    assert!(said.contains("garbage_collection_threshold changes nothing without"), "{said}");
}

#[test]
fn tune_prints_the_line_to_export() {
    let done = output(&["tune", STEP]);
    let said = text(&done.stdout);
    assert_eq!(done.status.code(), Some(0), "{said}");
    assert!(said.contains(" would do instead of 54.4 GiB, "), "{said}");
    assert!(said.contains("\nexport PYTORCH_CUDA_ALLOC_CONF="), "{said}");
}

/// A file of the repository with other settings, as memtrace writes it.
fn with_settings(folder: &std::path::Path, conf: &str, release: Option<&str>) -> String {
    let file = std::fs::File::open(common::data().join(STEP)).expect("there");
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).expect("intact");
    let mut snapshot = Snapshot::read(&bytes).expect("a snapshot");
    snapshot.memtrace = memtrace_format::key::Memtrace::read(
        serde_json::json!({"allocator_conf": conf, "pytorch": release}),
    );
    let path = folder.join("own.pickle");
    pickle::write(&snapshot, &mut std::fs::File::create(&path).expect("made")).expect("written");
    path.to_str().expect("text").to_owned()
}

#[test]
fn tune_changes_nothing_that_it_can_t_compare() {
    let folder = tempfile::tempdir().expect("made");
    for (conf, why) in [
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync can't be replayed"),
        ("a_key_of_tomorrow:1", "Unrecognized key 'a_key_of_tomorrow'"),
    ] {
        let own = with_settings(folder.path(), conf, Some("2.15.0"));
        for args in [&["tune", &own][..], &["tune", "--json", &own]] {
            let done = output(args);
            let (said, errors) = (text(&done.stdout), text(&done.stderr));
            assert_eq!((done.status.code(), &*said), (Some(2), ""), "{errors}");
            assert!(errors.contains(why) && errors.contains(conf), "{errors}");
        }
    }
}

#[test]
fn tune_exports_what_every_release_reads() {
    let folder = tempfile::tempdir().expect("made");
    let own = "pinned_num_register_threads:2,roundup_power2_divisions:[64:8,>:1]";
    let file = with_settings(folder.path(), own, None);
    let said = text(&output(&["tune", &file]).stdout);
    let is_command = |l: &&str| l.starts_with("export") || l.starts_with("unset");
    let found: Vec<&str> = said.lines().filter(is_command).collect();
    assert_eq!(found.len(), 2, "{said}");
    assert_eq!(found[0], "unset PYTORCH_HIP_ALLOC_CONF PYTORCH_ALLOC_CONF");
    let conf = found[1].strip_prefix("export PYTORCH_CUDA_ALLOC_CONF=").expect("by this name");
    assert!(conf.contains("pinned_num_register_threads:2"), "{conf}");
    // Which release it is, isn't known here.
    assert!(!conf.contains("large_segment_size_mb"), "{conf}");
}

#[test]
fn tune_leaves_alone_what_can_t_be_better() {
    // One small segment, which every setting needs.
    let small = "golden/context_none.pickle.gz";
    let done = output(&["tune", "--json", "--capacity", "4GiB", small]);
    let json: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!(json["capacity"], 4_u64 << 30);
    assert_eq!(json["best"], json["recorded"]);
    assert!(json["tried"].as_array().is_some_and(|t| t.len() > 15));
    let said = text(&output(&["tune", small]).stdout);
    assert!(said.contains("leave them"), "{said}");
    assert!(!said.contains("export"), "{said}");
}

#[test]
fn help_has_examples() {
    for command in ["replay", "tune"] {
        let said = text(&output(&[command, "--help"]).stdout);
        assert!(said.contains("Examples:") && said.contains("--capacity <SIZE>"), "{said}");
    }
}

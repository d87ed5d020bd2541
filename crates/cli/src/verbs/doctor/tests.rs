//! What is said of a recorded process: one line for each thing that is
//! wrong, and none for what is right.

use memtrace_format::key::Memtrace;
use memtrace_format::stacks::PYTHONS;
use serde_json::{Value, json};

use super::recorded::{self, Process};
use super::{Check, Level};

/// A process with whose record nothing is wrong.
fn sound() -> Value {
    json!({
        "pid": 7,
        "stacks": {
            "python": "3.11", "nodes": 10, "nodes_max": 100, "code_words": 2, "code_words_max": 10, "refused": 0,
        },
        "doors": [],
        "bound_elsewhere": [],
        "counters": {"unpublished": 0, "live_refused": 0, "anomalies": 0, "stalls": 0},
        "warnings": [],
    })
}

fn checks(about: Value) -> Vec<Check> {
    recorded::checks(&Process(*Memtrace::read(about).expect("an object")))
}

/// The lines that say something else than those of a sound process do.
fn said(change: impl FnOnce(&mut Value)) -> Vec<(Level, &'static str, String)> {
    let mut about = sound();
    change(&mut about);
    let usual: Vec<String> = checks(sound()).into_iter().map(|c| c.text).collect();
    let more = checks(about).into_iter().filter(|c| !usual.contains(&c.text));
    more.map(|c| (c.level, c.about, c.text)).collect()
}

#[test]
fn a_sound_process_has_no_drops_and_readable_frames() {
    let all: Vec<_> = checks(sound()).into_iter().map(|c| (c.level, c.about, c.text)).collect();
    let ok = |about, text: &str| (Level::Ok, about, format!("process 7: {text}"));
    assert_eq!(all, [ok("Python", "3.11, whose frames can be read"), ok("drops", "0")]);
}

#[test]
fn each_thing_that_is_wrong_has_its_line() {
    let versions = format!("use CPython 3.{} to 3.{}", PYTHONS.start(), PYTHONS.end());
    for (pointer, value, level, line, words) in [
        ("/counters/unpublished", json!(1), Level::Wrong, "drops", "1 events were not written"),
        ("/counters/live_refused", json!(2), Level::Wrong, "drops", "2 allocations found no room"),
        ("/counters/anomalies", json!(3), Level::Wrong, "drops", "3 events contradict"),
        ("/counters/stalls", json!(4), Level::Note, "stalls", "4 calls made room"),
        ("/stacks/refused", json!(5), Level::Wrong, "tables", "5 frames or stacks found no room"),
        ("/stacks/nodes", json!(95), Level::Note, "tables", "the table of stacks is 95 % full"),
        ("/warnings", json!([{"text": "stray"}]), Level::Note, "warning", "stray"),
        (
            "/stacks/python",
            json!("nothing fits"),
            Level::Wrong,
            "Python",
            "stacks have no Python frames",
        ),
        ("/stacks/python", json!("nothing fits"), Level::Wrong, "Python", &versions),
        (
            "/stacks/python",
            json!("free-threaded Python is not supported"),
            Level::Wrong,
            "Python",
            "the build with the GIL",
        ),
        ("/stacks/python", json!("not looked at"), Level::Note, "Python", "not looked at"),
        ("/bound_elsewhere", Value::Null, Level::Note, "doors", "it was killed"),
    ] {
        let lines = said(|about| {
            *about.pointer_mut(pointer).expect("a sound process has it") = value;
        });
        let [(found, about, text)] = &lines[..] else { panic!("{pointer}: {lines:?}") };
        assert_eq!((*found, *about), (level, line), "{pointer}");
        assert!(text.starts_with("process 7: ") && text.contains(words), "{text}");
    }
    let lost = json!({"unpublished": 1, "live_refused": 0, "anomalies": 0, "stalls": 0});
    let about = json!({"pid": 7, "counters": lost, "bound_elsewhere": []});
    assert!(checks(about).iter().all(|c| c.text != "process 7: 0"), "something was dropped");
}

#[test]
fn a_call_that_goes_elsewhere_is_wrong_unless_it_comes_back() {
    let bound =
        json!([{"library": "/a/user.so", "function": "cudaMalloc", "bound_to": "/a/own.so"}]);
    let doors = |caller: &str| json!([{"door": "cuMemAlloc_v2", "calls": 1, "callers": [{"library": caller, "calls": 1}]}]);
    for (caller, level, words) in [
        ("/a/other.so", Level::Wrong, "is not recorded; preload memtrace before /a/own.so"),
        ("/a/own.so", Level::Note, "/a/user.so calls cudaMalloc in /a/own.so, which calls on"),
    ] {
        let lines = said(|about| {
            (about["bound_elsewhere"], about["doors"]) = (bound.clone(), doors(caller));
        });
        let [(found, "doors", text)] = &lines[..] else { panic!("{lines:?}") };
        assert!(*found == level && text.contains(words), "{text}");
    }
}

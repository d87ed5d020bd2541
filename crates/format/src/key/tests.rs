//! What is read is written again, whatever it is; what is made here is complete.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn read(value: &Value) -> Memtrace {
    *Memtrace::read(value.clone()).expect("an object")
}

/// As text, so that the order counts.
fn again(value: &Value) -> String {
    serde_json::to_string(&read(value)).expect("JSON")
}

#[test]
fn what_is_read_is_written_again() {
    for value in [
        json!({}),
        // In another order, with keys that nobody knows, and without those that are always there.
        json!({"pid": 7, "version": "9.9", "future": {"a": [1, null]}, "owners": {"host": {"new": 1, "held": 3}}}),
        // Nothing is of its type.
        json!({"pid": -1, "version": 3, "owners": [], "warnings": [{"text": "a"}, 3], "virtual": "h100", "end": null}),
        // Null where a key may have it, and where it may not.
        json!({"rank": null, "host": null, "bound_elsewhere": null, "none": null}),
        json!({"counters": {"events": 1_u64 << 40, "lost": 4}, "refused_by_driver": [[0, 5], [1, 6]], "libraries": {"/a": "b"}}),
        json!({"libraries": {"/a": 5}, "refused_by_driver": [[0]], "reconcile": [{"lines": [{"bytes": -5}]}]}),
        json!({"stacks": {"mode": "all", "deep": [[[[{}]]]]}, "labels": {"devices": [{"device": -1}]}}),
    ] {
        assert_eq!(again(&value), value.to_string());
    }
    assert_eq!(Memtrace::read(json!([])), None);
}

/// Any JSON whose keys are mostly those of the format, at places where they belong and where not.
fn any_value() -> impl Strategy<Value = Value> {
    let mut names: Vec<String> =
        Memtrace::rows().into_iter().map(|row| row.key).filter(|key| !key.contains('.')).collect();
    names.extend(
        ["devices", "host", "by", "held", "peak", "device", "frames", "lines", "bytes", "x", "y"]
            .map(str::to_owned),
    );
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3_i64..3).prop_map(Value::from),
        ".{0,3}".prop_map(Value::from),
    ];
    let name = prop::sample::select(names);
    leaf.prop_recursive(5, 40, 6, move |inner| {
        let entries = prop::collection::vec((name.clone(), inner.clone()), 0..6);
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(Value::Array),
            entries.prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_is_read_is_written_again(
        entries in prop::collection::vec((prop::sample::select(
            Memtrace::rows().into_iter().map(|row| row.key).filter(|k| !k.contains('.')).collect::<Vec<_>>()
        ), any_value()), 0..6),
    ) {
        let value = Value::Object(entries.into_iter().collect());
        prop_assert_eq!(again(&value), value.to_string());
        let (once, mut bounded) = (read(&value), read(&value));
        bounded.bound();
        prop_assert!(!once.made_here().not_understood().iter().any(String::is_empty));
        prop_assert!(!serde_json::to_string(&bounded)?.contains(&u64::MAX.to_string()));
    }
}

#[test]
fn a_key_of_the_wrong_type_takes_no_other_with_it() {
    let about = read(&json!({
        "pid": "seven", "host": "h", "owners": {"devices": [{"device": 0, "held": "much", "by": [{"bytes": 5}]}]},
    }));
    assert_eq!((about.pid, about.host.as_deref()), (None, Some("h")));
    let device = &about.owners.as_ref().expect("there").devices[0];
    assert_eq!((device.held, device.by[0].bytes), (None, 5));
    let names = about.not_understood();
    assert_eq!(names, ["pid", "owners.devices[].held"]);
}

#[test]
fn a_record_has_the_keys_of_another_where_it_has_none() {
    let said = read(&json!({"pid": 7, "host": "h", "future": 1, "marks": []})).made_here();
    let known = Memtrace { pid: Some(8), warnings: Some(Vec::new()), ..Memtrace::default() };
    let all = serde_json::to_value(known.or(said)).expect("JSON");
    for (key, value) in [
        ("pid", json!(8)),
        ("warnings", json!([])),
        ("host", json!("h")),
        ("marks", json!([])),
        ("future", json!(1)),
        ("rank", Value::Null),
    ] {
        assert_eq!(all.get(key), Some(&value), "{key}");
    }
}

#[test]
fn what_is_set_takes_the_place_of_what_was_read() {
    let mut about = read(&json!({"reason": 5, "pid": 7, "future": 1}));
    (about.reason, about.symbolized) = (Some("replay".to_owned()), Some(true));
    let text = serde_json::to_string(&about).expect("JSON");
    assert_eq!(text, r#"{"reason":"replay","pid":7,"future":1,"symbolized":true}"#);
    let value = serde_json::to_value(about.made_here()).expect("JSON");
    let keys: Vec<&str> = value.as_object().expect("an object").keys().map(|k| &**k).collect();
    let order =
        ["pid", "pid_namespace", "command", "rank", "local_rank", "world_size", "allocator_conf"];
    assert_eq!(keys[..order.len()], order);
    assert_eq!(keys.last(), Some(&"future"), "what nobody knows comes last: {keys:?}");
}

#[test]
fn a_record_that_is_made_says_what_is_not_known() {
    let cost = Cost { sampled: 0, ns_each: None, kept: Kept::NOTHING };
    let about = Memtrace { cost: Some(cost), ..Memtrace::default() };
    let value = serde_json::to_value(&about).expect("JSON");
    assert_eq!(value["cost"], json!({"sampled": 0, "ns_each": null}));
    assert!(value.get("rank").is_some_and(Value::is_null) && value.get("marks").is_none());
    assert_eq!(read(&value), about, "what was made here is read as it was");
    let set = Memtrace { kept: Kept::ONLY_WHAT_IS_SET, pid: Some(3), ..Memtrace::default() };
    assert_eq!(serde_json::to_string(&set).expect("JSON"), r#"{"pid":3}"#);
}

#[test]
fn no_number_stays_too_large_for_a_viewer() {
    let large = json!(u64::MAX);
    let mut about = read(&json!({
        "pid": large, "future": [large], "owners": {"host": {"held": large, "new": {"a": large}}}, "refused_by_driver": [[0, large]],
    }));
    about.bound();
    let text = serde_json::to_string(&about).expect("JSON");
    assert!(!text.contains(&u64::MAX.to_string()), "{text}");
    assert_eq!(text.matches(&i64::MAX.to_string()).count(), 5);
}

#[test]
fn every_key_has_words_of_its_own() {
    let rows = Memtrace::rows();
    assert!(rows.len() > 150, "{}", rows.len());
    for row in &rows {
        assert!(row.meaning.ends_with('.') && !row.meaning.contains('|'), "{row:?}");
    }
    let has = |key: &str| rows.iter().any(|row| row.key == key);
    assert!(has("virtual.devices[].total") && has("bound_elsewhere[].library"));
    assert!(has("replay.oom[].entry"));
}

/// Many small parts in a short text: what they take is counted before they are made.
#[test]
fn parts_that_are_larger_than_their_text_are_counted() {
    let parts = |n: usize| json!({"owners": {"devices": vec![json!({}); n]}});
    let one = size_of::<DeviceOwners>();
    let [few, many] = [10, 1010].map(|n| Memtrace::cost(&parts(n)));
    assert_eq!(many - few, 1000 * one);
    let file = |n: usize| {
        let text = json!({"segments": [], "device_traces": [], "memtrace": parts(n)}).to_string();
        crate::snapshot::Snapshot::read(text.as_bytes())
    };
    let found = file(10).expect("few").memtrace.and_then(|about| about.owners).map(|o| o.devices);
    assert_eq!(found.map(|devices| devices.len()), Some(10));
    let error = file(1 << 16).expect_err("too many").to_string();
    assert!(error.contains("far more parts than words"), "{error}");
}

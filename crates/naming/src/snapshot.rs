//! The snapshot that a black box holds, as its process would have written it.
//!
//! Nothing here knows whether the process lives: the caller has read the file and says why. What the process said
//! of itself when it began stands in the file; what it would have counted since then is worked out.

use std::io;

use memtrace_files::NewFile;
use memtrace_format::blackbox::{BlackBox, Bytes, Life, Read, Region, at, lacking};
use memtrace_format::recording::Recording;
use memtrace_format::settings;
use memtrace_format::stacks::{DepotShape, HEAD_NEXT, HEAD_REFUSED, Words};
use serde_json::{Value, json};

use crate::doors::{cost, doors};
use crate::names::{Namer, Splice};
use crate::write::{Counts, Encoding, Moment, carry_over, write};

/// Keys of the description that are for the reader alone.
const NOT_SHOWN: [&str; 2] = ["entry_points", "out"];
/// What the virtual GPU counts as it runs: at the start, when the description is written, it means nothing.
const COUNTED: [&str; 3] = ["launches", "zero_reads", "cudnn"];

/// Writes state, history, stacks and names. `alive`: somebody is writing the file. `reason` and `written_us` are for the
/// snapshot's `memtrace` key. `target`: see [`write()`].
///
/// # Errors
/// The file is damaged or can't be read, or the snapshot can't be written.
pub fn snapshot<B: Bytes>(
    file: &BlackBox<B>,
    alive: bool,
    reason: &str,
    written_us: u64,
    target: (&NewFile, Encoding),
) -> io::Result<Counts> {
    let mut recording = file.recording(alive)?;
    let moment = if alive { Moment::Ticket(recording.written()?) } else { Moment::End };
    let about = file.about();
    let api = |i: u16| about["entry_points"][usize::from(i)].as_str().unwrap_or("unknown");
    // After the last ticket, so that every stack is there.
    let [depot, codes, libraries] = [Region::Depot, Region::Code, Region::Modules];
    let (depot, codes, libraries) = (file.part(depot)?, file.part(codes)?, file.part(libraries)?);
    let refused = [&depot, &codes, &libraries].map(|r| r.word(HEAD_REFUSED)).iter().sum::<u64>();
    let used = file.doors()?;
    let capacity = DepotShape::of(depot.count()).map_or(0, |shape| shape.capacity as u64);
    let nodes = (depot.word(HEAD_NEXT).min(capacity), capacity);
    let words = [codes.word(HEAD_NEXT), libraries.word(HEAD_NEXT)];
    let labels = file.part(Region::Labels)?;
    let mut namer = Namer::new(depot, codes, libraries, Splice::PyTorch).with_labels(labels);
    write(&mut recording, moment, &mut namer, &api, target, &mut |snapshot, counts, namer| {
        let release = namer.pytorch();
        let read = file.settings(|about| read_at_the_start(about, release.as_deref()));
        if let Some(Read { last, all }) = &read {
            snapshot.allocator_settings = settings::from_conf(all);
            snapshot.allocator_settings[settings::NAMES[0]] = last.as_str().into();
        }
        let known = std::mem::take(&mut snapshot.memtrace);
        let mut said = said(file, &about, reason, written_us, nodes, words, refused);
        said["libraries"] = namer.build_ids();
        said["python"] = namer.places_and_links().to_json();
        said["pytorch"] = release.into();
        if read.is_none()
            && let Some(said) = said.as_object_mut()
            && let Some(list) =
                said.entry("not_recorded").or_insert_with(|| json!([])).as_array_mut()
        {
            list.push(LACKING.into());
        }
        said["allocator_conf"] = read.map(|read| read.all).into();
        said["doors"] = doors(&used, &api, namer);
        said["cost"] = cost(file.header(at::SAMPLED), file.header(at::SAMPLED_NS));
        said["counters"] = counters(file, counts, &known["counters"]);
        // Only the process itself sees how its libraries are bound.
        said["bound_elsewhere"] = Value::Null;
        carry_over(&known, &mut said);
        // A damaged description may hold numbers that no viewer could read.
        bound(&mut said);
        snapshot.memtrace = said;
    })
}

/// In `not_recorded`.
const LACKING: &str = "the settings of PyTorch's allocator";

/// What the process's environment said when recording began, as this release of PyTorch reads it. `None`: the box doesn't say.
fn read_at_the_start(about: &Value, release: Option<&str>) -> Option<Read> {
    let conf = about["allocator_conf"].as_str()?;
    let variable = about["allocator_variable"].as_str().unwrap_or_default();
    let (last, all) = settings::read_by(release.unwrap_or_default(), variable, conf);
    Some(Read { last: last.to_owned(), all })
}

/// The `memtrace` key: what the process said of itself, without what is for the reader alone.
fn said<B: Bytes>(
    file: &BlackBox<B>,
    about: &Value,
    reason: &str,
    written_us: u64,
    nodes: (u64, u64),
    [code_words, module_words]: [u64; 2],
    refused: u64,
) -> Value {
    let mut said = about.clone();
    if !said.is_object() {
        // The description is damaged; the header knows this much.
        said = json!({
            "pid": file.header(at::PID),
            "started_us": file.header(at::STARTED_NS) / 1000,
            "stacks": {},
        });
    }
    said["reason"] = reason.into();
    said["written_us"] = written_us.into();
    if said["stacks"].is_object() {
        said["stacks"]["nodes"] = nodes.0.into();
        said["stacks"]["nodes_max"] = nodes.1.into();
        said["stacks"]["code_words"] = code_words.into();
        said["stacks"]["module_words"] = module_words.into();
        said["stacks"]["refused"] = refused.into();
    }
    if file.header(at::LIFE) == Life::SwitchedOff as u64 {
        said["switched_off"] = true.into();
    }
    if let Some(said) = said.as_object_mut() {
        said.retain(|key, _| !NOT_SHOWN.contains(&key.as_str()));
    }
    if let Some(gpu) = said.get_mut("virtual").and_then(Value::as_object_mut) {
        gpu.retain(|key, _| !COUNTED.contains(&key.as_str()));
        for device in gpu.get_mut("devices").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(device) = device.as_object_mut() {
                device.retain(|key, _| key != "used");
            }
        }
    }
    said
}

fn counters<B: Bytes>(file: &BlackBox<B>, counts: &Counts, known: &Value) -> Value {
    let mut counters = counts.to_json();
    // Who claims a ticket in a full ring waits until its slot may be overwritten.
    let waiting = file.header(at::HEAD).saturating_sub(counts.events);
    counters["events"] = (counts.events + waiting).into();
    counters["unpublished"] = (counts.unpublished + waiting).into();
    counters["stalls"] = file.header(at::STALLS).into();
    for (name, n) in lacking(&|word| file.header(word), true) {
        counters[name] = n.into();
    }
    counters["measured"] = file.header(at::OWN_EVENTS).into();
    counters["anomalies"] = known["anomalies"].clone();
    counters
}

/// Integers of a snapshot are below 2^63.
fn bound(value: &mut Value) {
    match value {
        Value::Number(n) if n.is_u64() && !n.is_i64() => *value = i64::MAX.into(),
        Value::Array(list) => list.iter_mut().for_each(bound),
        Value::Object(map) => map.values_mut().for_each(bound),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_files::Readers;
    use memtrace_format::blackbox::{LIVE, MAGIC, NOT_NOTED, VERSION};
    use memtrace_format::event::{Event, Kind, Layer, Pool, WORDS, What};
    use memtrace_format::snapshot::{BlockState, Snapshot};
    use memtrace_format::stacks::RawFrame;
    use proptest::prelude::*;

    use crate::made::{FIRST_TICKET, Made, SLOTS, black_box};

    fn event(kind: Kind, layer: Layer, addr: u64, size: u64) -> Event {
        let time_ns = 1_700_000_000_000_000_000;
        Event {
            kind,
            layer,
            device: 0,
            flags: 0,
            api: 1,
            what: What::Device,
            pool: Pool::DEFAULT,
            time_ns,
            addr,
            size,
            extra: size,
            stream: 0,
            stack: 2,
            thread: 7,
            label: 0,
        }
    }

    /// A black box with one old block, and a history of three events of which the last is half written.
    fn made() -> Vec<u64> {
        let mut stacks = Made::of_words(400);
        let code = stacks.function("f", "a.py", 7);
        stacks.stack(&[RawFrame::Python { code, unit: Some(1) }]);
        let live = [event(Kind::Alloc, Layer::Device, 0x1000, 100)];
        let history = [
            event(Kind::Alloc, Layer::Device, 0x2000, 200),
            event(Kind::SegmentMap, Layer::Framework, 0x20_0000, 0x40_0000),
            event(Kind::FreeRequested, Layer::Device, 0x1000, 0),
        ];
        let about = r#"{"pid":7,"host":"h","entry_points":["none","cudaMalloc"],"virtual":{"spec":"h100","launches":3,"devices":[{"device":0,"used":5,"total":9}]},"stacks":{"mode":"all"}}"#;
        let mut words = black_box(&live, &history, &stacks, about);
        let last = slot(&words, FIRST_TICKET + 2);
        words[last] = 0;
        words
    }

    /// The first word of a ticket's slot.
    fn slot(words: &[u64], ticket: usize) -> usize {
        words[at::REGIONS] as usize / 8 + ticket % SLOTS * WORDS
    }

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    fn written(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let folder = tempfile::tempdir()?;
        let new = NewFile::within(folder.path(), Readers::Owner)?;
        let file = BlackBox::open(bytes)?;
        snapshot(&file, false, "recovered", 5, (&new, Encoding::Pickle))?;
        std::fs::read(new.path())
    }

    fn read(words: &[u64]) -> Snapshot {
        Snapshot::read(&written(&bytes(words)).expect("sound")).expect("a snapshot")
    }

    #[test]
    fn everything_in_the_file_is_in_the_snapshot() {
        let found = read(&made());
        let live = |s: &&memtrace_format::snapshot::Block| s.state != BlockState::Inactive;
        let blocks = found.segments.iter().flat_map(|s| &s.blocks).filter(live);
        let sizes: Vec<_> = blocks.map(|b| (b.address, b.size)).collect();
        assert_eq!(sizes, [(0x1000, 100), (0x2000, 200)]);
        let entries = &found.device_traces[0];
        assert_eq!(entries.len(), 3);
        assert_eq!(entries[0].user_metadata.as_deref(), Some("driver: cudaMalloc"));
        assert_eq!((found.frames.len(), found.frames[0].line), (1, 8));
        let about = &found.memtrace;
        assert_eq!((&about["pid"], &about["reason"]), (&7.into(), &"recovered".into()));
        let counters = &about["counters"];
        for (key, n) in [
            ("events", 23),
            ("events_kept", 2),
            ("events_retired", 20),
            ("unpublished", 1),
            ("anomalies", 0),
        ] {
            assert_eq!(counters[key], n, "{key}");
        }
        assert_eq!(
            about["virtual"],
            json!({"spec": "h100", "devices": [{"device": 0, "total": 9}]})
        );
        assert_eq!(about.get("entry_points"), None);
    }

    #[test]
    fn an_event_that_is_in_the_table_already_counts_once() {
        let mut words = made();
        let live = words[at::REGIONS + 2] as usize / 8;
        let first = slot(&words, FIRST_TICKET);
        words.copy_within(first..first + WORDS, live);
        words[live] = LIVE;
        for sequence in [41, 42] {
            words[at::LIVE_SEQUENCE] = sequence;
            let counters = read(&words).memtrace["counters"].clone();
            assert_eq!(
                (&counters["anomalies"], &counters["events_retired"]),
                (&0.into(), &21.into())
            );
        }
    }

    /// The words of a place that holds them; anything else is said, not guessed.
    #[test]
    fn settings_are_those_that_were_noted() {
        let own = r#"{"last":"max_split_size_mb:7","all":"expandable_segments:True"}"#;
        let about = format!(r#"{{"allocator_conf":"max_split_size_mb:9","own":{own}}}"#);
        let at_own = (own.len() << 32 | about.find(own).expect("there")) as u64;
        for (place, said, holds) in [
            (0, Some("max_split_size_mb:9"), Some(false)),
            (at_own, Some("max_split_size_mb:7"), Some(true)),
            (at_own + 1, None, None),
            (at_own + (1 << 32), None, None),
            (NOT_NOTED, None, None),
            (u64::MAX, None, None),
        ] {
            let mut words = black_box(&[], &[], &Made::of_words(400), &about);
            words[at::SETTINGS] = place;
            let found = read(&words);
            let (settings, about) = (&found.allocator_settings, &found.memtrace);
            assert_eq!(settings["PYTORCH_CUDA_ALLOC_CONF"].as_str(), said, "{place}");
            assert_eq!(settings["expandable_segments"].as_bool(), holds, "{place}");
            let is_lacking = about["not_recorded"] == json!([LACKING]);
            assert_eq!(is_lacking, said.is_none(), "{place}");
        }
    }

    /// Found by the fuzz target `black_box`: a device's past that can't be counted on from.
    #[test]
    fn numbers_without_end_do_no_harm() {
        let mut words = made();
        words[at::PAST..at::PAST + 4].fill(u64::MAX);
        let measured = Event {
            kind: Kind::Measured,
            size: u64::MAX >> 1,
            addr: u64::MAX >> 1,
            stream: u64::MAX >> 1,
            extra: u64::MAX >> 1,
            flags: u8::MAX,
            ..event(Kind::Measured, Layer::Device, 0, 0)
        };
        let last = slot(&words, FIRST_TICKET + 2);
        words[last] = FIRST_TICKET as u64 + 3;
        words[last + 1..][..WORDS - 1].copy_from_slice(&measured.pack());
        assert_eq!(read(&words).device_traces[0].len(), 3);
    }

    fn any_word() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            0_u64..64,
            (0_u32..64).prop_map(|bit| 1 << bit),
            (0_u64..64).prop_map(|n| u64::MAX - n),
        ]
    }

    proptest! {
        /// Whatever is in the file: an answer, no panic, no endless loop, and what is written can be read.
        #[test]
        fn damaged_files_do_no_harm(
            changes in prop::collection::vec((prop_oneof![0_usize..128, 512_usize..640, 0_usize..1 << 16], 0_u32..64, any_word()), 1..20),
            cut in prop::option::of(0_usize..1 << 19),
        ) {
            let mut words = made();
            for (i, bit, word) in changes {
                let n = words.len();
                let old = &mut words[i % n];
                *old = if bit < 8 { *old ^ (1 << (word % 64)) } else { word };
            }
            (words[at::MAGIC], words[at::VERSION]) = (MAGIC, VERSION);
            let mut bytes = bytes(&words);
            bytes.truncate(cut.unwrap_or(usize::MAX));
            if let Ok(out) = written(&bytes) {
                prop_assert!(Snapshot::read(&out).is_ok());
            }
        }
    }
}

//! The snapshot that a black box holds, as its process would have written it.
//!
//! Nothing here knows whether the process lives: the caller has read the file and says
//! why. What the process said of itself when it began is in the file; what it would
//! have counted since then is worked out.

use std::io;

use memtrace_caching::conf;
use memtrace_files::NewFile;
use memtrace_format::blackbox::{BlackBox, Bytes, Life, Read, Region, at, count_from_header};
use memtrace_format::key::{Counters, Memtrace, OrNull, Part, StackTables};
use memtrace_format::stacks::{DepotShape, HEAD_NEXT, HEAD_REFUSED, Words};
use memtrace_symbols::{Namer, Splice};

use crate::usage::{cost, entry_point_calls};
use crate::write::{Counts, Encoding, Moment, write};

/// Writes state, history, stacks and names. `alive`: somebody is writing the file. `reason` and
/// `written_us` are for the snapshot's `memtrace` key. `target`: see [`write()`].
///
/// # Errors
/// The file is damaged or can't be read, or the snapshot can't be written.
pub fn of_black_box<B: Bytes>(
    file: &BlackBox<B>,
    alive: bool,
    reason: &str,
    written_us: u64,
    target: (&NewFile, Encoding),
) -> io::Result<Counts> {
    let mut recording = file.recording(alive)?;
    let moment = if alive { Moment::Ticket(recording.written()?) } else { Moment::End };
    let described = file.about();
    let entry_points = described.as_ref().map_or(&[][..], |d| &d.entry_points);
    let api = |i: u16| entry_points.get(usize::from(i)).map_or("unknown", String::as_str);
    // After the last ticket, so that every stack is there.
    let [depot, codes, libraries] = [Region::Depot, Region::Code, Region::Modules];
    let (depot, codes, libraries) = (file.part(depot)?, file.part(codes)?, file.part(libraries)?);
    let refused = [&depot, &codes, &libraries].map(|r| r.word(HEAD_REFUSED)).iter().sum::<u64>();
    let used = file.entry_points()?;
    let capacity = DepotShape::of(depot.count()).map_or(0, |shape| shape.capacity as u64);
    let nodes = (depot.word(HEAD_NEXT).min(capacity), capacity);
    let words = [codes.word(HEAD_NEXT), libraries.word(HEAD_NEXT)];
    let labels = file.part(Region::Labels)?;
    let mut namer = Namer::new(depot, codes, libraries, Splice::PyTorch).with_labels(labels);
    write(&mut recording, moment, &mut namer, &api, target, &mut |snapshot, mut known, namer| {
        let release = namer.pytorch();
        let read = file.settings(|about| read_at_the_start(about, release.as_deref()));
        if let Some(Read { last, all }) = &read {
            snapshot.allocator_settings = conf::from_conf(all);
            snapshot.allocator_settings[conf::NAMES[0]] = last.as_str().into();
        }
        let said = said(file, described.as_ref().map(|d| &d.memtrace));
        let mut stacks = said.stacks.clone();
        if let Some(stacks) = &mut stacks {
            (stacks.nodes, stacks.nodes_max) = (Some(nodes.0), Some(nodes.1));
            (stacks.code_words, stacks.module_words) = (Some(words[0]), Some(words[1]));
            stacks.refused = Some(refused);
        }
        let mut not_recorded = said.not_recorded.clone();
        if read.is_none() {
            not_recorded.get_or_insert_default().push(LACKING.to_owned());
        }
        let mut all = Memtrace {
            reason: Some(reason.to_owned()),
            written_us: Some(written_us),
            stacks,
            counters: Some(counters(file, known.counters.take().unwrap_or_default())),
            cost: Some(cost(file.header(at::SAMPLED), file.header(at::SAMPLED_NS))),
            not_recorded,
            libraries: Some(namer.build_ids()),
            python: Some(namer.places_and_links().to_key()),
            pytorch: release,
            allocator_conf: read.map(|read| read.all),
            doors: Some(entry_point_calls(&used, &api, namer)),
            // Only the process itself sees how its libraries are bound.
            bound_elsewhere: Some(OrNull(None)),
            switched_off: (file.header(at::LIFE) == Life::SwitchedOff as u64).then_some(true),
            ..known.or(said)
        };
        // A damaged description may hold numbers that no viewer could read.
        all.bound();
        snapshot.memtrace = Some(Box::new(all));
    })
}

/// In `not_recorded`.
const LACKING: &str = "the settings of PyTorch's allocator";

/// What the process's environment said when recording began, as this release of PyTorch
/// reads it. `None`: the box doesn't say.
fn read_at_the_start(about: &Memtrace, release: Option<&str>) -> Option<Read> {
    let conf = about.allocator_conf.as_deref()?;
    let variable = about.allocator_variable.as_deref().unwrap_or_default();
    let (last, all) = conf::read_by(release.unwrap_or_default(), variable, conf);
    Some(Read { last: last.to_owned(), all })
}

/// What the process said of itself, less what meant nothing when it began.
fn said<B: Bytes>(file: &BlackBox<B>, about: Option<&Memtrace>) -> Memtrace {
    let Some(about) = about else {
        // The description is damaged; the header knows this much.
        return Memtrace {
            pid: Some(file.header(at::PID)),
            started_us: Some(file.header(at::STARTED_NS) / 1000),
            stacks: Some(StackTables::default()),
            ..Memtrace::default()
        };
    };
    let mut said = about.clone().made_here();
    if let Some(gpu) = &mut said.virtual_gpu {
        (gpu.launches, gpu.zero_reads, gpu.cudnn) = (None, None, None);
        gpu.devices.iter_mut().for_each(|device| device.used = None);
    }
    said
}

fn counters<B: Bytes>(file: &BlackBox<B>, mut counters: Counters) -> Counters {
    // Who claims a ticket in a full ring waits until its slot may be overwritten.
    let waiting = file.header(at::HEAD).saturating_sub(counters.events);
    counters.events += waiting;
    counters.unpublished += waiting;
    count_from_header(&|word| file.header(word), true, &mut counters);
    counters
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_files::Readers;
    use memtrace_format::blackbox::{LIVE, MAGIC, NOT_NOTED, VERSION};
    use memtrace_format::event::{Event, Kind, Layer, MeasuredEvent, WORDS};
    use memtrace_format::snapshot::{BlockState, Snapshot};
    use memtrace_format::stacks::RawFrame;
    use proptest::prelude::*;
    use serde_json::json;

    use memtrace_format::made::{FIRST_TICKET, Made, SLOTS, black_box};

    fn event(kind: Kind, layer: Layer, addr: u64, size: u64) -> Event {
        let time_ns = 1_700_000_000_000_000_000;
        Event {
            api: 1,
            time_ns,
            addr,
            size,
            extra: size,
            stack: 2,
            thread: 7,
            ..Event::new(kind, layer)
        }
    }

    /// A black box with one old block, and a history of three events of
    /// which the last is half written.
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
        of_black_box(&file, false, "recovered", 5, (&new, Encoding::Pickle))?;
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
        let about = serde_json::to_value(&found.memtrace).expect("JSON");
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
            let counters = read(&words).memtrace.and_then(|about| about.counters);
            let counters = counters.expect("counters");
            assert_eq!((counters.anomalies, counters.events_retired), (0, 21));
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
            let (settings, about) = (&found.allocator_settings, found.memtrace.as_ref());
            assert_eq!(settings["PYTORCH_CUDA_ALLOC_CONF"].as_str(), said, "{place}");
            assert_eq!(settings["expandable_segments"].as_bool(), holds, "{place}");
            let lacking = about.and_then(|about| about.not_recorded.clone());
            assert_eq!(lacking, said.is_none().then(|| vec![LACKING.to_owned()]), "{place}");
        }
    }

    /// Found by the fuzz target `black_box`: a device's past that can't be counted on from.
    #[test]
    fn numbers_without_end_do_no_harm() {
        let mut words = made();
        words[at::PAST..at::PAST + 4].fill(u64::MAX);
        let most = u64::MAX >> 1;
        let said = MeasuredEvent { used: most, total: most, by: Some((most, most)) };
        let (time_ns, flags) = (1_700_000_000_000_000_000, u8::MAX);
        let measured = Event { time_ns, flags, ..said.event() };
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
        /// Whatever is in the file: an answer, no panic, no endless loop,
        /// and what is written can be read.
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

//! The snapshot that a black box holds, as its process would have written it.
//!
//! Nothing here knows whether the process lives: the caller has read the file and says why. What the process said
//! of itself when it began stands in the file; what it would have counted since then is worked out.

use memtrace_format::blackbox::{BlackBox, Life, OpenError, Region, at};
use memtrace_format::replay;
use memtrace_format::settings;
use memtrace_format::snapshot::Snapshot;
use memtrace_format::stacks::{DepotShape, HEAD_NEXT, HEAD_REFUSED, Words};
use serde_json::{Value, json};

use crate::names::{Namer, Splice};

/// A region of a black box.
struct Bytes<'a>(&'a [u8]);

impl Words for Bytes<'_> {
    fn count(&self) -> usize {
        self.0.len() / 8
    }
    fn word(&self, i: usize) -> u64 {
        let bytes = i.checked_mul(8).and_then(|at| self.0.get(at..)?.first_chunk());
        bytes.map_or(0, |b| u64::from_le_bytes(*b))
    }
}

/// Keys of the description that are for the reader alone.
const NOT_SHOWN: [&str; 2] = ["entry_points", "out"];
/// What the virtual GPU counts as it runs: at the start, when the description is written, it means nothing.
const COUNTED: [&str; 2] = ["launches", "zero_reads"];

/// State, history, stacks and names. `again`: the same file read a second time, if its process is alive. `reason`
/// and `written_us` are for the snapshot's `memtrace` key.
///
/// # Errors
/// The ring's place or size is impossible.
pub fn snapshot(
    file: &BlackBox<'_>,
    again: Option<&BlackBox<'_>>,
    reason: &str,
    written_us: u64,
) -> Result<Snapshot, OpenError> {
    let contents = file.contents(again)?;
    let kept = contents.events.len();
    let about = file.about();
    let api = |i: u16| about["entry_points"][usize::from(i)].as_str().unwrap_or("unknown");
    let [depot, codes, libraries] =
        [Region::Depot, Region::Code, Region::Modules].map(|r| Bytes(file.region(r)));
    let refused = [&depot, &codes, &libraries].map(|r| r.word(HEAD_REFUSED)).iter().sum::<u64>();
    let capacity = DepotShape::of(depot.count()).map_or(0, |shape| shape.capacity as u64);
    let nodes = (depot.word(HEAD_NEXT).min(capacity), capacity);
    let mut namer = Namer::new(depot, codes, libraries, Splice::PyTorch);
    let assembled =
        replay::assemble(contents.live, &contents.events, &api, &mut |id| namer.stack(id));
    let (frames, stacks) = namer.into_tables();

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
        said["stacks"]["refused"] = refused.into();
    }
    if file.header(at::LIFE) == Life::SwitchedOff as u64 {
        said["switched_off"] = true.into();
    }
    said["counters"] = json!({
        "events": contents.written,
        "stalls": file.header(at::STALLS),
        "live_refused": file.header(at::LIVE_REFUSED),
        "events_kept": kept,
        "events_retired": contents.retired,
        "unpublished": contents.torn,
        "anomalies": assembled.memtrace["counters"]["anomalies"],
    });
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
    // A damaged description may hold numbers that no viewer could read.
    bound(&mut said);
    let conf = about["allocator_conf"].as_str().unwrap_or_default();
    Ok(Snapshot {
        frames,
        stacks,
        allocator_settings: settings::from_conf(conf),
        memtrace: said,
        ..assembled
    })
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

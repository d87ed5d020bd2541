//! A replay as a snapshot, for the viewers: what the history would have been.

use std::collections::HashMap;

use memtrace_caching::{Action as Did, Settings};
use memtrace_format::settings::from_conf;
use memtrace_format::snapshot::{Action, BlockState, Snapshot, StackIx, TraceEntry, Value};

use super::requests::Requests;
use super::run::{BEFORE, Card, Log, Outcome, listen};

/// The snapshot that the program would have left, and how it went on each device.
pub fn picture(
    original: &Snapshot,
    requests: &[Requests],
    conf: &str,
    settings: &Settings,
    card: impl Fn(usize) -> Card,
) -> (Snapshot, Vec<Outcome>) {
    let mut snapshot = Snapshot {
        frames: original.frames.clone(),
        stacks: original.stacks.clone(),
        device_traces: vec![Vec::new(); original.device_traces.len()],
        allocator_settings: from_conf(conf),
        ..Snapshot::default()
    };
    let mut outcomes = Vec::new();
    for requests in requests {
        let device = requests.device;
        let (outcome, log, mut segments) = listen(requests, settings, card(device), Log::default());
        let original = original.device_traces.get(device).map_or(&[][..], Vec::as_slice);
        let (trace, stacks) = history(requests, original, &log);
        for block in segments.iter_mut().flat_map(|s| &mut s.blocks) {
            if block.state != BlockState::Inactive {
                block.frames = stacks.get(&block.address).copied();
            }
        }
        snapshot.segments.append(&mut segments);
        if let Some(place) = snapshot.device_traces.get_mut(device) {
            *place = trace;
        }
        outcomes.push(outcome);
    }
    snapshot.memtrace = about(original, conf, &outcomes);
    (snapshot, outcomes)
}

/// The new trace; and the stack of each block in use, by address.
fn history(
    requests: &Requests,
    original: &[TraceEntry],
    log: &Log,
) -> (Vec<TraceEntry>, HashMap<u64, StackIx>) {
    let mut stacks = HashMap::new();
    let mut trace = Vec::new();
    let mut seeds = requests.seeds.iter();
    for (entry, event) in &log.events {
        if *entry == BEFORE {
            if event.action == Did::Alloc
                && let Some((addr, _)) = seeds.next()
                && let Some(stack) = requests.beginning.blocks.get(addr).and_then(|b| b.stack)
            {
                stacks.insert(event.addr, stack);
            }
            continue;
        }
        let cause = original.get(*entry as usize);
        let frames = cause.and_then(|c| c.frames);
        if event.action == Did::Alloc {
            match frames {
                Some(stack) => stacks.insert(event.addr, stack),
                None => stacks.remove(&event.addr),
            };
        }
        trace.push(TraceEntry {
            action: Action::from(event.action),
            addr: event.addr,
            size: event.size,
            stream: event.stream,
            time_us: cause.and_then(|c| c.time_us),
            compile_context: cause.and_then(|c| c.compile_context.clone()),
            user_metadata: Some("".into()),
            pool_id: Some(event.pool),
            frames,
        });
    }
    (trace, stacks)
}

/// What memtrace says about the file: whose it is, and that nobody measured it.
fn about(original: &Snapshot, conf: &str, outcomes: &[Outcome]) -> Value {
    let mut about = match &original.memtrace {
        Value::Object(map) => map.clone(),
        _ => serde_json::Map::new(),
    };
    // They are about the process, not about this.
    about.remove("counters");
    about.insert("reason".to_owned(), "replay".into());
    let ooms: Vec<Value> =
        outcomes.iter().map(|o| serde_json::to_value(&o.oom).unwrap_or_default()).collect();
    about.insert("replay".to_owned(), serde_json::json!({"conf": conf, "oom": ooms}));
    Value::Object(about)
}

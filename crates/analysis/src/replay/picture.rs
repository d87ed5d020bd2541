//! A replay as a snapshot, for the viewers: what the history would have been.

use std::collections::HashMap;

use memtrace_caching::conf::from_conf;
use memtrace_caching::{Action as Did, Settings};
use memtrace_format::key::{Kept, Memtrace, OrNull, ReplayOom, Replayed};
use memtrace_format::snapshot::{Action, BlockState, Snapshot, StackIx, TraceEntry};

use super::requests::Requests;
use super::run::{BEFORE, Card, Log, Oom, Outcome, listen};

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
    snapshot.memtrace = Some(Box::new(about(original, conf, &outcomes)));
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
fn about(original: &Snapshot, conf: &str, outcomes: &[Outcome]) -> Memtrace {
    let oom = |outcome: &Outcome| OrNull(outcome.oom.as_ref().map(replay_oom));
    let nobody = || Memtrace { kept: Kept::ONLY_WHAT_IS_SET, ..Memtrace::default() };
    Memtrace {
        // They are about the process, not about this.
        counters: None,
        reason: Some("replay".to_owned()),
        replay: Some(Replayed {
            conf: conf.to_owned(),
            oom: outcomes.iter().map(oom).collect(),
            kept: Kept::NOTHING,
        }),
        ..original.memtrace.as_deref().cloned().unwrap_or_else(nobody)
    }
}

fn replay_oom(oom: &Oom) -> ReplayOom {
    let Oom { entry, requested, segment, allocated, reserved, device_free } = *oom;
    let (entry, kept) = (entry.into(), Kept::NOTHING);
    ReplayOom { entry, requested, segment, allocated, reserved, device_free, kept }
}

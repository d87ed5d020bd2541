//! Repeats what `tests/e2e/allocator_differential.py` recorded of PyTorch,
//! and says where the two first differ.
//!
//! `cargo run --release -p memtrace-caching --example differential --
//! FILE…`; exits with 1 if a file differs.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::process::ExitCode;

use memtrace_caching::{
    Action, Allocator, BlockId, Event, FailureCause, OutOfMemory, Ready, Route, Script, Settings,
    Step,
};
use serde_json::Value;

type Repeated = Allocator<Script, Vec<Event>>;

fn main() -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for path in std::env::args().skip(1) {
        let result = File::open(&path)
            .map_err(|e| e.to_string())
            .and_then(|f| serde_json::from_reader(BufReader::new(f)).map_err(|e| e.to_string()))
            .and_then(|run: Value| compare(&run));
        match result {
            Ok(events) => println!("{path}: {events} events, equal"),
            Err(difference) => {
                println!("{path}: {difference}");
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn pool(value: &Value) -> (u64, u64) {
    (number(&value[0]), number(&value[1]))
}

/// The event of a trace entry; `None` for what is not the allocator's.
fn event(entry: &Value) -> Option<Event> {
    let known = [
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentAlloc,
        Action::SegmentFree,
        Action::SegmentMap,
        Action::SegmentUnmap,
        Action::Oom,
    ];
    let action = known.into_iter().find(|a| entry[0] == a.name())?;
    let [addr, size, stream] = [1, 2, 3].map(|i| number(&entry[i]));
    Some(Event {
        action,
        addr,
        size,
        stream,
        pool: pool(&entry[4]),
        with_address: entry[5] == "mallocWithAddress",
    })
}

fn compare(run: &Value) -> Result<usize, String> {
    let expected: Vec<Event> = list(&run["events"]).iter().filter_map(event).collect();
    let operations = list(&run["operations"]);
    let of_driver = |e: &&Event| {
        !matches!(e.action, Action::Alloc | Action::FreeRequested | Action::FreeCompleted)
    };
    let steps = expected.iter().filter(of_driver);
    let steps = steps.map(|&Event { action, addr, size, stream, pool, .. }| Step {
        action,
        addr,
        size,
        stream,
        pool,
    });
    let ready = if run["lazy"] == true { Ready::AfterWait } else { Ready::Always };
    let mut device = Script::new(number(&run["total"]), steps).with_events(ready);
    // A graph takes memory of the driver that nobody reports.
    if !operations.iter().any(|o| o[0] == "capture") {
        device = device.with_capacity(number(&run["free"]));
    }
    for pair in list(&run["hashes"]) {
        device.set_stream_hash(number(&pair[0]), number(&pair[1]));
    }
    let conf = run["conf"].as_str().unwrap_or_default();
    let settings = Settings::parse(conf).map_err(|e| e.to_string())?.settings;
    let mut program =
        Program { allocator: Allocator::new(device, settings, Vec::new()), blocks: HashMap::new() };
    let mut compared = 0;
    let mut after_capture = false;
    for (n, operation) in operations.iter().enumerate() {
        let before = after_capture.then(|| program.clone());
        let mut done = program.step(operation, &expected[compared..]);
        if let Some(before) = before
            && done.is_err()
        {
            (program, done) = other_orders(&before, operation, &expected[compared..]);
        }
        compared += done.map_err(|e| format!("operation {n} {operation}: {e}"))?;
        after_capture = match operation[0].as_str() {
            Some("captured") => true,
            Some("alloc" | "empty" | "drop") => false,
            _ => after_capture,
        };
        if n % 1000 == 0 {
            program.allocator.check().map_err(|e| format!("operation {n}: {e}"))?;
        }
    }
    if compared != expected.len() {
        return Err(format!("PyTorch has more: {:x?}", expected[compared]));
    }
    if let Some(problem) = program.allocator.device_mut().problem() {
        return Err(format!("the device: {problem}"));
    }
    statistics(&program.allocator, &run["stats"])?;
    segments(&program.allocator, &run["segments"])?;
    Ok(compared)
}

fn statistics(allocator: &Repeated, expected: &Value) -> Result<(), String> {
    let got = allocator.flat_stats();
    for (key, value) in expected.as_object().into_iter().flatten() {
        if got.get(key).copied() != value.as_i64() {
            return Err(format!("{key} is {:?}, PyTorch's {value}", got.get(key)));
        }
    }
    match got.keys().find(|k| expected.get(k).is_none()) {
        Some(key) => Err(format!("PyTorch has no {key}")),
        None => Ok(()),
    }
}

fn segments(allocator: &Repeated, expected: &Value) -> Result<(), String> {
    let got = allocator.segments(0).into_iter().map(|s| {
        let blocks: Vec<Value> = s
            .blocks
            .iter()
            .map(|b| serde_json::json!([b.address, b.size, b.requested_size, b.state.name()]))
            .collect();
        let kind = if s.small { "small" } else { "large" };
        let id = [s.pool_id.0, s.pool_id.1];
        serde_json::json!([s.address, s.total_size, s.stream, kind, s.is_expandable, id, blocks])
    });
    let got: Vec<Value> = got.collect();
    for (got, expected) in got.iter().zip(list(expected)) {
        if got != expected {
            return Err(format!("a segment is\n  {got}, PyTorch's\n  {expected}"));
        }
    }
    if got.len() == list(expected).len() {
        Ok(())
    } else {
        Err("another number of segments".to_owned())
    }
}

/// Part of what happens to frees during a capture PyTorch leaves to chance
/// (`Device::after_capture`): whatever gives PyTorch's events is what it was.
fn other_orders(
    before: &Program,
    operation: &Value,
    expected: &[Event],
) -> (Program, Result<usize, String>) {
    let coming = expected.iter().filter(|e| e.action == Action::FreeCompleted).take(100);
    let mut order: Vec<u64> = coming.map(|e| e.addr).collect();
    let mut random = 1_u64;
    let mut last = None;
    for _ in 0..500 {
        for done in 0..20 {
            let mut program = before.clone();
            program.allocator.device_mut().set_order(order.iter().copied(), done);
            match program.step(operation, expected) {
                Ok(events) => return (program, Ok(events)),
                Err(e) => last = last.or(Some((program, Err(e)))),
            }
        }
        for i in (1..order.len()).rev() {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            order.swap(i, (random >> 33) as usize % (i + 1));
        }
    }
    last.expect("it was tried")
}

#[derive(Clone)]
struct Program {
    allocator: Repeated,
    blocks: HashMap<u64, BlockId>,
}

impl Program {
    /// Does what the program did; gives the number of events, which are the next ones of PyTorch's.
    fn step(&mut self, o: &Value, expected: &[Event]) -> Result<usize, String> {
        let done = self.operation(o);
        let events = std::mem::take(self.allocator.sink_mut());
        for (n, got) in events.iter().enumerate() {
            if expected.get(n) != Some(got) {
                return Err(format!(
                    "an event is\n  {got:x?}, PyTorch's\n  {:x?}",
                    expected.get(n)
                ));
            }
        }
        done.map(|()| events.len())
    }

    fn operation(&mut self, o: &Value) -> Result<(), String> {
        let a = &mut self.allocator;
        let said = |e: memtrace_caching::Misuse| e.to_string();
        match o[0].as_str().unwrap_or_default() {
            "alloc" => {
                a.device_mut().set_capturing(o[5] == true);
                let got = a.malloc(number(&o[2]), number(&o[3]));
                if let Ok(got) = got {
                    self.blocks.insert(number(&o[1]), got.id);
                }
                return same_address(got.map(|g| g.addr), &o[4]);
            }
            "at" => {
                a.device_mut().set_capturing(o[6] == true);
                let got = a.malloc_at(number(&o[2]), number(&o[3]), number(&o[4]));
                if let Ok(got) = got {
                    self.blocks.insert(number(&o[1]), got.id);
                }
                return match (got.is_ok(), o[5] == true) {
                    (ours, theirs) if ours == theirs => Ok(()),
                    (ours, theirs) => Err(format!("{ours}, PyTorch {theirs}")),
                };
            }
            "free" => {
                a.device_mut().set_capturing(o[2] == true);
                let id = self.blocks.remove(&number(&o[1])).ok_or("no such block")?;
                a.free(id).map_err(said)?;
            }
            "use" => {
                a.device_mut().set_capturing(o[3] == true);
                let id = *self.blocks.get(&number(&o[1])).ok_or("no such block")?;
                a.record_stream(id, number(&o[2])).map_err(said)?;
            }
            "empty" => a.empty_cache(),
            "wait" => a.device_mut().waited(),
            "pool" => {
                a.hold_pool(pool(&o[1])).map_err(said)?;
                if o[2] == true {
                    a.set_use_on_oom(pool(&o[1]), true).map_err(said)?;
                }
                if o[3] == true {
                    a.set_no_split(pool(&o[1])).map_err(said)?;
                }
            }
            "begin" => a.begin_allocate_to_pool(pool(&o[1]), Route::All).map_err(said)?,
            "end" => {
                a.end_allocate_to_pool(pool(&o[1])).map_err(said)?;
                a.release_pool(pool(&o[1])).map_err(said)?;
            }
            "drop" => {
                a.release_pool(pool(&o[1])).map_err(said)?;
                a.empty_pool(pool(&o[1]));
            }
            "capture" => {
                a.device_mut().set_wanted(0, list(&o[2]).iter().map(number));
                a.begin_allocate_to_pool(pool(&o[1]), Route::Ask(0)).map_err(said)?;
                a.capture_begins();
            }
            "captured" => {
                a.end_allocate_to_pool(pool(&o[1])).map_err(said)?;
                a.capture_ends();
                a.device_mut().set_capturing(false);
            }
            "release" => a.release_pool(pool(&o[1])).map_err(said)?,
            "settings" => {
                let conf = o[1].as_str().unwrap_or_default();
                let mut settings = a.settings().clone();
                settings.change(conf).map_err(|e| e.to_string())?;
                a.set_settings(settings);
            }
            "fraction" => a.set_memory_fraction(o[1].as_f64().unwrap_or_default()).map_err(said)?,
            other => return Err(format!("what is {other}?")),
        }
        Ok(())
    }
}

fn same_address(got: Result<u64, OutOfMemory>, expected: &Value) -> Result<(), String> {
    match (got, expected.as_u64()) {
        (Ok(got), Some(expected)) if got == expected => Ok(()),
        (Err(OutOfMemory { why: FailureCause::Exhausted | FailureCause::Rejected, .. }), None) => {
            Ok(())
        }
        (got, expected) => Err(format!("got {got:x?}, PyTorch {expected:x?}")),
    }
}

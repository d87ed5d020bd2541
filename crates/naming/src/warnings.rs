//! What only a recorder at the driver's doors can warn of, worked out when a snapshot is written.
//!
//! A warning that is wrong is worse than none: what is said here is what the books hold, and nothing is expected of what
//! the program may still do.

use memtrace_format::replay::State;
use memtrace_format::stacks::Words;
use serde_json::{Value, json};

use crate::names::Namer;

/// Warnings about a state, of which `ledger` is the books: a context on a device of which the process holds no memory,
/// while all that it holds is on one other device. Such a context takes hundreds of megabytes of a card that another
/// rank needs.
pub fn warnings<W: Words>(state: &State, ledger: &Value, namer: &mut Namer<W>) -> Vec<Value> {
    let devices = ledger["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    let held = |d: &Value| d["held"].as_u64().unwrap_or(0) > 0;
    let mut used = devices.iter().filter(|d| held(d)).map(|d| d["device"].as_i64().unwrap_or(-1));
    let (Some(home), None) = (used.next(), used.next()) else { return Vec::new() };
    if home < 0 {
        return Vec::new();
    }
    let mut found: Vec<Value> = Vec::new();
    for (device, stack) in state.ledger.contexts() {
        let device = i64::from(device);
        if device < 0 || device == home || found.iter().any(|w| w["device"] == device) {
            continue;
        }
        let text = format!(
            "a context was made on GPU {device}, of which this process holds no memory: all that it holds is on GPU \
             {home}; choose the device (torch.cuda.set_device) before anything that uses CUDA, or hide the others with \
             CUDA_VISIBLE_DEVICES"
        );
        let frames: Vec<Value> = namer
            .frames(stack)
            .iter()
            .map(|f| json!({"filename": f.filename, "line": f.line, "name": f.name}))
            .collect();
        found.push(
            json!({"kind": "stray context", "device": device, "text": text, "frames": frames}),
        );
    }
    found
}

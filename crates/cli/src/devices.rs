//! `memtrace devices`: what the virtual GPU can be.

use memtrace_devices::profiles;
use memtrace_format::screen::Page;
use serde_json::{Value, json};

use crate::args::Devices;
use crate::failure::Failure;
use crate::say::Answer;
use crate::units;

pub(crate) fn list(args: &Devices) -> Result<Answer, Failure> {
    if args.json { Answer::json(&as_json(), true) } else { Ok(Answer::page(table(), true)) }
}

fn table() -> Page {
    let mut text = Page::default();
    let _ = writeln!(
        text,
        "{:<10} {:<28} {:>7} {:>10} {:>4} {:>10}",
        "--virtual", "name", "compute", "memory", "SMs", "context"
    );
    for p in profiles() {
        let _ = writeln!(
            text,
            "{:<10} {:<28} {:>7} {:>10} {:>4} {:>10}",
            p.key,
            p.name,
            format!("{}.{}", p.major(), p.minor()),
            units::size(p.memory_bytes()),
            p.sms,
            units::size(p.context_bytes()),
        );
    }
    text.push_str(
        "\nmemory: what CUDA reports as the total.  context: what a process takes before its first allocation\n\
         (an estimate, `memtrace devices --json` has the sources).  Several GPUs: h100*8.  Streams that finish as\n\
         late as they may: h100,lazy.  Addresses as on Windows and under WSL: h100,placement=ascending.\n\
         Another GPU: sm_90,80GiB,132SM (compute capability, memory, SMs).\n",
    );
    text
}

fn as_json() -> Value {
    let list: Vec<Value> = profiles()
        .iter()
        .map(|p| {
            json!({
                "key": p.key,
                "name": p.name,
                "compute_capability": [p.major(), p.minor()],
                "memory_bytes": p.memory_bytes(),
                "memory_source": p.memory_source,
                "multiprocessors": p.sms,
                "context_bytes": p.context_bytes(),
                "context_source": p.context_source,
            })
        })
        .collect();
    Value::Array(list)
}

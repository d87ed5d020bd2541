//! `memtrace devices`: what this machine has, and what the virtual GPU can be.

use memtrace_devices::profiles;
use memtrace_terminal::Page;
use serde_json::{Value, json};

use crate::args::Devices;
use crate::cards::{self, CardsHere};
use crate::failure::Failure;
use crate::say::{Answer, eprint_line};
use crate::units;

pub(crate) fn devices(args: &Devices) -> Result<Answer, Failure> {
    if args.ask {
        return cards::answer();
    }
    if args.real {
        return cards::list(args.json);
    }
    if args.json {
        return Answer::json(&as_json(), true);
    }
    let mut text = Page::default();
    match cards::here() {
        CardsHere::Nothing => {}
        CardsHere::Cards(here) => {
            cards::table(&here, &mut text);
            text.push_str("\n");
        }
        CardsHere::Failed(why) => eprint_line(&why),
    }
    table(&mut text);
    Ok(Answer::page(text, true))
}

fn table(text: &mut Page) {
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

//! How many allocator events a replay makes in a second, on one core. Run with
//! `cargo bench -p memtrace-analysis`.
#![allow(missing_docs)]

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use memtrace_analysis::replay::requests::requests;
use memtrace_analysis::replay::run::{Card, Listener, listen};
use memtrace_analysis::replay::settings;
use memtrace_caching::{Event, Sink};
use memtrace_format::snapshot::Snapshot;

/// Each cell runs for so long, at least.
const LONG: Duration = Duration::from_millis(1500);

#[derive(Default)]
struct Count(u64);

impl Sink for Count {
    fn event(&mut self, _: &Event) {
        self.0 += 1;
    }
}

impl Listener for Count {
    fn at(&mut self, _: u32) {}
}

fn load(name: &str) -> Snapshot {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/snapshots")
        .join(format!("{name}.pickle.gz"));
    let mut bytes = Vec::new();
    GzDecoder::new(File::open(&path).expect("there")).read_to_end(&mut bytes).expect("intact");
    Snapshot::read(&bytes).expect("a snapshot")
}

fn main() {
    println!("| snapshot | settings | events | million events/s |\n|---|---|---|---|");
    for name in [
        "finetune_torch21",
        "lm24_ctx1024_infer",
        "lm24_ctx128_train",
        "lm24_ctx512_train_bf16",
        "lm_ctx256_fullstep_freed",
    ] {
        let snapshot = load(name);
        let asked = requests(&snapshot, 0);
        for conf in ["", "expandable_segments:True", "max_split_size_mb:128"] {
            let settings = settings(conf).expect("valid").settings;
            let start = Instant::now();
            let (mut events, mut best, mut total) = (0, f64::MAX, Duration::ZERO);
            while total < LONG {
                let before = Instant::now();
                let (outcome, count, _) =
                    listen(&asked, &settings, Card::default(), Count::default());
                assert!(outcome.fits());
                best = best.min(before.elapsed().as_secs_f64());
                events = count.0;
                total = start.elapsed();
            }
            let conf = if conf.is_empty() { "(none)" } else { conf };
            println!("| {name} | {conf} | {events} | {:.1} |", events as f64 / best / 1e6);
        }
    }
}

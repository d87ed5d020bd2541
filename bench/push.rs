//! What one event costs the thread that it happens in, without Python and PyTorch: the stack, and
//! the event's way into the ring. `cargo bench -p memtrace --bench push`.
//!
//! Threads allocate and free in turn, at a depth of so many frames of Rust. Another thread keeps
//! room in the ring, as the background thread does. The clock is read around batches short
//! enough to fit between two visits of the scheduler. So the median and the 99th percentile are
//! those of events that nobody interrupted.
#![allow(missing_docs)]

use std::collections::HashMap;
use std::ffi::OsString;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memtrace::config::Config;
use memtrace::os::clock;
use memtrace::process::Process;
use memtrace::record::{Recorder, guard};
use memtrace::stack::Site;
use memtrace_format::event::{BlockEvent, Event, Kind};

const BATCH: u64 = 64;
const BATCHES: usize = 4000;
/// Blocks that a thread holds at a time.
const BLOCKS: u64 = 64;

fn main() {
    let folder = std::env::temp_dir().join(format!("memtrace-bench-{}", std::process::id()));
    println!("| stacks | frames | threads | p50, ns | p99, ns |\n|---|---|---|---|---|");
    for stacks in ["none", "all"] {
        let set = HashMap::from([
            ("MEMTRACE_OUT", OsString::from(&folder)),
            ("MEMTRACE_STACKS", stacks.into()),
            ("MEMTRACE_QUIET", "1".into()),
        ]);
        let config = Config::from(|name| set.get(name).cloned());
        let recorder: &Recorder =
            &Box::leak(Box::new(Process::new(config).expect("memory"))).recorder;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    recorder.retire_ahead();
                    recorder.stacks.refresh();
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            for frames in [10, 40, 80] {
                for threads in [1, 2, 8] {
                    let (p50, p99) = measure(recorder, frames, threads);
                    println!("| {stacks} | {frames} | {threads} | {p50} | {p99} |");
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        recorder.blackbox.remove();
    }
    let _ = std::fs::remove_dir(folder);
}

/// Nanoseconds an event in the middle batch, and in the 99th of a hundred.
fn measure(recorder: &Recorder, frames: u32, threads: u64) -> (u128, u128) {
    let together = Barrier::new(threads as usize);
    let times = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let together = &together;
                scope.spawn(move || {
                    let mut batches = || {
                        together.wait();
                        (0..BATCHES).map(|i| batch(recorder, thread, i as u64)).collect::<Vec<_>>()
                    };
                    at_depth(frames, &mut batches)
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().expect("no panic")).collect::<Vec<_>>()
    });
    let mut times: Vec<Duration> = times.concat();
    times.sort_unstable();
    let at = |percent: usize| times[times.len() * percent / 100].as_nanos() / u128::from(BATCH);
    (at(50), at(99))
}

/// Calls itself so often; each call has a frame of its own.
#[inline(never)]
fn at_depth<T>(frames: u32, then: &mut dyn FnMut() -> T) -> T {
    let result = if frames <= 1 { then() } else { at_depth(frames - 1, then) };
    black_box(result)
}

fn batch(recorder: &Recorder, thread: u64, batch: u64) -> Duration {
    let start = Instant::now();
    for i in 0..BATCH {
        let n = batch * BATCH + i;
        let allocates = n % (2 * BLOCKS) < BLOCKS;
        let (kind, site) =
            if allocates { (Kind::Alloc, Site::Alloc) } else { (Kind::FreeRequested, Site::Free) };
        let addr = (thread << 32) + (n % BLOCKS + 1) * 512;
        let event = Event {
            time_ns: clock::now_ns(),
            stack: guard::local(|local| recorder.stacks.capture(&local.stacks, site)),
            thread: thread as u32,
            ..BlockEvent { addr, asked: 500, size: 512, stream: 0 }.event(kind)
        };
        black_box(recorder.write(&event));
    }
    start.elapsed()
}

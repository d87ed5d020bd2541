//! How long it takes to write a million trace entries as they come, and how long
//! the file is. Run with `cargo bench`.
#![allow(missing_docs)]

use std::time::Instant;

use memtrace_format::snapshot::{Action, Frame, Snapshot, Trace, TraceEntry};
use memtrace_format::stream::Stream;

const ENTRIES: u32 = 1_000_000;
const STACKS: u32 = 2000;
const DEPTH: u32 = 60;

fn main() {
    let frames = (0..STACKS * 4).map(|n| Frame {
        name: format!("function_{n}"),
        filename: format!("/home/user/project/file_{}.py", n % 97),
        line: u64::from(n),
    });
    let stack = |s| (0..DEPTH).map(|d| (s * 7 + d * 13) % (STACKS * 4)).collect();
    let entry = |n: u32| TraceEntry {
        action: [Action::Alloc, Action::FreeRequested, Action::FreeCompleted][n as usize % 3]
            .clone(),
        addr: 0x7f12_0000_0000 + u64::from(n / 3 % 50_000) * 0x12_3400,
        size: u64::from(n / 3 % 1000) * 40_004,
        stream: 0,
        time_us: Some(1_795_812_485_906_378 + i64::from(n)),
        compile_context: Some("N/A".into()),
        user_metadata: Some("".into()),
        pool_id: Some((0, 0)),
        frames: Some(n % STACKS),
    };
    let snapshot = Snapshot {
        frames: frames.collect(),
        stacks: (0..STACKS).map(stack).collect(),
        ..Snapshot::default()
    };
    for _ in 0..3 {
        let mut bytes = Vec::with_capacity(100 << 20);
        let start = Instant::now();
        let mut stream = Stream::pickle(&mut bytes).expect("memory");
        for n in 0..ENTRIES {
            stream.entry(Trace::Device(0), entry(n), snapshot.tables()).expect("written");
        }
        stream.finish(&snapshot, snapshot.tables()).expect("written");
        let written = start.elapsed();
        let start = Instant::now();
        let again = Snapshot::read(&bytes).expect("read");
        let read = start.elapsed();
        assert_eq!(again.device_traces[0].len(), ENTRIES as usize);
        let per_entry = bytes.len() as f64 / f64::from(ENTRIES);
        println!("written in {written:.0?}, {per_entry:.1} bytes an entry; read in {read:.0?}");
    }
}

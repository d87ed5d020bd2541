//! Frees that wait for events, of blocks in pools of high numbers, written down by two
//! threads until the process is killed.
//!
//! `deferred run LEDGER SEED` does it, and says in the mapped file how many events of each
//! thread are written. `deferred expect SEED THREAD N` says what of a thread's blocks is
//! there after N of its events, and after N + 1: a line each of address and state, by a
//! model in the plainest possible terms.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memtrace::config::Config;
use memtrace::process::Process;
use memtrace::record::Recorder;
use memtrace_format::event::{Event, FLAG_PENDING, Kind, Layer, Pool};

const THREADS: u64 = 2;
const BLOCKS: u64 = 64;
const SEGMENT: u64 = 2 << 20;

/// A block that is there: does its free wait, and for what?
struct Block {
    pending: bool,
    waits: Vec<u64>,
}

/// What one thread does.
struct Thread {
    number: u64,
    random: u64,
    blocks: BTreeMap<u64, Block>,
    /// Events whose wait is still to be reported: block, and how many.
    to_wait: Option<(u64, u64)>,
    handles: u64,
    written: u64,
}

impl Thread {
    fn new(seed: u64, number: u64) -> Thread {
        let random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((number + 1) << 20);
        Thread { number, random, blocks: BTreeMap::new(), to_wait: None, handles: 0, written: 0 }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 20) % n
    }

    fn addr(&self, block: u64) -> u64 {
        ((self.number + 1) << 40) + block * SEGMENT
    }

    fn event(&self, kind: Kind, block: u64, extra: u64) -> Event {
        Event {
            pool: Pool(128 + (block * 1021) as u16 % 65_408), // any from 128 on
            time_ns: 1_700_000_000_000_000_000 + self.written,
            addr: self.addr(block),
            size: SEGMENT,
            extra,
            stream: block % 3,
            thread: self.number as u32 + 1,
            ..Event::new(kind, Layer::Framework)
        }
    }

    /// The next event, of which the model knows then.
    fn next(&mut self) -> Event {
        self.written += 1;
        if self.written <= BLOCKS {
            return self.event(Kind::SegmentAlloc, self.written - 1, 0);
        }
        if let Some((block, left)) = self.to_wait.take() {
            self.to_wait = (left > 1).then_some((block, left - 1));
            self.handles += 1;
            let handle = ((self.number + 1) << 40) + self.handles;
            self.blocks.get_mut(&block).expect("there").waits.push(handle);
            return self.event(Kind::WaitsFor, block, handle);
        }
        let block = self.below(BLOCKS);
        let (choice, waits) = (self.below(4), 1 + self.below(3));
        match self.blocks.get_mut(&block) {
            None => {
                self.blocks.insert(block, Block { pending: false, waits: Vec::new() });
                self.event(Kind::Alloc, block, SEGMENT)
            }
            Some(known) if known.pending => {
                let at = choice as usize % known.waits.len();
                let handle = known.waits.swap_remove(at);
                if known.waits.is_empty() {
                    self.blocks.remove(&block);
                }
                self.event(Kind::EventReady, block, handle)
            }
            Some(known) if choice > 0 => {
                known.pending = true;
                self.to_wait = Some((block, waits));
                let free = self.event(Kind::FreeRequested, block, SEGMENT);
                Event { flags: FLAG_PENDING, ..free }
            }
            Some(_) => {
                self.blocks.remove(&block);
                self.event(Kind::FreeRequested, block, SEGMENT)
            }
        }
    }

    fn say(&self) {
        let state = |b: &Block| if b.pending { "active_pending_free" } else { "active_allocated" };
        let all = self.blocks.iter().map(|(n, b)| format!("{} {}", self.addr(*n), state(b)));
        println!("{}", all.collect::<Vec<_>>().join(","));
    }
}

/// A word for each thread in a file, which the kernel keeps.
fn ledger(path: &str) -> &'static [AtomicU64] {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.expect("a file");
    file.set_len(THREADS * 8).expect("room");
    // SAFETY: a mapping of a file of this length, which stays; zeros are valid atomics.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (length, fd) = (THREADS as usize * 8, file.as_raw_fd());
        let at = libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts(at.cast(), THREADS as usize)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |i: usize| arguments[i].parse::<u64>().expect("a number");
    if arguments[1] == "expect" {
        let mut thread = Thread::new(number(2), number(3));
        (0..number(4)).for_each(|_| _ = thread.next());
        thread.say();
        thread.next();
        thread.say();
        return;
    }
    let done = ledger(&arguments[2]);
    let recorder: &Recorder =
        &Box::leak(Box::new(Process::new(Config::from_env()).expect("memory"))).recorder;
    std::thread::scope(|scope| {
        for t in 0..THREADS {
            let mut thread = Thread::new(number(3), t);
            scope.spawn(move || {
                loop {
                    recorder.write(&thread.next());
                    done[t as usize].store(thread.written, Ordering::Release);
                }
            });
        }
        loop {
            recorder.retire_ahead();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

//! A black box in which some words are others. It has eight sorts of region, all of words, and most of it is zeros: so the
//! input is a list of changes to a small one that is sound, which is made here as a recorder makes it.

#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use memtrace_format::blackbox::{
    BlackBox, HEADER_WORDS, LIVE, LIVE_FIRST, MAGIC, REGIONS, VERSION, at,
};
use memtrace_format::event::{Event, Kind, Layer, Pool, WORDS, What};
use memtrace_format::json::Stacks;
use memtrace_format::snapshot::Snapshot;
use memtrace_format::stacks::{
    CODE_FIXED, CODE_MAGIC, DEPOT_FULL, DEPOT_MAGIC, DepotShape, HEAD_CAPACITY, HEAD_NEXT, HEADER,
    MODULE_FIXED, MODULE_MAGIC, RECORD_READY, RawFrame,
};
use memtrace_naming::Encoding;

const SLOTS: usize = 16;

#[derive(Arbitrary, Debug)]
struct Change {
    /// 0 is the header, then the regions.
    place: u8,
    word: u16,
    how: How,
}

#[derive(Arbitrary, Debug)]
enum How {
    Set(u64),
    Small(u8),
    Flip(u8),
    Byte(u8, u8),
    FromEnd(u16),
}

#[derive(Arbitrary, Debug)]
struct Input {
    changes: Vec<Change>,
    cut: Option<u32>,
    json: bool,
}

struct Sound {
    words: Vec<u64>,
    /// First word and number of words of the header and of each region.
    places: Vec<(usize, usize)>,
}

static SOUND: LazyLock<Sound> = LazyLock::new(sound);
static FILE: LazyLock<PathBuf> = LazyLock::new(|| memtrace_fuzz::scratch("snapshot"));

fuzz_target!(|input: Input| {
    let mut words = SOUND.words.clone();
    for change in &input.changes {
        let (start, length) = SOUND.places[usize::from(change.place) % SOUND.places.len()];
        if length == 0 {
            continue;
        }
        let word = &mut words[start + usize::from(change.word) % length];
        *word = match change.how {
            How::Set(value) => value,
            How::Small(value) => value.into(),
            How::Flip(bit) => *word ^ 1 << (bit % 64),
            How::Byte(at, value) => {
                let mut bytes = word.to_le_bytes();
                bytes[usize::from(at % 8)] = value;
                u64::from_le_bytes(bytes)
            }
            How::FromEnd(value) => u64::MAX - u64::from(value),
        };
    }
    (words[at::MAGIC], words[at::VERSION]) = (MAGIC, VERSION);
    let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    bytes.truncate(input.cut.map_or(usize::MAX, |cut| cut as usize));
    let Ok(file) = BlackBox::open(&bytes[..]) else { return };
    let encoding = if input.json { Encoding::Json(Stacks::Shared) } else { Encoding::Pickle };
    // Of one that is alive the reader waits for what is being written.
    if memtrace_naming::snapshot(&file, false, "recovered", 5, (&FILE, encoding)).is_ok() {
        let written = std::fs::read(&*FILE).expect("just written");
        let snapshot = Snapshot::read(&written).expect("our own");
        memtrace_fuzz::questions(&snapshot);
    }
});

fn event(kind: Kind, layer: Layer, addr: u64, size: u64) -> Event {
    Event {
        kind,
        layer,
        device: 0,
        flags: 0,
        api: 1,
        what: What::Device,
        pool: Pool::DEFAULT,
        time_ns: 1_700_000_000_000_000_000,
        addr,
        size,
        extra: size,
        stream: 0,
        stack: 2,
        thread: 7,
        label: 0,
    }
}

fn region(magic: u64, next: u64) -> Vec<u64> {
    let mut words = vec![0; 400];
    words[0] = magic;
    words[HEAD_CAPACITY] = HEADER as u64;
    words[HEAD_NEXT] = next;
    words
}

fn record<const N: usize>(region: &mut [u64], head: u64, fixed: [u64; N], strings: &[&[u8]]) -> u32 {
    let at = region[HEAD_NEXT] as usize;
    region[at + 1..at + 1 + N].copy_from_slice(&fixed);
    let bytes = strings.concat();
    for (cell, bytes) in region[at + 1 + N..].iter_mut().zip(bytes.chunks(8)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        *cell = u64::from_le_bytes(word);
    }
    let length = 1 + N + bytes.len().div_ceil(8);
    region[at] = RECORD_READY | head | length as u64;
    region[HEAD_NEXT] += length as u64;
    at as u32
}

/// A function, a library, a stack of both; old blocks and a history in each of the layers; a description.
fn sound() -> Sound {
    let mut codes = region(CODE_MAGIC, HEADER as u64);
    let fixed = [0, 0, 7, 1, 4 | 4 << 32];
    assert_eq!(fixed.len() + 1, CODE_FIXED);
    let code = record(&mut codes, 10 << 32, fixed, &[b"f", b"a.py", &[2, 0, 2, 1]]);
    let mut modules = region(MODULE_MAGIC, HEADER as u64);
    let path = b"/nowhere/libx.so";
    let fixed = [0x1000, 0x1000, 0x2000, 0, (path.len() as u64) << 32, 0];
    assert_eq!(fixed.len() + 1, MODULE_FIXED);
    record(&mut modules, 0, fixed, &[path]);

    let mut depot = region(DEPOT_MAGIC, u64::from(DEPOT_FULL) + 1);
    let shape = DepotShape::of(depot.len()).expect("large enough");
    let frames = [RawFrame::Python { code, unit: Some(1) }, RawFrame::Native { pc: 0x1010, epoch: 0 }];
    for (depth, frame) in (1_u64..).zip(frames) {
        let new = depot[HEAD_NEXT] as u32;
        let at = shape.node(new).expect("room");
        depot[at] = frame.pack();
        depot[at + 1] = u64::from(if depth == 1 { 0 } else { new - 1 }) | depth << 32;
        depot[HEAD_NEXT] += 1;
    }

    let put = |words: &mut [u64], slot: usize, first: u64, event: Event| {
        words[slot * WORDS] = first;
        words[slot * WORDS + 1..][..WORDS - 1].copy_from_slice(&event.pack());
    };
    let mut live = vec![0; LIVE_FIRST * WORDS];
    put(&mut live, 9, LIVE, event(Kind::Alloc, Layer::Device, 0x1000, 100));
    put(&mut live, 10, LIVE, event(Kind::SegmentAlloc, Layer::Framework, 0x40_0000, 0x20_0000));
    let mut ring = vec![0; SLOTS * WORDS];
    let history = [
        event(Kind::Alloc, Layer::Device, 0x2000, 200),
        event(Kind::SegmentMap, Layer::Framework, 0x80_0000, 0x40_0000),
        event(Kind::Alloc, Layer::Framework, 0x40_0000, 0x200),
        event(Kind::WaitsFor, Layer::Framework, 0x40_0000, 0x200),
        event(Kind::FreeRequested, Layer::Framework, 0x40_0000, 0x200),
        event(Kind::Measured, Layer::Device, 5, 9),
        event(Kind::FreeRequested, Layer::Device, 0x1000, 0),
    ];
    for (ticket, event) in (20_usize..).zip(history) {
        put(&mut ring, ticket % SLOTS, ticket as u64 + 1, event);
    }
    let mut about = br#"{"pid":7,"host":"h","entry_points":["none","cudaMalloc"],"virtual":{"spec":"h100","devices":[{"device":0,"total":9}]},"stacks":{"mode":"all"}}"#.to_vec();
    let about_bytes = about.len() as u64;
    about.resize(about.len().next_multiple_of(8), b' ');
    let about: Vec<u64> = about.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    let doors = vec![0, 0x1010, 0x2000, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let labels = vec![0; 64];

    let mut words = vec![0; HEADER_WORDS];
    let mut places = vec![(0, 160)];
    let regions: [Vec<u64>; REGIONS] = [ring, live, depot, codes, modules, about, doors, labels];
    for (i, region) in regions.iter().enumerate() {
        words[at::REGIONS + 2 * i] = words.len() as u64 * 8;
        words[at::REGIONS + 2 * i + 1] = region.len() as u64 * 8;
        // Of the live table's slots those with something in them are worth changing, and some behind.
        let worth = if i == 1 { 12 * WORDS } else { region.len() };
        places.push((words.len(), worth));
        words.extend(region);
    }
    for (i, value) in [
        (at::PID, 7),
        (at::ABOUT_BYTES, about_bytes),
        (at::RING_CAPACITY, SLOTS as u64),
        (at::HEAD, 27),
        (at::RETIRED, 20),
        (at::LIVE_SEQUENCE, 40),
    ] {
        words[i] = value;
    }
    Sound { words, places }
}

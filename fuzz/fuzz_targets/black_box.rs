//! A black box in which some words are others. It has eight kinds of region, all of words, and most
//! of it is zeros. So the input is a list of changes to a small one that is sound.

#![no_main]

use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use memtrace_files::{NewFile, Readers};
use memtrace_format::blackbox::{BlackBox, HEADER_WORDS, MAGIC, REGIONS, VERSION, at};
use memtrace_format::event::{Event, Kind, Layer};
use memtrace_format::json::Stacks;
use memtrace_format::made::{Made, black_box};
use memtrace_format::snapshot::Snapshot;
use memtrace_format::stacks::RawFrame;
use memtrace_snapshot::Encoding;

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
    /// Where this is 7, of 8, the snapshot is read, and asked; the other targets do that to
    /// all of theirs. Short inputs have 0.
    ask: u8,
}

struct Sound {
    bytes: Vec<u8>,
    /// First word and number of words of the header's part in use and of each region.
    places: Vec<(usize, usize)>,
}

static SOUND: LazyLock<Sound> = LazyLock::new(sound);
/// In memory where there is room for it, without a name from the
/// beginning, and used again by every run.
static FILE: LazyLock<NewFile> = LazyLock::new(|| {
    let new = NewFile::within(&memtrace_fuzz::folder(), Readers::Owner).expect("made");
    std::fs::remove_file(new.path()).expect("ours");
    new
});

fuzz_target!(|input: Input| {
    let mut bytes = SOUND.bytes.clone();
    for change in &input.changes {
        let (start, length) = SOUND.places[usize::from(change.place) % SOUND.places.len()];
        let word = &mut bytes.as_chunks_mut().0[start + usize::from(change.word) % length];
        let old = u64::from_le_bytes(*word);
        *word = match change.how {
            How::Set(value) => value.to_le_bytes(),
            How::Small(value) => u64::from(value).to_le_bytes(),
            How::Flip(bit) => (old ^ 1 << (bit % 64)).to_le_bytes(),
            How::FromEnd(value) => (u64::MAX - u64::from(value)).to_le_bytes(),
            How::Byte(at, value) => {
                word[usize::from(at % 8)] = value;
                *word
            }
        };
    }
    for (at, word) in [(at::MAGIC, MAGIC), (at::VERSION, VERSION)] {
        bytes.as_chunks_mut().0[at] = word.to_le_bytes();
    }
    bytes.truncate(input.cut.map_or(usize::MAX, |cut| cut as usize));
    let Ok(file) = BlackBox::open(&bytes[..]) else { return };
    let encoding = if input.json { Encoding::Json(Stacks::Shared) } else { Encoding::Pickle };
    // Of one that is alive the reader waits for what is being written.
    let written = memtrace_snapshot::of_black_box(&file, false, "recovered", 5, (&FILE, encoding));
    if written.is_err() || input.ask % 8 != 7 {
        return;
    }
    let file = FILE.file();
    let mut bytes = vec![0; file.metadata().expect("ours").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("just written");
    let snapshot = Snapshot::read(&bytes).expect("our own");
    memtrace_fuzz::questions(&snapshot);
});

fn event(kind: Kind, layer: Layer, addr: u64, size: u64) -> Event {
    Event {
        api: 1,
        time_ns: 1_700_000_000_000_000_000,
        addr,
        size,
        extra: size,
        stack: 2,
        thread: 7,
        ..Event::new(kind, layer)
    }
}

/// A function, a library, a stack of both; old blocks and a history in
/// each of the layers; a description.
fn sound() -> Sound {
    let mut stacks = Made::of_words(400);
    let code = stacks.function("f", "a.py", 7);
    stacks.library("/nowhere/libx.so", 0x1000..0x2000, 0, None);
    stacks.stack(&[
        RawFrame::Native { pc: 0x1010, epoch: 0 },
        RawFrame::Python { code, unit: Some(1) },
    ]);
    let live = [
        event(Kind::Alloc, Layer::Device, 0x1000, 100),
        event(Kind::SegmentAlloc, Layer::Framework, 0x40_0000, 0x20_0000),
    ];
    let history = [
        event(Kind::Alloc, Layer::Device, 0x2000, 200),
        event(Kind::SegmentMap, Layer::Framework, 0x80_0000, 0x40_0000),
        event(Kind::Alloc, Layer::Framework, 0x40_0000, 0x200),
        event(Kind::WaitsFor, Layer::Framework, 0x40_0000, 0x200),
        event(Kind::FreeRequested, Layer::Framework, 0x40_0000, 0x200),
        event(Kind::Measured, Layer::Device, 5, 9),
        event(Kind::FreeRequested, Layer::Device, 0x1000, 0),
    ];
    let about = r#"{"pid":7,"host":"h","entry_points":["none","cudaMalloc"],"virtual":{"spec":"h100","devices":[{"device":0,"total":9}]},"stacks":{"mode":"all"}}"#;
    let words = black_box(&live, &history, &stacks, about);
    let region = |i| [0, 1].map(|n| words[at::REGIONS + 2 * i + n] as usize / 8).into();
    // Of the header's words those that have a meaning are worth changing,
    // with the pasts of two devices.
    let header = (0, (at::PAST + 16).min(HEADER_WORDS));
    let places = [header].into_iter().chain((0..REGIONS).map(region)).collect();
    Sound { bytes: words.iter().flat_map(|w| w.to_le_bytes()).collect(), places }
}

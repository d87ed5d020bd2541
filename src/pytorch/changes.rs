//! Everything that changes what is allocated, in order, with what the thread was doing: for
//! `memtrace.MemTracker` and `memtrace.Tracer`.
//!
//! Four words for each block that PyTorch's allocator hands out or takes back, and for each
//! change of a thread's label, while a tracker asks. The reader works out what a block is *for*,
//! from tensors that it knows. What the thread was doing when it asked for the block is recorded
//! here, because it can't be known later.

use std::sync::atomic::Ordering;

use crate::hot::HOT;
use crate::os::sync::of_process;
use crate::pytorch::backward;
use crate::pytorch::journal::Journal;
use crate::pytorch::operators;
use crate::record::guard::{self, Local};

/// Words of a record: kind, work (from bit 4), device (bit 8), thread (bit 16) and label (bit 40);
/// address; bytes; the operator ([`operators::inside`]). So two of them are a line of the cache.
pub const WORDS: usize = 4;

/// A block was handed out.
const ALLOCATED: u64 = 1;
/// A block was taken back.
const FREED: u64 = 2;
/// The thread has another label.
const LABELLED: u64 = 3;
/// A block is a workspace of cuBLAS's.
const WORKSPACE: u64 = 4;

of_process! {
    static JOURNAL: Journal<WORDS> = Journal::empty();
}

/// One tracker more, or one less.
pub fn ask(on: bool) {
    // What comes later is another tracker's.
    let [upto, _] = JOURNAL.count();
    if on && HOT.changes.fetch_add(1, Ordering::AcqRel) == 0 {
        JOURNAL.begin();
    } else if !on && HOT.changes.fetch_sub(1, Ordering::AcqRel) == 1 {
        JOURNAL.leave(upto);
    }
}

/// Does a tracker ask?
#[inline]
pub fn asked() -> bool {
    HOT.changes.load(Ordering::Relaxed) > 0
}

/// See [`Journal::count`].
pub fn count() -> [u64; 2] {
    JOURNAL.count()
}

/// See [`Journal::read`].
pub fn read(from: u64, into: &mut [u64]) -> usize {
    JOURNAL.read(from, into)
}

/// All trackers have read the records before this number, or there is none.
pub fn release(upto: u64) {
    if asked() { JOURNAL.release(upto) } else { JOURNAL.leave(upto) }
}

/// A block was handed out, or, with `change` below zero, taken back.
#[inline]
pub fn block(local: &Local, addr: u64, change: i64, device: i8) {
    if asked() {
        let kind = if change > 0 { ALLOCATED } else { FREED };
        local.taken.set(if change > 0 { addr } else { 0 });
        write(local, kind | u64::from(device as u8) << 8, addr, change.unsigned_abs());
    }
}

/// The thread has another label from here on.
#[inline]
pub fn label(local: &Local) {
    if asked() {
        write(local, LABELLED, 0, 0);
    }
}

/// The calling thread hands cuBLAS this workspace, which it has done
/// before unless it took the block just now.
#[inline]
pub fn workspace(addr: u64) {
    if asked() && addr != 0 {
        guard::local(|local| {
            if local.taken.get() == addr {
                local.taken.set(0);
                write(local, WORKSPACE, addr, 0);
            }
        });
    }
}

fn write(local: &Local, first: u64, addr: u64, size: u64) {
    let work = backward::work(local) as u64;
    let (thread, label) = (u64::from(local.tid()), u64::from(local.label.get()));
    let first = first | work << 4 | (thread & 0xff_ffff) << 16 | label << 40;
    JOURNAL.write([first, addr, size, operators::inside(local)]);
}

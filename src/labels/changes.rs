//! Everything that changes what is allocated, in order, with what the thread was doing: for `memtrace.MemTracker` and
//! `memtrace.Tracer`.
//!
//! Five words for each block that PyTorch's allocator hands out or takes back, and for each change of a thread's label, while
//! a tracker asks. What a block is *for* is worked out by the reader, from tensors that it knows; what the thread was
//! doing when it asked for it is said here, because nobody can say it later.

use std::sync::atomic::Ordering;

use memtrace_format::event::LabelId;

use super::journal::Journal;
use super::operators;
use super::torch::{self, Work};
use crate::hot::HOT;

/// Words of a record: sort, work (from bit 8), device (bit 16), thread (bit 32); label; address; bytes; the operator
/// ([`operators::inside`]).
pub const WORDS: usize = 5;

/// A block was handed out.
const ALLOCATED: u64 = 1;
/// A block was taken back.
const FREED: u64 = 2;
/// The thread has another label.
const LABELLED: u64 = 3;

static JOURNAL: Journal<WORDS> = Journal::empty();

/// One tracker more, or one less.
pub fn ask(on: bool) {
    if on {
        HOT.changes.fetch_add(1, Ordering::AcqRel);
    } else if HOT.changes.fetch_sub(1, Ordering::AcqRel) == 1 {
        JOURNAL.release(JOURNAL.count()[0]);
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

/// See [`Journal::release`].
pub fn release(upto: u64) {
    JOURNAL.release(upto);
}

/// A block was handed out, or, with `change` below zero, taken back.
#[inline]
pub fn block(tid: u32, label: LabelId, addr: u64, change: i64, device: i8) {
    if asked() {
        let sort = if change > 0 { ALLOCATED } else { FREED };
        write(tid, sort | u64::from(device as u8) << 16, label, addr, change.unsigned_abs());
    }
}

/// The thread has this label from here on.
#[inline]
pub fn label(tid: impl FnOnce() -> u32, label: LabelId) {
    if asked() {
        write(tid(), LABELLED, label, 0, 0);
    }
}

fn write(tid: u32, first: u64, label: LabelId, addr: u64, size: u64) {
    let work = match torch::work() {
        Work::Forward => 0,
        Work::Backward => 1,
        Work::Again => 2,
        Work::Accumulate => 3,
    };
    let first = first | work << 8 | u64::from(tid) << 32;
    JOURNAL.write([first, u64::from(label), addr, size, operators::inside()]);
}

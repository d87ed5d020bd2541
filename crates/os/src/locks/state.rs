//! The word of a lock, and who may change it how. Tried with every
//! interleaving of threads (`tests::model`).

/// An atomic word, or loom's.
pub trait Word {
    /// What it is; it may be older than what another thread knows.
    fn look(&self) -> u32;
    /// Makes one value the other, or says which one it is.
    fn change(&self, from: u32, to: u32) -> Result<u32, u32>;
}

impl Word for std::sync::atomic::AtomicU32 {
    #[inline]
    fn look(&self) -> u32 {
        self.load(std::sync::atomic::Ordering::Relaxed)
    }

    #[inline]
    fn change(&self, from: u32, to: u32) -> Result<u32, u32> {
        use std::sync::atomic::Ordering;
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
    }
}

/// Above the state: the age of whoever used it last.
const AGE_AT: u32 = 16;
/// One thread has it, to change what is behind it.
const WRITING: u32 = 1 << 15;
/// Somebody sleeps until it is free.
pub const WAITING: u32 = 1 << 14;
/// So many threads read.
const READING: u32 = WAITING - 1;

/// How it was found by whoever has it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// As the last one left it.
    Whole,
    /// In the middle of a change, by a thread that isn't here.
    Abandoned,
}

/// The last one who used it was another process.
#[derive(Debug)]
pub struct OfAnother;

/// For one thread alone. `is_held_here`: this thread had it when it forked.
#[inline]
pub fn take<W: Word>(
    word: &W,
    age: u32,
    more: u32,
    is_held_here: impl Fn() -> bool,
) -> Option<Taken> {
    let mut now = word.look();
    loop {
        let (is_ours, is_written) = (now >> AGE_AT == age, now & WRITING != 0);
        if is_ours && now & (WRITING | READING) != 0 || is_written && is_held_here() {
            return None;
        }
        let waiting = if is_ours { now & WAITING } else { 0 };
        match word.change(now, age << AGE_AT | WRITING | waiting | more) {
            Ok(_) if is_written => return Some(Taken::Abandoned),
            Ok(_) => return Some(Taken::Whole),
            Err(other) => now = other,
        }
    }
}

/// It was taken at this age. Must somebody be woken?
#[inline]
pub fn give_back<W: Word>(word: &W, age: u32) -> bool {
    let free = age << AGE_AT;
    // In a child that has taken it anew, it isn't this one's any more.
    word.change(free | WRITING, free).is_err()
        && word.change(free | WRITING | WAITING, free).is_ok()
}

/// Whoever waits notes that, and says what the word is meanwhile; `None`: it is free.
pub fn will_wait<W: Word>(word: &W) -> Option<u32> {
    let now = word.look();
    let is_noted = now & (WRITING | READING) != 0 && word.change(now, now | WAITING).is_ok();
    is_noted.then_some(now | WAITING)
}

/// To read. `false`: somebody is changing it.
#[inline]
pub fn read<W: Word>(word: &W, age: u32) -> Result<bool, OfAnother> {
    let mut now = word.look();
    loop {
        if now >> AGE_AT != age {
            return Err(OfAnother);
        }
        if now & WRITING != 0 || now & READING == READING {
            return Ok(false);
        }
        match word.change(now, now + 1) {
            Ok(_) => return Ok(true),
            Err(other) => now = other,
        }
    }
}

/// It was read, since this age. Must somebody be woken?
#[inline]
pub fn has_read<W: Word>(word: &W, age: u32) -> bool {
    let mut now = word.look();
    while now >> AGE_AT == age && now & READING != 0 {
        let is_last = now & READING == 1;
        let left = if is_last { age << AGE_AT } else { now - 1 };
        match word.change(now, left) {
            Ok(_) => return is_last && now & WAITING != 0,
            Err(other) => now = other,
        }
    }
    false
}

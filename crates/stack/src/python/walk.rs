//! The chain of Python frames of the calling thread.
//!
//! # What didn't change is not worked out again
//!
//! Where the chain goes from a frame depends on a few words of it. They say whose it is, its code
//! object, its position, and the link to its caller. What is written down of a frame depends on
//! these words and on which code object that is. A thread remembers both for every frame of its
//! last walk ([`Cache`]). A new walk that comes to a frame it knows compares word by word, frame by
//! frame outwards. If all are the same, so is the rest of the walk, whatever happened in between.
//! No frame is read before the link that leads to it was.
//!
//! A code object is known again because none has died since ([`super::deaths`]), or else by its
//! fingerprint ([`super::code`]). Within one walk it is alive, because a frame holds it. So its
//! fingerprint is checked once, at the outermost of the frames that run it.
//!
//! # Two words are enough in most versions
//!
//! They are the frame's position, a pointer into the code of a live object, and the link to its
//! caller. Whose a frame is follows from where it lies: what is not Python's is on the C stack,
//! where no frame of Python's ever is. A generator's counts for something else only while it has
//! not begun, and then isn't taken as known.
//!
//! Which frames share an evaluation (3.11) follows from its records: each is at the innermost frame
//! of its own. That is only of use among native frames. So a walk that isn't *placed* among them
//! begins with no record. It takes no frame as known that was found with one, nor the other way
//! round.
//!
//! What is compared is kept short, because that is all that most stacks cost: of a frame its
//! address and its position. The link to its caller is the address that is kept of the next frame.
//! The last one's is 0, as a walk that ended for any other reason is not remembered. No address is
//! taken from what has just been read, so the processor need not wait for one frame before it looks
//! at the next.

use memtrace_format::stacks::{RawFrame, Reason};

use super::code::{CodeTable, Memo, fingerprint};
use super::deaths;
use super::offsets::{
    Evaluation, LAYOUTS, Layout, OB_TYPE, OWNER_GENERATOR, OWNER_SHIM, Runtime, position,
    raw_position,
};
use super::read;
use crate::deep::Deep;

/// Frames that are kept of each end of a deep stack.
pub const HALF: usize = 128;
/// Links that are kept: frames, and what stands between evaluations.
pub const MAX: usize = 3 * HALF;
/// More links than this are never followed. A chain that long is damaged, or a recursion of which
/// the ends say nothing that its first thousands don't.
const MAX_STEPS: usize = 1 << 14;

/// A link of the chain: a frame of Python's, or what the interpreter puts between two evaluations.
#[derive(Clone, Copy, Default)]
pub struct Link {
    /// The frame as it is written down; 0 if it shows nothing.
    pub word: u64,
    /// An address inside the native frame of the main loop that runs it;
    /// `usize::MAX` if none is known.
    pub inside: usize,
    /// How many words the stack has up to and with this frame, where there are no native frames.
    pub words: u16,
    /// How many links up to and with this one show something.
    shown: u16,
    /// 3.11: the record of the evaluation that it belongs to.
    record: usize,
    code: usize,
    mark: u64,
    /// What it is.
    kind: Kind,
    /// No frame further out runs the same code.
    first: bool,
    /// It is the outermost of its evaluation, as a record says.
    outermost: bool,
}

/// What a link rests on besides its code: the frame, and the word that says its position. That it
/// leads to the next outer link is the other word. Apart from the links, because to look at these
/// words is most of what a stack costs.
#[derive(Clone, Copy, Default)]
#[repr(C, align(16))]
struct Check {
    frame: usize,
    at: u64,
}

/// A link as it is found.
#[derive(Clone, Copy, Default)]
struct Found {
    link: Link,
    check: Check,
    /// As in [`Cache`].
    outer: usize,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    #[default]
    Other,
    Frame,
    Shim,
}

const INDEX: usize = 512;

/// The frames of the last walk, outermost first. All zeros is an empty one.
#[repr(C)]
pub struct Cache {
    len: usize,
    /// Of the table of code objects; 0: nothing can be known again.
    serial: u64,
    /// How many code objects had died before the walk.
    deaths: u64,
    /// The record that the walk began with.
    record: usize,
    /// The index before which frames were left out; 0: none.
    gap: usize,
    kept: usize,
    /// The last two walks are the same.
    same: bool,
    /// Of each link, after one that is never anything but zero: what the outermost frame leads to.
    /// Beside the words above: an unchanged stack touches nothing else.
    checks: [Check; MAX + 1],
    /// Where there are records: of each link that is the outermost of its
    /// evaluation the caller's, if it has a caller.
    outers: [usize; MAX],
    links: [Link; MAX],
    /// From a frame's address to where it may be found.
    index: [u16; INDEX],
    /// Links while they are found, innermost first.
    fresh: [Found; MAX],
    /// Frames of a deep stack while they are found.
    ends: Deep<Link, HALF>,
}

#[inline]
fn slot(frame: usize) -> usize {
    (frame >> 3 ^ frame >> 12) % INDEX
}

impl Cache {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.same = self.len == 0;
        (self.len, self.gap, self.kept, self.serial) = (0, 0, 0, 0);
    }

    /// The links, outermost first.
    #[inline]
    pub fn links(&mut self) -> &mut [Link] {
        &mut self.links[..self.len]
    }

    /// Frames were left out before this index.
    #[inline]
    pub fn gap(&self) -> Option<usize> {
        (self.gap > 0).then_some(self.gap)
    }

    /// How many links, from the outermost, the last two walks have in common, for certain.
    #[inline]
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// What the links up to the one that is `known` rest on, innermost first: their indices, and
    /// each one's check with its caller's.
    #[inline(always)]
    fn checks_out_from(&self, known: usize) -> impl Iterator<Item = (usize, (&Check, &Check))> {
        let n = known + 1;
        self.checks[1..][..n].iter().zip(&self.checks[..n]).enumerate().rev()
    }

    /// Are the last two walks the same, for certain?
    #[inline]
    pub fn is_same(&self) -> bool {
        self.same
    }

    /// Puts the first `n` fresh links at the inner end of the first `kept` ones.
    #[inline]
    fn extend(&mut self, kept: usize, n: usize, memo: &mut Memo) {
        self.same = (kept, n) == (self.len, 0);
        (self.kept, self.len, self.gap) = (kept, kept + n, 0);
        let (mut inside, mut shown) = match self.links[..kept].last() {
            Some(last) => (last.inside, last.shown),
            None => (usize::MAX, 0),
        };
        for (i, found) in self.fresh[..n].iter().rev().enumerate() {
            let (at, mut link, check) = (kept + i, found.link, found.check);
            if link.kind == Kind::Shim {
                inside = check.frame;
            } else if link.outermost {
                inside = link.record;
            }
            shown += u16::from(link.word != 0);
            (link.inside, link.shown) = (inside, shown);
            link.first = match memo.outermost(link.code) {
                Some(other) if *other < at && self.links[*other].code == link.code => false,
                Some(other) => {
                    *other = at;
                    true
                }
                None => true,
            };
            let Some(place) = self.links.get_mut(at) else { break };
            *place = link;
            self.checks[at + 1] = check;
            self.outers[at] = found.outer;
            self.index[slot(check.frame)] = at as u16;
        }
    }

    /// Takes the two ends of a deep stack.
    fn take_ends(&mut self) {
        let n = self.ends.len();
        let mut inside = usize::MAX;
        for i in 0..n {
            let mut link = self.ends.get(n - 1 - i);
            // Here the outermost frame of an evaluation has it already.
            if link.inside != 0 {
                inside = link.inside;
            }
            link.inside = inside;
            self.links[i] = link;
        }
        (self.kept, self.len, self.serial, self.same) = (0, n, 0, false);
        self.gap = self.ends.gap().map_or(0, |from_inside| n - from_inside);
    }
}

/// Walks the calling thread's frames into `cache`; `placed` says whether they are to be placed
/// among native ones. Returns why there is nothing, or nothing more.
#[inline]
pub fn walk(
    runtime: &Runtime,
    codes: &CodeTable,
    serial: u64,
    memo: &mut Memo,
    cache: &mut Cache,
    placed: bool,
) -> Option<Reason> {
    let thread = match (runtime.finalizing(), runtime.thread_state()) {
        (true, _) => Err(Reason::Finalizing),
        (_, 0) => Err(Reason::NoThreadState),
        (_, thread) => Ok(thread),
    };
    let thread = match thread {
        Ok(thread) => thread,
        Err(why) => {
            cache.clear();
            return Some(why);
        }
    };
    if cache.serial != serial {
        cache.clear();
    }
    // Before anything is looked at: what dies from now on is not what this walk finds alive.
    let deaths = deaths::count();
    memo.begin(serial, deaths);
    let alive = cache.deaths == deaths;
    // SAFETY: `thread` is the calling thread's own state, in an
    // interpreter whose layout was checked.
    let start = unsafe { current(runtime.layout, thread, placed) };
    let record = start.1;
    // SAFETY: as above.
    let end = unsafe {
        match runtime.which {
            0 => follow::<0>(runtime, codes, memo, start, alive, cache),
            1 => follow::<1>(runtime, codes, memo, start, alive, cache),
            2 => follow::<2>(runtime, codes, memo, start, alive, cache),
            3 => follow::<3>(runtime, codes, memo, start, alive, cache),
            4 => follow::<4>(runtime, codes, memo, start, alive, cache),
            _ => {
                cache.clear();
                return Some(Reason::VersionUnknown);
            }
        }
    };
    let why = match end {
        End::Known { kept, fresh } => {
            cache.extend(kept, fresh, memo);
            (cache.serial, cache.deaths) = (serial, deaths);
            None
        }
        End::Damaged { fresh } => {
            cache.extend(0, fresh, memo);
            cache.serial = 0;
            Some(Reason::Truncated)
        }
        End::Deep(why) => {
            cache.take_ends();
            why
        }
    };
    cache.record = record;
    why.or_else(|| cache.links().iter().all(|l| l.word == 0).then_some(Reason::NoFrame))
}

/// How a walk ended.
enum End {
    /// At the outermost frame, or at a part that is as remembered.
    Known { kept: usize, fresh: usize },
    /// At something that can't be.
    Damaged { fresh: usize },
    /// There is more than is kept; both ends have been taken, unless there is a reason why not.
    Deep(Option<Reason>),
}

/// Where a walk begins: the thread's current frame, and the record of its
/// evaluation where there is one and it matters.
///
/// # Safety
/// `thread` is the state of the calling thread, in an interpreter with this layout.
#[inline(always)]
unsafe fn current(layout: &Layout, thread: usize, placed: bool) -> (usize, usize) {
    // SAFETY: a live thread state; the record it may point to is on this
    // thread's stack, or inside the state.
    unsafe {
        match (read(thread + layout.thread), layout.record) {
            (frame, None) => (frame, 0),
            (0, Some(_)) => (0, 0),
            (record, Some(current)) => {
                let has_records = matches!(layout.evaluation, Evaluation::Marked { .. });
                (read(record + current), if placed && has_records { record } else { 0 })
            }
        }
    }
}

/// Is the chain of the calling thread, for certain, what it was at the last walk, which was
/// for this table, placed or not? Looks at the versions of which two words a frame tell
/// that, as long as no code object dies.
#[inline(always)]
pub fn is_unchanged(runtime: &Runtime, serial: u64, cache: &Cache, placed: bool) -> bool {
    match runtime.which {
        2 => is_unchanged_in::<2>(runtime, serial, cache, placed),
        3 => is_unchanged_in::<3>(runtime, serial, cache, placed),
        4 => is_unchanged_in::<4>(runtime, serial, cache, placed),
        _ => false,
    }
}

/// Each version has a walk of its own above, and each of which two words say enough has its
/// comparison here. So no version is walked by what was made for another.
const _: () = {
    assert!(LAYOUTS.len() == 5, "a version that has no walk of its own");
    let mut which = 0;
    while which < LAYOUTS.len() {
        assert!(LAYOUTS[which].position_tells_code() == (which >= 2));
        which += 1;
    }
};

/// The same for one version.
#[inline(always)]
fn is_unchanged_in<const WHICH: usize>(
    runtime: &Runtime,
    serial: u64,
    cache: &Cache,
    placed: bool,
) -> bool {
    let layout = const { &LAYOUTS[WHICH] };
    // Before any frame is looked at, as in a walk.
    let alive = cache.deaths == deaths::count();
    if !alive || cache.serial != serial || !(1..=MAX).contains(&cache.len) {
        return false;
    }
    let thread = if runtime.finalizing() { 0 } else { runtime.thread_state() };
    // SAFETY: `thread` is the calling thread's own state, in an interpreter whose layout was
    // checked; the frame that it begins with is alive.
    thread != 0
        && unsafe {
            current(layout, thread, placed) == (cache.checks[cache.len].frame, cache.record)
                && changed(layout, cache, cache.len - 1, cache.record).is_none()
        }
}

/// The walk for one version: its offsets are constants, which makes it twice as fast.
///
/// # Safety
/// `start` is where the calling thread is now, in an interpreter whose layout is `LAYOUTS[WHICH]`.
unsafe fn follow<const WHICH: usize>(
    runtime: &Runtime,
    codes: &CodeTable,
    memo: &mut Memo,
    start: (usize, usize),
    alive: bool,
    cache: &mut Cache,
) -> End {
    let layout = const { &LAYOUTS[WHICH] };
    let (mut frame, mut record) = start;
    let (mut fresh, mut kept) = (0, 0);
    // Links at this index and further in are not what they were.
    let mut candidates = cache.len;
    while frame != 0 {
        // Most often the innermost frame is the one that it was.
        let known = match candidates.checked_sub(1) {
            Some(last) if fresh == 0 && cache.checks[last + 1].frame == frame => last,
            _ => cache.index[slot(frame)] as usize,
        };
        if known < candidates
            && let (Some(link), Some(check)) = (cache.links.get(known), cache.checks.get(known + 1))
            && (check.frame, link.record) == (frame, record)
        {
            // SAFETY: the frame is alive, and its address is the remembered one.
            let changed = unsafe {
                if alive && layout.position_tells_code() {
                    changed(layout, cache, known, record)
                } else {
                    changed_or_dead(layout, cache, known, record, alive)
                }
            };
            match changed {
                None => {
                    kept = known + 1;
                    break;
                }
                Some(first) => candidates = first,
            }
        }
        // SAFETY: a frame in the chain of this thread, which keeps it alive.
        let found = unsafe { look::<WHICH>(runtime, codes, memo, frame, record) };
        let (Some((found, next)), Some(place)) = (found, cache.fresh.get_mut(fresh)) else {
            if fresh < MAX {
                return End::Damaged { fresh };
            }
            break;
        };
        *place = found;
        fresh += 1;
        (frame, record) = next;
    }
    let shown = cache.fresh[..fresh].iter().filter(|found| found.link.word != 0).count();
    let shown = shown + cache.links[..kept].last().map_or(0, |l| l.shown as usize);
    if shown > 2 * HALF || fresh + kept > MAX || fresh == MAX {
        // SAFETY: as the caller promises.
        return End::Deep(unsafe {
            both_ends::<WHICH>(runtime, codes, memo, start, &mut cache.ends)
        });
    }
    End::Known { kept, fresh }
}

/// The innermost of the links up to the one that is `known` that is not as it was; `record` is that
/// one's. No code object has died since, and positions are pointers into them.
///
/// # Safety
/// The frame of the known link is a live frame of this thread, in an interpreter with this layout.
#[inline(always)]
unsafe fn changed(
    layout: &Layout,
    cache: &Cache,
    known: usize,
    mut record: usize,
) -> Option<usize> {
    let (previous, at, placed) = (layout.previous, layout.at, record != 0);
    for (i, (check, caller)) in cache.checks_out_from(known) {
        // SAFETY: the frame is alive: it is the first, or the link that
        // leads to it was found unchanged.
        let differs = unsafe {
            (read::<usize>(check.frame + previous) ^ caller.frame) as u64
                | (read::<u64>(check.frame + at) ^ check.at)
        };
        // SAFETY: as above; the frame is unchanged, and so is its record.
        if differs != 0 || placed && unsafe { left(layout, cache, i, &mut record) } {
            return Some(i);
        }
    }
    None
}

/// The same for all other versions and times. With positions that are numbers, or when objects
/// have died, the code is looked at, too.
///
/// # Safety
/// As for [`changed`].
unsafe fn changed_or_dead(
    layout: &Layout,
    cache: &Cache,
    known: usize,
    mut record: usize,
    alive: bool,
) -> Option<usize> {
    cache.checks_out_from(known).find_map(|(i, (check, caller))| {
        let link = &cache.links[i];
        // SAFETY: as in `changed`. The code object is alive if it is the one in the frame.
        let same = unsafe {
            read::<usize>(check.frame + layout.previous) == caller.frame
                && raw_position(layout, check.frame) == check.at
                && read::<usize>(check.frame + layout.code) == link.code
                && (alive || !link.first || fingerprint(layout, link.code) == link.mark)
                && (record == 0 || !left(layout, cache, i, &mut record))
        };
        (!same).then_some(i)
    })
}

/// Does the record of this link's evaluation no longer lead to the same outer one, or is that no
/// longer at the link's caller? If it does, `record` becomes the outer one. Nothing is asked where
/// the evaluation goes on further out.
///
/// # Safety
/// The link is unchanged but for that, and its record is alive, in an interpreter with this layout.
#[inline(always)]
unsafe fn left(layout: &Layout, cache: &Cache, link: usize, record: &mut usize) -> bool {
    let (Evaluation::Marked { next, .. }, Some(current)) = (layout.evaluation, layout.record)
    else {
        return false;
    };
    let outer = cache.outers[link];
    if outer == 0 {
        return false;
    }
    // SAFETY: as the caller promises; the outer record is alive if the inner one leads to it.
    let same = unsafe {
        read::<usize>(*record + next) == outer
            && read::<usize>(outer + current) == cache.checks[link].frame
    };
    *record = outer;
    !same
}

/// Looks at a frame. Returns what it is, and the frame and the record that it
/// leads to; `None` if it can't be a frame.
///
/// # Safety
/// `frame` is in the chain of the calling thread, and `record` that of its evaluation, in an
/// interpreter whose layout is `LAYOUTS[WHICH]`.
#[inline(always)]
unsafe fn look<const WHICH: usize>(
    runtime: &Runtime,
    codes: &CodeTable,
    memo: &mut Memo,
    frame: usize,
    record: usize,
) -> Option<(Found, (usize, usize))> {
    let layout = const { &LAYOUTS[WHICH] };
    if !frame.is_multiple_of(align_of::<usize>()) {
        return None;
    }
    let mut link = Link { record, ..Link::default() };
    let (mut outer, mut next_record) = (0, record);
    // SAFETY: the frame is alive, and only this thread changes it. A frame that is Python's has a
    // code object, which it keeps alive. Others are known by their owner or by the type of what is
    // in the code's place, which is always an object.
    unsafe {
        let owner = layout.owner.map_or(0, |at| read(frame + at));
        link.code = read(frame + layout.code);
        let previous: usize = read(frame + layout.previous);
        let mut check = Check { frame, at: raw_position(layout, frame) };
        if owner >= OWNER_SHIM {
            link.kind = Kind::Shim;
        } else {
            if link.code == 0 || !link.code.is_multiple_of(align_of::<usize>()) {
                return None;
            }
            // What isn't fixed by the words of the check is never the same again.
            let mut certain = false;
            if read::<usize>(link.code + OB_TYPE) == runtime.code_type {
                let at = position(layout, check.at, link.code);
                if at.begun || owner == OWNER_GENERATOR {
                    let (code, mark) = codes.id(layout, link.code, memo);
                    link.mark = mark;
                    link.word = RawFrame::Python { code, unit: u32::try_from(at.unit).ok() }.pack();
                    link.kind = Kind::Frame;
                    certain = at.begun;
                }
            }
            if !certain {
                check.at = !check.at;
            }
            if let Evaluation::Marked { mark, next } = layout.evaluation {
                link.outermost = record != 0 && read::<u8>(frame + mark) != 0;
                if link.outermost {
                    next_record = read(record + next);
                    if previous != 0 {
                        outer = next_record;
                    }
                }
            }
        }
        Some((Found { link, check, outer }, (previous, next_record)))
    }
}

/// The walk of a deep stack, of which both ends are kept.
///
/// # Safety
/// As for [`follow`].
#[cold]
unsafe fn both_ends<const WHICH: usize>(
    runtime: &Runtime,
    codes: &CodeTable,
    memo: &mut Memo,
    start: (usize, usize),
    ends: &mut Deep<Link, HALF>,
) -> Option<Reason> {
    ends.clear();
    let (mut frame, mut record) = start;
    for _ in 0..MAX_STEPS {
        if frame == 0 {
            return None;
        }
        // SAFETY: a frame in the chain of this thread, which keeps it alive.
        let Some((Found { mut link, .. }, next)) =
            (unsafe { look::<WHICH>(runtime, codes, memo, frame, record) })
        else {
            break;
        };
        let end = match link.kind {
            Kind::Shim => frame,
            _ if link.outermost => record,
            _ => 0,
        };
        if link.word != 0 {
            link.inside = 0;
            ends.push(link);
        }
        // The evaluation ends with the last frame that counts, unless that belongs to an earlier
        // one because this evaluation has none.
        if end != 0
            && let Some(last) = ends.last_mut()
            && last.inside == 0
        {
            last.inside = end;
        }
        (frame, record) = next;
    }
    Some(Reason::Truncated)
}

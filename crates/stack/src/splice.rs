//! One stack out of two: Python frames inside the native frames that run them.
//!
//! Both lists are put together from the outermost frame inwards: that is how the depot takes a
//! stack, and the outer part is what stays. A thread remembers the stack that it took last. A new
//! one goes on from the innermost native frame up to which both lists are the old ones. From there
//! on it compares word by word, and only from the first that differs on are nodes looked up.
//!
//! A Python frame belongs to the native frame in whose part of the stack its evaluation keeps its
//! record. Where that can't be said (the native walk was cut short), the frame stands outside of
//! all native ones.

use memtrace_format::stacks::{DEPOT_FULL, NO_STACK, RawFrame, Reason, StackId};

use super::depot::Depot;
use super::epoch::epoch;
use super::native::{self, Native};
use super::python::offsets::{Evaluation, Runtime};
use super::python::walk::{self, Link};

/// Most words of a stack: all frames, two gaps, two reasons.
const MAX_WORDS: usize = 2 * walk::HALF + native::MAX + 4;

/// What a stack holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Nothing.
    None = 0,
    /// Python frames.
    Python = 1,
    /// Python frames among native ones.
    All = 2,
}

/// The last stack of a thread. All zeros is none.
#[repr(C)]
pub struct Last {
    depth: usize,
    id: StackId,
    python_gap: bool,
    /// What else it depends on.
    kind: Kind,
}

/// What it is made of.
pub struct Words {
    /// Outermost first.
    words: [u64; MAX_WORDS],
    /// The ids of their nodes.
    ids: [StackId; MAX_WORDS],
}

/// What must be the same for a remembered stack to be of use.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// Which depot; 0: none.
    depot: u64,
    mode: u8,
    reasons: [u8; 2],
    epoch: u16,
}

impl Last {
    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.depth, self.kind.depot) = (0, 0);
    }

    /// The id, if the stack is one of this depot's, taken in this mode with the libraries
    /// of now, and nothing of it is missing.
    #[inline(always)]
    pub fn whole(&self, depot: u64, mode: Mode) -> Option<StackId> {
        let kind = Kind { depot, mode: mode as u8, reasons: [0, 0], epoch: epoch() };
        (self.kind == kind && self.depth > 0 && !self.python_gap).then_some(self.id)
    }
}

/// What a stack is made of, besides the frames.
pub struct Source<'a> {
    /// Where its nodes go.
    pub depot: &'a Depot,
    /// Tells that depot from others.
    pub serial: u64,
    /// The interpreter, if there is one.
    pub runtime: Option<&'a Runtime>,
    /// What is wanted.
    pub mode: Mode,
    /// Why Python frames are missing; why native ones are.
    pub reasons: [Option<Reason>; 2],
}

/// Puts a stack together and returns its id. In one body, since where it goes on and what comes
/// next share their positions in the lists, at every stack that is taken.
#[inline]
pub fn splice(
    source: &Source<'_>,
    python: &mut walk::Cache,
    native: &mut native::Cache,
    last: &mut Last,
    Words { words, ids }: &mut Words,
) -> StackId {
    let all = source.mode == Mode::All;
    let epoch = epoch();
    let kind = Kind {
        depot: source.serial,
        mode: source.mode as u8,
        reasons: source.reasons.map(|r| r.map_or(0, |r| r as u8)),
        epoch,
    };
    let (python_gap, native_gap) = (python.gap(), native.gap().filter(|_| all));
    let gaps = python_gap.is_some() || last.python_gap || native_gap.is_some();
    let usable = kind == last.kind && !gaps;
    if last.kind.depot != source.serial {
        last.depth = 0;
    }
    (last.kind, last.python_gap) = (kind, python_gap.is_some());
    let (mut python_kept, native_kept) = (python.kept(), native.kept());
    let same = python.is_same() && (!all || native.is_same());
    let (links, natives) = (python.links(), if all { native.frames_mut() } else { &mut [] });
    if all && let Some(runtime) = source.runtime {
        python_kept = python_kept.min(place(runtime, links, python_gap, natives));
    }
    if usable && same && last.depth > 0 {
        return last.id;
    }
    let mut out = Out { depot: source.depot, words, ids, known: last.depth, at: 0, id: NO_STACK };
    let elided = RawFrame::Elided.pack();

    // Everything up to and with this native frame, or Python frame where
    // there are none, is as it was.
    let (mut next, mut done) = (0, 0);
    let mut begin = true;
    if usable && all {
        // Also no other Python frame may stand further out now. Where it stands depends on itself:
        // the native frames of a call are the same whichever of two functions began an evaluation.
        let same = |i: usize| {
            let outside = natives[i].python_outside as usize;
            let border = i.checked_sub(1).map_or(usize::MAX, |out| natives[out].sp as usize);
            outside <= python_kept && links.get(outside).is_none_or(|link| link.inside < border)
        };
        if let Some(i) = (0..native_kept).rev().find(|i| same(*i)) {
            (next, done, begin) = (i + 1, natives[i].python_outside as usize, false);
            out.resume(natives[i].word_at as usize + 1);
        }
    } else if usable && let Some(link) = links[..python_kept].last() {
        (done, begin) = (python_kept, false);
        out.resume(link.words as usize);
    }
    if begin {
        for reason in source.reasons.into_iter().rev().flatten() {
            out.push(RawFrame::Missing(reason).pack());
        }
    }
    loop {
        // Of the Python frames that are left, those belong here that lie
        // further out than the next native frame.
        let border = match (natives.get(next), next.checked_sub(1)) {
            (None, _) => 0,
            (Some(_), None) => usize::MAX,
            (Some(_), Some(here)) => natives[here].sp as usize,
        };
        while let Some(link) = links.get_mut(done).filter(|link| link.inside >= border) {
            if python_gap == Some(done) {
                out.push(elided);
            }
            if link.word != 0 {
                out.push(link.word);
            }
            link.words = out.at as u16;
            done += 1;
        }
        let Some(frame) = natives.get_mut(next) else { break };
        if native_gap == Some(next) {
            out.push(elided);
        }
        (frame.word_at, frame.python_outside) = (out.at as u32, done as u32);
        out.push(RawFrame::Native { pc: frame.pc, epoch }.pack());
        next += 1;
    }
    let id = out.id;
    (last.depth, last.id) = (out.at, id);
    if id == DEPOT_FULL {
        last.clear();
    }
    id
}

/// A stack while it is put together, in the place of the last one.
struct Out<'a> {
    depot: &'a Depot,
    words: &'a mut [u64; MAX_WORDS],
    ids: &'a mut [StackId; MAX_WORDS],
    /// So many words of the last stack are still in place and of use.
    known: usize,
    at: usize,
    id: StackId,
}

impl Out<'_> {
    /// Takes the first `n` words over.
    #[inline]
    fn resume(&mut self, n: usize) {
        self.at = n.min(self.known);
        self.id = self.at.checked_sub(1).map_or(NO_STACK, |i| self.ids[i]);
    }

    #[inline]
    fn push(&mut self, word: u64) {
        let (Some(old), Some(id)) = (self.words.get_mut(self.at), self.ids.get_mut(self.at)) else {
            return; // `MAX_WORDS` is enough
        };
        if self.at >= self.known || *old != word {
            self.known = 0;
            *old = word;
            *id = self.depot.intern(self.id, word);
        }
        self.id = *id;
        self.at += 1;
    }
}

/// Before 3.11: gives each Python frame an address inside the native frame that runs it. Returns
/// how many, from the outermost, had it already.
#[inline]
fn place(runtime: &Runtime, links: &mut [Link], gap: Option<usize>, natives: &[Native]) -> usize {
    let total = links.len();
    if runtime.layout.evaluation != Evaluation::EachFrame {
        return total;
    }
    // Each main loop runs one frame. Counted from the inner end, where nothing is ever missing, as
    // far as the frames are there; beyond a gap, from the outer end.
    let loops = |frame: &&Native| runtime.eval.contains(&(frame.pc as usize).wrapping_sub(1));
    let (mut from_inside, mut from_outside) =
        (natives.iter().rev().filter(loops), natives.iter().filter(loops));
    let (outer, inner) = links.split_at_mut(gap.unwrap_or(0));
    let mut same = total;
    for (i, link) in inner.iter_mut().enumerate().rev() {
        let inside = from_inside.next().map_or(usize::MAX, |f| f.sp as usize);
        if link.inside != inside {
            link.inside = inside;
            same = i;
        }
    }
    for link in outer {
        link.inside = from_outside.next().map_or(usize::MAX, |f| f.sp as usize);
        same = 0;
    }
    same
}

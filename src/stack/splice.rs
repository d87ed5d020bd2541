//! One stack out of two: Python frames inside the native frames that run them.
//!
//! Both lists are put together from the outermost frame inwards, because that is how the depot takes a stack, and
//! because the outer part is what stays. A thread remembers the stack that it took last; a new one goes on from the
//! innermost native frame up to which both lists are the old ones, from there on compares word by word, and only
//! from the first that differs on are nodes looked up.
//!
//! A Python frame belongs to the native frame in whose part of the stack its evaluation keeps its record. Frames
//! of which that can't be said (the native walk was cut short) stand outside of all native ones.

use memtrace_format::stacks::{DEPOT_FULL, NO_STACK, RawFrame, Reason, StackId};

use super::Mode;
use super::depot::Depot;
use super::modules;
use super::native::{self, Native, Trail};
use super::python::offsets::{Evaluation, Runtime};
use super::python::walk::{Found, PYTHON_HALF, Step};

const PYTHON_MAX: usize = 2 * PYTHON_HALF;
/// Most words of a stack: all frames, two gaps, two reasons.
const MAX_WORDS: usize = PYTHON_MAX + native::MAX + 4;

/// The last stack of a thread. All zeros is none.
pub struct Last {
    /// Outermost first.
    words: [u64; MAX_WORDS],
    /// The ids of their nodes.
    ids: [StackId; MAX_WORDS],
    depth: usize,
    /// Its Python frames, outermost first.
    python: [Step; PYTHON_MAX],
    python_len: usize,
    python_gap: bool,
    /// What else it depends on.
    kind: Kind,
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
        (self.depth, self.python_len, self.kind.depot) = (0, 0, 0);
    }

    /// Takes over the Python frames of a new stack. Returns how many, from the outermost, it had already.
    fn take(&mut self, python: &Found) -> usize {
        let total = python.len();
        let mut same = 0;
        for i in 0..total {
            let step = python.get(total - 1 - i);
            if same == i && i < self.python_len && self.python[i] == step {
                same += 1;
            } else {
                self.python[i] = step;
            }
        }
        self.python_len = total;
        same
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

/// Puts a stack together and returns its id.
#[inline]
pub fn splice(
    source: &Source<'_>,
    python: &mut Found,
    trail: &mut Trail,
    last: &mut Last,
) -> StackId {
    let all = source.mode == Mode::All;
    if all {
        place(source.runtime, python, trail.frames());
    }
    let epoch = modules::epoch();
    let kind = Kind {
        depot: source.serial,
        mode: source.mode as u8,
        reasons: source.reasons.map(|r| r.map_or(0, |r| r as u8)),
        epoch,
    };
    let python_gap = python.gap().map(|inside| python.len() - inside);
    let (kept, native_gap) = if all { (trail.kept(), trail.gap()) } else { (0, None) };
    let whole = python_gap.is_none() && !last.python_gap && native_gap.is_none();
    let kept = if whole && kind == last.kind { kept } else { 0 };
    if last.kind.depot != source.serial {
        last.depth = 0;
    }
    (last.kind, last.python_gap) = (kind, python_gap.is_some());
    let same_python = last.take(python);

    let natives: &mut [Native] = if all { trail.frames() } else { &mut [] };
    let Last { words, ids, depth, python, python_len, .. } = last;
    let python = &python[..*python_len];
    let mut out = Out { depot: source.depot, words, ids, known: *depth, at: 0, id: NO_STACK };
    let elided = RawFrame::Elided.pack();

    // Everything up to and with this native frame is as it was.
    let resume =
        natives[..kept].iter().rposition(|frame| frame.python_outside as usize <= same_python);
    let (mut next, mut done) = (0, 0);
    if let Some(frame) = resume {
        next = frame + 1;
        done = natives[frame].python_outside as usize;
        out.resume(natives[frame].word_at as usize + 1);
    } else {
        for reason in source.reasons.into_iter().rev().flatten() {
            out.push(RawFrame::Missing(reason).pack());
        }
    }
    loop {
        // Of the Python frames that are left, those belong here that lie further out than the next native frame.
        let border = match (natives.get(next), next.checked_sub(1)) {
            (None, _) => 0,
            (Some(_), None) => usize::MAX,
            (Some(_), Some(here)) => natives[here].sp as usize,
        };
        while let Some(step) = python.get(done).filter(|step| step.inside >= border) {
            if python_gap == Some(done) {
                out.push(elided);
            }
            out.push(step.word);
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
    let (id, at) = (out.id, out.at);
    *depth = at;
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

/// Gives each Python frame an address inside the native frame that runs it; `usize::MAX` if none is known.
#[inline]
fn place(runtime: Option<&Runtime>, python: &mut Found, natives: &[Native]) {
    let Some(runtime) = runtime else { return };
    let total = python.len();
    if runtime.layout.evaluation != Evaluation::EachFrame {
        // The outermost frame of an evaluation has it already; so have, then, those that it called.
        let mut inside = usize::MAX;
        for i in (0..total).rev() {
            let step = python.get_mut(i);
            if step.inside == 0 {
                step.inside = inside;
            } else {
                inside = step.inside;
            }
        }
        return;
    }
    // Each main loop runs one frame. Counted from the inner end, where nothing is ever missing, as far as the
    // frames are there; beyond a gap, from the outer end.
    let loops = |frame: &&Native| runtime.eval.contains(&(frame.pc as usize).wrapping_sub(1));
    let near = python.gap().unwrap_or(total);
    let mut from_inside = natives.iter().rev().filter(loops);
    let mut from_outside = natives.iter().filter(loops);
    for i in 0..near {
        python.get_mut(i).inside = from_inside.next().map_or(usize::MAX, |f| f.sp as usize);
    }
    for i in (near..total).rev() {
        python.get_mut(i).inside = from_outside.next().map_or(usize::MAX, |f| f.sp as usize);
    }
}

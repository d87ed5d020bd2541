//! Native frames of the calling thread: return addresses, and how far out each frame reaches.
//!
//! The walk follows the rules of [`super::rules`]. It reads nothing but the thread's own stack,
//! between its stack pointer and the stack's end. So a wrong rule can give a wrong frame, but never
//! a fault. Where a rule is unknown, or the thread runs on another stack (a fiber's, a signal's),
//! another walk ([`odd`]) takes the whole stack instead. It is slower, reads as carefully, and
//! knows all there is to know: generated code whose tables were registered, signal frames, odd
//! tables. The system's own unwinder is never called: it believes what it reads.
//!
//! # What didn't change is not walked again
//!
//! A step out of a frame depends on three registers: instruction, stack and frame pointer. It
//! depends on the rule for the first, and on at most two words of the stack. Where these words lie
//! follows from the registers and the rule. The thread's [`Cache`] has the registers of every frame
//! of its last walk. Beside them it has a check (`Check`): where the two words lie, and what they
//! were.
//!
//! A new walk may come to a frame whose three registers are those of a remembered one. If its two
//! words are the same, too, the step leads to the same caller, and so on outwards. So comparing
//! words that are known beforehand proves, frame by frame, that the walk would go as before.
//! Nothing is assumed of what happened in between: frames may have been left and entered again.
//! Memtrace's own frames at the inner end are checked the same way before any other.
//!
//! Where a word differs, the walk goes on by the rules from there. Rules change only when a library
//! is unloaded. That changes [`super::rules::generation`], and then nothing is remembered. A step
//! that depends on a third word always fails its check.
//!
//! # Where the frame pointer does not matter it is not compared
//!
//! Most code uses that register for anything, such as a size that is another one each time. Its
//! value *matters* in a frame if the step out of the frame needs it, or hands it on to a frame
//! where it matters. That follows from the rules of this frame and of those further out alone.
//!
//! Take a frame whose other two registers are as remembered, and its frame pointer, too, if that
//! matters. If its words are as they were (the frame pointer's only if it matters in the caller),
//! the same is true of the caller. So a remembered frame pointer that does not matter may be out of
//! date. Where a walk leaves what is remembered it is read again, from where the nearest frame
//! further in keeps it.

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::stacks::Reason;

use self::odd::MAX_FRAMES;
use super::deep::Deep;
use super::registers::{Registers, here, stack_pointer, word};
use super::room::Room;
use super::rules::{Caller, Outcome, Rule, generation, rule_for};
use memtrace_libraries::objects::own_library;

/// Frames that are kept of each end of a deep stack.
pub const HALF: usize = 256;
/// Frames that are kept.
pub const MAX: usize = 2 * HALF;

/// A native frame.
#[derive(Clone, Copy, Default)]
pub struct Native {
    /// The address that its callee returns to.
    pub pc: u64,
    /// Its stack pointer; its callee's frame ends here.
    pub sp: u64,
    fp: u64,
    /// Where its word is in the stack that was last put together; see `splice.rs`.
    pub word_at: u32,
    /// How many Python frames stood further out.
    pub python_outside: u32,
}

/// What the step out of a frame rests on: two words of the stack, and what they were. Apart from
/// the frames, and with nothing to ask about it: to look at these words is most of what a stack
/// costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(32))]
struct Check {
    pc_at: u64,
    pc: u64,
    fp_at: u64,
    fp: u64,
}

/// Where a check looks that needs no word of the stack.
static ZERO: u64 = 0;

impl Check {
    /// The step rests on other words, too.
    fn never() -> Check {
        Check::that_holds(&raw const ZERO as u64, 1)
    }

    /// The step rests on this word alone.
    fn that_holds(at: u64, value: u64) -> Check {
        Check { pc_at: at, pc: value, fp_at: at, fp: value }
    }

    /// That the step is this one, and leads to this frame pointer if that matters.
    #[inline]
    fn of(step: &Step, fp: Option<u64>) -> Check {
        if step.pc_at == 0 {
            return Check::never();
        }
        let pc = Check::that_holds(step.pc_at, step.pc);
        match fp {
            Some(fp) if step.fp_at != 0 => Check { fp_at: step.fp_at, fp, ..pc },
            _ => pc,
        }
    }

    /// 0 if the step is certain to come to the remembered caller again.
    ///
    /// # Safety
    /// The thread's stack pointer is no further out than when the words were read, inside this
    /// thread's stack. So they lie in the part of it that is in use.
    #[inline(always)]
    unsafe fn differs(&self) -> u64 {
        // SAFETY: as promised; `ZERO` can always be read.
        unsafe { (word(self.pc_at) ^ self.pc) | (word(self.fp_at) ^ self.fp) }
    }
}

/// The innermost of these frames whose step outwards is no longer the same.
///
/// # Safety
/// As for [`Check::differs`].
#[inline(always)]
unsafe fn changed(checks: &[Check]) -> Option<usize> {
    // SAFETY: as promised.
    let differs = |check: &Check| unsafe { check.differs() };
    let mut same = 0;
    // One question for four frames.
    for four in checks.rchunks_exact(4) {
        if four.iter().fold(0, |all, check| all | differs(check)) != 0 {
            break;
        }
        same += 4;
    }
    checks[..checks.len() - same].iter().rposition(|check| differs(check) != 0)
}

/// The step out of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Where the return address is, and what it is; no place: it rests on other words, too.
    pc_at: u64,
    pc: u64,
    /// Where the caller's frame pointer is; 0: where this frame has it.
    fp_at: u64,
    /// It takes the frame pointer as it is in this frame to make it.
    needs_fp: bool,
    /// The frame pointer matters in this frame.
    fp_matters: bool,
}

impl Step {
    /// One that no rule has made.
    const UNKNOWN: Step = Step { pc_at: 0, pc: 0, fp_at: 0, needs_fp: true, fp_matters: true };

    /// By a rule that needs the frame pointer or not.
    fn by(caller: &Caller, needs_fp: bool) -> Step {
        let Caller { registers, pc_at, fp_at } = *caller;
        Step { pc_at, pc: registers.pc, fp_at, needs_fp, fp_matters: needs_fp }
    }

    /// Nowhere: the rule says so, or else the return address at this place is 0.
    fn end(rule: Rule, zero_at: Option<u64>) -> Step {
        let pc_at = match zero_at {
            Some(at) => at,
            None if rule == Rule::END => &raw const ZERO as u64,
            None => return Step::UNKNOWN,
        };
        let needs_fp = rule.needs_fp();
        Step { pc_at, pc: 0, fp_at: 0, needs_fp, fp_matters: needs_fp }
    }

    /// To a caller in which the frame pointer matters or not.
    fn to(self, matters: bool) -> Step {
        Step { fp_matters: self.needs_fp || self.fp_at == 0 && matters, ..self }
    }
}

/// A frame that was found, and the step out of it.
#[derive(Clone, Copy)]
struct Entry {
    frame: Native,
    step: Step,
}

/// Frames while they are found, innermost first.
pub struct Found(Deep<Entry, HALF>);

/// Most of memtrace's own frames that are remembered; a hook has half as many.
const OWN: usize = 16;

/// The frames of the last walk, outermost first. All zeros is an empty one.
#[repr(C, align(64))]
pub struct Cache {
    len: usize,
    /// The index before which frames were left out; 0: none.
    gap: usize,
    /// Of the rules that it was walked by; 0: not by rules, or not all of it.
    generation: u64,
    /// How many of the frames, counted from the outermost, are those of the walk before.
    kept: usize,
    /// The last two walks are the same.
    same: bool,
    /// Memtrace's own frames further in, which are in no stack, innermost
    /// first. More than `OWN`: too many.
    own_len: usize,
    /// Where the walk begins, in them if there are any.
    begin: Registers,
    /// The frame pointer matters there.
    fp_matters: bool,
    own: [Check; OWN],
    /// Of each frame. Beside the words above: an unchanged stack touches nothing else.
    checks: [Check; MAX],
    frames: [Native; MAX],
    steps: [Step; MAX],
    own_steps: [Step; OWN],
}

impl Cache {
    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.len, self.gap, self.generation, self.kept, self.own_len) = (0, 0, 0, 0, 0);
        (self.same, self.fp_matters) = (false, true);
    }

    /// The frames, outermost first.
    #[inline]
    pub fn frames_mut(&mut self) -> &mut [Native] {
        &mut self.frames[..self.len]
    }

    /// The same, to look at.
    #[inline]
    pub fn frames(&self) -> &[Native] {
        &self.frames[..self.len]
    }

    /// Frames were left out before this index.
    #[inline]
    pub fn gap(&self) -> Option<usize> {
        (self.gap > 0).then_some(self.gap)
    }

    /// How many frames, from the outermost, the last two walks have in common, for certain.
    #[inline]
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Are the last two walks the same, for certain?
    #[inline]
    pub fn is_same(&self) -> bool {
        self.same
    }

    /// Puts frames that were found at the inner end of the first `kept` ones.
    ///
    /// # Safety
    /// If there are frames of memtrace's own, they are active.
    #[inline]
    unsafe fn extend(&mut self, kept: usize, found: &Found) {
        let n = found.0.len();
        self.same = (kept, n) == (self.len, 0);
        for i in 0..n {
            let Entry { frame, step } = found.0.get(n - 1 - i);
            let fp = self.fp_that_matters(kept + i);
            self.checks[kept + i] = Check::of(&step, fp);
            self.steps[kept + i] = step.to(fp.is_some());
            self.frames[kept + i] = frame;
        }
        self.kept = kept;
        self.len = kept + n;
        self.gap = found.0.gap().map_or(0, |_| HALF);
        // SAFETY: as promised.
        unsafe { self.prove_own() };
    }

    /// The frame pointer in the frame outside of the `i`-th, if it matters there.
    #[inline]
    fn fp_that_matters(&self, i: usize) -> Option<u64> {
        let outside = i.checked_sub(1)?;
        self.steps[outside].fp_matters.then_some(self.frames[outside].fp)
    }

    /// Works out the checks of the steps out of memtrace's own frames.
    ///
    /// # Safety
    /// They are active.
    #[inline]
    unsafe fn prove_own(&mut self) {
        let mut fp = self.fp_that_matters(self.len);
        let n = self.own_len.min(OWN);
        // The frame pointer in each frame.
        let mut fps = [self.begin.fp; OWN];
        for i in 1..n {
            // SAFETY: as promised.
            fps[i] = unsafe { self.own_steps[i - 1].fp_outside(fps[i - 1]) };
        }
        for i in (0..n).rev() {
            let step = self.own_steps[i].to(fp.is_some());
            self.own[i] = Check::of(&step, fp);
            fp = step.fp_matters.then_some(fps[i]);
        }
        self.fp_matters = fp.is_some();
    }

    /// Does a walk from `here` come to no other frames than the last one,
    /// and to all of them, for certain?
    #[inline(always)]
    pub fn is_unchanged(&self, here: Registers) -> bool {
        // SAFETY: this is where the last walk was, too.
        generation() == Some(self.generation)
            && self.begins(here)
            && unsafe { changed(&self.checks[..self.len]) }.is_none()
    }

    /// Does a walk from `here`, under the same generation of rules, come to the
    /// innermost frame of the last one for certain?
    #[inline(always)]
    fn begins(&self, here: Registers) -> bool {
        let begin = self.begin;
        let at =
            (here.pc, here.sp) == (begin.pc, begin.sp) && (here.fp == begin.fp || !self.fp_matters);
        // SAFETY: this is where the last walk began, too.
        at && self.len > 0
            && self.own.get(..self.own_len).is_some_and(|own| unsafe { changed(own) }.is_none())
    }

    /// Where a walk that begins `here` leaves memtrace's own code, if it is there that the last
    /// one, under the same generation of rules, left it.
    #[inline]
    fn beyond_own(&self, here: Registers) -> Option<Registers> {
        let last = self.frames().last().filter(|_| self.begins(here))?;
        let mut fp = here.fp;
        for step in &self.own_steps[..self.own_len] {
            // SAFETY: these frames have just been proven to be those of the last walk.
            fp = unsafe { step.fp_outside(fp) };
        }
        Some(Registers { pc: last.pc, sp: last.sp, fp })
    }

    /// Is `here` the remembered frame, as far as it matters?
    #[inline]
    fn is_at(&self, i: usize, here: Registers) -> bool {
        let frame = &self.frames[i];
        (frame.pc, frame.sp) == (here.pc, here.sp)
            && (frame.fp == here.fp || !self.steps[i].fp_matters)
    }
}

impl Step {
    /// The frame pointer in the caller, if it is `fp` in the frame.
    ///
    /// # Safety
    /// The frame is active.
    #[inline]
    unsafe fn fp_outside(&self, fp: u64) -> u64 {
        // SAFETY: the frame keeps it there, which lies in the part of the stack that is in use.
        if self.fp_at == 0 { fp } else { unsafe { word(self.fp_at) } }
    }
}

/// Walks the calling thread's frames into `cache`, without memtrace's own at the inner end; `found`
/// is for the walk's own use. It begins `here`, in a frame of memtrace's that is still active.
/// Returns why it does not reach the outermost.
#[inline(never)]
pub fn walk(room: &Room, here: Registers, cache: &mut Cache, found: &mut Found) -> Option<Reason> {
    let generation = generation();
    if let Some(kept) = by_rules(room, here, cache, generation, found) {
        let too_many = found.0.gap().is_some() || kept + found.0.len() > MAX;
        if kept == 0 || !too_many {
            // SAFETY: here and below, memtrace's own frames are those that call this.
            unsafe { cache.extend(kept, found) };
            cache.generation = if too_many { 0 } else { generation.unwrap_or(0) };
            return None;
        }
        // Which frames are left out must not depend on what is remembered.
        if by_rules(room, here, cache, None, found).is_some() {
            // SAFETY: as above.
            unsafe { cache.extend(0, found) };
            cache.generation = 0;
            return None;
        }
    }
    let why = odd_walk(room, found);
    cache.own_len = 0;
    // SAFETY: there are no frames of memtrace's own.
    unsafe { cache.extend(0, found) };
    cache.generation = 0;
    why
}

/// The walk for all other stacks.
#[cold]
#[inline(never)]
fn odd_walk(room: &Room, found: &mut Found) -> Option<Reason> {
    let own = own_code();
    // Taken in this function, whose frame lasts: in a function handed to another one
    // it would be of a frame that is gone.
    let here = match room.left_at(stack_pointer() as u64) {
        Some(left) => left,
        None => here(),
    };
    let mut visit = |frame: Option<(u64, u64)>| {
        let Some((pc, sp)) = frame else {
            found.0.clear();
            return false;
        };
        let ours = found.0.is_empty() && (own.0..own.1).contains(&pc);
        if pc != 0 && !ours {
            let frame = Native { pc, sp, ..Native::default() };
            found.0.push(Entry { frame, step: Step::UNKNOWN });
        }
        false
    };
    visit(None);
    let whole = room.run(|| odd::walk(room, &here, &mut visit));
    (!whole).then_some(Reason::Truncated)
}

/// The walk by rules from `here`, until it comes to what is remembered under this generation and
/// unchanged. Returns how many frames that are; `None` if the walk has to be done otherwise.
#[inline(never)]
fn by_rules(
    room: &Room,
    mut here: Registers,
    cache: &mut Cache,
    generation: Option<u64>,
    found: &mut Found,
) -> Option<usize> {
    found.0.clear();
    let own_stack = room.in_use(here.sp);
    let (low, last) = (own_stack.start, own_stack.end.checked_sub(8)?);
    let read = |at: u64| {
        // SAFETY: the bytes between the stack pointer and the end of the
        // thread's own stack are mapped and readable.
        (at >= low && at <= last).then(|| unsafe { word(at) })
    };
    let own = own_code();
    let known = generation == Some(cache.generation);
    let border = if known { cache.beyond_own(here) } else { None };
    cache.begin = here;
    match border {
        Some(border) => here = border,
        None => cache.own_len = 0,
    }
    // Remembered frames below this index are further out than where the walk is.
    let mut candidates = if known { cache.len } else { 0 };
    for _ in 0..MAX_FRAMES {
        while let Some(last) = cache.frames[..candidates].last()
            && last.sp < here.sp
        {
            candidates -= 1;
        }
        // What is ours at the inner end may have stood in the middle of the last stack.
        let ours = found.0.is_empty() && (own.0..own.1).contains(&here.pc);
        if candidates > 0 && cache.is_at(candidates - 1, here) && !ours {
            // SAFETY: here is where the walk is, as another was before.
            let Some(changed) = (unsafe { changed(&cache.checks[..candidates]) }) else {
                return Some(candidates);
            };
            for i in (changed + 1..candidates).rev() {
                let (frame, step) = (Native { fp: here.fp, ..cache.frames[i] }, cache.steps[i]);
                found.0.push(Entry { frame, step });
                // SAFETY: this frame has just been proven to be that of the last walk.
                here.fp = unsafe { step.fp_outside(here.fp) };
            }
            (here.pc, here.sp) = (cache.frames[changed].pc, cache.frames[changed].sp);
            candidates = changed;
        }
        let frame = Native { pc: here.pc, sp: here.sp, fp: here.fp, ..Native::default() };
        let rule = rule_for(here.pc, room);
        match rule.step(here, read) {
            Outcome::Caller(caller) => {
                let step = Step::by(&caller, rule.needs_fp());
                here = caller.registers;
                if !ours {
                    found.0.push(Entry { frame, step });
                } else if let Some(place) = cache.own_steps.get_mut(cache.own_len) {
                    *place = step;
                    cache.own_len += 1;
                } else {
                    cache.own_len = OWN + 1;
                }
            }
            Outcome::End(zero_at) => {
                found.0.push(Entry { frame, step: Step::end(rule, zero_at) });
                return Some(0);
            }
            Outcome::Unknown => return None,
        }
    }
    None
}

/// The range of memtrace's own library; empty if it is part of the
/// program, but for a section of the tests.
pub(super) fn own_code() -> (u64, u64) {
    // Whoever finds it out finds the same, and the end is set last.
    static START: AtomicU64 = AtomicU64::new(0);
    static END: AtomicU64 = AtomicU64::new(0);
    let end = END.load(Ordering::Acquire);
    if end != 0 {
        return (START.load(Ordering::Relaxed), end);
    }
    let (start, end) = own_library().map_or(OWN_IN_PROGRAM(), |o| (o.start, o.end));
    START.store(start, Ordering::Relaxed);
    END.store(end, Ordering::Release);
    (start, end)
}

pub mod odd;
#[cfg(test)]
mod tests;
#[cfg(test)]
const OWN_IN_PROGRAM: fn() -> (u64, u64) = tests::own_code;
#[cfg(not(test))]
const OWN_IN_PROGRAM: fn() -> (u64, u64) = || (1, 1);

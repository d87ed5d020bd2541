//! The chain of Python frames of the calling thread.

use memtrace_format::stacks::{RawFrame, Reason};

use super::code::{CodeTable, Memo};
use super::offsets::{
    Evaluation, LAYOUTS, Layout, OB_TYPE, OWNER_GENERATOR, OWNER_SHIM, Position, Runtime,
};
use super::read;
use crate::stack::deep::Deep;

/// Frames that are kept of each end of a deep stack.
pub const PYTHON_HALF: usize = 128;

/// A frame.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    /// The frame, packed.
    pub word: u64,
    /// For the outermost frame of an evaluation, where the version lets us tell: an address inside the native
    /// frame of the interpreter's main loop. 0 for others.
    pub inside: usize,
}

/// Frames while they are found, innermost first.
pub type Found = Deep<Step, PYTHON_HALF>;

/// More frames than this are never followed: a chain that long is damaged, or a recursion of which the ends
/// tell nothing that its first thousands don't.
const MAX_FRAMES: usize = 1 << 14;

/// Walks the calling thread's frames, innermost first, into `out`. Returns why there is nothing (more).
#[inline]
pub fn walk(
    runtime: &Runtime,
    codes: &CodeTable,
    memo: &mut Memo,
    out: &mut Found,
) -> Option<Reason> {
    out.clear();
    if runtime.finalizing() {
        return Some(Reason::Finalizing);
    }
    let thread = runtime.thread_state();
    if thread == 0 {
        return Some(Reason::NoThreadState);
    }
    // SAFETY: `thread` is the calling thread's own state, in an interpreter whose layout was checked.
    let stopped = unsafe {
        match runtime.which {
            0 => follow::<0>(runtime, codes, memo, thread, out),
            1 => follow::<1>(runtime, codes, memo, thread, out),
            2 => follow::<2>(runtime, codes, memo, thread, out),
            3 => follow::<3>(runtime, codes, memo, thread, out),
            _ => follow::<4>(runtime, codes, memo, thread, out),
        }
    };
    stopped.or_else(|| out.is_empty().then_some(Reason::NoFrame))
}

/// The walk for one version: its offsets are constants, which makes it twice as fast.
///
/// # Safety
/// `thread` is the state of the calling thread, in an interpreter whose layout is `LAYOUTS[WHICH]`.
unsafe fn follow<const WHICH: usize>(
    runtime: &Runtime,
    codes: &CodeTable,
    memo: &mut Memo,
    thread: usize,
    out: &mut Found,
) -> Option<Reason> {
    let layout = const { &LAYOUTS[WHICH] };
    // SAFETY: a live thread state; the record it may point to is on this thread's stack, or inside the state.
    let (mut frame, mut record): (usize, usize) = unsafe {
        match (read(thread + layout.thread), layout.record) {
            (frame, None) => (frame, 0),
            (0, Some(_)) => (0, 0),
            (record, Some(current)) => (read(record + current), record),
        }
    };
    for _ in 0..MAX_FRAMES {
        if frame == 0 {
            return None;
        }
        if !frame.is_multiple_of(align_of::<usize>()) {
            return Some(Reason::Truncated);
        }
        // SAFETY: a frame in the chain of this thread: alive, and only this thread changes it. A frame that is
        // Python's has a code object, which it keeps alive; others are told by their owner or by the type of
        // what is in the code's place, which is always an object.
        unsafe {
            let owner = layout.owner.map_or(0, |at| read::<u8>(frame + at));
            if owner >= OWNER_SHIM {
                end_evaluation(out, frame);
            } else {
                let code: usize = read(frame + layout.code);
                if code == 0 || !code.is_multiple_of(align_of::<usize>()) {
                    return Some(Reason::Truncated);
                }
                if read::<usize>(code + OB_TYPE) == runtime.code_type
                    && let Some(at) = position(layout, frame, code, owner)
                {
                    let (code, unit) = (codes.id(layout, code, memo), u32::try_from(at).ok());
                    out.push(Step { word: RawFrame::Python { code, unit }.pack(), inside: 0 });
                }
                if let Evaluation::Marked { mark, next } = layout.evaluation
                    && read::<u8>(frame + mark) != 0
                    && record != 0
                {
                    end_evaluation(out, record);
                    record = read(record + next);
                }
            }
            frame = read(frame + layout.previous);
        }
    }
    Some(Reason::Truncated)
}

/// Notes in the last frame that its evaluation ends with it, unless that frame belongs to an earlier one
/// because this evaluation has none that count.
#[inline(always)]
fn end_evaluation(out: &mut Found, inside: usize) {
    if let Some(step) = out.last_mut()
        && step.inside == 0
    {
        step.inside = inside;
    }
}

/// The index of the code unit at which the frame is, negative before the first. `None` if the frame has not begun
/// (its arguments are still being put in place), which Python's own tracebacks leave out, too.
///
/// # Safety
/// `frame` is a live frame and `code` its code object, in an interpreter with this layout.
#[inline(always)]
unsafe fn position(layout: &Layout, frame: usize, code: usize, owner: u8) -> Option<i64> {
    // SAFETY: fields of live objects.
    unsafe {
        match layout.position {
            // An arithmetic shift: what is negative stays so.
            Position::Bytes => Some(i64::from(read::<i32>(frame + layout.at)) >> 1),
            Position::Units => Some(i64::from(read::<i32>(frame + layout.at))),
            Position::Pointer => {
                let first = code + layout.instructions;
                let at: usize = read(frame + layout.at);
                let begun = layout.first_traceable.map_or(0, |f| read::<u32>(code + f) as usize);
                if owner != OWNER_GENERATOR && at < first + 2 * begun {
                    return None;
                }
                Some((at as i64).wrapping_sub(first as i64) >> 1)
            }
        }
    }
}

//! A walk by the system's unwinder: slower than the rules, and it knows all that there is to know of generated code, signal
//! frames and odd tables. What it finds is never taken for known in the next walk, because what it read is not known.

use std::ffi::{c_int, c_void};

use memtrace_format::stacks::Reason;

use super::{Found, MAX_FRAMES, Native, Stop, Way, own_code};
use crate::stack::rules::{Rule, rule_for};

/// The system's unwinder's context of a frame.
enum Context {}
type Visit = unsafe extern "C-unwind" fn(*mut Context, *mut c_void) -> c_int;

unsafe extern "C-unwind" {
    fn _Unwind_Backtrace(visit: Visit, arg: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut Context, before: *mut c_int) -> usize;
    fn _Unwind_GetCFA(context: *mut Context) -> usize;
}

const CONTINUE: c_int = 0;
const STOP: c_int = 4;

/// Shows the calling thread's frames, innermost first, as the system's unwinder finds them: where each goes on, and its stack
/// pointer there. Ends when `visit` says so. For rare use: it allocates and takes the loader's lock.
pub fn each_frame(visit: &mut dyn FnMut(usize, usize) -> bool) {
    unsafe extern "C-unwind" fn step(context: *mut Context, visit: *mut c_void) -> c_int {
        let mut exact = 0;
        // SAFETY: the unwinder hands in its context and our own pointer.
        let (visit, pc, sp) = unsafe {
            (
                &mut *visit.cast::<&mut dyn FnMut(usize, usize) -> bool>(),
                _Unwind_GetIPInfo(context, &raw mut exact),
                _Unwind_GetCFA(context),
            )
        };
        if visit(pc, sp) { STOP } else { CONTINUE }
    }
    let mut visit = visit;
    // SAFETY: the unwinder's function; `visit` outlives it.
    unsafe { _Unwind_Backtrace(step, (&raw mut visit).cast()) };
}

/// The walk by the system's unwinder.
#[inline(never)]
pub fn by_system(found: &mut Found) -> Option<Reason> {
    struct Walk<'a> {
        found: &'a mut Found,
        own: (u64, u64),
        seen: usize,
        outermost: u64,
    }
    unsafe extern "C-unwind" fn visit(context: *mut Context, walk: *mut c_void) -> c_int {
        let mut exact = 0;
        // SAFETY: the unwinder hands in its context and our own pointer. What it calls a frame's CFA while it is
        // at that frame is the stack pointer there.
        let (walk, pc, sp) = unsafe {
            (
                &mut *walk.cast::<Walk<'_>>(),
                _Unwind_GetIPInfo(context, &raw mut exact) as u64,
                _Unwind_GetCFA(context) as u64,
            )
        };
        // A frame that a signal interrupted is at an instruction, not behind a call.
        let pc = if exact == 0 || pc == 0 { pc } else { pc + 1 };
        walk.outermost = pc;
        let ours = walk.found.0.is_empty() && (walk.own.0..walk.own.1).contains(&pc);
        if pc != 0 && !ours {
            let frame = Native { pc, sp, ..Native::default() };
            walk.found.0.push(Stop { frame, way: Way::UNKNOWN });
        }
        walk.seen += 1;
        if walk.seen < MAX_FRAMES { CONTINUE } else { STOP }
    }
    found.0.clear();
    let mut walk = Walk { found, own: own_code(), seen: 0, outermost: 0 };
    // SAFETY: `visit` gets the pointer to `walk`, which outlives the call, and doesn't unwind.
    unsafe { _Unwind_Backtrace(visit, (&raw mut walk).cast()) };
    let outermost = walk.outermost;
    // It also ends, without a word, where it finds no table.
    let whole = walk.seen < MAX_FRAMES && (outermost == 0 || rule_for(outermost) == Rule::END);
    (!whole).then_some(Reason::Truncated)
}

//! The system's unwinder, which a test may ask: nothing in a test program is described wrongly.

use std::ffi::{c_int, c_void};

use super::super::{Found, Native, Stop, Way, own_code};

enum Context {}
type Visit = unsafe extern "C-unwind" fn(*mut Context, *mut c_void) -> c_int;

unsafe extern "C-unwind" {
    fn _Unwind_Backtrace(visit: Visit, arg: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut Context, before: *mut c_int) -> usize;
    fn _Unwind_GetCFA(context: *mut Context) -> usize;
}

/// The calling thread's frames.
#[inline(never)]
pub fn frames(found: &mut Found) {
    unsafe extern "C-unwind" fn visit(context: *mut Context, found: *mut c_void) -> c_int {
        let mut exact = 0;
        // SAFETY: the unwinder hands in its context and our own pointer. What it calls a frame's CFA while it is
        // at that frame is the stack pointer there.
        let (found, pc, sp) = unsafe {
            (
                &mut *found.cast::<Found>(),
                _Unwind_GetIPInfo(context, &raw mut exact) as u64,
                _Unwind_GetCFA(context) as u64,
            )
        };
        let own = own_code();
        let ours = found.0.is_empty() && (own.0..own.1).contains(&pc);
        if pc != 0 && !ours {
            let frame = Native { pc, sp, ..Native::default() };
            found.0.push(Stop { frame, way: Way::UNKNOWN });
        }
        0
    }
    found.0.clear();
    // SAFETY: `visit` gets the pointer to `found`, which outlives the call, and doesn't unwind.
    unsafe { _Unwind_Backtrace(visit, std::ptr::from_mut(found).cast()) };
}

//! Whether a code object has died since.
//!
//! A frame is known again by its address, its code object's address and its position in it. All
//! three may belong to another function by then. Code objects die (torch.compile, dataclasses,
//! notebooks make and drop them all the time), and their addresses are used again at once. Telling
//! that from a code object's content touches half a dozen cache lines for every frame of every
//! stack.
//!
//! But a code object always dies in one place: its type's `tp_dealloc`, a public slot of the
//! exported `PyCode_Type`. So we put a function there that counts and goes on to the real one. As
//! long as the count stands still, whatever was known of a code object is still true.
//!
//! A walk reads the count before it looks at code objects that its frames hold. If it finds the
//! count unchanged later, it has missed no death. The memory of a dead object reaches another
//! thread's frames only through the GIL, and the count was raised before that. Some objects were
//! frozen into the interpreter, which frees them otherwise, at its end. They lie in its own image,
//! which nothing else ever uses.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::line::LINE;
use memtrace_os::address::Address;

/// Offset of `tp_dealloc` in a type object, the same in every version.
const TP_DEALLOC: usize = 48;

type Dealloc = unsafe extern "C" fn(*mut c_void);

static REAL: Address = Address::new();

/// How many code objects have died, plus 1. Meaningful once [`watch`] has been called.
#[inline]
pub fn count() -> u64 {
    LINE.deaths.load(Ordering::Acquire)
}

/// Begins to count. May be called by several threads at once; each finds it begun when it returns.
///
/// # Safety
/// `code_type` is the address of the interpreter's `PyCode_Type`.
pub unsafe fn watch(code_type: usize) {
    // SAFETY: the slot is an aligned pointer in a static object. The interpreter itself fills it at
    // its start, so it can be written; whoever reads it reads it whole.
    let slot = unsafe { &*((code_type + TP_DEALLOC) as *const AtomicPtr<c_void>) };
    let real = slot.load(Ordering::Acquire);
    if real != counting as *mut c_void {
        REAL.set(real);
        slot.store(counting as *mut c_void, Ordering::SeqCst);
    }
}

unsafe extern "C" fn counting(code: *mut c_void) {
    LINE.deaths.fetch_add(1, Ordering::AcqRel);
    // SAFETY: set before this function was put into the slot, whose function
    // it is; the argument is the caller's.
    unsafe {
        let real: Dealloc = std::mem::transmute(REAL.get());
        real(code);
    }
}

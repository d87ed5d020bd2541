//! `longjmp` out of a signal handler: what a thread leaves behind without coming back.
//!
//! A handler that jumps leaves whatever it has interrupted, in the middle: also a call of CUDA's,
//! or the recorder at work. The thread would count as inside for ever, and nothing that it does
//! afterwards be recorded. So each of the C library's functions that jump first says where to; what
//! lies further in on the thread's stack is over ([`guard::end_below`]).
//!
//! It must change nothing. The real function gets its arguments in the registers they came
//! in. A jump that leaves nothing of ours costs some nanoseconds. It takes no lock and
//! allocates nothing, since handlers call it.
//!
//! It rests on one fact about glibc on x86-64: the seventh word of a `jmp_buf` is the stack
//! pointer. It is hidden by an exclusive or with a word of the thread's control block, and then
//! rotated by 17 bits. A value that is no address in the thread's own stack is left alone, so
//! with another C library nothing happens.

use std::ffi::{CStr, c_void};
use std::ptr;

use crate::libraries::next;
use crate::naked::calling;
use crate::os::address::Address;
use crate::record::guard;

/// Which word of a `jmp_buf` is the stack pointer.
const STACK_POINTER: usize = 6;

macro_rules! jumps {
    ($( $name:ident, $look:ident; )*) => {
        $(
            /// The function of the C library that has this name.
            ///
            /// # Safety
            /// As the C library documents.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    calling!("look"),
                    "jmp rax",
                    look = sym $look,
                )
            }

            /// Has a look, and says where the real function is.
            extern "C" fn $look(to: *const usize) -> *mut c_void {
                static NEXT: Address = Address::new();
                look(to);
                let name = concat!(stringify!($name), "\0").as_bytes();
                next::behind(&NEXT, CStr::from_bytes_with_nul(name).unwrap_or_default())
            }
        )*

        /// Looks for the real functions while it may be done: not in a handler.
        pub fn loading() {
            $( $look(ptr::null()); )*
        }
    };
}

jumps! {
    longjmp, look_longjmp;
    _longjmp, look_old_longjmp;
    siglongjmp, look_siglongjmp;
    __longjmp_chk, look_checked_longjmp;
}

fn look(to: *const usize) {
    if to.is_null() || !guard::has_steps() {
        return;
    }
    // SAFETY: the caller's `jmp_buf`, which the real function reads, too; and a
    // word of the thread's control block.
    let sp = unsafe {
        let hidden = to.add(STACK_POINTER).read().rotate_right(17);
        let with: usize;
        std::arch::asm!("mov {}, fs:[0x30]", out(reg) with, options(nostack, readonly, preserves_flags));
        hidden ^ with
    };
    guard::end_below(sp);
}

//! What those functions of ours have in common that are jumps to the ones behind them.
//!
//! Some functions must see who called them: the C library finds out by the return address where to
//! look for a library or a name. So ours is no function that calls, but a few instructions that end
//! in a jump, with all arguments where they were. Each macro here is a piece of those, for
//! [`core::arch::naked_asm`].

/// Calls a function of ours. The first three arguments are afterwards as they were, and the stack,
/// which is one word off where a function begins, is aligned meanwhile.
macro_rules! calling {
    ($function:literal) => {
        concat!(
            "push rdi\n",
            "push rsi\n",
            "push rdx\n",
            "call {",
            $function,
            "}\n",
            "pop rdx\n",
            "pop rsi\n",
            "pop rdi\n",
        )
    };
}
pub(crate) use calling;

/// Jumps to the function whose address is in the word `next`. As long as that is 0, `find` is asked
/// for it. The first three arguments are as they were.
macro_rules! jumping {
    () => {
        concat!(
            "mov rax, qword ptr [rip + {next}]\n",
            "test rax, rax\n",
            "jz 99f\n",
            "jmp rax\n",
            "99:\n",
            $crate::naked::calling!("find"),
            "jmp rax\n",
        )
    };
}
pub(crate) use jumping;

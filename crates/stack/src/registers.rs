//! Registers of the calling function, which a walk begins with, and the
//! words of the stack that they lead to.

/// Registers of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// Instruction pointer: a return address.
    pub pc: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer.
    pub fp: u64,
}

/// The registers of a running function that its callers may need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Here {
    /// rbx, rbp, r12 to r15.
    pub kept: [u64; 6],
    /// Stack pointer.
    pub sp: u64,
    /// Instruction pointer: a return address.
    pub pc: u64,
}

impl Here {
    /// Those that rules need.
    pub fn registers(&self) -> Registers {
        Registers { pc: self.pc, sp: self.sp, fp: self.kept[1] }
    }
}

/// The registers as they are in the calling function behind this call.
#[inline(always)]
pub fn here() -> Here {
    let mut here = Here::default();
    // SAFETY: the function writes into the record alone, and changes no
    // other register than a call may.
    unsafe { save(&raw mut here) };
    here
}

#[unsafe(naked)]
unsafe extern "C" fn save(to: *mut Here) {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "mov [rdi], rbx",
        "mov [rdi + 8], rbp",
        "mov [rdi + 16], r12",
        "mov [rdi + 24], r13",
        "mov [rdi + 32], r14",
        "mov [rdi + 40], r15",
        "lea rax, [rsp + 8]",
        "mov [rdi + 48], rax",
        "mov rax, [rsp]",
        "mov [rdi + 56], rax",
        "ret",
        ".cfi_endproc",
    )
}

/// The registers as they are in the calling function behind this call.
#[inline(always)]
pub fn registers() -> Registers {
    let (pc, sp, fp);
    // SAFETY: a call that changes these three registers.
    unsafe {
        std::arch::asm!("call {}", sym caller_registers, out("rax") pc, out("rcx") sp, out("rdx") fp);
    }
    Registers { pc, sp, fp }
}

/// What the caller's instruction pointer, stack pointer and frame pointer are once this has
/// returned: a return address, where unwind tables are exact. In rax, rcx and rdx: from memory they
/// would be read in other pieces than they were written in, for which the processor waits.
#[unsafe(naked)]
unsafe extern "C" fn caller_registers() {
    core::arch::naked_asm!("mov rax, [rsp]", "lea rcx, [rsp + 8]", "mov rdx, rbp", "ret")
}

/// Where the stack pointer is, about.
#[inline(always)]
pub fn stack_pointer() -> usize {
    let sp;
    // SAFETY: reads a register.
    unsafe {
        std::arch::asm!("mov {}, rsp", out(reg) sp, options(nomem, nostack, preserves_flags));
    };
    sp
}

/// A word of the stack.
///
/// # Safety
/// The place is mapped.
#[inline]
pub unsafe fn word(at: u64) -> u64 {
    // SAFETY: as promised.
    unsafe { (at as *const u64).read_unaligned() }
}

//! Room to work in: a stack of memtrace's own for each thread.
//!
//! A program's stack may have no room for us: threads with 16 KiB, fibers and signal handlers with 4. Nobody tells how
//! large a fiber's stack is, and below its end may lie anything. So a hook that finds itself anywhere but well inside
//! the thread's own stack goes to the recorder on another one ([`Room::run`]), and what takes more than some hundred bytes and
//! is rare (turning the recorder on, reading unwind tables, a thread's first event) always does ([`aside`]). The
//! real calls are made where the program stands.
//!
//! There are two such stacks a thread, because a signal may interrupt the work on one, and its handler may come to a hook.
//! A handler that finds both in use works where it is. If a handler leaves by `longjmp`, the stack that it left
//! counts as in use for ever.
//!
//! Where a thread left its stack is kept: a walk begins there.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::checked::Process;
use super::native::odd::Here;
use crate::record::guard;

/// Bytes of a stack that is ours: reading the configuration and opening files are the most that happens there, and a signal
/// handler of the program's on top of it.
const SIZE: usize = 192 << 10;
/// Nobody can read or write these at its lower end.
const GUARD: usize = 4096;
/// Stacks of ours for each thread.
const LEVELS: usize = 2;
/// A hook works on the program's stack if it has as much left as this: ten times what it ever took.
pub const ENOUGH: usize = 16 << 10;

/// The stack that the C library gave a thread: from the lowest address to the one after the highest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds {
    /// The lowest.
    pub low: u64,
    /// The one after the highest.
    pub high: u64,
    /// From here on it was found to be readable. The main thread's grows, and what lies below may be anything.
    pub proven: u64,
}

impl Bounds {
    /// The calling thread's. Slow (for the main thread, the C library reads a file): once a thread.
    pub fn of_thread() -> Bounds {
        // SAFETY: an all-zero attribute object is only written to; it is destroyed if it was filled in.
        unsafe {
            let mut attr: libc::pthread_attr_t = std::mem::zeroed();
            if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attr) != 0 {
                return Bounds::default();
            }
            let (mut at, mut size) = (std::ptr::null_mut::<c_void>(), 0);
            let known =
                libc::pthread_attr_getstack(&raw const attr, &raw mut at, &raw mut size) == 0;
            libc::pthread_attr_destroy(&raw mut attr);
            let (low, high) = if known { (at as u64, at as u64 + size as u64) } else { (0, 0) };
            Bounds { low, high, proven: high }
        }
    }

    /// Where a hook may work without asking.
    pub fn roomy(&self) -> (usize, usize) {
        let low = self.low as usize + ENOUGH;
        (low, (self.high as usize).saturating_sub(low))
    }

    /// Is everything from here to the upper end readable? A stack is in use from the stack pointer on, and that stays.
    #[cold]
    fn prove(&mut self, sp: u64) -> bool {
        let proven =
            (self.low..self.high).contains(&sp) && Process::default().is_readable(sp, self.proven);
        if proven {
            self.proven = self.proven.min(sp);
        }
        proven
    }
}

/// A thread's stacks. All zeros is a valid one that has none yet.
#[repr(C)]
pub struct Room {
    /// The program's.
    bounds: Cell<Bounds>,
    /// The lower end of the first; 0 if there is none.
    low: Cell<usize>,
    busy: [Cell<bool>; LEVELS],
    left: [UnsafeCell<MaybeUninit<Here>>; LEVELS],
}

impl Room {
    /// Takes memory, if there is any. Touches none of it.
    pub fn furnish(&self) {
        // SAFETY: a fresh private mapping, of which pages are made inaccessible that nobody uses.
        unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                LEVELS * SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK,
                -1,
                0,
            );
            if at == libc::MAP_FAILED {
                return;
            }
            for level in 0..LEVELS {
                libc::mprotect(at.byte_add(level * SIZE), GUARD, libc::PROT_NONE);
            }
            self.low.set(at as usize);
        }
    }

    /// Finds out about the thread's own stack, for a new owner: nobody is on ours.
    pub fn enter(&self) -> Bounds {
        for busy in &self.busy {
            busy.set(false);
        }
        self.bounds.set(Bounds::default());
        let bounds = self.run(Bounds::of_thread);
        self.bounds.set(bounds);
        bounds
    }

    /// Takes this for the thread's own stack.
    #[cfg(test)]
    pub fn pretend(&self, bounds: Bounds) {
        self.bounds.set(bounds);
    }

    /// What of the thread's own stack is in use, and can be read, when the stack pointer is there; empty if it is on another one.
    #[inline]
    pub fn in_use(&self, sp: u64) -> Range<u64> {
        let mut bounds = self.bounds.get();
        if !(bounds.proven..bounds.high).contains(&sp) {
            if !bounds.prove(sp) {
                return 0..0;
            }
            self.bounds.set(bounds);
        }
        sp..bounds.high
    }

    /// Which of our stacks this address is in.
    fn level_of(&self, sp: usize) -> Option<usize> {
        let level = sp.wrapping_sub(self.low.get()) / SIZE;
        (self.low.get() != 0 && level < LEVELS).then_some(level)
    }

    /// Where the thread left its own stack, if this address is in one of ours.
    pub fn left_at(&self, sp: u64) -> Option<Here> {
        let level = self.level_of(sp as usize)?;
        // SAFETY: whoever stands on one of our stacks has come by `run`, which noted where from.
        Some(unsafe { (*self.left[level].get()).assume_init() })
    }

    /// Runs `f` on one of our stacks, unless the thread is on one already or all are in use.
    #[inline]
    pub fn run<R>(&self, f: impl FnOnce() -> R) -> R {
        let (mut f, mut result) = (Some(f), None);
        self.call(&mut || result = f.take().map(|f| f()));
        result.unwrap_or_else(|| unreachable!("it was called"))
    }

    /// The same, with as little of the present stack as can be.
    #[cold]
    #[inline(never)]
    fn call(&self, mut work: &mut dyn FnMut()) {
        extern "C-unwind" fn begin(work: *mut c_void) {
            // SAFETY: the pointer below, of which nobody else knows.
            unsafe { (*work.cast::<&mut dyn FnMut()>())() }
        }
        let here = self.level_of(stack_pointer());
        let free = self.busy.iter().position(|busy| !busy.get());
        let (None, Some(level), true) = (here, free, self.low.get() != 0) else { return work() };
        self.busy[level].set(true);
        let _until_done = Busy(&self.busy[level]);
        let top = self.low.get() + (level + 1) * SIZE;
        // SAFETY: the stack is not in use and large enough; the function gets the pointer to `work`, which outlives the call.
        unsafe { switch(begin, (&raw mut work).cast(), top, self.left[level].get().cast()) };
    }
}

/// One of our stacks is in use.
struct Busy<'a>(&'a Cell<bool>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Runs `f` on a stack of this thread's that is memtrace's own.
#[cold]
#[inline(never)]
pub fn aside<R>(f: impl FnOnce() -> R) -> R {
    guard::local(|local| local.stacks.aside(f))
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

/// Calls `f` with `state` on the stack that ends at `top`, and notes at `left` where it was called from.
#[unsafe(naked)]
unsafe extern "C-unwind" fn switch(
    f: extern "C-unwind" fn(*mut c_void),
    state: *mut c_void,
    top: usize,
    left: *mut Here,
) {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "mov [rcx], rbx",
        "mov [rcx + 8], rbp",
        "mov [rcx + 16], r12",
        "mov [rcx + 24], r13",
        "mov [rcx + 32], r14",
        "mov [rcx + 40], r15",
        "lea rax, [rsp + 8]",
        "mov [rcx + 48], rax",
        "mov rax, [rsp]",
        "mov [rcx + 56], rax",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdx",
        "mov rax, rdi",
        "mov rdi, rsi",
        "call rax",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        ".cfi_restore rbp",
        "ret",
        ".cfi_endproc",
    )
}

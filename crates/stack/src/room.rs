//! Room to work in: a stack of memtrace's own for each thread.
//!
//! A program's stack may have no room for us: threads with 16 KiB, fibers and signal handlers with
//! 4. Nobody says how large a fiber's stack is, and below its end may lie anything. So a hook that
//! isn't well inside the thread's own stack goes to the recorder on another one ([`Room::run`]).
//! Some work takes more than a few hundred bytes and is rare: turning the recorder on, reading
//! unwind tables, a thread's first event. That always goes there ([`super::aside`]). The real calls
//! are made where the program stands.
//!
//! There are two such stacks a thread, because a signal may interrupt the work on one, and its
//! handler may come to a hook. A handler that finds both in use works where it is. If a handler
//! leaves by `longjmp`, the stack that it left counts as in use for ever.
//!
//! A handler may itself be on a stack that the program has set up for signals. As soon as we leave
//! that, it is free for the kernel. The next handler begins at its top, over what the first one
//! still needs. So then all signals wait until we are back but those that are faults. Those find no
//! such stack, and run on ours.
//!
//! Where a thread left its stack is kept: a walk begins there.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::registers::{Here, stack_pointer};
use memtrace_os::checked::{Process, system};

/// Bytes of a stack that is ours. Reading the configuration and opening files are the most that
/// happens there, with a signal handler of the program's on top of it.
const SIZE: usize = 192 << 10;
/// Bytes of the stack on which a snapshot is written: names of functions may be nested as deep as
/// somebody likes. The background thread has as much.
const LARGE: usize = 2 << 20;
/// Nobody can read or write these at its lower end.
const GUARD: usize = 4096;
/// Stacks of ours for each thread.
const LEVELS: usize = 2;
/// A hook works on the program's stack if it has as much left as this: ten times what it ever took.
pub const ENOUGH: usize = 16 << 10;
/// As much of the first thread's stack is taken for one. Where it may grow for ever
/// (`ulimit -s unlimited`), what lies further down may be anybody's. The kernel maps nothing nearer
/// than 128 MiB of its own accord.
const MOST: u64 = 64 << 20;
const PAGE: u64 = 4096;
/// Pages that are asked about at a time.
const AT_A_TIME: usize = 1 << 10;

/// The stack that the C library gave a thread: from the lowest address to
/// the one after the highest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bounds {
    /// The lowest.
    pub low: u64,
    /// The one after the highest.
    pub high: u64,
    /// From here on it was found to be readable. The main thread's grows,
    /// and what lies below may be anything.
    pub proven: u64,
}

impl Bounds {
    /// The calling thread's, which came from there. The first thread's is known without a file to
    /// be read, for which there may be no descriptor. It is known without memory, too, which a
    /// signal handler must not ask for. Once a thread.
    fn of_thread(sp: u64, on_signal_stack: bool) -> Bounds {
        // SAFETY: neither has preconditions. A thread that forked is the first in
        // its child, on whatever stack it was.
        let is_first = unsafe { libc::getpid() == libc::gettid() };
        let first = if is_first { Bounds::of_first() } else { Bounds::default() };
        if (first.low..first.high).contains(&sp) || is_first && on_signal_stack {
            return first;
        }
        match Bounds::as_known() {
            Some(Bounds { low, high, proven }) if is_first => {
                Bounds { low: low.max(high.saturating_sub(MOST)), high, proven }
            }
            known => known.unwrap_or(first),
        }
    }

    /// That of the first thread, at whose upper end the kernel put the program's name.
    fn of_first() -> Bounds {
        // SAFETY: both only say something about this process.
        let (name, limit) = unsafe {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::getrlimit(libc::RLIMIT_STACK, &raw mut limit);
            (libc::getauxval(libc::AT_EXECFN), limit.rlim_cur)
        };
        if name == 0 {
            return Bounds::default();
        }
        let high = (name | (PAGE - 1)) + 1;
        // The name may go on in the next page.
        let low = high - limit.min(MOST).saturating_sub(2 * PAGE);
        Bounds { low, high, proven: high }
    }

    /// As the C library knows it, which takes memory, and for the first thread reads a file.
    fn as_known() -> Option<Bounds> {
        // SAFETY: an all-zero attribute object is only written to; it is
        // destroyed if it was filled in.
        unsafe {
            let mut attr: libc::pthread_attr_t = std::mem::zeroed();
            if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attr) != 0 {
                return None;
            }
            let (mut at, mut size) = (std::ptr::null_mut::<c_void>(), 0);
            let known =
                libc::pthread_attr_getstack(&raw const attr, &raw mut at, &raw mut size) == 0;
            libc::pthread_attr_destroy(&raw mut attr);
            let (low, high) = (at as u64, at as u64 + size as u64);
            known.then_some(Bounds { low, high, proven: high })
        }
    }

    /// Where a hook may work without asking.
    pub fn roomy(&self) -> (usize, usize) {
        let low = self.low as usize + ENOUGH;
        (low, (self.high as usize).saturating_sub(low))
    }

    /// Is everything from here to the upper end readable? A stack is in use from the stack pointer
    /// on, and that stays. What is not on the stack is behind a hole. A large part is proven in
    /// several calls.
    #[cold]
    fn prove(&mut self, sp: u64) -> bool {
        if !(self.low..self.high).contains(&sp) {
            return false;
        }
        let process = Process::default();
        for _ in 0..AT_A_TIME {
            let page = (self.proven - 1) & !(PAGE - 1);
            if self.proven <= sp || !process.is_readable(page, page + PAGE) {
                break;
            }
            self.proven = page.max(self.low);
        }
        self.proven <= sp
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

    /// Nobody is on ours.
    pub fn vacate(&self) {
        for busy in &self.busy {
            busy.set(false);
        }
    }

    /// Finds out about the thread's own stack, for a new owner: nobody is on ours.
    pub fn enter(&self) -> Bounds {
        self.vacate();
        self.bounds.set(Bounds::default());
        let (sp, on_signal_stack) = (stack_pointer() as u64, is_on_signal_stack());
        let bounds = self.run(|| Bounds::of_thread(sp, on_signal_stack));
        self.bounds.set(bounds);
        bounds
    }

    /// Takes this for the thread's own stack.
    #[cfg(test)]
    pub fn pretend(&self, bounds: Bounds) {
        self.bounds.set(bounds);
    }

    /// What of the thread's own stack is in use, and can be read, when the stack pointer is
    /// there; empty if it is on another one.
    #[inline]
    pub fn in_use(&self, sp: u64) -> Range<u64> {
        let mut bounds = self.bounds.get();
        if !(bounds.proven..bounds.high).contains(&sp) {
            let proven = bounds.prove(sp);
            self.bounds.set(bounds);
            if !proven {
                return 0..0;
            }
        }
        sp..bounds.high
    }

    /// Is this in the stack that the C library gave the thread?
    pub fn is_own(&self, at: u64) -> bool {
        let bounds = self.bounds.get();
        (bounds.low..bounds.high).contains(&at)
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
    fn call(&self, work: &mut dyn FnMut()) {
        let here = self.level_of(stack_pointer());
        let free = self.busy.iter().position(|busy| !busy.get());
        let (None, Some(level), true) = (here, free, self.low.get() != 0) else { return work() };
        self.busy[level].set(true);
        let _until_done = Busy(&self.busy[level]);
        let there =
            Stack { top: self.low.get() + (level + 1) * SIZE, left: self.left[level].get().cast() };
        // SAFETY: nobody else is on it; it lives as long as the thread.
        unsafe { there.call(work) };
    }
}

/// A stack that can be gone to: its upper end, and where to note where from.
#[derive(Clone, Copy)]
struct Stack {
    top: usize,
    left: *mut Here,
}

impl Stack {
    /// # Safety
    /// It is large enough, nobody is on it, and both it and the note live that long.
    #[inline(always)]
    unsafe fn call(self, work: &mut dyn FnMut()) {
        if is_on_signal_stack() {
            // SAFETY: promised by the caller.
            return unsafe { self.call_off_signal_stack(work) };
        }
        // SAFETY: promised by the caller.
        unsafe { self.go(work) };
    }

    #[inline(always)]
    unsafe fn go(self, mut work: &mut dyn FnMut()) {
        extern "C-unwind" fn begin(work: *mut c_void) {
            // SAFETY: the pointer below, of which nobody else knows.
            unsafe { (*work.cast::<&mut dyn FnMut()>())() }
        }
        // SAFETY: promised by the caller; the function gets the pointer to
        // `work`, which outlives the call.
        unsafe { switch(begin, (&raw mut work).cast(), self.top, self.left) };
    }

    /// What is live on the program's stack for signals stays.
    #[cold]
    #[inline(never)]
    unsafe fn call_off_signal_stack(self, work: &mut dyn FnMut()) {
        let _until_back = Quiet::begin();
        let signal_stack = signal_stack();
        let mut there = || {
            let _without = signal_stack.map(WithoutStack::begin);
            work();
        };
        // SAFETY: promised by the caller.
        unsafe { self.go(&mut there) };
    }
}

/// One of our stacks is in use.
struct Busy<'a>(&'a Cell<bool>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// The program's stack for signals, if the thread is on it.
fn signal_stack() -> Option<libc::stack_t> {
    // SAFETY: a record that the call fills, and nothing to be changed.
    unsafe {
        let mut now = std::mem::zeroed::<libc::stack_t>();
        let known = libc::sigaltstack(std::ptr::null(), &raw mut now) == 0;
        (known && now.ss_flags & libc::SS_ONSTACK != 0).then_some(now)
    }
}

/// Is the thread on it? A function of its own, which leaves nothing on the stack.
#[inline(never)]
fn is_on_signal_stack() -> bool {
    signal_stack().is_some()
}

/// Signals wait, but for those that are faults (or else they would end the
/// program) and the C library's own.
struct Quiet {
    before: u64,
}

impl Quiet {
    fn begin() -> Quiet {
        let faults = [
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
            libc::SIGTRAP,
            libc::SIGSYS,
            32,
            33,
        ];
        let waiting = !faults.iter().fold(0, |set, signal| set | 1_u64 << (signal - 1));
        Quiet { before: Quiet::mask(libc::SIG_BLOCK, waiting) }
    }

    /// Changes which signals wait, and returns which did. The C library's
    /// function has sets of 128 bytes.
    fn mask(how: i32, set: u64) -> u64 {
        let mut before = 0_u64;
        let args =
            [how as usize, &raw const set as usize, &raw mut before as usize, size_of::<u64>()];
        let [how, set, old, size] = args;
        // SAFETY: the kernel reads one set and writes the other, both of the size that it is given.
        unsafe { system(libc::SYS_rt_sigprocmask, [how, set, old, size, 0, 0]) };
        before
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        Quiet::mask(libc::SIG_SETMASK, self.before);
    }
}

/// There is no stack for signals, until this one is put back.
struct WithoutStack(libc::stack_t);

impl WithoutStack {
    /// Not to be called on it.
    fn begin(mut stack: libc::stack_t) -> WithoutStack {
        let nothing =
            libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
        // SAFETY: plain numbers; whoever handles a signal then does so where
        // this thread is, where there is room.
        unsafe { libc::sigaltstack(&raw const nothing, std::ptr::null_mut()) };
        stack.ss_flags &= !libc::SS_ONSTACK;
        WithoutStack(stack)
    }
}

impl Drop for WithoutStack {
    fn drop(&mut self) {
        // SAFETY: the program's own, as it was.
        unsafe { libc::sigaltstack(&raw const self.0, std::ptr::null_mut()) };
    }
}

/// A large stack of its own, which ends with it.
pub(super) struct Large(*mut c_void);

impl Large {
    /// Touches none of it. `None` if there is no memory.
    pub(super) fn new() -> Option<Large> {
        // SAFETY: a fresh private mapping, of which a page is made inaccessible that nobody uses.
        unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let how = kind | libc::MAP_STACK;
            let at = libc::mmap(std::ptr::null_mut(), LARGE, protection, how, -1, 0);
            if at == libc::MAP_FAILED {
                return None;
            }
            libc::mprotect(at, GUARD, libc::PROT_NONE);
            Some(Large(at))
        }
    }

    /// Does the work on it.
    pub(super) fn call(&self, work: &mut dyn FnMut()) {
        let mut left = MaybeUninit::<Here>::uninit();
        let there = Stack { top: self.0 as usize + LARGE, left: left.as_mut_ptr() };
        // SAFETY: nobody else knows of it; it is unmapped later.
        unsafe { there.call(work) };
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        // SAFETY: our own mapping, on which nobody stands any more.
        unsafe { libc::munmap(self.0, LARGE) };
    }
}

/// Calls `f` with `state` on the stack that ends at `top`, and notes at
/// `left` where it was called from.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_stack_is_proven_in_pieces_and_a_hole_ends_it() {
        let pages = 3 * AT_A_TIME as u64;
        // SAFETY: a fresh private mapping, of which nobody uses the page that is made inaccessible.
        let low = unsafe {
            let (size, rights) = ((pages * PAGE) as usize, libc::PROT_READ | libc::PROT_WRITE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let at = libc::mmap(std::ptr::null_mut(), size, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::mprotect(at.byte_add(PAGE as usize), PAGE as usize, libc::PROT_NONE);
            at as u64
        };
        let high = low + pages * PAGE - 40;
        let mut bounds = Bounds { low, high, proven: high };
        assert!(bounds.prove(high - 8) && bounds.prove(high - 9 * PAGE));
        let deep = low + 2 * PAGE + 8;
        let asked: Vec<bool> = (0..4).map(|_| bounds.prove(deep)).collect();
        assert_eq!(asked, [false, false, true, true]);
        for _ in 0..3 {
            assert!(!bounds.prove(low + 8), "behind a hole");
        }
        assert!(!bounds.prove(low - 8) && !bounds.prove(high) && bounds.prove(deep));
        assert_eq!(bounds.proven, low + 2 * PAGE);
    }

    #[test]
    fn the_first_threads_stack_is_known_without_a_file() {
        let first = Bounds::of_first();
        // SAFETY: no preconditions. These bytes lie outside of all frames,
        // and inside of the program's name.
        let random = unsafe { libc::getauxval(libc::AT_RANDOM) };
        assert!((first.low..first.high).contains(&random), "{first:x?} and {random:#x}");
        assert!(first.high - first.low <= MOST);
    }
}

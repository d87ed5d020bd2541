//! Reads that can't fault, of memory that nobody has promised to be there.
//!
//! Beyond the thread's own stack a walk follows pointers that it found in somebody else's memory.
//! They lead to unwind tables, code, the stack of a fiber or of a signal handler. Tables may be
//! wrong, and code may have none. A library may be unmapped or protected while its addresses still
//! lie on a stack. Such a pointer is read by the kernel on our behalf, which answers "no" where the
//! processor would end the program. Nothing here takes a lock or allocates, and errno stays as it
//! is.
//!
//! * `process_vm_readv(2)` of the process itself copies, so nothing can happen between a check
//!   and a read. It needs no permission.
//! * A sandbox may punish a system call that it doesn't know. So where `prctl(PR_GET_SECCOMP)` says
//!   that there is one, the copy is made here, page by page. Before each page `rt_sigprocmask(2)`
//!   is asked to take a mask from there for an operation that doesn't exist. It reads the mask
//!   first (EFAULT) and then refuses (EINVAL). Every program may call that.
//!
//! A [`Window`] keeps what it read, in lines of 256 bytes, and only so many of them. It is looked
//! through only so often. So tables that lead astray, or in a circle, cost a bounded time. What it
//! keeps is as old as itself, so it lives for one walk or one look-up.

use std::cell::Cell;

/// Where a window looks.
pub trait Memory {
    /// Copies the words at `at`; `false` if they are not all readable. They never cross a page.
    fn copy(&self, at: u64, to: &[Cell<u64>]) -> bool;
}

/// This process's own memory. It is asked once how that can be read: one of
/// these lives for one walk or look-up.
#[derive(Default)]
pub struct Process {
    access: Cell<Access>,
}

#[derive(Clone, Copy, Default)]
enum Access {
    #[default]
    Unknown,
    /// The kernel copies from the process of this number.
    ByKernel(usize),
    /// The copy is made here.
    Here,
}

impl Process {
    /// That of a process in a sandbox.
    #[cfg(test)]
    fn sandboxed() -> Process {
        Process { access: Cell::new(Access::Here) }
    }

    /// The number of the process if the kernel is to copy.
    fn number(&self) -> Option<usize> {
        if let Access::Unknown = self.access.get() {
            let question = [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0];
            // SAFETY: both calls only say something about this process.
            let (sandbox, number) =
                unsafe { (system(libc::SYS_prctl, question), system(libc::SYS_getpid, [0; 6])) };
            self.access.set(if sandbox == 0 {
                Access::ByKernel(number as usize)
            } else {
                Access::Here
            });
        }
        match self.access.get() {
            Access::ByKernel(number) => Some(number),
            _ => None,
        }
    }

    /// Are all pages from that of `from` up to `to` readable?
    pub fn is_readable(&self, from: u64, to: u64) -> bool {
        let mut at = from & !(PAGE - 1);
        let word = [Cell::new(0)];
        while at < to {
            if !self.copy(at, &word) {
                return false;
            }
            at += PAGE;
        }
        true
    }

    /// Is the word at this address, a multiple of 8, readable?
    fn has_word(at: u64) -> bool {
        const NO_SUCH_OPERATION: usize = usize::MAX;
        let args = [NO_SUCH_OPERATION, at as usize, 0, 8, 0, 0];
        // SAFETY: no signal mask is changed by an operation that there is not.
        let refused = unsafe { system(libc::SYS_rt_sigprocmask, args) };
        refused == -(libc::EINVAL as isize) // at null there is no mask, which is fine with it
    }
}

impl Memory for Process {
    fn copy(&self, at: u64, to: &[Cell<u64>]) -> bool {
        let bytes = size_of_val(to);
        if let Some(pid) = self.number() {
            let local = libc::iovec { iov_base: to.as_ptr().cast_mut().cast(), iov_len: bytes };
            let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes };
            let places = [(&raw const local) as usize, 1, (&raw const remote) as usize, 1, 0];
            let [local, one, remote, another, flags] = places;
            // SAFETY: the kernel writes into the cells, which are ours and as long as it says.
            let n = unsafe {
                system(libc::SYS_process_vm_readv, [pid, local, one, remote, another, flags])
            };
            if n == bytes as isize {
                return true;
            }
            if n >= 0 || n == -(libc::EFAULT as isize) {
                return false;
            }
            self.access.set(Access::Here); // a kernel without this call, or one that forbids it
        }
        if !Process::has_word(at) {
            return false;
        }
        for (i, cell) in to.iter().enumerate() {
            // SAFETY: the page can be read, and the words lie in it.
            cell.set(unsafe { (at as *const u64).add(i).read_volatile() });
        }
        true
    }
}

const PAGE: u64 = 4096;

/// A system call that leaves errno alone: a hook may run between a call of
/// the program's and its look at it.
///
/// # Safety
/// As for the call of this number.
pub unsafe fn system(number: libc::c_long, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: promised by the caller; the kernel changes these registers alone.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Words of a line; a line never crosses a page.
const WORDS: usize = 32;
const LINE: u64 = 8 * WORDS as u64;
const LINES: usize = 16;
/// Lines that are read at most.
const MOST: u32 = 1 << 12;

struct Line {
    /// Number of the line, plus 1; 0 is none.
    number: Cell<u64>,
    words: [Cell<u64>; WORDS],
}

/// Memory as it was when it was first looked at, of which so many lines are kept.
pub struct Window<'m, const N: usize = LINES> {
    memory: &'m dyn Memory,
    left: Cell<u32>,
    /// Looks that are left, at first as many as there are bytes to see: a loop of
    /// a table's goes nowhere that is new.
    looks: Cell<u32>,
    lines: [Line; N],
}

impl<'m> Window<'m> {
    /// One that has seen nothing yet.
    pub fn new(memory: &'m dyn Memory) -> Window<'m> {
        Window::within(memory, MOST)
    }
}

impl<'m, const N: usize> Window<'m, N> {
    /// One that has seen nothing yet and reads at most so many lines.
    pub fn within(memory: &'m dyn Memory, most: u32) -> Self {
        let lines =
            [const { Line { number: Cell::new(0), words: [const { Cell::new(0) }; WORDS] } }; N];
        let looks = Cell::new(most.saturating_mul(LINE as u32));
        Window { memory, left: Cell::new(most), looks, lines }
    }

    /// So many looks less; `None` if there are no more.
    pub fn spend(&self, looks: u32) -> Option<()> {
        let left = self.looks.get().checked_sub(looks);
        self.looks.set(left.unwrap_or(0));
        left.map(|_| ())
    }

    /// How many looks are left.
    pub fn looks(&self) -> u32 {
        self.looks.get()
    }

    /// Is there nothing more to be seen through it?
    pub fn is_spent(&self) -> bool {
        self.looks.get() == 0 || self.left.get() == 0
    }

    /// The line that this address is in.
    fn line(&self, at: u64) -> Option<&[Cell<u64>; WORDS]> {
        self.spend(1)?;
        let number = at / LINE;
        let line = &self.lines[number as usize % N];
        if line.number.get() != number + 1 {
            self.left.set(self.left.get().checked_sub(1)?);
            line.number.set(0);
            if !self.memory.copy(number * LINE, &line.words) {
                return None;
            }
            line.number.set(number + 1);
        }
        Some(&line.words)
    }

    /// The byte there.
    pub fn byte(&self, at: u64) -> Option<u8> {
        let word = self.line(at)?[(at % LINE) as usize / 8].get();
        Some(word.to_ne_bytes()[at as usize % 8])
    }

    /// The bytes there.
    pub fn bytes(&self, at: u64, to: &mut [u8]) -> Option<()> {
        for (i, byte) in to.iter_mut().enumerate() {
            *byte = self.byte(at.checked_add(i as u64)?)?;
        }
        Some(())
    }

    /// The word there.
    pub fn word(&self, at: u64) -> Option<u64> {
        if at.is_multiple_of(8) {
            return Some(self.line(at)?[(at % LINE) as usize / 8].get());
        }
        let mut word = [0; 8];
        self.bytes(at, &mut word)?;
        Some(u64::from_ne_bytes(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of which the second can't be read.
    fn pages() -> u64 {
        // SAFETY: a fresh private mapping, of which nobody uses the part that is made inaccessible.
        unsafe {
            let (size, rights) = (3 * PAGE as usize, libc::PROT_READ | libc::PROT_WRITE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), size, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            at.cast::<u8>().write_bytes(7, size);
            libc::mprotect(at.byte_add(PAGE as usize), PAGE as usize, libc::PROT_NONE);
            at as u64
        }
    }

    #[test]
    fn what_is_there_is_read_and_what_is_not_is_no_fault() {
        let at = pages();
        for process in [Process::default(), Process::sandboxed()] {
            let window = Window::new(&process);
            assert_eq!(window.byte(at + PAGE - 1), Some(7));
            assert_eq!(window.word(at + PAGE - 8), Some(0x0707_0707_0707_0707));
            assert_eq!(window.word(at + 2 * PAGE + 3), Some(0x0707_0707_0707_0707));
            let gone =
                [at + PAGE, at + PAGE - 7, at + 2 * PAGE - 1, 0, 1 << 47, u64::MAX, u64::MAX - 7];
            for gone in gone {
                assert_eq!(window.word(gone), None, "{gone:#x}");
            }
        }
        let is_readable = |from, pages| Process::default().is_readable(from, from + pages * PAGE);
        assert!(is_readable(at, 1) && is_readable(at + 2 * PAGE, 1));
        assert!(!is_readable(at, 2) && !is_readable(at + PAGE + 9, 2));
    }

    #[test]
    fn errno_stays_as_it_is() {
        // SAFETY: this thread's own errno.
        let errno = || unsafe { libc::__errno_location() };
        // SAFETY: as above.
        unsafe { *errno() = 1234 };
        let process = Process::default();
        assert_eq!(Window::new(&process).byte(8), None);
        // SAFETY: as above.
        assert_eq!(unsafe { *errno() }, 1234);
    }

    #[test]
    fn a_window_ends() {
        let process = Process::default();
        let window = Window::new(&process);
        let bytes = vec![1_u8; 4 << 20];
        let read = (0..).map_while(|i| window.byte(bytes.as_ptr() as u64 + i)).count();
        assert!((1 << 19..2 << 20).contains(&read), "{read} bytes");
    }
}

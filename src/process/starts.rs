//! Programs that this process becomes or starts: will they have memtrace in them?
//!
//! A child whose `LD_PRELOAD` was replaced or cleared runs none of our code, so nobody would ever
//! hear of it. But the process that starts it does. So each of the C library's functions that start
//! a program first looks at the environment that is passed on. If memtrace isn't in it, it adds a
//! line to the run's list ([`crate::process::tree`]). Then it is a jump: the C library sees its
//! true caller, and nothing that it answers is touched.
//!
//! All of this may run in a signal handler, or between `vfork` and `exec`, in memory
//! that belongs to the parent. So it takes no lock, allocates nothing, and writes at
//! most one line. Outside `memtrace run` it is one look at a word. Not seen: a program
//! that the kernel is asked for directly.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use crate::libraries::next;
use crate::os::address::Address;
use crate::os::checked::{Process, Window};
use crate::os::descriptors;
use crate::os::errno;
use crate::process::tree;
use crate::process::tree::SHORT;

type Words = *const *const c_char;

unsafe extern "C" {
    static environ: Words;
}

/// The environment of this process.
fn own() -> Words {
    // SAFETY: the C library's variable; a program that changes it while it
    // starts another is in for worse.
    unsafe { environ }
}

/// The body of a function that may have any arguments: all that may hold one is kept; `al` counts
/// those in vector registers, which are none.
macro_rules! look_and_jump {
    ($look:ident $(, $before:literal)?) => {
        core::arch::naked_asm!(
            "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
            $($before,)?
            "call {look}",
            "mov r11, rax",
            "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
            "jmp r11",
            look = sym $look,
        )
    };
}

/// Each function: its name, and its arguments, of which the first block says
/// what is started in which environment.
macro_rules! starters {
    ($( $name:ident, $look:ident ($($arg:ident : $ty:ty),*) => $program:expr, $arguments:expr, $environment:expr, $becomes:expr; )*) => {
        $(
            /// The function of the C library that has this name.
            ///
            /// # Safety
            /// As the C library documents.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name() {
                look_and_jump!($look)
            }

            /// Has a look, and says where the real function is.
            extern "C" fn $look($($arg: $ty),*) -> *mut c_void {
                static NEXT: Address = Address::new();
                if tree::is_of_a_run() {
                    look($program, $arguments, $environment, $becomes);
                }
                let name = concat!(stringify!($name), "\0").as_bytes();
                next::behind(&NEXT, CStr::from_bytes_with_nul(name).unwrap_or_default())
            }
        )*

        /// Looks for the real functions while it may be done: in a forked child the
        /// loader's lock may be held for ever.
        pub fn loading() {
            $( find!($look, $($arg: $ty),*); )*
            look_execle(ptr::null());
        }
    };
}

/// Calls a look with nothing to look at.
macro_rules! find {
    ($look:ident, $($arg:ident : $ty:ty),*) => {
        $look($( <$ty as Nothing>::NOTHING ),*)
    };
}

/// An argument that says nothing.
trait Nothing {
    const NOTHING: Self;
}

impl<T> Nothing for *const T {
    const NOTHING: Self = ptr::null();
}

impl Nothing for c_int {
    const NOTHING: Self = -1;
}

starters! {
    execve, look_execve(path: *const c_char, argv: Words, envp: Words) => path, Arguments::List(argv), envp, true;
    execvpe, look_execvpe(path: *const c_char, argv: Words, envp: Words) => path, Arguments::List(argv), envp, true;
    execv, look_execv(path: *const c_char, argv: Words) => path, Arguments::List(argv), own(), true;
    execvp, look_execvp(path: *const c_char, argv: Words) => path, Arguments::List(argv), own(), true;
    execl, look_execl(path: *const c_char, first: *const c_char) => path, Arguments::One(first), own(), true;
    execlp, look_execlp(path: *const c_char, first: *const c_char) => path, Arguments::One(first), own(), true;
    fexecve, look_fexecve(_file: c_int, argv: Words, envp: Words) => first(argv), Arguments::List(argv), envp, true;
    posix_spawn, look_posix_spawn(_pid: *const c_void, path: *const c_char, _actions: *const c_void, _attributes: *const c_void, argv: Words, envp: Words) => path, Arguments::List(argv), envp, false;
    posix_spawnp, look_posix_spawnp(_pid: *const c_void, path: *const c_char, _actions: *const c_void, _attributes: *const c_void, argv: Words, envp: Words) => path, Arguments::List(argv), envp, false;
    system, look_system(command: *const c_char) => command, Arguments::One(command), own(), false;
    popen, look_popen(command: *const c_char, _mode: *const c_char) => command, Arguments::One(command), own(), false;
}

/// The function of the C library that has this name. Its environment stands behind its arguments,
/// of which the first six are in registers and the others on the stack.
///
/// # Safety
/// As the C library documents.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execle() {
    look_and_jump!(look_execle, "mov rdi, rsp")
}

/// Has a look at what [`execle`] has put on the stack (null: nothing), and
/// says where the real function is.
extern "C" fn look_execle(saved: *const *const c_char) -> *mut c_void {
    /// `rax`, then the registers from the last one to the first, and the return address.
    const REGISTERS: usize = 6;
    static NEXT: Address = Address::new();
    if !saved.is_null() && tree::is_of_a_run() {
        // SAFETY: the registers and, behind the return address, the caller's arguments, which end
        // in null; then comes the environment.
        unsafe {
            let argument = |i: usize| *saved.add(if i < REGISTERS { REGISTERS - i } else { i + 2 });
            let mut end = 1;
            while !argument(end).is_null() {
                end += 1;
            }
            look(argument(0), Arguments::One(argument(1)), argument(end + 1).cast(), true);
        }
    }
    next::behind(&NEXT, c"execle")
}

/// The arguments of a program that is started.
#[derive(Clone, Copy)]
enum Arguments {
    /// Its own name first.
    List(Words),
    /// The first word of a command.
    One(*const c_char),
}

/// The first word of a list; null if that isn't there.
fn first(argv: Words) -> *const c_char {
    let process = Process::default();
    Window::<1>::within(&process, 2).word(argv as u64).unwrap_or(0) as *const c_char
}

/// What is passed to the C library. Nobody has promised that it is there: an address that is wrong
/// is an error in its answer, and must not be a fault here.
struct Passed<'p> {
    list: Window<'p, 1>,
    text: Window<'p, 1>,
}

impl<'p> Passed<'p> {
    /// Lines that are read at most: more than the kernel takes.
    const MAX: u32 = 1 << 15;

    fn new(process: &'p Process) -> Passed<'p> {
        let window = || Window::within(process, Self::MAX);
        Passed { list: window(), text: window() }
    }

    /// The bytes of a C string, as long as that wants more. `None`: they are not there.
    fn text(&self, at: u64, want: &mut dyn FnMut(u8) -> bool) -> Option<()> {
        let mut at = at;
        while let byte @ 1.. = self.text.byte(at)? {
            if !want(byte) {
                break;
            }
            at = at.checked_add(1)?;
        }
        Some(())
    }

    /// Where the strings of a list are, as long as that wants more. `None`: it is not there.
    fn words(&self, list: Words, want: &mut dyn FnMut(u64) -> Option<bool>) -> Option<()> {
        let mut at = list as u64;
        while let word @ 1.. = self.list.word(at)? {
            if !want(word)? {
                break;
            }
            at = at.checked_add(8)?;
        }
        Some(())
    }

    /// Is memtrace preloaded in this environment?
    fn has_memtrace(&self, environment: Words) -> Option<bool> {
        let mut found = false;
        if !environment.is_null() {
            self.words(environment, &mut |word| {
                let mut preload = Preload::default();
                self.text(word, &mut |byte| preload.next(byte))?;
                found = preload.next(b':') && preload.has_memtrace;
                Some(!preload.is_that)
            })?;
        }
        Some(found)
    }

    /// Adds a string, as far as a line of the list has room.
    fn say(&self, at: u64, add: tree::AddWord<'_>) -> Option<usize> {
        let (mut bytes, mut n) = ([0; SHORT], 0);
        self.text(at, &mut |byte| {
            bytes[n] = byte;
            n += 1;
            n < SHORT
        })?;
        add(&bytes[..n]);
        Some(n)
    }
}

/// Adds a line to the run's list if a program is started without memtrace.
fn look(program: *const c_char, arguments: Arguments, environment: Words, becomes: bool) {
    errno::kept(|| look_at(program, arguments, environment, becomes));
}

fn look_at(
    program: *const c_char,
    arguments: Arguments,
    environment: Words,
    becomes: bool,
) -> Option<()> {
    if program.is_null() || environment.is_null() && !becomes {
        return None;
    }
    let process = Process::default();
    let passed = Passed::new(&process);
    let (mut has_slash, mut has_blank) = (false, false);
    passed.text(program as u64, &mut |byte| {
        has_slash |= byte == b'/';
        has_blank |= byte == b' ';
        true
    })?;
    if passed.has_memtrace(environment)? {
        return None;
    }
    // A look along PATH asks for many files that are not there. Of
    // `system` and `popen` it is a whole command.
    let is_path = has_slash && !has_blank;
    // SAFETY: a C string, or what the kernel says isn't there.
    let is_there = || unsafe { libc::access(program, libc::X_OK) == 0 };
    if is_path && (!is_there() || is_static(program)) {
        return None;
    }
    // SAFETY: getpid has no preconditions.
    let pid = if becomes { unsafe { libc::getpid() } } else { 0 };
    tree::started_without(pid, &mut |add| match arguments {
        Arguments::List(argv) if !argv.is_null() => {
            let mut room = SHORT;
            passed.words(argv, &mut |word| {
                room = room.saturating_sub(passed.say(word, add)?);
                Some(room > 0)
            })
        }
        Arguments::One(word) if !word.is_null() => passed.say(word as u64, add).map(|_| ()),
        _ => passed.say(program as u64, add).map(|_| ()),
    });
    Some(())
}

/// Is it a program that takes no libraries, and so never had memtrace in it? (`ldconfig`, which
/// Python's `find_library` starts without its environment.)
fn is_static(program: *const c_char) -> bool {
    const HEAD: usize = 1024;
    const INTERPRETER: usize = 3; // PT_INTERP
    let mut head = [0_u8; HEAD];
    // SAFETY: a C string, or what the kernel says isn't there; our own descriptor, and a
    // buffer that is valid for its length.
    let got = unsafe {
        let how = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK;
        let file = descriptors::open(program, how, 0);
        if file < 0 {
            return false;
        }
        let got = libc::read(file, head.as_mut_ptr().cast(), HEAD);
        libc::close(file);
        usize::try_from(got).unwrap_or(0)
    };
    // Where the table of parts is, how large one is, and how many there are.
    let number = |at: usize, bytes: usize| {
        head.get(at..at + bytes)
            .map_or(0, |b| b.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)))
    };
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    let parts =
        (0..count.min(HEAD)).map(|i| table.saturating_add(i * size)).take_while(|at| *at < got);
    let mut parts = parts.filter(|at| *at <= HEAD - 4);
    let is_program = got >= 64 && head.starts_with(b"\x7fELF\x02") && count > 0;
    is_program && !parts.any(|at| number(at, 4) == INTERPRETER)
}

/// What a variable preloads, byte by byte.
#[derive(Default)]
struct Preload {
    /// Bytes so far, up to the beginning of the value.
    read: usize,
    /// It is that variable.
    is_that: bool,
    /// How much of our name the last name of a path has; `None` if it is another one.
    ours: Option<usize>,
    has_memtrace: bool,
}

impl Preload {
    /// The next byte of the variable, and at its end a colon. `false`: the rest doesn't matter.
    fn next(&mut self, byte: u8) -> bool {
        const NAME: &[u8] = b"LD_PRELOAD=";
        const OURS: &[u8] = b"libmemtrace.so";
        if !self.is_that {
            let same = NAME.get(self.read) == Some(&byte);
            self.read += 1;
            self.is_that = same && self.read == NAME.len();
            self.ours = Some(0);
            return same;
        }
        self.has_memtrace |= b": ".contains(&byte) && self.ours == Some(OURS.len());
        self.ours = match byte {
            b':' | b' ' | b'/' => Some(0),
            _ => self.ours.filter(|n| OURS.get(*n) == Some(&byte)).map(|n| n + 1),
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(environment: &[*const c_char]) -> Option<bool> {
        let process = Process::default();
        Passed::new(&process).has_memtrace(environment.as_ptr())
    }

    #[test]
    fn memtrace_is_found_among_what_is_preloaded() {
        for (value, found) in [
            (c"LD_PRELOAD=/a/libmemtrace.so", true),
            (c"LD_PRELOAD=/x.so:/a/libmemtrace.so", true),
            (c"LD_PRELOAD=/x.so libmemtrace.so:/y.so", true),
            (c"LD_PRELOAD=/a/libmemtrace.so.old", false),
            (c"LD_PRELOAD=/a/xlibmemtrace.so", false),
            (c"LD_PRELOAD=/libmemtrace.so/x.so", false),
            (c"LD_PRELOAD=", false),
            (c"LD_PRELOAD", false),
            (c"LD_PRELOADS=/a/libmemtrace.so", false),
            (c"A=LD_PRELOAD=/a/libmemtrace.so", false),
        ] {
            assert_eq!(
                has(&[c"A=b".as_ptr(), value.as_ptr(), ptr::null()]),
                Some(found),
                "{value:?}"
            );
        }
        assert_eq!(has(&[ptr::null()]), Some(false));
        let twice = [c"LD_PRELOAD=x".as_ptr(), c"LD_PRELOAD=libmemtrace.so".as_ptr(), ptr::null()];
        assert_eq!(has(&twice), Some(false), "the first one counts");
    }

    #[test]
    fn what_is_not_there_is_no_fault() {
        let wrong = [8, usize::MAX, usize::MAX - 7, 1 << 47].map(|at| at as *const c_char);
        for wrong in wrong {
            let process = Process::default();
            let passed = Passed::new(&process);
            assert_eq!(passed.has_memtrace(wrong.cast()), None);
            assert_eq!(has(&[wrong, ptr::null()]), None);
            assert_eq!(first(wrong.cast()), ptr::null());
            assert_eq!(look_at(wrong, Arguments::One(wrong), own(), true), None);
            assert_eq!(
                look_at(c"/bin/true".as_ptr(), Arguments::One(wrong), wrong.cast(), true),
                None
            );
        }
    }
}

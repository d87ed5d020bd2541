//! Programs that this process becomes or starts: will they have memtrace in them?
//!
//! A child whose `LD_PRELOAD` was replaced or cleared runs none of our code, so nobody would ever hear of it. The one who
//! starts it still has: each of the C library's functions that start a program first has a look at the environment that is
//! passed on, and adds a line to the run's list if memtrace isn't in it ([`crate::tree`]). Then it is a jump: the C library
//! sees its true caller, and nothing that it answers is touched.
//!
//! All of this may run between `vfork` and `exec`, in memory that belongs to the parent, or in a signal handler: it takes no
//! lock, allocates nothing, and writes at most one line. Outside `memtrace run` it is one look at a word. Not seen: a
//! program that the kernel is asked for directly.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicPtr;

use crate::hooks::lookup;
use crate::tree;

type Words = *const *const c_char;

unsafe extern "C" {
    static environ: Words;
}

/// The environment of this process.
fn own() -> Words {
    // SAFETY: the C library's variable; a program that changes it while it starts another is in for worse.
    unsafe { environ }
}

/// Each function: its name, and its arguments, of which the first block says what is started in which environment.
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
                // All that may hold an argument is kept; `al` counts those in vector registers, which are none.
                core::arch::naked_asm!(
                    "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                    "call {look}",
                    "mov r11, rax",
                    "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                    "jmp r11",
                    look = sym $look,
                )
            }

            /// Has a look, and says where the real function is.
            extern "C" fn $look($($arg: $ty),*) -> *mut c_void {
                static NEXT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
                if tree::is_of_a_run() {
                    look($program, $arguments, $environment, $becomes);
                }
                let name = concat!(stringify!($name), "\0").as_bytes();
                lookup::next(&NEXT, CStr::from_bytes_with_nul(name).unwrap_or_default())
            }
        )*

        /// Looks for the real functions while it may be done: in a forked child the loader's lock may be held for ever.
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

/// The function of the C library that has this name. Its environment stands behind its arguments, of which the first six are in
/// registers and the others on the stack.
///
/// # Safety
/// As the C library documents.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execle() {
    core::arch::naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
        "mov rdi, rsp",
        "call {look}",
        "mov r11, rax",
        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "jmp r11",
        look = sym look_execle,
    )
}

/// Has a look at what [`execle`] has put on the stack (null: nothing), and says where the real function is.
extern "C" fn look_execle(saved: *const *const c_char) -> *mut c_void {
    /// `rax`, then the registers from the last one to the first, and the return address.
    const REGISTERS: usize = 6;
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    if !saved.is_null() && tree::is_of_a_run() {
        // SAFETY: the registers and, behind the return address, the caller's arguments, which end in null; then comes the
        // environment.
        unsafe {
            let argument = |i: usize| *saved.add(if i < REGISTERS { REGISTERS - i } else { i + 2 });
            let mut end = 1;
            while !argument(end).is_null() {
                end += 1;
            }
            look(argument(0), Arguments::One(argument(1)), argument(end + 1).cast(), true);
        }
    }
    lookup::next(&NEXT, c"execle")
}

/// What a program is told.
#[derive(Clone, Copy)]
enum Arguments {
    /// Its own name first.
    List(Words),
    /// As far as one word tells.
    One(*const c_char),
}

fn first(argv: Words) -> *const c_char {
    // SAFETY: null, or the caller's list, which ends in null.
    if argv.is_null() { ptr::null() } else { unsafe { *argv } }
}

/// Adds a line to the run's list if a program is started without memtrace.
fn look(program: *const c_char, arguments: Arguments, environment: Words, becomes: bool) {
    // SAFETY: what is passed to the C library: null or a C string; null or a list of them that ends in null.
    unsafe {
        if program.is_null() || environment.is_null() && !becomes || has_memtrace(environment) {
            return;
        }
        let program = CStr::from_ptr(program);
        // A look along PATH asks for many files that are not there. Of `system` and `popen` it is a whole command.
        let is_path = program.to_bytes().contains(&b'/') && !program.to_bytes().contains(&b' ');
        if is_path && (libc::access(program.as_ptr(), libc::X_OK) != 0 || is_static(program)) {
            return;
        }
        let pid = if becomes { libc::getpid() } else { 0 };
        tree::started_without(pid, &mut |add| match arguments {
            Arguments::List(argv) if !argv.is_null() => {
                words(argv).for_each(|word| add(word.to_bytes()));
            }
            Arguments::One(word) if !word.is_null() => add(CStr::from_ptr(word).to_bytes()),
            _ => add(program.to_bytes()),
        });
    }
}

/// Is it a program that takes no libraries, and so never had memtrace in it? (`ldconfig`, which Python's `find_library`
/// starts without its environment.)
fn is_static(program: &CStr) -> bool {
    const HEAD: usize = 1024;
    const INTERPRETER: usize = 3; // PT_INTERP
    let mut head = [0_u8; HEAD];
    // SAFETY: a C string, our own descriptor, and a buffer that is valid for its length.
    let got = unsafe {
        let file =
            libc::open(program.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK);
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

/// The C strings of a list.
///
/// # Safety
/// It is the caller's, and ends in null.
unsafe fn words<'a>(list: Words) -> impl Iterator<Item = &'a CStr> {
    let at = move |i| {
        // SAFETY: not beyond the null that ends the list, where `take_while` stops.
        unsafe { *list.add(i) }
    };
    // SAFETY: each is a C string.
    (0..).map(at).take_while(|word| !word.is_null()).map(|word| unsafe { CStr::from_ptr(word) })
}

/// Is memtrace preloaded in this environment?
///
/// # Safety
/// It is null or a list of C strings that ends in null.
unsafe fn has_memtrace(environment: Words) -> bool {
    if environment.is_null() {
        return false;
    }
    // SAFETY: promised by the caller.
    let mut all = unsafe { words(environment) };
    let value = all.find_map(|word| word.to_bytes().strip_prefix(b"LD_PRELOAD="));
    value.is_some_and(preloads_memtrace)
}

fn preloads_memtrace(value: &[u8]) -> bool {
    let parts = value.split(|b| b": ".contains(b));
    parts.into_iter().any(|path| path.rsplit(|b| *b == b'/').next() == Some(b"libmemtrace.so"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memtrace_is_found_among_what_is_preloaded() {
        for (value, found) in [
            (&b"/a/libmemtrace.so"[..], true),
            (b"/x.so:/a/libmemtrace.so", true),
            (b"/x.so libmemtrace.so:/y.so", true),
            (b"/a/libmemtrace.so.old", false),
            (b"/libmemtrace.so/x.so", false),
            (b"", false),
        ] {
            assert_eq!(preloads_memtrace(value), found, "{}", String::from_utf8_lossy(value));
        }
    }

    #[test]
    fn an_environment_is_looked_through_to_its_end() {
        let with = [c"A=b".as_ptr(), c"LD_PRELOAD=/m/libmemtrace.so".as_ptr(), ptr::null()];
        let without = [c"A=LD_PRELOAD=/m/libmemtrace.so".as_ptr(), ptr::null()];
        // SAFETY: lists of C strings that end in null.
        unsafe {
            assert!(has_memtrace(with.as_ptr()));
            assert!(!has_memtrace(without.as_ptr()));
            assert!(!has_memtrace(ptr::null()));
        }
    }
}

//! A black box that somebody cuts short while the program runs.
//!
//! A mapped page beyond the end of its file is a SIGBUS in whichever thread touches it next, and
//! that ends the program. Cutting can't be prevented: a file that the kernel seals against it has
//! no name by which it could be found after its process. What has been cut away is gone. But the
//! program must run on. So a fault inside the mapping puts plain memory in its place, switches
//! recording off and says so, and the instruction is tried again. To the threads that are inside a
//! hook at that moment the whole record reads as zeros: no loop of theirs may wait for anything but
//! that.
//!
//! What is done here is done in a signal handler: system calls and atomics, nothing else. Every
//! other SIGBUS goes where it would have gone before, as if we weren't there: to a handler of the
//! program's with its own mask and stack. It is ignored if it was ignored, and else is the end. It
//! can't help where the program sets up a handler of its own later and doesn't pass on what isn't
//! its business. Nor can it in a thread that blocks SIGBUS: the kernel ends that process at once.
//! It never runs on a stack for signals that a handler of the program's is still on: who leaves
//! that sees to it (`crates/stack`, `room.rs`).

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::descriptors;

/// The mapping, as addresses; and in which process it is one. A forked
/// child has something else there. All of this is set before any thread hears of the mapping, so
/// before any can fault in it.
static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
static OWNER: AtomicI32 = AtomicI32::new(0);
/// What switches recording off.
static LOST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// What to say, made beforehand.
static LINE: AtomicPtr<String> = AtomicPtr::new(std::ptr::null_mut());
/// Whether it has been said: it has happened.
static SAID: AtomicBool = AtomicBool::new(false);
/// What the program did with SIGBUS before.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the program survive it if this mapping's file is cut short: then `lost` switches recording
/// off, in a handler of a signal. Once for each recorder; never in a hook.
pub fn survive(words: &'static [AtomicU64], path: &Path, lost: fn()) {
    let line = format!(
        "memtrace: somebody cut the black box short ({}): what was recorded in it is lost and recording is switched off; \
         the program goes on. Set MEMTRACE_BLACKBOX to a folder where nobody does that\n",
        path.display()
    );
    LINE.store(Box::leak(Box::new(line)), Ordering::Relaxed);
    LOST.store(lost as *mut c_void, Ordering::Relaxed);
    let range = words.as_ptr_range();
    SAID.store(false, Ordering::Relaxed);
    START.store(range.start as usize, Ordering::Relaxed);
    END.store(range.end as usize, Ordering::Relaxed);
    OWNER.store(std::process::id() as i32, Ordering::Release);
    listen();
}

fn listen() {
    // SAFETY: plain system calls on initialised records.
    unsafe {
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) != 0
            || before.sa_sigaction == on_bus as *const () as usize
        {
            return; // a forked child has inherited it
        }
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_flags = libc::SA_ONSTACK;
        if is_function(&before) {
            // It runs inside ours, and finds everything as it asked for it.
            (ours.sa_mask, ours.sa_flags) = (before.sa_mask, before.sa_flags & !libc::SA_RESETHAND);
        }
        ours.sa_flags |= libc::SA_SIGINFO;
        ours.sa_sigaction = on_bus as *const () as usize;
        BEFORE.store(Box::leak(Box::new(before)), Ordering::Release);
        libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut());
    }
}

fn is_function(action: &libc::sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

extern "C" fn on_bus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands over a valid record; errno is this thread's own.
    unsafe {
        let errno = *libc::__errno_location();
        let at = (*info).si_addr() as usize;
        let ours = (*info).si_code == libc::BUS_ADRERR
            && (START.load(Ordering::Relaxed)..END.load(Ordering::Relaxed)).contains(&at)
            && OWNER.load(Ordering::Acquire) == libc::getpid();
        if !(ours && replace()) {
            pass_on(signal, info, context);
        }
        *libc::__errno_location() = errno;
    }
}

/// Plain memory in place of the file, and the end of recording. Several threads may do it at once:
/// nothing that they would lose counts any more. `false`: there is no memory.
pub fn replace() -> bool {
    let (start, end) = (START.load(Ordering::Relaxed), END.load(Ordering::Relaxed));
    let lost = LOST.load(Ordering::Relaxed);
    if !lost.is_null() {
        // SAFETY: `survive` alone has set it, to a function of this type.
        unsafe { std::mem::transmute::<*mut c_void, fn()>(lost)() };
    }
    let first = !SAID.swap(true, Ordering::AcqRel);
    // SAFETY: the range is our own mapping, which is never unmapped; all
    // its words are atomics, valid as zeros.
    let placed = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(start as *mut c_void, end - start, protection, kind, -1, 0)
    };
    // SAFETY: null or a leaked line.
    let line = unsafe { LINE.load(Ordering::Relaxed).as_ref() };
    if let Some(line) = line.filter(|_| first) {
        descriptors::say(line.as_bytes());
    }
    placed != libc::MAP_FAILED
}

/// Is the record lost?
pub fn happened() -> bool {
    SAID.load(Ordering::Acquire)
}

/// To whom it would have gone.
///
/// # Safety
/// The arguments are those of a signal handler that runs.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: null or a leaked record, which the system filled.
    let Some(before) = (unsafe { BEFORE.load(Ordering::Acquire).as_ref() }) else { return };
    // SAFETY: the program's own handler, called as it asked to be called; plain system calls.
    unsafe {
        let fault = (*info).si_code > 0; // not sent by a process
        if !is_function(before) {
            if before.sa_sigaction == libc::SIG_IGN && !fault {
                return;
            }
            // The end, as by the fault itself: the instruction is tried again. One
            // that was sent comes again on return.
            libc::signal(signal, libc::SIG_DFL);
            if !fault {
                libc::raise(signal);
            }
            return;
        }
        if before.sa_flags & libc::SA_RESETHAND != 0 {
            libc::signal(signal, libc::SIG_DFL);
        }
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            let f: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                std::mem::transmute(before.sa_sigaction);
            f(signal, info, context);
        } else {
            let f: extern "C" fn(c_int) = std::mem::transmute(before.sa_sigaction);
            f(signal);
        }
    }
}

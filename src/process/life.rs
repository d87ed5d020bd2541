//! The ends of a process: exit, `_exit`, fork, an end without any CUDA call.
//!
//! `exit` runs our handler early (it was registered late), with every other thread still running.
//! `_exit` runs no handlers: its callers are in a hurry, or in a signal handler, or share their
//! memory with a parent (`vfork`). So there the background thread writes the snapshot while the
//! caller waits, for a bounded time, on a word. If that fails, the black box still has everything.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_format::blackbox::Life;
use memtrace_options::RUN_PID;
use memtrace_snapshot::Moment;

use crate::cuda::hooks::HOOKS;
use crate::cuda::{callers, devices, shared_names, under_way};
use crate::gauges;
use crate::libraries::{self, loaded, next};
use crate::nccl::communicators;
use crate::os::address::Address;
use crate::os::{age, clock, descriptors, message, signals};
use crate::process;
use crate::process::Process;
use crate::process::background;
use crate::process::{dump, jumps, measure, starts, tree};
use crate::pytorch::captures;
use crate::record::guard;
use crate::record::switch::{self, ASLEEP, WOKEN, recorder};
use crate::stack::{on_a_large_one, registered, rules};

/// Registers, once a process image, what happens at exit and in a forked child.
pub fn register() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if REGISTERED.swap(true, Ordering::AcqRel) {
        return; // a forked child has inherited both
    }
    // SAFETY: both are plain functions of this library, which is never unloaded (-z nodelete).
    unsafe {
        libc::atexit(exiting);
        libc::pthread_atfork(None, None, Some(forked));
    }
}

extern "C" fn exiting() {
    let Some(process) = process::current() else { return };
    guard::nested(|| {
        on_a_large_one(|| {
            let write = || signals::uncancelled(|| last_snapshot(process));
            if std::panic::catch_unwind(write).is_err() {
                message!("an internal error while the last snapshot was written");
            }
        });
    });
}

/// Writes what has not been written yet and takes the black box away.
pub fn last_snapshot(process: &Process) {
    let recorder = &process.recorder;
    recorder.mailbox.close();
    background::serve_oom(process);
    background::say_what_stacks_lack(recorder);
    // What had no room is reported also where the background thread didn't come to it,
    // and there is no memory for a snapshot.
    recorder.retire_ahead();
    let nothing = recorder.ring.written() == 0;
    if nothing || dump::to_folder(process, Moment::End, dump::Reason::Exit).is_some() {
        recorder.blackbox.set_life(Life::Ended);
        recorder.blackbox.remove();
    }
}

/// How long `_exit` waits for the background thread.
const TIMEOUT_NS: u64 = 20_000_000_000;

/// `_exit(2)`: ends the process without its exit handlers.
///
/// # Safety
/// As the C library documents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    end(status)
}

/// `_Exit`, C's name for the same.
///
/// # Safety
/// As the C library documents.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    end(status)
}

fn end(status: c_int) -> ! {
    if let Some(recorder) = recorder()
        // SAFETY: getpid has no preconditions. A child of vfork has our memory and another number.
        && recorder.pid == unsafe { libc::getpid() }
        && !guard::inside()
    {
        recorder.mailbox.request_last_snapshot(TIMEOUT_NS);
    }
    tree::ending();
    let next = NEXT_EXIT.get();
    // SAFETY: the C library's (or the next interposer's) function of this name; failing that, the
    // system call that it is made of. Neither returns.
    unsafe {
        if !next.is_null() {
            let next: extern "C" fn(c_int) -> ! = std::mem::transmute(next);
            next(status)
        }
        libc::syscall(libc::SYS_exit_group, status);
        std::process::abort()
    }
}

/// The `_exit` behind ours. It is looked up when the library is loaded. A forked child of a program
/// with threads often calls nothing but `_exit`, and the loader's lock may be held there for ever.
static NEXT_EXIT: Address = Address::new();

extern "C" fn loading() {
    descriptors::loading();
    tree::loading();
    next::behind(&NEXT_EXIT, c"_exit");
    libraries::loading();
    shared_names::look(&HOOKS);
    starts::loading();
    registered::loading();
    jumps::loading();
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = loading;

/// In the child of a fork: asleep again. The parent's recorder is the parent's;
/// its memory is a copy here. Of the parent's threads there is only this one: what
/// the others were at will never be done.
extern "C" fn forked() {
    switch::forget();
    age::forget();
    WOKEN.store(ASLEEP, Ordering::Release);
    devices::forget_entered();
    under_way::forget_others();
    communicators::forget_work();
    gauges::forget();
    callers::forget_others();
    captures::forget_others();
    rules::forget_others();
    measure::forget_others();
    clock::forget_others();
    guard::local(guard::Local::forget_thread);
}

/// Runs when a process ends. Of the one that `memtrace run` became, says what its processes have
/// written, or why there is nothing to look at.
extern "C" fn unloading() {
    if tree::ending() || WOKEN.load(Ordering::Relaxed) != ASLEEP {
        return;
    }
    let pid = std::env::var_os(RUN_PID.variable);
    if pid.and_then(|p| p.to_str()?.parse().ok()) == Some(std::process::id()) {
        on_a_large_one(explain_nothing);
    }
}

fn explain_nothing() {
    let has = |name: &str| loaded::loaded(name).is_some();
    if has("libtorch_cpu.so") && !has("libc10_cuda.so") {
        message!(
            "nothing recorded: this PyTorch is built without CUDA; install a CUDA build (pip install torch)"
        );
    } else if has("libc10_cuda.so") || has("libcudart.so") || has("libcuda.so") {
        message!("nothing recorded: the program has loaded CUDA but asked it for no memory");
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_UNLOAD: extern "C" fn() = unloading;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Is this so in a forked child?
    pub fn in_child(f: impl FnOnce() -> bool) -> bool {
        crate::os::testing::in_child(|| forked(), f)
    }
}

//! `libmemtrace.so`: the flight recorder for GPU memory, preloaded into somebody else's process.
//!
//! Its life: *asleep* until the first CUDA call, because a preloaded library is loaded into every shell and
//! helper on the way: no thread, no file, no allocation; *on* from then; *off* for ever after an internal
//! error or in the last moments of the process. A forked child starts asleep again, with a recorder of its own.
//!
//! It must never change what the program does: no hook takes a lock of ours or the GIL, no panic crosses the
//! boundary, no return code, exit code or message of the program's changes.

pub mod api;
pub mod config;
pub mod dump;
pub mod emitter;
pub mod hooks;
pub mod message;
pub mod record;
pub mod stack;
pub mod sync;
pub mod virtual_gpu;

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use config::Config;
use memtrace_format::blackbox::Life;
use record::{Recorder, guard};

/// The recorder of this process while it is on.
static RECORDER: AtomicPtr<Recorder> = AtomicPtr::new(std::ptr::null_mut());
/// Somebody is waking it, or it was on before, or it must stay off.
static WOKEN: AtomicBool = AtomicBool::new(false);

/// The recorder, if it is on.
pub fn recorder() -> Option<&'static Recorder> {
    // SAFETY: the pointer is null or a leaked recorder.
    unsafe { RECORDER.load(Ordering::Acquire).as_ref() }.filter(|r| r.is_ours())
}

/// Is this recorder the one that is on?
pub fn is_on(recorder: &Recorder) -> bool {
    std::ptr::eq(RECORDER.load(Ordering::Acquire), recorder)
}

/// Turns the recorder on at the first CUDA call of the process. Cheap ever after.
pub fn wake() {
    if WOKEN.load(Ordering::Relaxed) || guard::inside() {
        return;
    }
    if WOKEN.swap(true, Ordering::AcqRel) {
        return; // another thread is at it; what happens meanwhile in this one is before the beginning
    }
    guard::nested(|| {
        let on = std::panic::catch_unwind(|| {
            let recorder: &'static Recorder =
                Box::leak(Box::new(Recorder::new(Config::from_env())));
            RECORDER.store(std::ptr::from_ref(recorder).cast_mut(), Ordering::Release);
            emitter::start(recorder);
            hooks::torch::attach();
            at_exit_and_fork();
        });
        if on.is_err() {
            switch_off("an internal error at the start");
        }
    });
}

/// Off for ever. The program goes on as if memtrace had never been there.
pub fn switch_off(why: &str) {
    if !RECORDER.swap(std::ptr::null_mut(), Ordering::AcqRel).is_null() {
        message!("{why}: recording is switched off; the program goes on");
    }
}

/// Registers, once a process image, what happens at exit and in a forked child.
fn at_exit_and_fork() {
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
    let Some(recorder) = recorder() else { return };
    guard::nested(|| {
        let done = std::panic::catch_unwind(|| {
            recorder.emitter.serve_oom(recorder);
            let nothing = recorder.ring.written() == 0;
            if nothing || dump::to_folder(recorder, u64::MAX, dump::Reason::Exit).is_some() {
                recorder.blackbox.set_life(Life::Ended);
                recorder.blackbox.remove();
            }
        });
        if done.is_err() {
            message!("an internal error while the last snapshot was written");
        }
    });
}

/// In the child of a fork: asleep again. The parent's recorder is the parent's; its memory is a copy here.
extern "C" fn forked() {
    RECORDER.store(std::ptr::null_mut(), Ordering::Release);
    WOKEN.store(false, Ordering::Release);
    guard::local(guard::Local::forget_thread);
}

/// Runs when the process that `memtrace run` became ends: says why there is nothing to look at.
extern "C" fn unloading() {
    if WOKEN.load(Ordering::Relaxed) {
        return;
    }
    let Some(pid) = std::env::var_os("MEMTRACE_RUN_PID") else { return };
    if pid.to_str().and_then(|p| p.parse().ok()) == Some(std::process::id()) {
        explain_nothing();
    }
}

fn explain_nothing() {
    let has = |name: &str| hooks::resolve::loaded(name).is_some();
    if has("libtorch_cpu.so") && !has("libc10_cuda.so") {
        message!(
            "nothing recorded: this PyTorch is built without CUDA; install a CUDA build (pip install torch)"
        );
    } else if has("libc10_cuda.so") || has("libcudart.so") || has("libcuda.so") {
        message!("nothing recorded: the program has loaded CUDA but called nothing in it");
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_UNLOAD: extern "C" fn() = unloading;

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
pub mod life;
pub mod message;
pub mod record;
pub mod stack;
pub mod sync;
pub mod virtual_gpu;

use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use config::Config;
use record::{Recorder, guard};

/// The recorder of this process while it is on.
pub(crate) static RECORDER: AtomicPtr<Recorder> = AtomicPtr::new(std::ptr::null_mut());
/// Somebody is waking it, or it was on before, or it must stay off.
pub(crate) static WOKEN: AtomicBool = AtomicBool::new(false);

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
            life::register();
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

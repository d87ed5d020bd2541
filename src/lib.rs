//! `libmemtrace.so`: the flight recorder for GPU memory, preloaded into somebody else's process.
//!
//! Its life: *asleep* until the first CUDA call, because a preloaded library is loaded into every shell and
//! helper on the way: no thread, no file, no allocation; *on* from then; *off* for ever after an internal
//! error or in the last moments of the process. A forked child starts asleep again, with a recorder of its own.
//!
//! It must never change what the program does: no hook takes a lock of ours or the GIL, no panic crosses the
//! boundary, no return code, exit code or message of the program's changes.

pub mod allocator;
pub mod api;
pub mod config;
pub mod dump;
pub mod emitter;
pub mod gauges;
pub mod hooks;
pub mod hot;
pub mod jumps;
pub mod labels;
pub mod last;
pub mod libraries;
pub mod life;
pub mod measure;
pub mod os;
pub mod record;
pub mod stack;
pub mod starts;
pub mod tree;
pub mod virtual_gpu;

use std::sync::atomic::{AtomicU32, Ordering};

use config::Config;
use hot::HOT;
use memtrace_format::blackbox::Life;
use os::signals::uncancelled;
use os::{clock, errno, futex, message};
use record::{Recorder, guard};

/// Whether it has been woken: [`ASLEEP`], [`WAKING`], or [`AWAKE`], also if it went off again or must stay off. A
/// futex word.
pub(crate) static WOKEN: AtomicU32 = AtomicU32::new(ASLEEP);
pub(crate) const ASLEEP: u32 = 0;
pub(crate) const WAKING: u32 = 1;
pub(crate) const AWAKE: u32 = 2;

/// How long a thread waits for another one that wakes the recorder.
const PATIENCE_NS: u64 = 2_000_000_000;

/// The recorder, if it is on.
#[inline]
pub fn recorder() -> Option<&'static Recorder> {
    // SAFETY: the pointer is null or a word that is never freed; the word is 0 or the address of a leaked recorder.
    unsafe {
        let word = HOT.recorder.load(Ordering::Acquire).as_ref()?;
        (word.load(Ordering::Acquire) as *const Recorder).as_ref()
    }
}

/// Is this recorder the one that is on?
pub fn is_on(recorder: &Recorder) -> bool {
    crate::recorder().is_some_and(|on| std::ptr::eq(on, recorder))
}

/// Forgets the recorder, whose memory is a copy of the parent's: for the child of a fork.
pub(crate) fn forget_recorder() {
    HOT.recorder.store(std::ptr::null_mut(), Ordering::Release);
}

/// Turns the recorder on at the first CUDA call of the process. Cheap ever after.
///
/// A thread that comes while another one is at it waits, or what it allocates would be missing for ever. Not without
/// end: it may hold a lock that the other one needs (the loader's, in a library's constructor), or be the child of a
/// fork in that moment, where there is no other one.
#[inline]
pub fn wake() {
    if WOKEN.load(Ordering::Relaxed) != AWAKE {
        wake_up();
    }
}

#[cold]
fn wake_up() {
    if guard::inside() {
        return;
    }
    let _errno = errno::Kept::now();
    match WOKEN.compare_exchange(ASLEEP, WAKING, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => guard::nested(|| {
            let turned_on = || std::panic::catch_unwind(|| uncancelled(turn_on));
            if stack::room::aside(turned_on).is_err() {
                switch_off("an internal error at the start");
            }
            WOKEN.store(AWAKE, Ordering::Release);
            futex::wake_all(&WOKEN);
        }),
        Err(WAKING) => {
            let end = clock::now_ns() + PATIENCE_NS;
            while WOKEN.load(Ordering::Acquire) == WAKING {
                if clock::now_ns() > end {
                    WOKEN.store(AWAKE, Ordering::Release); // nobody waits twice
                }
                futex::sleep_on(&WOKEN, WAKING);
            }
        }
        Err(_) => {}
    }
}

fn turn_on() {
    let Some(recorder) = Recorder::new(Config::from_env()) else {
        message!(
            "there is no memory to record in (ulimit -v, ulimit -d): nothing is recorded; the program goes on"
        );
        return;
    };
    let recorder: &'static Recorder = Box::leak(Box::new(recorder));
    let word = record::word_of_this_process();
    word.store(std::ptr::from_ref(recorder) as usize, Ordering::Release);
    HOT.recorder.store(std::ptr::from_ref(word).cast_mut(), Ordering::Release);
    hooks::conf::note(recorder);
    if let Some(labels) = labels::store::existing() {
        labels.mirror_all(recorder);
    }
    tree::began(recorder);
    emitter::start(recorder);
    hooks::torch::attach();
    labels::torch::attach();
    hooks::interposers::find();
    life::register();
}

/// Off for ever. The program goes on as if memtrace had never been there.
pub fn switch_off(why: &str) {
    let on = recorder();
    let word = HOT.recorder.swap(std::ptr::null_mut(), Ordering::AcqRel);
    // Of several threads that come here at once, one takes the word away.
    if let Some(recorder) = on.filter(|_| !word.is_null()) {
        recorder.blackbox.set_life(Life::SwitchedOff);
        message!("{why}: recording is switched off; the program goes on");
    }
}

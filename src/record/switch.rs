//! Whether this process is recorded: asleep, on, or off for ever.
//!
//! Hooks ask here, and nothing above. What turning on takes (a recorder, its thread, hooks
//! that must be looked for) is known to the library's root alone. That is the only function
//! that is called upwards, by its symbol.

use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_format::blackbox::Life;

use crate::hot::{HOT, forget_recorder};
use crate::os::age::word_of_this_process;
use crate::os::signals::uncancelled;
use crate::os::{clock, errno, futex, message};
use crate::record::{Recorder, guard};
use crate::stack;

// For this library alone: nobody else finds it by its name.
std::arch::global_asm!(".hidden memtrace_turn_on");

unsafe extern "Rust" {
    /// [`crate::turn_on`].
    safe fn memtrace_turn_on();
}

/// Whether it has been woken: [`ASLEEP`], [`WAKING`], or [`AWAKE`], also if it went off
/// again or must stay off. A futex word, which says nothing of the recorder: that has its own.
pub static WOKEN: AtomicU32 = AtomicU32::new(ASLEEP);
/// Not woken yet.
pub const ASLEEP: u32 = 0;
/// A thread is waking it.
pub const WAKING: u32 = 1;
/// Was woken.
pub const AWAKE: u32 = 2;

/// How long a thread waits for another one that wakes the recorder.
const TIMEOUT_NS: u64 = 2_000_000_000;

/// The recorder, if it is on.
#[inline]
pub fn recorder() -> Option<&'static Recorder> {
    // SAFETY: the pointer is null or a word that is never freed; the word is 0
    // or the address of a leaked recorder.
    unsafe {
        let word = HOT.recorder.load(Ordering::Acquire).as_ref()?;
        (word.load(Ordering::Acquire) as *const Recorder).as_ref()
    }
}

/// Is this recorder the one that is on?
pub fn is_on(known: &Recorder) -> bool {
    recorder().is_some_and(|on| std::ptr::eq(on, known))
}

/// Forgets the recorder, whose memory is a copy of the parent's: for the child of a fork.
pub fn forget() {
    forget_recorder();
}

/// Turns the recorder on at the first CUDA call of the process. Cheap ever after.
///
/// A thread that comes while another one wakes the recorder waits, or what it allocates would
/// be missing for ever. It doesn't wait without end. It may hold a lock that the other thread
/// needs (the loader's, in a library's constructor). Or it may be the child of a fork in that
/// moment, where there is no other thread.
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
            let turned_on = || std::panic::catch_unwind(|| uncancelled(memtrace_turn_on));
            if stack::aside(turned_on).is_err() {
                switch_off("an internal error at the start");
            }
            WOKEN.store(AWAKE, Ordering::Release);
            futex::wake_all(&WOKEN);
        }),
        Err(WAKING) => {
            let end = clock::now_ns() + TIMEOUT_NS;
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

/// From now on this recorder is on.
pub fn set(recorder: &'static Recorder) {
    let (word, _) = word_of_this_process();
    word.store(std::ptr::from_ref(recorder) as usize, Ordering::Release);
    HOT.recorder.store(std::ptr::from_ref(word).cast_mut(), Ordering::Release);
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

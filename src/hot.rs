//! What every event asks before anything else, in one line of the cache. Is there a recorder? Does
//! anybody want more of an event than that it is recorded?
//!
//! Each of these words belongs to the module that it is named after, which alone changes it, and
//! seldom. Each says all by itself, but for the pointer: what it leads to is whole before it is
//! set, and stays. They lie together for speed. By the next event the program has pushed a line
//! that lies elsewhere out of the cache, and its page out of the TLB. What every stack needs lies
//! in the same line ([`crate::stack::line`]).

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use crate::stack::line::{Beside, beside};

/// See the module's documentation.
#[repr(C)]
pub struct Words {
    /// Points to a word with the address of this process's recorder while it is on. A
    /// forked child finds that word empty.
    pub recorder: AtomicPtr<AtomicUsize>,
    /// How many trackers ask for changes ([`crate::pytorch::changes`]).
    pub changes: AtomicU32,
    /// Are operators seen as they begin ([`crate::pytorch::quick`])?
    pub quick: AtomicBool,
    /// Does every change of a thread's current stream come by us ([`crate::pytorch::streams`])?
    pub streams: AtomicBool,
    /// Has a block been handed out on another stream than the default one
    /// ([`crate::pytorch::captures`])?
    pub other_streams: AtomicBool,
    /// Uses of blocks that are noted ([`crate::pytorch::captures`]).
    pub uses: AtomicUsize,
    /// Blocks that wait for the end of a capture ([`crate::pytorch::captures`]).
    pub deferred: AtomicUsize,
}

// SAFETY: atomics, which may be zeros; there is no other one in this library.
unsafe impl Beside for Words {}

/// Leads to them.
pub struct Hot;

/// The only ones.
pub static HOT: Hot = Hot;

/// No recorder is on. May be called in a handler of a signal.
pub fn forget_recorder() {
    HOT.recorder.store(std::ptr::null_mut(), Ordering::Release);
}

impl Deref for Hot {
    type Target = Words;

    #[inline(always)]
    #[allow(clippy::inline_always, reason = "an address")]
    fn deref(&self) -> &Words {
        beside()
    }
}

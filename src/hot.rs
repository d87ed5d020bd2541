//! What every event asks before anything else, in one line of the cache: is there a recorder, and
//! does anybody want more of an event than that it is written down?
//!
//! Each of these words belongs to the module that it is named after, which alone changes it, and
//! seldom. They lie together because a word elsewhere is a line that the program itself has pushed
//! out of the cache, and a page that it has pushed out of the table of pages, by the next event.
//! What every stack needs lies in the same line ([`crate::stack::line`]).

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use crate::stack::line::{Beside, beside};

/// See the module's essay.
#[repr(C)]
pub struct Words {
    /// Where the address of the recorder of this process is while it is on: a word that a forked
    /// child finds empty.
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

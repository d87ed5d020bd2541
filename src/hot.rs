//! What every event asks before anything else, in one line of the cache: is there a recorder, and
//! does anybody want more of an event than that it is written down?
//!
//! Each of these words belongs to the module that it is named after, which alone changes it, and
//! seldom. They lie together because a word elsewhere is a line that the program itself has pushed
//! out of the cache, and a page that it has pushed out of the table of pages, by the next event.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize};

/// See the module's essay.
#[repr(C, align(64))]
pub struct Hot {
    /// Where the address of the recorder of this process is while it is on: a
    /// word that a forked child finds empty.
    pub recorder: AtomicPtr<AtomicUsize>,
    /// How many trackers ask for changes ([`crate::pytorch::changes`]).
    pub changes: AtomicU32,
    /// Are operators seen as they begin ([`crate::pytorch::quick`])?
    pub quick: AtomicBool,
    /// Does every change of a thread's current stream come by us ([`crate::pytorch::streams`])?
    pub streams: AtomicBool,
    /// Which libraries addresses mean now ([`crate::stack::modules`]).
    pub epoch: AtomicU16,
    /// Uses of blocks that are noted ([`crate::pytorch::captures`]).
    pub uses: AtomicUsize,
    /// Blocks that wait for the end of a capture ([`crate::pytorch::captures`]).
    pub deferred: AtomicUsize,
    /// The interpreter, once there is one that can be walked ([`crate::stack::python::offsets`]).
    pub python: AtomicPtr<()>,
    /// How many code objects have died, plus 1 ([`crate::stack::python::deaths`]).
    pub deaths: AtomicU64,
    /// Has a block been handed out on another stream than the default one
    /// ([`crate::pytorch::captures`])?
    pub other_streams: AtomicBool,
}

const _: () = assert!(size_of::<Hot>() == 64);

/// The only one.
pub static HOT: Hot = Hot {
    recorder: AtomicPtr::new(std::ptr::null_mut()),
    changes: AtomicU32::new(0),
    quick: AtomicBool::new(false),
    streams: AtomicBool::new(false),
    epoch: AtomicU16::new(0),
    uses: AtomicUsize::new(0),
    deferred: AtomicUsize::new(0),
    python: AtomicPtr::new(std::ptr::null_mut()),
    deaths: AtomicU64::new(1),
    other_streams: AtomicBool::new(false),
};

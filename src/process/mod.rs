//! The process that is recorded, seen from above the recorder: its snapshots, its background
//! thread, its ends, and the others of its run.
//!
//! Hooks know nothing of this. They leave a word in the recorder's mailbox
//! ([`crate::record::mailbox`]).

pub mod background;
pub mod dump;
pub mod jumps;
pub mod last;
pub mod life;
pub mod measure;
pub mod starts;
pub mod tree;
pub mod virtual_gpu;

use std::sync::atomic::{AtomicPtr, Ordering};

use crate::config::Config;
use crate::cuda::table::ROWS;
use crate::os::clock;
use crate::os::locks::{ForkLock, Turn};
use crate::record::{Recorder, switch};
use background::OomFiles;
use measure::MeasuredDevices;
use tree::TreeNode;

/// A recorder and what belongs to it. Never freed, as the recorder isn't.
/// A forked child has its own.
pub struct Process {
    /// What hooks write into.
    pub recorder: Recorder,
    /// Where this process stands among those of its run.
    pub place: TreeNode,
    /// The devices that are asked how full they are.
    measured: MeasuredDevices,
    /// One dump at a time; the others wait. Never taken in a hook.
    dumping: Turn,
    /// Snapshots of failures.
    oom: ForkLock<OomFiles>,
}

/// The last one that was made, by this process or by the one that it was forked from: whole before
/// it is set.
static LAST: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

impl Process {
    /// This process, which begins to record; `None` if there is no memory for that.
    pub fn new(config: Config) -> Option<Process> {
        clock::prepare();
        let started_ns = clock::now_ns();
        let (host, pid) = (dump::host(), std::process::id());
        let name = format!("memtrace-{host}-{pid}-{}.blackbox", started_ns / 1_000_000);
        let place = TreeNode::find(&config, &name);
        let describe = |config: &Config, stacks, room| {
            dump::description(config, started_ns, &place, stacks, room)
        };
        let recorder = Recorder::new(config, started_ns, &name, ROWS, describe)?;
        let (measured, dumping, oom) = <(MeasuredDevices, Turn, ForkLock<OomFiles>)>::default();
        Some(Process { recorder, place, measured, dumping, oom })
    }

    /// From now on this is [`last`].
    pub fn remember(&'static self) {
        LAST.store(std::ptr::from_ref(self).cast_mut(), Ordering::Release);
    }
}

/// The last one that began to record here, or in the process that this one was forked from.
pub fn last() -> Option<&'static Process> {
    // SAFETY: null, or leaked, here or in the process that this one was forked from,
    // whose memory this one has a copy of.
    unsafe { LAST.load(Ordering::Acquire).as_ref() }
}

/// The one that is on.
pub fn current() -> Option<&'static Process> {
    let recorder = switch::recorder()?;
    last().filter(|process| std::ptr::eq(&raw const process.recorder, recorder))
}

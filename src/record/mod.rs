//! The recorder: events into the ring, and what keeps a hook from harming the program it sits in.
//!
//! A hook calls [`Recorder::write`] and nothing else here. It takes no lock, allocates nothing on the
//! common path and can't fail; what may go wrong later (naming, writing files) goes wrong in the background.

pub mod clock;
pub mod guard;
pub mod ring;
pub mod stacks;

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::event::Event;
use memtrace_format::replay::State;

use crate::config::Config;
use crate::emitter::Emitter;
use crate::record::ring::Ring;
use crate::record::stacks::Stacks;

/// Everything one process records into. Made at the first CUDA call and never freed: other threads may be
/// inside a hook at any time, also while the process exits.
pub struct Recorder {
    /// What the user asked for.
    pub config: Config,
    /// The history.
    pub ring: Ring,
    /// Interned call stacks.
    pub stacks: Stacks,
    /// The background thread's mailbox.
    pub emitter: Emitter,
    /// The process that owns this recorder; a forked child must not write into it.
    pub pid: i32,
    /// When recording began, nanoseconds since 1970.
    pub started_ns: u64,
    /// Events that found the ring full and retired a batch themselves.
    pub stalls: AtomicU64,
}

impl Recorder {
    /// A recorder for this process.
    pub fn new(config: Config) -> Recorder {
        Recorder {
            ring: Ring::new(config.events),
            stacks: Stacks::new(config.stacks),
            emitter: Emitter::new(),
            // SAFETY: getpid has no preconditions.
            pid: unsafe { libc::getpid() },
            started_ns: clock::now_ns(),
            stalls: AtomicU64::new(0),
            config,
        }
    }

    /// Writes one event. Returns its ticket.
    pub fn write(&self, event: &Event) -> u64 {
        let (ticket, stalled) = self.ring.push(event.pack(), |state, e| {
            state.apply(e, &|_| "", &mut |_, _| ());
        });
        if stalled {
            self.stalls.fetch_add(1, Ordering::Relaxed);
        }
        if ticket.is_multiple_of(self.ring.batch()) {
            self.emitter.wake();
        }
        ticket
    }

    /// Retires the oldest events so that producers always find room. Called by the background thread.
    pub fn retire_ahead(&self) {
        self.ring.retire_ahead(|state: &mut State, e| state.apply(e, &|_| "", &mut |_, _| ()));
    }
}

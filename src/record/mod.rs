//! The recorder: events into the ring, and what keeps a hook from harming the program it sits in.
//!
//! A hook calls [`Recorder::write`] and nothing else here. It takes no lock, allocates
//! nothing on the common path and can't fail. What may go wrong later (naming, writing
//! files) goes wrong in the background.

pub mod activity;
pub mod blackbox;

pub mod guard;
pub mod hook;
pub mod live;
pub mod mailbox;
pub mod places;
pub mod ring;

pub mod stacks;
pub mod switch;
#[cfg(test)]
mod testing;
pub mod this_thread;
pub mod usage;

use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_format::blackbox::{Region, at};
use memtrace_format::event::{Event, FLAG_ENDING, Kind, NO_STACK, StackId};
use memtrace_format::key::{Description, StackTables};
use memtrace_format::world::World;

use crate::config::Config;
use crate::os::message;
use crate::os::space::Room;
use crate::os::sync::of_file;
use crate::os::truncated;
use crate::record::blackbox::{ABOUT_BYTES, Mapped};
use crate::record::guard::Local;
use crate::record::live::Live;
use crate::record::mailbox::Mailbox;
use crate::record::ring::{LOOK_EVERY, Ring};
use crate::record::stacks::Stacks;
use crate::record::usage::Usage;
use crate::stack::Site;
use crate::stack::python::offsets;

/// Everything one process records into. Made at the first CUDA call and never freed:
/// other threads may be inside a hook at any time, also while the process exits.
/// What every event needs comes first.
#[repr(C)]
pub struct Recorder {
    /// The history.
    pub ring: Ring<Live>,
    /// Interned call stacks.
    pub stacks: Stacks,
    /// The background thread's mailbox.
    pub mailbox: Mailbox,
    /// The file behind everything above.
    pub blackbox: Mapped,
    /// What the user asked for.
    pub config: Config,
    /// The process that owns this recorder; a forked child must not write into it.
    pub pid: i32,
    /// When recording began, nanoseconds since 1970.
    pub started_ns: u64,
    /// Which entry points are used by whom.
    pub usage: Usage,
    /// For the names of labels in the box.
    pub labels: Room,
    /// Which shortages of room have been reported, a bit each.
    reported: AtomicU32,
}

impl Recorder {
    /// A recorder for this process, in a black box of this name, with places for so many entry
    /// points. `None` if there is no memory for it. `describe` gives the box's description of the
    /// process, from what is known of stacks and in how many bytes.
    pub fn new(
        config: Config,
        started_ns: u64,
        name: &str,
        entry_points: usize,
        describe: impl FnOnce(&Config, StackTables, usize) -> Description,
    ) -> Option<Recorder> {
        let blackbox = Mapped::create(&config, name, entry_points)?;
        let stacks = Stacks::new(config.stacks, config.stacks_of_frees, &blackbox);
        blackbox.describe(&describe(&config, stacks.about(), ABOUT_BYTES));
        let header = of_file(blackbox.header());
        let slots = |region| of_file(blackbox.region(region)).as_chunks().0;
        let live = Live::new(slots(Region::Live), header, blackbox.space());
        Some(Recorder {
            ring: Ring::new(slots(Region::Ring), header, blackbox.space(), live),
            stacks,
            mailbox: Mailbox::new(config.peak_step),
            pid: std::process::id() as i32,
            started_ns,
            usage: Usage::new(&blackbox),
            labels: blackbox.room(Region::Labels),
            blackbox,
            config,
            reported: AtomicU32::new(0),
        })
    }

    /// The stack of the calling thread, which gives memory back; none if
    /// the user wants none for that.
    pub fn stack_of_free(&self, local: &Local) -> StackId {
        if self.stacks.wanted(Site::Free) {
            self.stacks.capture(&local.stacks, Site::Free)
        } else {
            NO_STACK
        }
    }

    /// The same for a call that returns to `caller`.
    pub fn stack_of_freeing_call(&self, local: &Local, caller: usize) -> StackId {
        if self.config.stacks_of_frees {
            self.stacks.capture_call(&local.stacks, Site::Free, caller)
        } else {
            NO_STACK
        }
    }

    /// Writes one event. Returns its ticket. Inlined, so that the event
    /// goes from registers into the ring.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "an event is larger than what is written of it")]
    pub fn write(&self, event: &Event) -> u64 {
        let ending = event.kind.gives_back() && self.python_ends(event.thread);
        let flags = event.flags | if ending { FLAG_ENDING } else { 0 };
        let event = &Event { flags, ..*event };
        let (ticket, stalled) = self.ring.push(event.pack(), Live::apply);
        self.wrote(event, ticket, stalled);
        ticket
    }

    /// Writes an event if it is the next one after the first `written`
    /// ([`Recorder::written`]). `false`: others came before it.
    pub fn write_at(&self, written: u64, event: &Event) -> bool {
        let stalled = self.ring.push_at(written, event.pack(), Live::apply);
        stalled.map(|stalled| self.wrote(event, written, stalled)).is_some()
    }

    /// Events so far.
    pub fn written(&self) -> u64 {
        self.ring.written()
    }

    #[inline]
    fn wrote(&self, event: &Event, ticket: u64, stalled: bool) {
        if matches!(event.kind, Kind::Measured | Kind::Entered | Kind::Mark) {
            self.blackbox.header()[at::OWN_EVENTS].fetch_add(1, Ordering::Relaxed);
        }
        if stalled {
            self.blackbox.header()[at::STALLS].fetch_add(1, Ordering::Relaxed);
        }
        if ticket.is_multiple_of(LOOK_EVERY) && self.ring.is_short(ticket) {
            self.mailbox.wake();
        }
    }

    /// The process has joined a communicator.
    pub fn joined(&self, new: World) {
        let word = &self.blackbox.header()[at::WORLD];
        let join = |old| Some(new.after(World::unpack(old)).map_or(0, World::pack));
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, join);
    }

    /// Which rank it is, as far as NCCL knows.
    pub fn world(&self) -> Option<World> {
        World::unpack(self.blackbox.header()[at::WORLD].load(Ordering::Relaxed))
    }

    /// Does this thread of a Python program do what it does because Python ends?
    #[inline]
    fn python_ends(&self, thread: u32) -> bool {
        offsets::found().is_some_and(|python| python.ending(thread == self.pid as u32))
    }

    /// Makes room so that producers always find some. Called by the background thread.
    pub fn retire_ahead(&self) {
        self.ring.retire_ahead(Live::apply);
        // A file that somebody truncated reads as zeros: what it says is not so.
        if !truncated::happened() {
            self.report_shortage();
        }
    }

    /// Reports, once, what there was no room for.
    fn report_shortage(&self) {
        let header = |word: usize| self.blackbox.header()[word].load(Ordering::Relaxed);
        let path = self.blackbox.path.as_ref();
        let folder = path.and_then(|path| path.parent()).unwrap_or("memory".as_ref()).display();
        let remedy = |limit: Option<&str>| match limit {
            Some(limit) => (format!("the limit on {limit}"), "Raise it for more"),
            None => (folder.to_string(), "Set MEMTRACE_BLACKBOX to a folder with more room"),
        };
        let capacity = self.ring.capacity();
        let history = self.ring.retired() > 0 && capacity < self.config.events as u64;
        if history && self.first_time(1) {
            let (what, remedy) = remedy(self.blackbox.limit_of(Region::Ring, capacity * 2));
            message!(
                "only the last {capacity} events of history fit into {what}; what is alive stays exact. {remedy}"
            );
        }
        if header(at::LIVE_OUTSIDE) > 0 && self.first_time(2) {
            let needed = header(at::LIVE_ROOM) + 1;
            let (what, remedy) = remedy(self.blackbox.limit_of(Region::Live, needed));
            message!(
                "no room in {what} for everything that is alive: the rest is kept in the program's memory, and would \
                 be missing if it is killed. {remedy}"
            );
        }
        if header(at::LIVE_REFUSED) > 0 && self.first_time(4) {
            message!(
                "no memory for everything that is alive: what comes from here on is counted, and missing from snapshots"
            );
        }
    }

    fn first_time(&self, what: u32) -> bool {
        self.reported.fetch_or(what, Ordering::Relaxed) & what == 0
    }
}

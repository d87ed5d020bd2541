//! The background thread's mailbox: what a hook has to say to it, in words and a futex.
//!
//! A hook leaves a number and makes at most one system call. Who looks into it is
//! [`crate::process::background`].
//!
//! Words that the thread takes out, by exchange, are put in by exchange, too: so of any two the
//! order is certain.

use crate::os::clock;
use crate::os::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, sleep_on, wake_all};

/// See [`Mailbox::request_last_snapshot`].
const REQUESTED: u32 = 1;
/// See [`Mailbox::request_last_snapshot`].
const DONE: u32 = 2;

/// See the module's documentation.
pub struct Mailbox {
    /// Changes with every call for attention; the futex word.
    calls: AtomicU32,
    /// Ticket + 1 of the first out-of-memory event that nobody has looked at yet; 0 if none.
    oom: AtomicU64,
    /// Ticket + 1 of the last new peak that nobody has looked at yet; 0 if none.
    peak: AtomicU64,
    /// How much higher the next new peak must be, bytes.
    peak_step: u64,
    /// Bytes that the next new peak must reach; `u64::MAX` if nobody asked for peaks.
    next_peak: AtomicU64,
    /// A signal has come.
    signalled: AtomicU32,
    /// How full the devices are is worth asking.
    to_measure: AtomicU32,
    /// The last snapshot is being written, or is: no other comes after it.
    closed: AtomicU32,
    /// There is a thread that looks into all this.
    running: AtomicBool,
    /// The process ends by `_exit`: asked for ([`REQUESTED`]), and done ([`DONE`]). A futex word.
    last_snapshot: AtomicU32,
}

impl Mailbox {
    /// An empty mailbox; no thread yet. A new peak is worth a snapshot if
    /// it is this many bytes above the last.
    pub fn new(peak_step: Option<u64>) -> Mailbox {
        let peak_step = peak_step.unwrap_or(u64::MAX);
        Mailbox {
            calls: AtomicU32::new(0),
            oom: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            peak_step,
            next_peak: AtomicU64::new(peak_step),
            signalled: AtomicU32::new(0),
            to_measure: AtomicU32::new(0),
            closed: AtomicU32::new(0),
            running: AtomicBool::new(false),
            last_snapshot: AtomicU32::new(0),
        }
    }

    /// Wakes the thread. Callable from a hook.
    pub fn wake(&self) {
        self.calls.fetch_add(1, Ordering::Release);
        wake_all(&self.calls);
    }

    /// Notes that the event with this ticket says out of memory. Callable from a hook.
    pub fn out_of_memory(&self, ticket: u64) {
        // One that is waiting already is nearer to the cause.
        let _ = self.oom.compare_exchange(0, ticket + 1, Ordering::AcqRel, Ordering::Relaxed);
        self.wake();
    }

    /// Notes that PyTorch has `allocated` bytes on one device after the event
    /// with this ticket. Callable from a hook.
    pub fn allocated(&self, allocated: u64, ticket: u64) {
        if allocated < self.next_peak.load(Ordering::Relaxed) {
            return;
        }
        self.next_peak.store(allocated.saturating_add(self.peak_step), Ordering::Relaxed);
        self.peak.swap(ticket + 1, Ordering::AcqRel);
        self.wake();
    }

    /// Notes that the user's signal has come. Callable from a signal handler.
    pub fn signal(&self) {
        self.signalled.swap(1, Ordering::AcqRel);
        self.wake();
    }

    /// Notes that something without a size has come or gone. Callable from a hook.
    pub fn measure(&self) {
        self.to_measure.swap(1, Ordering::AcqRel);
        self.wake();
    }

    /// The same, when the thread looks again anyway.
    pub fn measure_later(&self) {
        self.to_measure.swap(1, Ordering::AcqRel);
    }

    /// No more snapshots by the clock, at peaks or by signal: the last one comes now.
    pub fn close(&self) {
        self.closed.store(1, Ordering::Release);
    }

    /// Has the thread write the last snapshot, and waits for it. Allocates nothing and takes no
    /// lock: the caller may be in a signal handler.
    pub fn request_last_snapshot(&self, timeout_ns: u64) {
        if !self.running.load(Ordering::Acquire) {
            return; // what is in the black box stays there
        }
        let end = clock::now_ns() + timeout_ns;
        // It may be done already: by a thread that has gone since the question whether there is
        // one.
        let asked =
            self.last_snapshot.compare_exchange(0, REQUESTED, Ordering::AcqRel, Ordering::Acquire);
        if asked.is_ok() {
            self.wake();
        }
        while self.last_snapshot.load(Ordering::Acquire) == REQUESTED && clock::now_ns() < end {
            sleep_on(&self.last_snapshot, REQUESTED);
        }
    }

    // --- for the thread
    // -----------------------------------------------------------------------------

    /// There is a thread now.
    pub fn begun(&self) {
        self.running.store(true, Ordering::Release);
    }

    /// How often it has been called. Look into the mailbox after this, then [`Mailbox::wait`].
    pub fn calls(&self) -> u32 {
        self.calls.load(Ordering::Acquire)
    }

    /// Sleeps until it is called again, or for a while.
    pub fn wait(&self, calls: u32) {
        sleep_on(&self.calls, calls);
    }

    /// Takes the ticket after an out-of-memory event that is waiting.
    pub fn take_oom(&self) -> Option<u64> {
        Some(self.oom.swap(0, Ordering::AcqRel)).filter(|ticket| *ticket != 0)
    }

    /// Takes the ticket after the last new peak.
    pub fn take_peak(&self) -> Option<u64> {
        Some(self.peak.swap(0, Ordering::AcqRel)).filter(|ticket| *ticket != 0)
    }

    /// Has the signal come?
    pub fn take_signal(&self) -> bool {
        self.signalled.swap(0, Ordering::AcqRel) != 0
    }

    /// Shall the devices be asked?
    pub fn take_measure(&self) -> bool {
        self.to_measure.swap(0, Ordering::AcqRel) != 0
    }

    /// Does no other snapshot come, but the last one?
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }

    /// Was the last snapshot asked for?
    pub fn is_last_snapshot_requested(&self) -> bool {
        self.last_snapshot.load(Ordering::Acquire) == REQUESTED
    }

    /// It is written.
    pub fn last_snapshot_done(&self) {
        self.last_snapshot.swap(DONE, Ordering::AcqRel);
        wake_all(&self.last_snapshot);
    }

    /// The thread is gone: nobody waits for it.
    pub fn gone(&self) {
        self.running.store(false, Ordering::Release);
        self.last_snapshot_done();
    }
}

#[cfg(all(test, loom))]
mod tests;

//! The time of an event: the wall clock, because PyTorch's own trace uses it, and so
//! traces of ranks can be laid side by side.
//!
//! The system call without entering the kernel (vDSO) takes 24 ns, and there are two readings in an
//! allocation and its free. Where the kernel itself keeps time by the processor's counter, we read
//! the counter, 10 ns. (`current_clocksource` is `tsc`, which the kernel gives up if the counter
//! isn't constant or differs between processors.) We go on from an *anchor*: a pair of readings of
//! both, and the counter's rate since an earlier one. An anchor holds for a quarter of a second;
//! then whoever comes by takes a new one. So a clock that was set or that the network corrects is
//! followed soon. The rate comes from the monotonic clock, which nobody sets.
//!
//! Must never wait: a reader that meets somebody at work on the anchor asks the system.

use crate::sync::{AtomicBool, AtomicU64, Ordering, constant, fence, of_process};

/// Nanoseconds since 1970.
#[inline]
pub fn now_ns() -> u64 {
    ANCHOR.read().unwrap_or_else(|| ANCHOR.renew())
}

/// Allows the use of the processor's counter, if the kernel trusts it.
/// Reads a file: once, not in a hook.
pub fn prepare() {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let trusted = memtrace_files::read(path).is_ok_and(|text| text.trim_ascii() == b"tsc");
    ANCHOR.trusted.store(trusted && cfg!(target_arch = "x86_64"), Ordering::Relaxed);
}

/// In a forked child, nobody else is at work on the anchor, which may be half done.
pub fn forget_others() {
    ANCHOR.forget_others();
}

/// In a model, time is what the model says.
#[cfg(all(test, loom))]
use self::tests::model::{counter, system};

#[cfg(not(all(test, loom)))]
fn system(clock: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is valid for writing; the two clocks that are asked for always exist.
    unsafe { libc::clock_gettime(clock, &raw mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(all(target_arch = "x86_64", not(all(test, loom))))]
#[inline]
fn counter() -> u64 {
    // SAFETY: every 64-bit x86 processor has it; systems that forbid its
    // use to programs don't use it as clock.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(any(target_arch = "x86_64", all(test, loom))))]
fn counter() -> u64 {
    0
}

/// How long the rate is measured before it is used.
const MEASURE_NS: u64 = 10_000_000;
/// How long an anchor holds; not more than four times as long as its rate was measured.
const HOLD_NS: u64 = 250_000_000;
/// Readings that belong together are no further apart. So the time is
/// never off by more than five times this.
const TOGETHER_NS: u64 = 2_000;
/// So often in turn they don't, and the system's clock is too slow to be compared with.
const PATIENCE: u64 = 1000;

of_process! {
    static ANCHOR: Anchor = Anchor::new();
}

#[repr(align(64))]
struct Anchor {
    trusted: AtomicBool,
    /// Odd while somebody writes the rest.
    version: AtomicU64,
    counter: AtomicU64,
    wall: AtomicU64,
    monotonic: AtomicU64,
    /// Nanoseconds a tick, times 2^32; 0 as long as it isn't known.
    rate: AtomicU64,
    /// Ticks for which the anchor holds.
    hold: AtomicU64,
    /// How often in turn the readings did not belong together.
    misses: AtomicU64,
}

impl Anchor {
    constant! {
        fn new() -> Anchor {
            Anchor {
                trusted: AtomicBool::new(false),
                version: AtomicU64::new(0),
                counter: AtomicU64::new(0),
                wall: AtomicU64::new(0),
                monotonic: AtomicU64::new(0),
                rate: AtomicU64::new(0),
                hold: AtomicU64::new(0),
                misses: AtomicU64::new(0),
            }
        }
    }

    /// The time by the counter; `None` if the anchor is too old, or not
    /// there yet, or in somebody's hands.
    #[inline]
    fn read(&self) -> Option<u64> {
        let version = self.version.load(Ordering::Acquire);
        let (at, wall) = (self.counter.load(Ordering::Relaxed), self.wall.load(Ordering::Relaxed));
        let (rate, hold) = (self.rate.load(Ordering::Relaxed), self.hold.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if version != self.version.load(Ordering::Relaxed) || !version.is_multiple_of(2) {
            return None;
        }
        let ticks = counter().wrapping_sub(at);
        // A holding time of 0 ends here. `hold` × `rate` is below 2^60.
        (ticks < hold).then(|| wall + ((ticks * rate) >> 32))
    }

    /// The time by the system; takes a new anchor if nobody else is at it.
    #[cold]
    fn renew(&self) -> u64 {
        let version = self.version.load(Ordering::Relaxed);
        let free = self.trusted.load(Ordering::Relaxed) && version.is_multiple_of(2);
        let taken = free
            && self
                .version
                .compare_exchange(version, version + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !taken {
            return system(libc::CLOCK_REALTIME);
        }
        fence(Ordering::Release);
        let before = system(libc::CLOCK_MONOTONIC);
        let (wall, now) = (system(libc::CLOCK_REALTIME), counter());
        let monotonic = system(libc::CLOCK_MONOTONIC);
        // If the thread lost the processor in between, the readings don't belong together.
        if monotonic - before < TOGETHER_NS {
            self.misses.store(0, Ordering::Relaxed);
            self.take(now, wall, monotonic);
        } else if self.misses.fetch_add(1, Ordering::Relaxed) > PATIENCE {
            self.trusted.store(false, Ordering::Relaxed);
        }
        self.version.store(version + 2, Ordering::Release);
        wall
    }

    fn forget_others(&self) {
        let version = self.version.load(Ordering::Relaxed);
        if !version.is_multiple_of(2) {
            self.hold.store(0, Ordering::Relaxed);
            self.counter.store(0, Ordering::Relaxed);
            self.rate.store(0, Ordering::Relaxed);
            self.version.store(version + 1, Ordering::Release);
        }
    }

    /// Makes an anchor of these readings. For the one that has the odd version.
    fn take(&self, now: u64, wall: u64, monotonic: u64) {
        let ticks = now.wrapping_sub(self.counter.load(Ordering::Relaxed));
        let passed = monotonic - self.monotonic.load(Ordering::Relaxed).min(monotonic);
        // Whoever had the version before has just taken one, which is as good.
        if ticks < self.hold.load(Ordering::Relaxed) {
            return;
        }
        let first = self.counter.load(Ordering::Relaxed) == 0;
        if !first && passed < MEASURE_NS && self.rate.load(Ordering::Relaxed) == 0 {
            return; // go on measuring
        }
        let rate = if first { 0 } else { rate(passed, ticks) };
        self.counter.store(now, Ordering::Relaxed);
        self.wall.store(wall, Ordering::Relaxed);
        self.monotonic.store(monotonic, Ordering::Relaxed);
        self.rate.store(rate, Ordering::Relaxed);
        let hold_ns = HOLD_NS.min(4 * passed);
        let hold = (u128::from(hold_ns) << 32).checked_div(u128::from(rate)).unwrap_or(0);
        self.hold.store(hold as u64, Ordering::Relaxed);
    }
}

/// Nanoseconds a tick, times 2^32; 0 if these two can't be true of a processor.
fn rate(passed_ns: u64, ticks: u64) -> u64 {
    let rate = (u128::from(passed_ns) << 32).checked_div(u128::from(ticks)).unwrap_or(0);
    // Counters run at some 0.1 to 10 GHz.
    if (1 << 28..1 << 36).contains(&rate) { rate as u64 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who reads the anchor while others take new ones gets the time, or nothing. Seen red:
    /// without either fence, a reader puts parts of two anchors together; where one that holds is
    /// taken again at once, its rate is lost.
    #[cfg(loom)]
    pub mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;
        use std::cell::Cell;

        std::thread_local! {
            /// Loom's threads are all on one of the system's.
            static NOW: Cell<u64> = const { Cell::new(0) };
        }
        /// The three clocks began at different times, and all go at the same rate.
        const WALL: u64 = 1 << 60;

        pub fn counter() -> u64 {
            NOW.get()
        }

        pub fn system(clock: libc::clockid_t) -> u64 {
            NOW.get() + if clock == libc::CLOCK_REALTIME { WALL } else { 0 }
        }

        fn pass(ns: u64) {
            NOW.set(NOW.get() + ns);
        }

        /// `others` take new anchors, and this thread reads.
        fn explore(others: usize) {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(move || {
                NOW.set(1);
                let anchor = Arc::new(trusted());
                anchor.renew();
                pass(MEASURE_NS);
                anchor.renew();
                let renew = |anchor: Arc<Anchor>| {
                    move || {
                        pass(4 * MEASURE_NS); // so the anchor holds no longer
                        anchor.renew();
                    }
                };
                let others: Vec<_> =
                    (0..others).map(|_| thread::spawn(renew(anchor.clone()))).collect();
                let read = anchor.read();
                assert!(read.is_none_or(|read| read == system(libc::CLOCK_REALTIME)));
                others.into_iter().for_each(|other| other.join().unwrap());
                assert_eq!(anchor.read(), Some(system(libc::CLOCK_REALTIME)));
            });
        }

        #[test]
        fn a_reader_never_takes_half_of_a_new_anchor() {
            explore(1);
        }

        #[test]
        fn of_two_who_take_a_new_anchor_one_does() {
            explore(2);
        }
    }

    fn trusted() -> Anchor {
        Anchor { trusted: AtomicBool::new(true), ..Anchor::new() }
    }

    #[test]
    fn the_time_is_the_systems() {
        let anchor = trusted();
        let (mut by_counter, start) = (0, system(libc::CLOCK_MONOTONIC));
        while system(libc::CLOCK_MONOTONIC) - start < 600_000_000 {
            let before = system(libc::CLOCK_REALTIME);
            let read = anchor.read();
            by_counter += u32::from(read.is_some());
            let time = read.unwrap_or_else(|| anchor.renew());
            let after = system(libc::CLOCK_REALTIME);
            let off = 5 * TOGETHER_NS;
            assert!(time + off >= before && time <= after + off, "{before} {time} {after}");
        }
        // Where the counter isn't fit for use the kernel's file says so,
        // and this test has nothing to compare.
        prepare();
        if ANCHOR.trusted.load(Ordering::Relaxed) {
            assert!(by_counter > 1000, "{by_counter} readings came from the counter");
        }
    }

    #[test]
    fn nothing_is_read_before_the_rate_is_known_nor_after_the_anchor_has_gone_stale() {
        let anchor = trusted();
        assert_eq!(anchor.read(), None);
        let now = counter();
        anchor.take(now, 5_000_000_000, 1);
        assert_eq!((anchor.read(), anchor.hold.load(Ordering::Relaxed)), (None, 0));
        // A tick a nanosecond, as it would seem; then far too long ago.
        anchor.take(now + MEASURE_NS, 6_000_000_000, 1 + MEASURE_NS);
        assert_eq!(anchor.rate.load(Ordering::Relaxed), 1 << 32);
        assert_eq!(anchor.hold.load(Ordering::Relaxed), 4 * MEASURE_NS);
        anchor.counter.store(counter().wrapping_sub(4 * MEASURE_NS + 1), Ordering::Relaxed);
        assert_eq!(anchor.read(), None);
    }

    #[test]
    fn an_anchor_in_somebodys_hands_is_not_waited_for() {
        let anchor = trusted();
        anchor.version.store(1, Ordering::Relaxed);
        assert_eq!(anchor.read(), None);
        assert!(anchor.renew() > 1_600_000_000_000_000_000);
        assert_eq!(anchor.version.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn an_impossible_rate_is_none() {
        assert_eq!(rate(10, 0), 0);
        assert_eq!(rate(0, 1_000), 0);
        assert_eq!(rate(1_000_000_000, 1_000), 0);
        assert_eq!(rate(1_000, 3_000), (1 << 32) / 3);
    }

    #[test]
    fn an_anchor_that_nobody_finishes_is_made_anew() {
        let anchor = trusted();
        anchor.renew();
        anchor.version.fetch_add(1, Ordering::Relaxed); // by a thread that a fork has left behind
        anchor.wall.store(5, Ordering::Relaxed);
        anchor.forget_others();
        assert_eq!(anchor.read(), None);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while anchor.read().is_none() {
            assert!(std::time::Instant::now() < end, "it is never used again");
            std::thread::sleep(std::time::Duration::from_millis(15));
            anchor.renew();
        }
    }
}

//! Warnings that only a recorder with hooks in the driver can give. They are
//! worked out when a snapshot is written.
//!
//! - *A stray context*: the process used a device of which it never held more than next to nothing,
//!   while it worked on another. A context takes hundreds of megabytes of a card that another rank
//!   needs. What counts is the most that was ever held ([`memtrace_state::past`]), not what is
//!   there at the end or in the recorded part of the history.
//! - *Memory that a library took beside the pool just before it ran out*: within [`JUST_BEFORE_US`]
//!   before the failure, and still held then. Without it the request would have fitted.
//! - *Growth beside the pool*, step by step ([`super::growth`]).
//!
//! A warning that is wrong is worse than none: each says what was seen, and nothing is
//! expected of what the program may still do.

use std::collections::VecDeque;

use memtrace_format::event::StackId;
use memtrace_format::key::{CodeLine, Kept, Warning};
use memtrace_format::stacks::Words;
use memtrace_state::ApiName;

use super::growth::WINDOWS;
use super::{Accounts, CONTEXTS, NOBODY, frames};
use crate::owner::Names;

/// The most that a process holds at a time of a device that it doesn't use,
/// bytes: a few of PyTorch's segments.
const NEXT_TO_NOTHING: u64 = 32 << 20;
/// What it holds at least of one that it works on, bytes. In a small
/// program a little is not nothing.
const MUCH: u64 = 1 << 30;
/// How long before a failure is just before it.
pub(crate) const JUST_BEFORE_US: u64 = 10_000_000;
/// Recent allocations that are remembered.
const RECENT: usize = 4096;

/// Is a device stray of which at most `peak` bytes were held, in a process
/// that held at most `most` of one?
pub(crate) fn is_stray(peak: u64, most: u64) -> bool {
    peak == 0 && most > 0 || peak <= NEXT_TO_NOTHING && most >= MUCH
}

/// One warning.
fn warning(kind: &str, device: i8, text: String, frames: Vec<CodeLine>) -> Warning {
    Warning { kind: kind.to_owned(), device: device.into(), text, frames, kept: Kept::NOTHING }
}

/// An allocation beside the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Taken {
    time_us: u64,
    owner: usize,
    bytes: u64,
    stack: StackId,
}

/// What was taken beside the pool of one device lately, and is still held.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recent(VecDeque<Taken>);

/// What was taken just before a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TakenBefore {
    /// Bytes by owner, the largest first.
    pub by: Vec<(usize, u64)>,
    /// Where the largest single one was taken.
    pub stack: StackId,
    /// What was asked for, bytes.
    pub asked: u64,
    /// What the device had free, if it said so.
    pub free: Option<u64>,
}

impl Recent {
    /// Memory beside the pool came or went. The last one like it is the one that goes.
    pub(crate) fn note(
        &mut self,
        time_us: u64,
        owner: usize,
        bytes: u64,
        stack: StackId,
        came: bool,
    ) {
        if came {
            if self.0.len() == RECENT {
                self.0.pop_front();
            }
            self.0.push_back(Taken { time_us, owner, bytes, stack });
        } else if let Some(i) =
            self.0.iter().rposition(|t| (t.owner, t.bytes, t.stack) == (owner, bytes, stack))
        {
            self.0.remove(i);
        }
    }

    /// A request failed that `by` had made; the framework is nobody here.
    pub(crate) fn taken_before(
        &self,
        time_us: u64,
        by: Option<usize>,
        asked: u64,
        free: Option<u64>,
    ) -> Option<TakenBefore> {
        let since = time_us.saturating_sub(JUST_BEFORE_US);
        let counts = |t: &&Taken| t.time_us >= since && Some(t.owner) != by;
        let recent = || self.0.iter().filter(counts);
        let sum = recent().map(|t| t.bytes).fold(0, u64::saturating_add);
        let had = free.unwrap_or(0);
        if asked <= had || asked > had.saturating_add(sum) {
            return None;
        }
        let stack = recent().max_by_key(|t| t.bytes)?.stack;
        let mut by: Vec<(usize, u64)> = Vec::new();
        for t in recent() {
            match by.iter_mut().find(|(owner, _)| *owner == t.owner) {
                Some((_, bytes)) => *bytes = bytes.saturating_add(t.bytes),
                None => by.push((t.owner, t.bytes)),
            }
        }
        by.sort_by_key(|(owner, bytes)| (u64::MAX - bytes, *owner));
        Some(TakenBefore { by, stack, asked, free })
    }
}

impl Accounts {
    /// All that there is to warn of.
    pub(super) fn warnings<W: Words>(
        &self,
        api: ApiName<'_>,
        namer: &mut Names<'_, W>,
    ) -> Vec<Warning> {
        let mut all = Vec::new();
        let owned_by = |owner: usize| self.owners.get(owner).map_or(NOBODY, |name| &**name);
        let most = self.devices.values().map(|d| d.peak).max().unwrap_or(0);
        for (ordinal, d) in &self.devices {
            if let Some(way) = d.entered.filter(|_| *ordinal >= 0 && is_stray(d.peak, most)) {
                let by = namer.owner(way.stack).map_or_else(String::new, |o| format!(" by {o}"));
                let takes = match d.overhead.get(&CONTEXTS) {
                    Some(bytes) if *bytes > 0 => format!(", which takes {bytes} bytes"),
                    _ => String::new(),
                };
                let text = format!(
                    "stray context on device {ordinal}, of which this process has never held more than {} bytes{takes}: \
                     {}{by}",
                    d.peak,
                    api(way.api)
                );
                all.push(warning("stray context", *ordinal, text, frames(way.stack, namer)));
            }
            if let Some(c) = &d.taken_before {
                let by: Vec<String> =
                    c.by.iter()
                        .map(|(o, bytes)| format!("{} took {bytes} bytes", owned_by(*o)))
                        .collect();
                let free = c.free.map_or_else(String::new, |f| format!(" with {f} free"));
                let text = format!(
                    "{} of device {ordinal} outside PyTorch's pool within {} seconds before memory ran out ({} bytes \
                     asked{free}): without that it would have fitted",
                    by.join(", "),
                    JUST_BEFORE_US / 1_000_000,
                    c.asked
                );
                all.push(warning(
                    "taken before out of memory",
                    *ordinal,
                    text,
                    frames(c.stack, namer),
                ));
            }
            if let Some(g) = d.growth.grown() {
                let text = format!(
                    "device {ordinal}: memory outside PyTorch's pool grows: by {} bytes over the second half of the history, in \
                     each of {WINDOWS} parts with equally many of PyTorch's allocations, while PyTorch reserved no more; {} of it \
                     by {}",
                    g.bytes,
                    g.of_owner,
                    owned_by(g.owner)
                );
                all.push(warning("growth outside PyTorch", *ordinal, text, frames(g.last, namer)));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    #[test]
    fn a_device_that_was_used_is_not_stray() {
        for (peak, most, stray) in [
            (0, 4096, true),
            (2 << 20, 1 << 30, true),
            (32 << 20, 1 << 30, true),
            (33 << 20, 1 << 40, false),
            (512, 1 << 29, false),
            (1 << 30, 1 << 30, false),
            (0, 0, false),
        ] {
            assert_eq!(is_stray(peak, most), stray, "{peak} of {most}");
        }
    }

    #[test]
    fn what_would_have_fitted_without_it_crowds() {
        let mut recent = Recent::default();
        recent.note(SECOND, 1, 1000, 9, true); // too long ago
        recent.note(15 * SECOND, 1, 300, 1, true);
        recent.note(15 * SECOND, 2, 500, 2, true);
        recent.note(16 * SECOND, 1, 300, 1, true);
        recent.note(17 * SECOND, 2, 700, 3, true);
        recent.note(17 * SECOND, 2, 700, 3, false);
        let found = recent.taken_before(20 * SECOND, None, 1200, Some(100));
        assert_eq!(
            found,
            Some(TakenBefore {
                by: vec![(1, 600), (2, 500)],
                stack: 2,
                asked: 1200,
                free: Some(100)
            })
        );
        assert_eq!(
            recent.taken_before(20 * SECOND, None, 1201, Some(100)),
            None,
            "it wouldn't have"
        );
        assert_eq!(
            recent.taken_before(20 * SECOND, None, 99, Some(100)),
            None,
            "not for want of memory"
        );
        assert_eq!(recent.taken_before(20 * SECOND, Some(2), 700, Some(0)), None, "his own");
        assert_eq!(
            recent.taken_before(20 * SECOND, Some(3), 1100, None).map(|c| c.by.len()),
            Some(2)
        );
        assert_eq!(recent.taken_before(60 * SECOND, None, 1200, Some(100)), None, "long before");
    }

    #[test]
    fn a_long_history_takes_no_more_memory() {
        let mut recent = Recent::default();
        (0..3 * RECENT as u64).for_each(|i| recent.note(i, 1, 1, 1, true));
        assert_eq!(recent.0.len(), RECENT);
    }
}

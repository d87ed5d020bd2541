//! Reading a record while its process goes on writing it.
//!
//! The reader asks nobody to wait. It takes a copy of the live table, which is the state before
//! some ticket, and reads the ring from that ticket on, a batch at a time. The process may
//! meanwhile retire what has been read or not. Only when it needs a slot again for a new event, a
//! whole ring later, is the old event gone. A reader that is that much slower gets `None` from
//! [`Recording::read`] and begins again from a newer copy.
//!
//! So the state is exact, or is known not to be. The history is whole, or it is known what is
//! missing at its beginning. Memory is needed only for what is alive and for one batch.
//!
//! **Python's end.** A Python program's memory goes when Python takes itself apart, so at the end
//! of the process nothing is left of what the program held. Hooks flag what goes then, and in
//! `atexit` handlers ([`FLAG_ENDING`]); what a user expects to see is the state before the first of
//! these. A thread may go on all the same, and a handler may allocate. So only the flags after the
//! last allocation count, and no allocation is ever left out ([`ending`]).

use std::io;

use crate::State;
use memtrace_format::event::{Event, FLAG_ENDING, StackId};

/// A ring and a live table: this process's own, or a file's.
pub trait Recording {
    /// Tickets given out so far.
    ///
    /// # Errors
    /// The file can't be read.
    fn written(&mut self) -> io::Result<u64>;

    /// The state before some ticket, and that ticket.
    ///
    /// # Errors
    /// The file can't be read, or is never the same for long enough.
    fn live(&mut self) -> io::Result<(State, u64)>;

    /// Appends the events with the tickets `from..to`, in order. Returns how
    /// many of them are missing because they are not published (yet); `None` if
    /// one of them may have been overwritten.
    ///
    /// # Errors
    /// The file can't be read.
    fn read(&mut self, from: u64, to: u64, events: &mut Vec<Event>) -> io::Result<Option<u64>>;
}

/// Events that are read at a time from the end.
const BATCH: u64 = 1024;

/// The ticket of the first event that Python's end has caused and after which nothing
/// was allocated. `None` if there is none, or if it is no longer in the history.
/// `is_of_end` says of a stack whether Python's end is on it, for versions where nothing
/// else says that `atexit` handlers run.
///
/// # Errors
/// The file can't be read.
pub fn ending(
    recording: &mut dyn Recording,
    is_of_end: &mut dyn FnMut(StackId) -> bool,
) -> io::Result<Option<u64>> {
    let (mut end, mut first) = (recording.written()?, None);
    while end > 0 {
        let start = end.saturating_sub(BATCH);
        let Some(events) = with_tickets(recording, start, end)? else { return Ok(None) };
        for (ticket, event) in events.iter().rev() {
            if event.kind.takes() {
                return Ok(first);
            }
            let flagged = event.flags & FLAG_ENDING != 0;
            if flagged || event.kind.gives_back() && is_of_end(event.stack) {
                first = Some(*ticket);
            }
        }
        end = start;
    }
    Ok(first)
}

/// The events of these tickets, each with its own; `None` if some may be
/// overwritten, or all are missing.
fn with_tickets(
    recording: &mut dyn Recording,
    from: u64,
    to: u64,
) -> io::Result<Option<Vec<(u64, Event)>>> {
    let mut events = Vec::new();
    let missing = recording.read(from, to, &mut events)?;
    if missing.is_none() || events.is_empty() {
        return Ok(None);
    }
    if missing == Some(0) {
        return Ok(Some((from..).zip(events).collect()));
    }
    // Which ones are missing is not said.
    let mut found = Vec::new();
    for ticket in from..to {
        events.clear();
        if recording.read(ticket, ticket + 1, &mut events)?.is_none() {
            return Ok(None);
        }
        found.extend(events.first().map(|event| (ticket, *event)));
    }
    Ok(Some(found))
}

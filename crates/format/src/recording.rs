//! Reading a record while its process goes on writing it.
//!
//! The reader asks nobody to wait. It takes a copy of the live table, which is the state before some ticket, and
//! reads the ring from that ticket on, a batch at a time. The process may meanwhile retire what has been read or not;
//! only when it needs a slot again for a new event, a whole ring later, is the old event gone. A reader that is that
//! much slower is told so ([`Recording::read`] returns `None`) and begins again from a newer copy.
//!
//! So the state is exact, or is known not to be; the history is whole, or it is known what is missing at its
//! beginning; and memory is needed for what is alive and for one batch.

use std::io;

use crate::event::Event;
use crate::replay::State;

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

    /// Appends the events with the tickets `from..to`, in order. Returns how many of them are missing because they
    /// are not published (yet); `None` if one of them may have been overwritten.
    ///
    /// # Errors
    /// The file can't be read.
    fn read(&mut self, from: u64, to: u64, events: &mut Vec<Event>) -> io::Result<Option<u64>>;
}

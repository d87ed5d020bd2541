//! References to physical memory, and by which event their number was last changed.

use memtrace_format::event::Event;

/// References to physical memory, as its entry's `stream` keeps them.
///
/// Beside their number is the ticket of the last event that changed it. So an event that was being
/// applied when its process died isn't counted twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct References {
    count: u32,
    ticket: u32,
}

impl References {
    /// Of a ticket no more is kept.
    const TICKET: u64 = 0x7fff_ffff;

    /// Those of an entry.
    pub fn of(entry: &Event) -> References {
        References { count: entry.stream as u32, ticket: (entry.stream >> 32) as u32 }
    }

    /// How many there are.
    pub fn count(self) -> u32 {
        self.count
    }

    /// Was the number last changed by this ticket?
    pub fn changed_by(self, ticket: u64) -> bool {
        u64::from(self.ticket) == ticket & Self::TICKET
    }

    /// So many, as this ticket has made them.
    pub(super) fn changed(count: u32, ticket: u64) -> References {
        References { count, ticket: (ticket & Self::TICKET) as u32 }
    }

    /// As the entry keeps them.
    pub(super) fn word(self) -> u64 {
        u64::from(self.count) | u64::from(self.ticket) << 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::event::{Kind, Layer};

    #[test]
    fn neither_field_reaches_the_other() {
        let event = Event::new(Kind::HandleCreate, Layer::Device);
        for count in [0, 1, u32::MAX] {
            for ticket in [0, 1, References::TICKET, u64::MAX] {
                let stream = References::changed(count, ticket).word();
                let kept = References::of(&Event { stream, ..event });
                assert!(kept.count() == count && kept.changed_by(ticket));
            }
        }
    }
}

//! The recording that a black box holds: [`memtrace_format::blackbox`] reads
//! the file, here is what it stands for.

use std::io;

use memtrace_format::blackbox::{Bytes, Reading};
use memtrace_format::event::Event;

use crate::past::Past;
use crate::recording::Recording;
use crate::state::State;

impl<B: Bytes> Recording for Reading<'_, B> {
    fn written(&mut self) -> io::Result<u64> {
        Ok(Reading::written(self)?)
    }

    fn live(&mut self) -> io::Result<(State, u64)> {
        let table = self.live_table()?;
        let mut retired = table.retired;
        let mut live = State::restore(table.entries());
        live.anomalies = table.anomalies;
        live.past = Past::of_all(&table.past);
        let mut half = Vec::new();
        if retired < Reading::written(self)?
            && table.sequence != retired.wrapping_mul(2)
            && let Some(0) = Reading::read(self, retired, retired + 1, &mut half)?
        {
            for event in half {
                if !live.ledger.counted(&event, retired) {
                    live.apply(&event, &|_| "", &mut |_, _| ());
                }
            }
            live.anomalies = table.anomalies;
            retired += 1;
        }
        Ok((live, retired))
    }

    fn read(&mut self, from: u64, to: u64, events: &mut Vec<Event>) -> io::Result<Option<u64>> {
        Ok(Reading::read(self, from, to, events)?)
    }
}

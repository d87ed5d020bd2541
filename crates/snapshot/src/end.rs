//! The end of a Python program, of which there are two: when Python began
//! to end, and when the process did.
//!
//! A snapshot of the end shows the first, because after it Python frees what the program held until
//! then ([`memtrace_state::recording::ending`] finds it). What was left at the second is beside
//! it, under `end` of the `memtrace` key. What a device says of itself at the very end still goes
//! into the accounts, unless something was given back to it in between.

use std::io;
use std::ops::Range;

use memtrace_format::event::{Event, Kind, Layer};
use memtrace_format::key::{EndDevice, EndState, Ends, Kept, LedgerDevice};
use memtrace_state::recording::Recording;
use memtrace_state::{ApiName, State};

/// Events that are read at a time.
const BATCH: u64 = 1024;

/// The events with these tickets: some frees, no more than there were
/// blocks. Without the rest if some are gone.
pub(crate) fn events_after(
    recording: &mut dyn Recording,
    tickets: Range<u64>,
) -> io::Result<Vec<Event>> {
    let mut events = Vec::new();
    let mut next = tickets.start;
    while next < tickets.end {
        let to = next.saturating_add(BATCH).min(tickets.end);
        if recording.read(next, to, &mut events)?.is_none() {
            break;
        }
        next = to;
    }
    Ok(events)
}

/// Hands out what devices said of themselves before something was given back to them.
pub(crate) fn measured(after: &[Event], note: &mut dyn FnMut(&Event)) {
    let from_device = |e: &Event| {
        e.kind.gives_back() && !(e.layer == Layer::Framework && e.kind == Kind::FreeRequested)
    };
    for event in after.iter().take_while(|e| !from_device(e)) {
        if event.kind == Kind::Measured {
            note(event);
        }
    }
}

/// Both ends, by device; `state` is that of the first, before `ticket`.
pub(crate) fn ends(mut state: State, ticket: u64, after: &[Event], api: ApiName<'_>) -> Ends {
    let time_us = |event: Option<&Event>| event.map(|event| event.time_ns / 1000);
    let python = end_state(&state, ticket, time_us(after.first()));
    for event in after {
        state.apply(event, api, &mut |_, _| ());
    }
    let process = end_state(&state, ticket + after.len() as u64, time_us(after.last()));
    Ends { shown: "python".to_owned(), python, process, kept: Kept::NOTHING }
}

/// What PyTorch's allocator has handed out and reserved on each device, and
/// what the process holds of it in all.
fn end_state(state: &State, events: u64, time_us: Option<u64>) -> EndState {
    let handed_out = |device: i64| {
        let device = state.devices.get(usize::try_from(device).ok()?)?;
        let blocks = device.blocks.values().filter(|block| !block.pending);
        Some(
            blocks.fold((0_u64, 0_u64), |(bytes, n), b| (bytes.saturating_add(b.requested), n + 1)),
        )
    };
    let one = |row: &LedgerDevice| {
        let (allocated, blocks) = handed_out(row.device).unwrap_or_default();
        let LedgerDevice { device, held, framework: reserved, .. } = *row;
        EndDevice { device, allocated, blocks, reserved, held, kept: Kept::NOTHING }
    };
    let devices = state.ledger_key().devices.iter().map(one).collect();
    EndState { events, time_us, devices, kept: Kept::NOTHING }
}

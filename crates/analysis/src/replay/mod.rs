//! "Would it have fitted?" The requests of a recorded program, run again through PyTorch's own
//! algorithm (`memtrace-caching`): with other settings, on a smaller card.
//!
//! A snapshot says what the allocator did. [`requests`] finds out what it had been asked. [`run`]
//! asks the same of an allocator that only counts, under any settings and any capacity. [`exact`]
//! asks it of one that gets the answers of the recorded driver, and must come out with the recorded
//! events. How well it does says how far the rest can be trusted. [`tune`] tries settings.
//!
//! What a replay can't know, it says in its notes. What was there before the trace
//! begins has sizes and addresses but no order. A program that would have gone on after
//! an out-of-memory error stops at it.

pub mod exact;
pub mod picture;
pub mod requests;
pub mod run;
pub mod tune;

use memtrace_caching::Settings;
use memtrace_caching::settings::{Backend, ConfError, Parsed};
use memtrace_format::snapshot::Snapshot;

pub use crate::conf::own_conf;
pub use exact::Exact;
pub use requests::Requests;
pub use run::{Card, Outcome};

/// A configuration that can be replayed.
///
/// # Errors
/// PyTorch refuses it, or it is not about this allocator.
pub fn settings(conf: &str) -> Result<Parsed, ConfError> {
    let mut parsed = Settings::parse(conf)?;
    if parsed.settings.backend == Backend::CudaMallocAsync {
        return Err(ConfError {
            pytorch: "backend:cudaMallocAsync can't be replayed".to_owned(),
            about: Some("there the driver's pools decide, by rules that are not public".to_owned()),
        });
    }
    let collects = parsed.settings.garbage_collection_threshold > 0.0;
    if collects && parsed.settings.memory_fraction >= 1.0 {
        parsed.notes.push(
            "garbage_collection_threshold changes nothing without a per_process_memory_fraction below 1".to_owned(),
        );
    }
    Ok(parsed)
}

/// The card of a device of a snapshot, where memtrace wrote it down.
pub fn recorded_card(snapshot: &Snapshot, device: usize) -> Option<Card> {
    let mut devices = snapshot.memtrace.as_ref()?.virtual_gpu.as_ref()?.devices.iter();
    let found = devices.find(|d| usize::try_from(d.device) == Ok(device))?;
    Some(Card { capacity: Some(found.total?), overhead: found.context.unwrap_or(0) })
}

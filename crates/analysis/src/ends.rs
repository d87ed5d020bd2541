//! The two ends of a Python program. A snapshot of its end shows what was held when Python began to
//! end. What was left at the end of the process is reported beside it.

use memtrace_format::key::EndDevice;
use memtrace_format::snapshot::Snapshot;
use serde::Serialize;

/// What was left on one device at the end of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessEnd {
    /// Bytes in blocks of PyTorch's.
    pub allocated: u64,
    /// How many blocks.
    pub blocks: u64,
    /// Bytes that PyTorch had reserved.
    pub reserved: u64,
    /// Bytes that the process held.
    pub held: u64,
}

/// What was left at the end of the process; `None` if the snapshot doesn't show
/// the moment when Python began to end.
pub fn process_end(snapshot: &Snapshot, device: i64) -> Option<ProcessEnd> {
    let ends = snapshot.memtrace.as_ref()?.ends.as_ref()?;
    let of = ends.process.devices.iter().find(|d| d.device == device)?;
    let EndDevice { allocated, blocks, reserved, held, .. } = *of;
    Some(ProcessEnd { allocated, blocks, reserved, held })
}

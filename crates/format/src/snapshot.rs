//! A snapshot of GPU memory, as `torch.cuda.memory._snapshot()` of PyTorch 2.15 returns it.
//!
//! The model keeps what the pickle shares. A frame and a stack exist once and are named by
//! index. So a million trace entries over a thousand stacks cost a million small records.
//! Field names, order and meaning are PyTorch's (see the docstring of
//! `torch.cuda.memory._snapshot` and what the viewer reads). What memtrace adds is under one
//! extra top-level key, `memtrace`, which viewers ignore.

use std::borrow::Cow;

pub use serde_json::Value;

use crate::key::Memtrace;

/// Index into [`Snapshot::frames`].
pub type FrameIx = u32;
/// Index into [`Snapshot::stacks`].
pub type StackIx = u32;
/// Text of a trace entry: nearly always one of a few words, so that a
/// history needs no memory for it.
pub type Text = Cow<'static, str>;

/// One line of code on a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Frame {
    /// Function name.
    pub name: String,
    /// Source file, or the library where only that is known.
    pub filename: String,
    /// Line number, or the byte offset in the library. [`NO_LINE`] where Python doesn't know it.
    pub line: u64,
}

/// A line that Python doesn't know. PyTorch writes −1 for it.
pub const NO_LINE: u64 = u64::MAX;

/// (0, n) for a user's pool, (n, 0) for a graph capture's, (0, 0) for the default one.
pub type PoolId = (u64, u64);

/// Which of a snapshot's traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// That of the device with this ordinal.
    Device(usize),
    /// That of page-locked and managed host memory.
    Host,
}

/// State of a block, by PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// In use by the program.
    ActiveAllocated,
    /// Given back, but work on another stream may still use it.
    ActivePendingFree,
    /// Free for the next request.
    Inactive,
}

impl BlockState {
    /// The state with this name.
    pub fn from_name(name: &str) -> Option<BlockState> {
        use BlockState::{ActiveAllocated, ActivePendingFree, Inactive};
        [ActiveAllocated, ActivePendingFree, Inactive].into_iter().find(|s| s.name() == name)
    }

    /// The string in the file.
    pub fn name(self) -> &'static str {
        match self {
            BlockState::ActiveAllocated => "active_allocated",
            BlockState::ActivePendingFree => "active_pending_free",
            BlockState::Inactive => "inactive",
        }
    }
}

/// A piece of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Device address.
    pub address: u64,
    /// Rounded size in bytes.
    pub size: u64,
    /// Bytes the program asked for (stale or 0 where inactive).
    pub requested_size: u64,
    /// In use or not.
    pub state: BlockState,
    /// The stack that allocated it.
    pub frames: Option<StackIx>,
}

/// A contiguous range got from the driver.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Device ordinal; −1 for host segments.
    pub device: i64,
    /// First address.
    pub address: u64,
    /// Bytes; the sum of its blocks.
    pub total_size: u64,
    /// Bytes in allocated blocks.
    pub allocated_size: u64,
    /// Bytes in allocated or pending blocks.
    pub active_size: u64,
    /// Bytes that were asked for, over active blocks.
    pub requested_size: u64,
    /// Raw stream handle.
    pub stream: u64,
    /// `true` for "small" (2 MiB), `false` for "large".
    pub small: bool,
    /// Which pool it belongs to.
    pub pool_id: PoolId,
    /// A mapped range of an expandable segment.
    pub is_expandable: bool,
    /// The stack that made it, where it is known.
    pub frames: Option<StackIx>,
    /// Its pieces by address.
    pub blocks: Vec<Block>,
}

impl Segment {
    /// Fills the room between two blocks with an inactive one.
    pub fn fill_gap(&mut self, from: u64, to: u64) {
        if from < to {
            self.blocks.push(Block {
                address: from,
                size: to - from,
                requested_size: 0,
                state: BlockState::Inactive,
                frames: None,
            });
        }
    }
}

/// One line of the history.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceEntry {
    /// PyTorch's action name.
    pub action: Action,
    /// Device address; for [`Action::Oom`] the bytes the device had free (key `device_free`).
    pub addr: u64,
    /// Bytes, as PyTorch counts them for this action.
    pub size: u64,
    /// Raw stream handle.
    pub stream: u64,
    /// Microseconds since 1970; `None` in files older than PyTorch 2.2.
    pub time_us: Option<i64>,
    /// Name of the compiled region, "N/A" outside one; `None` in files older than PyTorch 2.8.
    pub compile_context: Option<Text>,
    /// Free text of the user (or of memtrace: the API call behind an entry that is not PyTorch's).
    pub user_metadata: Option<Text>,
    /// Which pool; `None` in files older than PyTorch 2.12.
    pub pool_id: Option<PoolId>,
    /// Where it happened; `None` leaves the key out.
    pub frames: Option<StackIx>,
}

/// What a trace entry says, by PyTorch's names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A block was handed out.
    Alloc,
    /// A block was given back.
    FreeRequested,
    /// A block is free again.
    FreeCompleted,
    /// A segment from the driver.
    SegmentAlloc,
    /// A segment back to the driver.
    SegmentFree,
    /// Memory mapped into an expandable segment.
    SegmentMap,
    /// Memory unmapped from an expandable segment.
    SegmentUnmap,
    /// `_snapshot()` was called.
    Snapshot,
    /// Out of memory.
    Oom,
    /// Anything else PyTorch says (`annotate`, since 2.14) or may say.
    Other(String),
}

impl Action {
    /// The string in the file.
    pub fn name(&self) -> &str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::Snapshot => "snapshot",
            Action::Oom => "oom",
            Action::Other(s) => s,
        }
    }

    /// The action with this name.
    pub fn from_name(name: &str) -> Action {
        use Action::{
            Alloc, FreeCompleted, FreeRequested, Oom, Other, SegmentAlloc, SegmentFree, SegmentMap,
            SegmentUnmap, Snapshot,
        };
        [
            Alloc,
            FreeRequested,
            FreeCompleted,
            SegmentAlloc,
            SegmentFree,
            SegmentMap,
            SegmentUnmap,
            Snapshot,
            Oom,
        ]
        .into_iter()
        .find(|a| a.name() == name)
        .unwrap_or_else(|| Other(name.to_owned()))
    }
}

/// Which dictionary of the file a key is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The snapshot itself.
    Top,
    /// A frame, by its index in [`Snapshot::frames`].
    Frame(FrameIx),
    /// A segment by index.
    Segment(u32),
    /// A block of a segment: index of the segment, index of the block.
    Block(u32, u32),
    /// A trace entry: device, index.
    Entry(u32, u32),
    /// A segment of pinned host memory by index.
    HostSegment(u32),
    /// A block of such a segment.
    HostBlock(u32, u32),
    /// An entry of [`Snapshot::host_traces`].
    HostEntry(u32),
}

/// A key that this model has no field for. Such are rare ones of PyTorch (`internal_metadata`,
/// `forward_frames`, the `fx_…` keys of a frame) and whatever a newer PyTorch adds. Kept, so
/// that what is read can be written again.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    /// Where it is.
    pub place: Place,
    /// The key.
    pub key: String,
    /// Its value; tuples have become lists.
    pub value: Value,
}

/// Top-level keys that PyTorch 2.15 always writes and an older one did not. (`allocator_settings`
/// needs no entry here: it is [`Value::Null`] where absent.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Absent {
    /// No `external_annotations`: before PyTorch 2.5.
    pub external_annotations: bool,
    /// No `host_segments`: before PyTorch 2.14.
    pub host_segments: bool,
    /// No `host_traces`: before PyTorch 2.14.
    pub host_traces: bool,
}

/// Frames and stacks by number, wherever they are kept.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    /// All distinct frames.
    pub frames: &'a [Frame],
    /// All distinct stacks, innermost frame first.
    pub stacks: &'a [Vec<FrameIx>],
}

/// Everything a snapshot file holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// All distinct frames.
    pub frames: Vec<Frame>,
    /// All distinct stacks, innermost frame first.
    pub stacks: Vec<Vec<FrameIx>>,
    /// Segments, by device and address.
    pub segments: Vec<Segment>,
    /// History, one list a device, oldest first.
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// PyTorch's `allocator_settings`, a JSON object in PyTorch's order
    /// ([`Value::Null`] if absent).
    pub allocator_settings: Value,
    /// PyTorch's `external_annotations`, as JSON objects.
    pub external_annotations: Vec<Value>,
    /// Pinned host memory, in segment shape.
    pub host_segments: Vec<Segment>,
    /// History of pinned host memory.
    pub host_traces: Vec<TraceEntry>,
    /// What memtrace adds; `None` in files of others.
    pub memtrace: Option<Box<Memtrace>>,
    /// What an older PyTorch did not write; nothing in a snapshot of ours.
    pub absent: Absent,
    /// Keys that have no field above; none in a snapshot of ours.
    pub other: Vec<Other>,
}

impl Snapshot {
    /// Its frames and stacks.
    pub fn tables(&self) -> Tables<'_> {
        Tables { frames: &self.frames, stacks: &self.stacks }
    }
}

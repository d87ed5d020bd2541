//! The strings that every snapshot repeats: its keys and its fixed values.
//!
//! They are an enumeration, so that writing one costs no look-up: the pickle writer gives the first
//! numbers of its memo to them. Reading costs one look-up for each string, not for each use.

macro_rules! literals {
    ($($literal:ident = $text:literal,)*) => {
        /// A string of the snapshot format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Literal { $($literal,)* }

        impl Literal {
            /// All of them, in the order of their numbers.
            pub(crate) const ALL: &[Literal] = &[$(Literal::$literal,)*];

            /// The string in the file.
            pub(crate) fn text(self) -> &'static str {
                match self { $(Literal::$literal => $text,)* }
            }
        }
    };
}

literals! {
    // the snapshot
    Segments = "segments",
    DeviceTraces = "device_traces",
    AllocatorSettings = "allocator_settings",
    ExternalAnnotations = "external_annotations",
    HostSegments = "host_segments",
    HostTraces = "host_traces",
    Memtrace = "memtrace",
    // a segment
    Device = "device",
    Address = "address",
    TotalSize = "total_size",
    AllocatedSize = "allocated_size",
    ActiveSize = "active_size",
    RequestedSize = "requested_size",
    Stream = "stream",
    SegmentType = "segment_type",
    Small = "small",
    Large = "large",
    SegmentPoolId = "segment_pool_id",
    IsExpandable = "is_expandable",
    Frames = "frames",
    Blocks = "blocks",
    // a block
    Size = "size",
    State = "state",
    ActiveAllocated = "active_allocated",
    ActivePendingFree = "active_pending_free",
    Inactive = "inactive",
    History = "history",
    // a trace entry
    Action = "action",
    Addr = "addr",
    DeviceFree = "device_free",
    TimeUs = "time_us",
    CompileContext = "compile_context",
    UserMetadata = "user_metadata",
    PoolId = "pool_id",
    Alloc = "alloc",
    FreeRequested = "free_requested",
    FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc",
    SegmentFree = "segment_free",
    SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap",
    SnapshotTaken = "snapshot",
    Oom = "oom",
    NotCompiled = "N/A",
    Empty = "",
    // a frame
    Name = "name",
    Filename = "filename",
    Line = "line",
    // the tables of a JSON snapshot
    Stacks = "stacks",
}

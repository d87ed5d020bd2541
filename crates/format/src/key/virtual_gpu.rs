//! What the virtual GPU says of itself: that the numbers are an estimate,
//! and how far to trust them.

records! {
    /// The virtual GPU of a run.
    VirtualGpu {
        /// The words behind `--virtual`.
        spec: Option<String>,
        /// The profile of the first card.
        profile: Option<String>,
        /// The name of the first card.
        name: Option<String>,
        /// Where the size of a context is known from.
        context_source: Option<String>,
        /// Where the sizes of NCCL's memory are known from.
        nccl_source: Option<String>,
        /// Streams finish as late as they may.
        lazy: Option<bool>,
        /// Kernels that were launched. Only the process itself knows: absent
        /// where another one wrote the snapshot.
        launches: Option<u64>,
        /// Values that the program read back though nothing had computed them: what depends on them
        /// is a lower bound. Only the process itself knows.
        zero_reads: Option<u64>,
        /// Workspaces of cuDNN's. Only the process itself knows.
        cudnn: Option<Cudnn>,
        /// The cards.
        devices: Vec<VirtualDevice>,
    }

    /// How the sizes of cuDNN's workspaces are known.
    Cudnn {
        /// Convolutions whose workspace is not known, and which got none.
        unknown: u64,
        /// Other graphs of cuDNN's of which the same is true.
        other: u64,
        /// Convolutions whose workspace was measured on a card.
        measured: u64,
        /// Convolutions whose workspace is an estimate.
        modelled: u64,
        /// Bytes of the estimated workspaces, each counted once.
        modelled_bytes: u64,
        /// Bytes of the largest of them.
        modelled_largest: u64,
    }

    /// One card.
    VirtualDevice {
        /// Its ordinal.
        device: i64,
        /// Bytes in use, of all processes. Only the process itself knows.
        used: Option<u64>,
        /// Bytes that it has.
        total: Option<u64>,
        /// Bytes that a context takes.
        context: Option<u64>,
    }
}

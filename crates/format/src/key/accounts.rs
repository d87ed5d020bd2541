//! Who holds what, and whether it adds up. The rules are those of the crate that writes
//! snapshots; here is what is in the file.

records! {
    /// The driver's ledger at the end: each column is a sum, and what is in one is in no other.
    Ledger {
        /// By device.
        devices: Vec<LedgerDevice>,
        /// The host's.
        host: LedgerHost,
        /// Bytes of addresses that are reserved, of whatever device.
        reserved_addresses: u64,
        /// Memory pools whose size the program has asked for.
        pools: Vec<LedgerPool>,
    }

    /// One device's.
    LedgerDevice {
        /// Its ordinal; −1 is one that no call has named.
        device: i64,
        /// Bytes that the process holds of the device, each counted once: the sum of `framework`,
        /// `device_bytes`, `pool_used`, `arrays` and `physical`.
        held: u64,
        /// Bytes that PyTorch's allocator has reserved.
        framework: u64,
        /// Bytes of plain device memory (`cudaMalloc`) outside every framework.
        device_bytes: u64,
        /// Bytes in use that were taken in stream order, from memory pools.
        pool_used: u64,
        /// Bytes of arrays.
        arrays: u64,
        /// Bytes of physical memory (`cuMemCreate`), mapped or not.
        physical: u64,
        /// Bytes of addresses under which physical memory is mapped.
        mapped: u64,
        /// Bytes of managed memory, which is on the host or on a device.
        managed: u64,
        /// Bytes of other processes and APIs that are in use here, as far as their size was said.
        imported: u64,
        /// Bytes of addresses that are promised to allocation nodes of graphs.
        graph_nodes: u64,
        /// Contexts that were made, and are there.
        contexts: u64,
        /// Modules and libraries of kernels that are loaded.
        modules: u64,
        /// Instantiated graphs.
        graph_executables: u64,
    }

    /// The host's.
    LedgerHost {
        /// Bytes of page-locked memory that CUDA allocated.
        pinned: u64,
        /// Bytes of page-locked memory of the program's own.
        registered: u64,
        /// Of both, bytes that PyTorch's allocator of pinned memory keeps to hand out.
        framework: u64,
        /// Of `framework`, bytes that were asked for, of blocks in use.
        requested: u64,
        /// Bytes of physical memory (`cuMemCreate`) that is on the host.
        physical: u64,
    }

    /// A memory pool whose size the program has asked for.
    LedgerPool {
        /// Its handle.
        pool: u64,
        /// Its device.
        device: i64,
        /// Bytes that it had reserved then.
        reserved: u64,
        /// When, in microseconds since 1970.
        asked_us: u64,
    }

    /// Memory by owner: PyTorch, a library, or the program.
    Owners {
        /// By device.
        devices: Vec<DeviceOwners>,
        /// Page-locked host memory.
        host: HostOwners,
    }

    /// One device's.
    DeviceOwners {
        /// Its ordinal; −1 is one that no call has named.
        device: i64,
        /// Bytes that the process holds at the end.
        held: Option<u64>,
        /// By owner, the largest first.
        by: Vec<Owner>,
        /// When it held most.
        peak: Option<OwnersPeak>,
        /// All that was ever taken.
        taken: Taken,
        /// Of NCCL's memory: by communicator.
        communicators: Vec<Communicator>,
        /// Managed memory, which is in none of the other sums; null where there was none.
        managed: Option<ManagedOwners> [null],
    }

    /// Memory of one owner.
    Owner {
        /// Who.
        owner: String,
        /// Bytes.
        bytes: u64,
        /// Allocations; for PyTorch its segments.
        count: u64,
    }

    /// The highest point.
    OwnersPeak {
        /// Bytes that were held.
        held: Option<u64>,
        /// When, in microseconds since 1970; null if it is before the history.
        time_us: Option<u64> [null],
        /// By owner, the largest first; null where that is not known.
        by: Option<Vec<Owner>> [null],
    }

    /// All that was ever taken of a device.
    Taken {
        /// Bytes.
        bytes: u64,
        /// Allocations.
        count: u64,
    }

    /// Memory of one communicator of NCCL's.
    Communicator {
        /// Its number in this process, from 1; 0 stands for memory that could be several ones'.
        communicator: u64,
        /// Ranks in it; null where that is not known.
        ranks: Option<u64> [null],
        /// This process's rank in it; null where that is not known.
        rank: Option<u64> [null],
        /// Bytes.
        bytes: u64,
        /// Allocations.
        count: u64,
    }

    /// Managed memory that was taken for one device.
    ManagedOwners {
        /// Bytes at the end.
        held: u64,
        /// By owner, the largest first.
        by: Vec<Owner>,
        /// When there was most of it.
        peak: OwnersPeak,
    }

    /// Page-locked host memory.
    HostOwners {
        /// Bytes at the end.
        held: u64,
        /// Of these, bytes of PyTorch's allocator of pinned memory.
        framework: u64,
        /// Of `framework`, bytes that were asked for, of blocks in use.
        requested: u64,
        /// Bytes that rounding adds to what was asked for.
        rounding: u64,
        /// By stack, what rounding adds: the largest sixteen.
        rounded: Vec<RoundedStack>,
        /// When there was most of it in the recorded history.
        peak: HostPeak,
        /// By owner at the end, the largest first.
        by: Vec<Owner>,
        /// Of NCCL's memory: by communicator.
        communicators: Vec<Communicator>,
    }

    /// The highest point of page-locked host memory.
    HostPeak {
        /// Bytes that were held.
        held: u64,
        /// Of these, bytes of PyTorch's allocator of pinned memory.
        framework: u64,
        /// Of `framework`, bytes that were asked for, of blocks in use.
        requested: u64,
        /// Bytes that rounding adds to what was asked for.
        rounding: u64,
        /// By stack, what rounding adds: the largest sixteen.
        rounded: Vec<RoundedStack>,
        /// When, in microseconds since 1970; null if it is before the history.
        time_us: Option<u64> [null],
    }

    /// What rounding adds to the requests of one stack.
    RoundedStack {
        /// Bytes.
        bytes: u64,
        /// Blocks.
        count: u64,
        /// The stack, innermost frame first.
        frames: Vec<CodeLine>,
    }

    /// A frame, as PyTorch writes one.
    CodeLine {
        /// Function.
        name: String,
        /// Source file, or the library where only that is known.
        filename: String,
        /// Line, or the byte offset in the library.
        line: u64,
    }

    /// What a device said is in use, and what that is made up of.
    Reconciled {
        /// Its ordinal.
        device: i64,
        /// When, in microseconds since 1970.
        time_us: u64,
        /// Who said it: a function of CUDA's that the program called, or NVML.
        source: String,
        /// Bytes in use on the device, of all processes.
        used: u64,
        /// Bytes that it has.
        total: u64,
        /// Of what; adds up to `used`.
        lines: Vec<ReconciledLine>,
        /// Bytes of the last line once more.
        unexplained: i64,
    }

    /// A line of that table.
    ReconciledLine {
        /// An owner, or what else takes memory.
        name: String,
        /// Bytes.
        bytes: i64,
        /// How that is known: `booked`, `measured`, `estimated` or `what is left`.
        known: String,
    }

    /// How the process came to a device.
    Entered {
        /// Its ordinal.
        device: i64,
        /// When, in microseconds since 1970.
        time_us: u64,
        /// By which call.
        call: String,
        /// Who made it; null where no stack was recorded.
        owner: Option<String> [null],
        /// The stack, innermost frame first.
        frames: Vec<CodeLine>,
    }

    /// The last request that failed for want of memory.
    OutOfMemory {
        /// The device; null for the host.
        device: Option<i64> [null],
        /// When, in microseconds since 1970.
        time_us: Option<u64>,
        /// Bytes that were asked for.
        asked: Option<u64>,
        /// Bytes that the device had free; null where it did not say so.
        free: Option<u64> [null],
        /// The driver refused it, not a limit of PyTorch's own.
        refused_by_driver: bool,
        /// The call that failed; null if it was PyTorch's allocator.
        call: Option<String> [null],
        /// Who made it; null where no stack was recorded.
        owner: Option<String> [null],
        /// The stack, innermost frame first.
        frames: Vec<CodeLine>,
    }

    /// Something to look at.
    Warning {
        /// Which kind: `stray context`, `taken before out of memory`, `growth outside PyTorch`.
        kind: String,
        /// The device that it is about.
        device: i64,
        /// In words.
        text: String,
        /// The stack that it is about, innermost frame first.
        frames: Vec<CodeLine>,
    }

    /// Frees that waited for other streams.
    DeferredFrees {
        /// How many.
        count: u64,
        /// Bytes that waited at most at a time.
        most_bytes: u64,
        /// Those that held most for longest, at most sixteen.
        longest: Vec<DeferredFree>,
    }

    /// One of them.
    DeferredFree {
        /// The device.
        device: i64,
        /// Bytes of the block.
        bytes: u64,
        /// When the free was requested, in microseconds since 1970.
        requested_us: u64,
        /// When the block was free again; null if it still waits.
        completed_us: Option<u64> [null],
        /// The streams that it waited for; none for the end of a graph capture.
        streams: Vec<u64>,
        /// The stack of the free, innermost frame first.
        frames: Vec<CodeLine>,
    }

    /// Memory by what the program said it was doing.
    Labels {
        /// By device.
        devices: Vec<DeviceLabels>,
        /// Labels that found no room and are missing.
        refused: u64,
    }

    /// One device's: blocks of PyTorch's allocator, and memory that is taken past it.
    DeviceLabels {
        /// Bytes in blocks of PyTorch's at most.
        peak: u64,
        /// By label then, the largest first.
        at_peak: Vec<Labelled>,
        /// By label at the end, the largest first.
        now: Vec<Labelled>,
        /// Its ordinal.
        device: i64,
        /// What is taken from the driver past PyTorch.
        outside: OutsideLabels,
    }

    /// What is taken from the driver past PyTorch.
    OutsideLabels {
        /// Bytes at most.
        peak: u64,
        /// By label then, the largest first.
        at_peak: Vec<Labelled>,
        /// By label at the end, the largest first.
        now: Vec<Labelled>,
    }

    /// Memory under one label.
    Labelled {
        /// The label, outermost name first, with `/` between; empty for what has none.
        label: String,
        /// Bytes.
        bytes: i64,
        /// Blocks or allocations.
        count: i64,
    }

    /// A point that the program marked.
    Mark {
        /// When, in microseconds since 1970.
        time_us: u64,
        /// `step`, `begin`, `end` or `mark`.
        sort: String,
        /// Its name.
        name: String,
        /// The number of a step.
        number: u64,
        /// The label that its thread was in.
        label: String,
        /// The thread, as the operating system numbers it.
        thread: u64,
        /// Bytes in blocks of PyTorch's then, by device.
        allocated: Vec<u64>,
    }

    /// The two ends of a Python program.
    Ends {
        /// Which of them the snapshot shows.
        shown: String,
        /// When Python began to end.
        python: EndState,
        /// When the process ended.
        process: EndState,
    }

    /// What there was at one of them.
    EndState {
        /// The state after this many events.
        events: u64,
        /// When, in microseconds since 1970; null where no event says so.
        time_us: Option<u64> [null],
        /// By device.
        devices: Vec<EndDevice>,
    }

    /// One device's.
    EndDevice {
        /// Its ordinal.
        device: i64,
        /// Bytes in blocks of PyTorch's.
        allocated: u64,
        /// How many blocks.
        blocks: u64,
        /// Bytes that PyTorch had reserved.
        reserved: u64,
        /// Bytes that the process held.
        held: u64,
    }
}

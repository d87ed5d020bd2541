//! What the recorder says of itself: its tables, its counters, what it cost, and who called what.

records! {
    /// How full the tables of stacks are.
    StackTables {
        /// Which stacks were taken: `none`, `python` or `all`.
        mode: Option<String>,
        /// Why there are no tables; absent where there are some.
        problem: Option<String>,
        /// The version of Python whose frames were read (`3.11.9`), or why none were.
        python: Option<String>,
        /// Nodes of the tree of stacks that are in use.
        nodes: Option<u64>,
        /// Nodes that the tree has room for.
        nodes_max: Option<u64>,
        /// Words of the table of code objects that are in use, 8 bytes each.
        code_words: Option<u64>,
        /// Words that the table has room for.
        code_words_max: Option<u64>,
        /// Words of the table of libraries that are in use, 8 bytes each.
        module_words: Option<u64>,
        /// Words that the table has room for.
        module_words_max: Option<u64>,
        /// Frames, stacks, code objects and libraries that found no room and are missing.
        refused: Option<u64>,
    }

    /// What was recorded and what is missing, in events unless a key says otherwise.
    Counters {
        /// The snapshot shows the state after this many events.
        events: u64,
        /// Events that the history holds.
        events_kept: u64,
        /// Older events, which are in the state and no longer in the history.
        events_retired: u64,
        /// Events that were begun and not written to their end when they were read.
        unpublished: u64,
        /// Events that the program overwrote before they could be read.
        overwritten: u64,
        /// By how many events the state is later than the moment that was asked for.
        late: u64,
        /// Calls that had to make room in the history themselves.
        stalls: u64,
        /// Allocations that found no room in the table of what is alive,
        /// and are missing from the state.
        live_refused: u64,
        /// The bytes of these allocations.
        live_refused_bytes: u64,
        /// Live allocations that were kept outside the black box, and are
        /// missing from what was read from it.
        live_outside: u64,
        /// The bytes of these allocations.
        live_outside_bytes: u64,
        /// Calls from a signal handler that had interrupted the recorder, which are not recorded.
        interrupted: u64,
        /// Events by which memtrace noted how full a device is.
        measured: u64,
        /// Events that did not fit what was known of the memory.
        anomalies: u64,
    }

    /// What recording cost.
    Cost {
        /// Events that were timed.
        sampled: u64,
        /// Nanoseconds that one took on average; null if none was timed.
        ns_each: Option<u64> [null],
    }

    /// Calls of one function of CUDA's.
    EntryPoint {
        /// The function.
        door: String,
        /// How often it was called.
        calls: u64,
        /// By whom.
        callers: Vec<Caller>,
    }

    /// Calls by one library.
    Caller {
        /// Its path; null for those that found no place in the table or are no longer loaded.
        library: Option<String> [null],
        /// How often it called.
        calls: u64,
    }

    /// A function of CUDA's that a library calls past memtrace.
    BoundElsewhere {
        /// Who calls it; empty for the program itself.
        library: String,
        /// The function.
        function: String,
        /// The library whose function is called; null where that is not known.
        bound_to: Option<String> [null],
    }
}

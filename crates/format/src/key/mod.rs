//! The key `memtrace`: all that a snapshot of ours says beside what PyTorch's own would say.
//!
//! [`Memtrace`] is what is in the file, key by key. Whoever writes a snapshot fills it in,
//! and whoever reads one asks it; nobody looks a key up by its name. `docs/file-format.md` is
//! written from the words beside the fields.
//!
//! The rules of the format: keys come, and none goes. A key keeps its name, its type, its unit and
//! its meaning; what would mean something else gets another name. So a file of another release is
//! read as far as it is understood, and what is not understood is kept ([`Kept`]). `version` says
//! which release wrote the file; if the first number of it ever grows, these rules were broken.

#[macro_use]
mod records;
mod accounts;
mod description;
mod part;
mod recorder;
mod virtual_gpu;

use std::collections::BTreeMap;

use serde_json::Value;

pub use accounts::{
    CodeLine, Communicator, DeferredFree, DeferredFrees, DeviceLabels, DeviceOwners, EndDevice,
    EndState, Ends, Entered, HostOwners, HostPeak, Labelled, Labels, Ledger, LedgerDevice,
    LedgerHost, LedgerPool, ManagedOwners, Mark, OutOfMemory, OutsideLabels, Owner, Owners,
    OwnersPeak, Reconciled, ReconciledLine, RoundedStack, Taken, Warning,
};
pub use description::Description;
pub use part::{Kept, OrNull, Part, Row};
pub use recorder::{BoundElsewhere, Caller, Cost, Counters, EntryPoint, StackTables};
pub use virtual_gpu::{Cudnn, VirtualDevice, VirtualGpu};

use crate::snapshot::Frame;

records! {
    /// All that is under the key.
    Memtrace {
        /// The release of memtrace that recorded the process.
        version: Option<String>,
        /// The process, as it numbers itself.
        pid: Option<u64>,
        /// Its parent.
        parent: Option<u64>,
        /// The name of the machine.
        host: Option<String>,
        /// The namespace of process numbers (`pid:[4026531836]`) in which `pid` counts.
        pid_namespace: Option<String> [null],
        /// The command line; null if it was too long to be kept.
        command: Option<Vec<String>> [null],
        /// The rank of the process, from its environment or from NCCL.
        rank: Option<u64> [null],
        /// Its rank on this machine.
        local_rank: Option<u64> [null],
        /// How many ranks there are.
        world_size: Option<u64> [null],
        /// When recording began, in microseconds since 1970.
        started_us: Option<u64>,
        /// The configuration of PyTorch's allocator that held at the end, as
        /// one line; null where it is not known.
        allocator_conf: Option<String> [null],
        /// The environment variable that it came from; empty if none was set.
        allocator_variable: Option<String>,
        /// The file name of the process's black box. No other process ever has the same.
        blackbox: Option<String>,
        /// The first process of the run; null outside `memtrace run`.
        root: Option<i64> [null],
        /// The nearest process above that was recorded; null if there was none.
        recorded_parent: Option<RecordedParent> [null],
        /// Why the snapshot was written: `exit`, `oom`, `peak`, `signal`, `clock`,
        /// `request`; `recovered` or `snapshot` if the command wrote it from a black box;
        /// `replay` if it shows what would have been.
        reason: Option<String>,
        /// When it was written, in microseconds since 1970.
        written_us: Option<u64>,
        /// How full the tables of stacks are.
        stacks: Option<StackTables>,
        /// What was recorded and what is missing.
        counters: Option<Counters>,
        /// What recording cost.
        cost: Option<Cost>,
        /// What PyTorch's own snapshot would say, and this one doesn't.
        not_recorded: Option<Vec<String>>,
        /// The virtual GPU; absent on a real one.
        virtual_gpu = "virtual": Option<VirtualGpu>,
        /// The device of `rank`, as the process gave it to NCCL.
        rank_device: Option<i64>,
        /// The driver's ledger at the end.
        ledger: Option<Ledger>,
        /// Memory by owner.
        owners: Option<Owners>,
        /// Of each device that was asked: what it said is in use, and what that is made up of.
        reconcile: Option<Vec<Reconciled>>,
        /// How the process came to each device.
        entered: Option<Vec<Entered>>,
        /// The last request that failed for want of memory; absent if none did.
        out_of_memory: Option<OutOfMemory>,
        /// All of PyTorch's requests that failed because the driver refused: pairs of a device and
        /// the time in microseconds since 1970.
        refused_by_driver: Option<Vec<(i64, u64)>>,
        /// What to look at.
        warnings: Option<Vec<Warning>>,
        /// Frees that waited for other streams; absent if none did.
        deferred_frees: Option<DeferredFrees>,
        /// Memory by label; absent where nothing has one.
        labels: Option<Labels>,
        /// Points that the program marked; absent if there are none.
        marks: Option<Vec<Mark>>,
        /// The two ends of a Python program; absent where they are one.
        ends = "end": Option<Ends>,
        /// Libraries in which native frames of the stacks lie, each with
        /// its build id in hex (or nothing).
        libraries: Option<BTreeMap<String, String>>,
        /// Where the process has its Python.
        python: Option<PythonPlaces>,
        /// The release of PyTorch; null where there is none.
        pytorch: Option<String> [null],
        /// The functions of CUDA's that were called, and by whom.
        doors: Option<Vec<EntryPoint>>,
        /// Functions of CUDA's that libraries call past memtrace; null where only
        /// the process itself could have said so.
        bound_elsewhere: Option<OrNull<Vec<BoundElsewhere>>>,
        /// Recording was switched off under way. Only in what was read from a black box.
        switched_off: Option<bool>,
        /// `memtrace symbolize` has put source lines in the place of native frames.
        symbolized: Option<bool>,
        /// What was replayed: the file shows what would have been, and `counters` is absent.
        replay: Option<Replayed>,
    }

    /// A process above.
    RecordedParent {
        /// Its number.
        pid: i64,
        /// The file name of its black box.
        blackbox: String,
    }

    /// Where a process has its Python.
    PythonPlaces {
        /// Folders of PyTorch.
        pytorch: Option<Vec<String>>,
        /// Folders of the standard library.
        standard: Option<Vec<String>>,
    }

    /// A replay (`memtrace replay`).
    Replayed {
        /// The configuration that was replayed.
        conf: String,
        /// By device, the request that failed; null where none did.
        oom: Vec<OrNull<ReplayOom>>,
    }

    /// A request that failed in a replay.
    ReplayOom {
        /// Which entry of the trace.
        entry: u64,
        /// Bytes that were asked for.
        requested: u64,
        /// Bytes asked of the device.
        segment: u64,
        /// Bytes handed out then.
        allocated: u64,
        /// Bytes taken from the device then.
        reserved: u64,
        /// Bytes that the device had free then.
        device_free: u64,
    }
}

/// A key inside another one.
fn inside(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

impl Memtrace {
    /// What a file has under the key. `None`: it is not an object.
    pub fn read(value: Value) -> Option<Box<Memtrace>> {
        Memtrace::fits(&value).then(|| Box::new(Memtrace::take(value)))
    }

    /// The keys of the file that have no field here, and those that have
    /// not the type of their field.
    pub fn not_understood(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.unknown("", &mut names);
        names
    }

    /// All keys, as the documentation has them.
    pub fn rows() -> Vec<Row> {
        let mut rows = Vec::new();
        Memtrace::describe("", &mut rows);
        rows
    }

    /// As if it had been made here: all keys that are always written, in their
    /// order, then what is not understood.
    #[must_use]
    pub fn made_here(mut self) -> Memtrace {
        self.kept.forget_order();
        self
    }

    /// What to look at.
    pub fn warnings(&self) -> &[Warning] {
        self.warnings.as_deref().unwrap_or_default()
    }
}

impl From<Frame> for CodeLine {
    fn from(frame: Frame) -> CodeLine {
        let Frame { name, filename, line } = frame;
        CodeLine { name, filename, line, kept: Kept::NOTHING }
    }
}

impl From<&CodeLine> for Frame {
    fn from(line: &CodeLine) -> Frame {
        let CodeLine { name, filename, line, .. } = line.clone();
        Frame { name, filename, line }
    }
}

#[cfg(test)]
mod tests;

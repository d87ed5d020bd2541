//! Every record of the recorder's that CUDA, NCCL or NVTX fills in is held against
//! theirs, or is here with the reason.

use std::collections::BTreeSet;
use std::path::Path;

use memtrace_layouts::unchecked;

/// The modules that know functions of others'. Records in the modules below are the
/// kernel's, the loader's, Python's or our own.
const MODULES: [&str; 6] = ["labels/", "pytorch/", "nccl/", "cuda/", "process/", "allocator/"];

/// Of NVIDIA's, but `cudarc` doesn't have them.
const NOT_IN_CUDARC: [&str; 3] =
    ["labels/nvtx.rs: Exports", "process/measure.rs: Memory", "process/measure.rs: ProcessInfo"];

/// PyTorch's and C++'s.
const OF_OTHERS: [&str; 6] = [
    "allocator/throw.rs: Location",
    "pytorch/methods.rs: DataPtr",
    "pytorch/pools.rs: Function",
    "pytorch/record_functions.rs: Callback",
    "pytorch/settings.rs: Text",
    "pytorch/streams.rs: CudaStream",
];

/// Nobody else's: code in assembly reads them, or gets them as an answer.
const OWN: [&str; 4] = [
    "cuda/choose.rs: Choice",
    "cuda/lines.rs: Line",
    "cuda/routes.rs: Row",
    "pytorch/quick.rs: Answer",
];

#[test]
fn no_record_of_cudas_is_taken_on_trust() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let listed = [&NOT_IN_CUDARC[..], &OF_OTHERS, &OWN].concat();
    let listed: BTreeSet<String> = listed.into_iter().map(str::to_owned).collect();
    let mut found = unchecked(&sources);
    found.retain(|record| MODULES.iter().any(|module| record.starts_with(module)));
    let new: Vec<&String> = found.difference(&listed).collect();
    assert!(new.is_empty(), "no same_layout! is about {new:#?}: add one, or list them here");
    let gone: Vec<&String> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "no record, or it is compared now: {gone:#?}");
}

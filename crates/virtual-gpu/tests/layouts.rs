//! Every record that callers pass to the virtual GPU is held against
//! `cudarc`'s, or stands here with the reason.

use std::collections::BTreeSet;
use std::path::Path;

use memtrace_layouts::unchecked;

/// Of NVIDIA's, but `cudarc` doesn't have them; `api/layouts.tsv`, which is
/// made from NVIDIA's headers, has NVML's.
const NOT_IN_CUDARC: [&str; 1] = ["nvml/memory.rs: Process"];

/// A part of records that are compared, and compared there.
const PART: [&str; 1] = ["driver/array.rs: Element"];

/// Nobody else's: ours alone look into them, or several processes of ours do.
const OWN: [&str; 3] = ["gpu/card.rs: Slot", "gpu/card.rs: Table", "libs/sparselt.rs: Record"];

#[test]
fn no_record_of_cudas_is_taken_on_trust() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let listed = [&NOT_IN_CUDARC[..], &PART, &OWN].concat();
    let listed: BTreeSet<String> = listed.into_iter().map(str::to_owned).collect();
    let found = unchecked(&sources);
    let new: Vec<&String> = found.difference(&listed).collect();
    assert!(new.is_empty(), "no same_layout! is about {new:#?}: add one, or list them here");
    let gone: Vec<&String> = listed.difference(&found).collect();
    assert!(gone.is_empty(), "no record, or it is compared now: {gone:#?}");
}

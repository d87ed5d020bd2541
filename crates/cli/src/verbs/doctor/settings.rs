//! What the environment sets that changes what there is to see.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::{Check, Level};
use crate::stand_ins::{self, DRIVER};
use crate::verbs::run::{RECORDER, as_it_is, is_sanitizer, misspelt};

/// What else is preloaded, and in which order `memtrace run` leaves it.
pub(super) fn preloaded() -> Vec<Check> {
    let value = env::var_os("LD_PRELOAD").unwrap_or_default();
    let parts = value.as_bytes().split(|b| b": ".contains(b)).filter(|p| !p.is_empty());
    let paths: BTreeSet<PathBuf> =
        parts.map(|part| as_it_is(Path::new(OsStr::from_bytes(part)))).collect();
    // The virtual GPU is some forty libraries, and they are ours.
    let (virtual_gpu, others): (Vec<_>, Vec<_>) =
        paths.into_iter().partition(|path| is_of_virtual_gpu(path));
    let virtual_gpu = virtual_gpu.first().map(|_| {
        let text = "memtrace's virtual GPU is loaded; memtrace comes before it".to_owned();
        Check::new(Level::Note, "LD_PRELOAD", text)
    });
    let one = |path: PathBuf| {
        if path.is_absolute() && !path.exists() {
            let text = format!("{} is not there: take it out of LD_PRELOAD", path.display());
            return Check::new(Level::Wrong, "LD_PRELOAD", text);
        }
        let order = if path.file_name() == Some(OsStr::new(RECORDER)) {
            "is memtrace itself: memtrace run preloads it without that"
        } else if is_sanitizer(path.as_os_str().as_bytes()) {
            "is loaded, too, and stays first, as a sanitizer must; memtrace comes behind it"
        } else {
            "is loaded, too; memtrace comes before it"
        };
        Check::new(Level::Note, "LD_PRELOAD", format!("{} {order}", path.display()))
    };
    virtual_gpu.into_iter().chain(others.into_iter().map(one)).collect()
}

/// Is this one of the libraries that `memtrace run --virtual` preloads?
fn is_of_virtual_gpu(path: &Path) -> bool {
    let names = || stand_ins::names().chain([DRIVER]);
    let Some(folder) = path.parent() else { return false };
    path.file_name().is_some_and(|name| names().any(|own| name == own))
        && stand_ins::names().all(|name| folder.join(name).exists())
}

/// Settings of PyTorch's that change what there is to see, and variables
/// of ours that change nothing.
pub(super) fn settings() -> Vec<Check> {
    // Set to nothing is set, for PyTorch.
    let set = |name: &str| env::var_os(name).map(|v| v.to_string_lossy().into_owned());
    let mut found = Vec::new();
    let mut note = |text: String| found.push(Check::new(Level::Note, "settings", text));
    for name in ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"] {
        if let Some(value) = set(name) {
            note(format!("{name}={value}: {}", caching_is_off(&value)));
        }
    }
    if let Some(value) = set("CUDA_INJECTION64_PATH").filter(|v| !v.is_empty()) {
        note(format!(
            "CUDA_INJECTION64_PATH={value}: CUDA's driver loads this library into every process that uses it; what it takes is \
             recorded as its own, and unset it for a run without it"
        ));
    }
    misspelt().for_each(&mut note);
    let mut read: Option<&str> = None;
    for name in CONF {
        let Some(value) = set(name) else { continue };
        let what = if let Some(first) = read {
            format!("PyTorch doesn't read it, because {first} is set; unset one of them")
        } else if value.contains("cudaMallocAsync") {
            "memory comes from CUDA's pool, and there are no segments or blocks of PyTorch's"
                .to_owned()
        } else {
            "kept in each snapshot's allocator settings".to_owned()
        };
        let older =
            if name == CONF[0] { "" } else { "; PyTorch 2.6 reads PYTORCH_CUDA_ALLOC_CONF alone" };
        note(format!("{name}={value}: {what}{older}"));
        read = read.or(Some(name));
    }
    found
}

/// PyTorch's variable by its names. The first one that is set is read, also if
/// it is empty (seen in 2.11 and 2.15).
const CONF: [&str; 3] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// Which values turn PyTorch's allocator off, by either name: any up to 2.6, later
/// only 1 (seen in 2.6, 2.11 and 2.15).
fn caching_is_off(value: &str) -> &'static str {
    if value == "1" {
        "PyTorch's allocator is off, each tensor is a call of the driver's"
    } else {
        "PyTorch 2.6 turns its allocator off for any value, also this one; 2.11 does for 1 alone. Unset it, or set it to 1"
    }
}

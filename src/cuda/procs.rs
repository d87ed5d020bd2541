//! Functions by name, asked of CUDA itself: `cuGetProcAddress`, and the runtime's ways to it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::records::Out;
use crate::cuda::table::{self, Api, EntryPoint, Hooks};
use crate::cuda::{resolve, routes};
use crate::libraries::loaded;
use crate::os::message;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`, and the same of the runtime.
const PER_THREAD: u64 = 2;
/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`, and the same of the runtime.
const LEGACY: u64 = 1;

/// Does a look-up with these flags ask for the variants for a default stream per thread?
pub fn is_per_thread(flags: u64, default: bool) -> bool {
    flags & PER_THREAD != 0 || default && flags & LEGACY == 0
}

/// The newest version of CUDA whose interfaces the table was made from.
const NEWEST: u32 = 13_020;

/// Replaces what a look-up has just found by our own, keeping `code`. `version` is the version of
/// CUDA whose interface the caller wants, if it said so.
///
/// # Safety
/// `name` is a C string and `out` was filled by the real look-up if `code` is 0.
pub unsafe fn hand_out(
    hooks: &Hooks,
    code: c_int,
    name: *const c_char,
    out: Out,
    version: Option<u32>,
    per_thread: bool,
) -> c_int {
    if code != 0 || name.is_null() || out.is_null() {
        return code;
    }
    // SAFETY: promised by the caller.
    let (name, found) = unsafe { (CStr::from_ptr(name).to_bytes(), *out) };
    if found.is_null() {
        return code;
    }
    if let Some(instead) = ours_for(hooks, name, found, version, per_thread) {
        // SAFETY: promised by the caller.
        unsafe { *out = instead };
    }
    code
}

/// Our function for what was found under this name: the row that the driver exports at that
/// address, or else the one that the version means.
fn ours_for(
    hooks: &Hooks,
    name: &[u8],
    found: *mut c_void,
    version: Option<u32>,
    per_thread: bool,
) -> Option<*mut c_void> {
    table::of_driver().find(|(_, row)| is_named(row, name))?;
    if loaded::is_own(found as usize) {
        return None;
    }
    let same = |(_, row): &(Api, &EntryPoint)| is_named(row, name) && resolve::beside(row, found);
    let chosen = table::of_driver().find(same).or_else(|| by_version(name, version, per_thread));
    let Some((api, _)) = chosen else {
        unknown_interface(name);
        return None;
    };
    Some(routes::trampoline_for(hooks, api, found as usize) as *mut c_void)
}

fn is_named(row: &EntryPoint, name: &[u8]) -> bool {
    row.base().as_bytes() == name || row.name.as_bytes() == name
}

/// The newest interface that isn't newer than the version, for the streams that are asked for if
/// there is one of its own for them. A name with its suffix means that one interface; without a
/// version, a name must have had one only.
fn by_version(
    name: &[u8],
    version: Option<u32>,
    per_thread: bool,
) -> Option<(Api, &'static EntryPoint)> {
    let of_name = || table::of_driver().filter(|(_, row)| is_named(row, name));
    let since = of_name().next()?.1.since;
    let is_only = of_name().all(|(_, row)| row.since == since);
    let fits = |row: &EntryPoint| match version {
        Some(version) => row.since <= version && version <= NEWEST,
        None => is_only,
    };
    of_name()
        .filter(|(_, row)| per_thread || !row.is_per_thread())
        .filter(|(_, row)| row.base().as_bytes() != name || fits(row))
        .max_by_key(|(_, row)| (row.since, row.is_per_thread()))
}

/// A driver newer than the table may have an interface with other arguments:
/// it is left alone, and reported once.
fn unknown_interface(name: &[u8]) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        message!(
            "the driver has an interface of {} that this version of memtrace doesn't know: calls through it are not \
             recorded; a newer memtrace may know it",
            String::from_utf8_lossy(name)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_chooses_the_interface() {
        let chosen = |name: &str, version, per_thread| {
            by_version(name.as_bytes(), version, per_thread).map(|(_, row)| row.name)
        };
        for (name, version, symbol) in [
            ("cuMemAlloc", 2000, "cuMemAlloc"),
            ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
            ("cuMemAlloc", 13_020, "cuMemAlloc_v2"),
            ("cuIpcOpenMemHandle", 4010, "cuIpcOpenMemHandle"),
            ("cuIpcOpenMemHandle", 12_000, "cuIpcOpenMemHandle_v2"),
            ("cuCtxCreate", 11_040, "cuCtxCreate_v3"),
            ("cuGetProcAddress", 11_030, "cuGetProcAddress"),
            ("cuGetProcAddress", 12_000, "cuGetProcAddress_v2"),
        ] {
            assert_eq!(chosen(name, Some(version), false), Some(symbol), "{name} {version}");
        }
        assert_eq!(chosen("cuMemAllocAsync", Some(12_000), true), Some("cuMemAllocAsync_ptsz"));
        assert_eq!(
            chosen("cuMemAlloc", Some(12_000), true),
            Some("cuMemAlloc_v2"),
            "it has no other"
        );
        assert_eq!(chosen("cuMemAlloc_v2", None, false), Some("cuMemAlloc_v2"));
        assert_eq!(chosen("cuMemAllocAsync", Some(11_010), false), None, "older than the function");
        assert_eq!(chosen("cuMemAlloc", Some(NEWEST + 10), false), None, "newer than the table");
        assert_eq!(chosen("cuMemAlloc", None, false), None, "no version, no guess");
        assert_eq!(chosen("cuMemMap", None, false), Some("cuMemMap"), "nothing to guess");
    }
}

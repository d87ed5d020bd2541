//! The C functions for programs and for the Python package; declared in `include/memtrace.h`.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::dump::{self, Reason};
use crate::message;
use crate::record::guard;

/// Writes a snapshot of now. `path` null: the next free name in `MEMTRACE_OUT`. A path that ends in `.json`
/// gets JSON, in `.pickle` or `.pkl` a pickle. Returns 0; 1 if nothing was recorded because no CUDA call has
/// been made; 2 if the file could not be written (the reason is on stderr).
///
/// # Safety
/// `path` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_dump(path: *const c_char) -> c_int {
    let Some(recorder) = crate::recorder() else { return 1 };
    let dump = || {
        if path.is_null() {
            return if dump::to_folder(recorder, u64::MAX, Reason::Request).is_some() {
                0
            } else {
                2
            };
        }
        // SAFETY: promised by the caller.
        let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        match dump::to_path(recorder, path) {
            Ok(()) => 0,
            Err(e) => {
                message!("cannot write {}: {e}", path.display());
                2
            }
        }
    };
    guard::nested(|| guard::uncancelled(dump))
}

/// Is memtrace recording in this process?
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_active() -> c_int {
    c_int::from(crate::recorder().is_some())
}

/// The version, as a C string that lives for ever.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

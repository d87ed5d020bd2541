//! The end of a library: `dlclose`.

use std::ffi::{c_int, c_void};

use crate::cuda::routes;
use crate::libraries::next;
use crate::record::guard;
use crate::record::switch::recorder;

/// `dlclose`: what was learnt from a library's unwind tables, and where
/// its calls go, ends with the library.
///
/// # Safety
/// As the C library documents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlclose(handle: *mut c_void) -> c_int {
    // SAFETY: promised by the caller.
    let close = || unsafe { next::close(handle) };
    routes::closing(|| match recorder() {
        Some(recorder) if !guard::inside() => recorder.stacks.closing(close),
        _ => close(),
    })
}

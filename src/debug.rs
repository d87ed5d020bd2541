//! C functions that take the calling thread's stack and hand it out, for
//! tests and for `memtrace doctor`.
//!
//! They work without a recorder, in regions of their own, made at the first call.

use std::ffi::{c_char, c_int, c_uint};
use std::time::Instant;

use memtrace_symbols::{Namer, Splice};

use crate::os::locks::SetOnce;
use crate::stack::{Mine, Mode, Regions, Site, Stacks};

fn stacks() -> Option<&'static Stacks> {
    static STACKS: SetOnce<Option<Stacks>> = SetOnce::new();
    let known = STACKS.get();
    known.unwrap_or_else(|| STACKS.set(Regions::anonymous().and_then(Stacks::new))).as_ref()
}

thread_local! {
    static MINE: Mine = const { Mine::new() };
}

fn mode(n: c_int) -> Mode {
    match n {
        0 => Mode::None,
        1 => Mode::Python,
        _ => Mode::All,
    }
}

/// Takes the calling thread's stack and returns its id. `mode` is 1 for Python frames, 2 for all.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_debug_capture(mode: c_int) -> c_uint {
    stacks().map_or(0, |s| MINE.with(|mine| s.capture(self::mode(mode), Site::Alloc, mine)))
}

/// Writes the stack with this id as text into `buf`, which has `len` bytes. Each frame is a line,
/// innermost first: a JSON list of name, file and line. `splice` is 1 for PyTorch's order. Returns
/// the length of the whole text; of what doesn't fit, the end is left out.
///
/// # Safety
/// `buf` must have `len` writable bytes, or `len` be 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_debug_names(
    id: c_uint,
    splice: c_int,
    buf: *mut c_char,
    len: usize,
) -> usize {
    let Some(stacks) = stacks() else { return 0 };
    let splice = if splice == 1 { Splice::PyTorch } else { Splice::Evaluation };
    let mut text = String::new();
    let [depot, codes, modules] = stacks.words();
    for frame in Namer::new(depot, codes, modules, splice).frames(id) {
        let row = serde_json::json!([frame.name, frame.filename, frame.line]);
        text.push_str(&row.to_string());
        text.push('\n');
    }
    let fits = text.len().min(len);
    if fits > 0 {
        // SAFETY: the caller's buffer has room for `len` bytes, of which `fits` are written.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), fits) };
    }
    text.len()
}

/// Takes the calling thread's stack, all frames, and writes it as text:
/// see [`memtrace_debug_names`].
///
/// # Safety
/// As for [`memtrace_debug_names`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_debug_stack(buf: *mut c_char, len: usize) -> usize {
    let id = memtrace_debug_capture(2);
    // SAFETY: as the caller promises.
    unsafe { memtrace_debug_names(id, 0, buf, len) }
}

/// Makes the calling thread forget the last stack that it took, so that
/// the next one is taken from nothing.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_debug_forget() {
    MINE.with(Mine::forget);
}

/// Nanoseconds that a capture takes at this place, over `rounds` captures.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_debug_cost(mode: c_int, rounds: c_uint) -> f64 {
    let Some(stacks) = stacks() else { return f64::NAN };
    let mode = self::mode(mode);
    let start = Instant::now();
    for _ in 0..rounds {
        MINE.with(|mine| std::hint::black_box(stacks.capture(mode, Site::Alloc, mine)));
    }
    start.elapsed().as_nanos() as f64 / f64::from(rounds)
}

/// How many stacks, code objects and libraries found no room.
#[unsafe(no_mangle)]
pub extern "C" fn memtrace_debug_refused() -> u64 {
    stacks().map_or(u64::MAX, |s| s.status().refused)
}

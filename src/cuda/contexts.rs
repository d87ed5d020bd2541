//! Roles of calls about contexts, and of queries whose answers are worth knowing.
//!
//! None of these calls takes memory by itself. But what a context holds goes with
//! it, and these calls say which device other calls are about
//! ([`crate::cuda::place`]). So CUDA need not be asked.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_format::event::{Event, Kind, ObjectEvent, PoolEvent, ResetEvent, What};

use crate::cuda::calls::also_inside;
use crate::cuda::calls::{pass, pass_after};
use crate::cuda::devices;
use crate::cuda::notes::note_on;
use crate::cuda::place;
use crate::cuda::records::Out;
use crate::record::hook::{HookCall, got};

// --- queries whose answers are worth knowing -----------------------------------------------------

/// The program asks for the handle of something on a device: its pool, a green context there.
pub unsafe fn queries_device(
    hook: HookCall,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(hook, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    place::remember(unsafe { got(code, out) } as usize, device as i8);
    code
}

/// What keeps memory that is not in use.
#[derive(Clone, Copy)]
pub enum ReservedBy {
    /// A pool.
    Pool(usize),
    /// The graphs of a device.
    Graphs(c_int),
}

/// The program asks how much is kept, which is one of the numbers that it may ask for.
pub unsafe fn queries_reserved(
    hook: HookCall,
    reserved_by: ReservedBy,
    attribute: c_int,
    value: *mut c_void,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (reserved, what, handle, device) = match reserved_by {
        // CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        ReservedBy::Pool(pool) => (5, What::MemoryPool, pool as u64, place::device_of(pool)),
        // CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
        ReservedBy::Graphs(device) => (2, What::GraphNode, device as u64, device as i8),
    };
    let (code, own) = pass(hook, call);
    if own && attribute == reserved {
        // SAFETY: the caller's out-parameter, 8 bytes for this attribute.
        let bytes = unsafe { got(code, value.cast::<u64>()) };
        if code == 0 {
            let said = PoolEvent { handle, reserved: bytes }.event();
            note_on(hook, device, Event { what, ..said });
        }
    }
    code
}

// --- contexts ------------------------------------------------------------------------------------

fn context(handle: u64, kind: Kind) -> Event {
    Event { what: What::Context, ..ObjectEvent { handle, context: 0 }.event(kind) }
}

/// A context is there, whoever made it: the runtime does so inside calls of the program's, too.
fn made(hook: HookCall, handle: u64, device: c_int) {
    also_inside(|| {
        note_on(hook, device as i8, context(handle, Kind::Create));
    });
}

/// A context, which is current from then on.
pub unsafe fn creates_context(
    hook: HookCall,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    let code = unsafe { creates_green(hook, out, device, call) };
    if code == 0 {
        // SAFETY: the caller's out-parameter, of the call that has just returned.
        place::push(unsafe { got(code, out) } as usize);
    }
    code
}

/// A green context, a share of a device's processors with a context of its own;
/// it does not become current by itself.
pub unsafe fn creates_green(
    hook: HookCall,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    let code = unsafe { queries_device(hook, out, device, call) };
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let handle = unsafe { got(code, out) };
    if handle != 0 {
        made(hook, handle, device);
    }
    code
}

/// A context goes, with everything in it. (A primary one does not go this way.)
pub unsafe fn destroys_context(
    hook: HookCall,
    handle: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let before = || {
        if !place::is_primary(handle) {
            note_on(hook, place::device_of(handle), context(handle as u64, Kind::Destroy));
        }
    };
    let code = pass_after(hook, before, call);
    if code == 0 {
        place::forget(handle);
        if place::current().handle == handle {
            place::pop();
        }
    }
    code
}

/// `cuCtxSetCurrent`.
pub unsafe fn sets_context(hook: HookCall, handle: usize, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(hook, call);
    if code == 0 {
        place::set_context(handle);
    }
    code
}

/// `cuCtxPushCurrent`.
pub unsafe fn pushes_context(hook: HookCall, handle: usize, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(hook, call);
    if code == 0 {
        place::push(handle);
    }
    code
}

/// `cuCtxPopCurrent`.
pub unsafe fn pops_context(hook: HookCall, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(hook, call);
    if code == 0 {
        place::pop();
    }
    code
}

/// References to each device's primary context that calls have taken, less
/// those they have given back: counts, behind which nothing is read.
static RETAINED: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];

fn retained(device: c_int) -> Option<&'static AtomicU32> {
    RETAINED.get(usize::try_from(device).ok()?)
}

/// A reference to a device's primary context.
pub unsafe fn retains_primary(
    hook: HookCall,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(hook, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let handle = unsafe { got(code, out) };
    if let Some(count) = retained(device).filter(|_| handle != 0) {
        place::remember_primary(handle as usize, device as i8);
        let first = count.fetch_add(1, Ordering::Relaxed) == 0;
        if first {
            made(hook, handle, device);
        }
    }
    code
}

/// The reference goes; the last one takes the context with it, unless the runtime is there, too.
pub unsafe fn releases_primary(
    hook: HookCall,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let fewer = |n: u32| n.checked_sub(1);
    let before = retained(device)
        .and_then(|count| count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).ok());
    let is_last = before == Some(1) && !devices::is_runtime_used();
    let note = || {
        if is_last {
            reset(hook, device as i8);
        }
    };
    pass_after(hook, note, call)
}

/// All of a device's primary context destination: of the current device, or of a given one.
pub unsafe fn resets(hook: HookCall, device: Option<c_int>, call: impl FnOnce() -> c_int) -> c_int {
    let before = || {
        let device = device.map_or_else(|| place::current().device, |d| d as i8);
        if let Some(count) = retained(c_int::from(device)) {
            count.store(0, Ordering::Relaxed);
        }
        reset(hook, device);
    };
    pass_after(hook, before, call)
}

fn reset(hook: HookCall, device: i8) {
    let handle = place::primary(device) as u64;
    note_on(hook, device, ResetEvent { context: handle }.event());
    if handle != 0 {
        note_on(hook, device, context(handle, Kind::Destroy));
    }
}

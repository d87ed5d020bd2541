//! Roles of calls that are about contexts, and of those that say in passing what is worth knowing.
//!
//! None of these calls takes memory by itself; but what a context holds goes with it, and what these calls say is how
//! the others' device is known ([`crate::cuda::place`]) without asking CUDA anything.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use memtrace_format::event::{Event, Kind, Layer, What};

use crate::cuda::calls::also_inside;
use crate::cuda::place;
use crate::cuda::resolve;
use crate::cuda::roles::{got, note, pass, pass_after};
use crate::cuda::table::{Api, Out};
use crate::real::Real;
use crate::record::door::Door;
use crate::record::guard::event;
use crate::record::{Recorder, guard};
use crate::stack::Site;

// --- what is said in passing ---------------------------------------------------------------------------

/// The program asks for a device's pool.
pub unsafe fn tells_pool(
    door: Door,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(door, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    place::remember(unsafe { got(code, out) } as usize, device as i8);
    code
}

/// Who keeps memory that is not in use.
#[derive(Clone, Copy)]
pub enum Keeper {
    /// A pool.
    Pool(usize),
    /// The graphs of a device.
    Graphs(c_int),
}

/// The program asks how much is kept, which is one of the numbers that it may ask for.
pub unsafe fn tells_reserved(
    door: Door,
    keeper: Keeper,
    attribute: c_int,
    value: *mut c_void,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (reserved, what, handle, device) = match keeper {
        // CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
        Keeper::Pool(pool) => {
            (5, What::MemoryPool, pool as u64, place::of(pool).unwrap_or(place::UNKNOWN))
        }
        // CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
        Keeper::Graphs(device) => (2, What::GraphNode, device as u64, device as i8),
    };
    let (code, own) = pass(door, call);
    if own && attribute == reserved {
        // SAFETY: the caller's out-parameter, 8 bytes for this attribute.
        let bytes = unsafe { got(code, value.cast::<u64>()) };
        if code == 0 {
            note(door, Kind::PoolReserved, what, |e| {
                (e.addr, e.size, e.device) = (handle, bytes, device);
            });
        }
    }
    code
}

// --- devices -------------------------------------------------------------------------------------------

/// One bit for each device that this process has entered.
static ENTERED: AtomicU64 = AtomicU64::new(0);

/// Has this process entered a device?
pub fn has_entered(device: i8) -> bool {
    (0..64).contains(&device) && ENTERED.load(Ordering::Relaxed) & (1 << device) != 0
}

/// Has it entered any?
pub fn any_entered() -> bool {
    ENTERED.load(Ordering::Relaxed) != 0
}

/// A forked child begins anew, without the parent's other threads.
pub fn forget_entered() {
    ENTERED.store(0, Ordering::Relaxed);
    CALLS.store(0, Ordering::Relaxed);
}

/// Calls about memory: how many have begun (from bit 32), and how many of them are under way.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// A call about memory, from before the real one until it is in the books.
pub struct UnderWay(());

impl UnderWay {
    /// It begins.
    #[inline]
    pub fn begin() -> UnderWay {
        CALLS.fetch_add(1 << 32 | 1, Ordering::SeqCst);
        UnderWay(())
    }
}

impl Drop for UnderWay {
    #[inline]
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A piece of physical memory that PyTorch's allocator has taken for a segment, or cut off one. It is the device's, and in no segment of
/// the books, until [`pieces_end`]: so long this thread has a call about memory under way. PyTorch may ask in between how much is free.
pub(super) fn piece_begins() {
    guard::local(|local| {
        if local.pieces.replace(local.pieces.get().saturating_add(1)) == 0 {
            std::mem::forget(UnderWay::begin());
        }
    });
}

/// So many of them are in the books, or back.
pub(super) fn pieces_end(done: u32) {
    guard::local(|local| {
        let pieces = local.pieces.get();
        local.pieces.set(pieces.saturating_sub(done));
        if (1..=done).contains(&pieces) {
            drop(UnderWay(()));
        }
    });
}

/// The same answer twice, and not `None`, means that the books were complete and stayed so in between.
pub fn at_rest() -> Option<u64> {
    Some(CALLS.load(Ordering::SeqCst)).filter(|calls| *calls as u32 == 0)
}

/// Writes down what a device has said, beside the books of the moment when it said so: where no call about memory has been
/// under way since `before`, the answer of [`at_rest`] before the question, and at the very place in the order of events.
/// Between a look and a write others may have taken or given back gigabytes. `false`: there was no such moment.
pub fn write_said(recorder: &Recorder, before: Option<u64>, said: &Event) -> bool {
    /// What comes in between may be about blocks of a framework's, which is nothing to the device.
    const TRIES: usize = 8;
    (0..TRIES).any(|_| {
        let written = recorder.written();
        before.is_some() && at_rest() == before && recorder.write_at(written, said)
    })
}

/// This call has chosen a device or taken memory of it: its primary context is there from now on, whoever makes it.
/// The first such call is worth knowing, since a context takes hundreds of megabytes.
pub(super) fn enters(door: Door, device: i8) {
    if !(0..64).contains(&device) || has_entered(device) {
        return;
    }
    guard::observe(|recorder, local| {
        if ENTERED.fetch_or(1 << device, Ordering::Relaxed) & (1 << device) == 0 {
            let stack = recorder.stacks.capture_call(&local.stacks, Site::Alloc, door.caller);
            let api = door.api;
            recorder.write(&Event {
                api,
                device,
                stack,
                ..event(local, Kind::Entered, Layer::Device)
            });
            recorder.mailbox.measure();
        }
    });
}

/// The program asked how much of the current device is free. `before`: [`at_rest`] before it asked.
pub(super) unsafe fn tells_free(
    door: Door,
    code: c_int,
    (free, total): (*const usize, *const usize),
    before: Option<u64>,
) {
    if code != 0 || free.is_null() || total.is_null() {
        return;
    }
    // SAFETY: the caller's out-parameters, which a successful call has filled.
    let (free, total) = unsafe { (*free as u64, *total as u64) };
    guard::observe(|recorder, local| {
        let said = event(local, Kind::Measured, Layer::Device);
        let (api, device) = (door.api, place::current().device);
        let size = total.saturating_sub(free);
        write_said(recorder, before, &Event { api, device, size, extra: total, ..said });
    });
}

/// Bytes that the current device has free, when a request has just failed and its driver is asked anyway; 0 if it doesn't
/// say. The only call of ours in a hook: a later answer would be about another moment.
#[cold]
pub(super) fn free_now() -> u64 {
    type Ask = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
    static REAL: Real = Real::new();
    let Some(real) = resolve::real(&REAL, "cuMemGetInfo_v2", "libcuda.so") else { return 0 };
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver's function of that name has this signature; the places are ours.
    let code = unsafe {
        let ask: Ask = std::mem::transmute(real);
        ask(&raw mut free, &raw mut total)
    };
    if code == 0 { free as u64 } else { 0 }
}

// --- contexts ------------------------------------------------------------------------------------------

/// A context is there, whoever made it: the runtime does so inside calls of the program's, too.
fn made(door: Door, handle: u64, device: c_int) {
    also_inside(|| {
        note(door, Kind::Create, What::Context, |e| (e.addr, e.device) = (handle, device as i8));
    });
}

/// A context, which is current from then on.
pub unsafe fn creates_context(
    door: Door,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(door, call);
    if code == 0 {
        // SAFETY: the caller's out-parameter, of the call that has just returned.
        let handle = unsafe { got(code, out) };
        place::remember(handle as usize, device as i8);
        place::push(handle as usize);
        made(door, handle, device);
    }
    code
}

/// A green context, a share of a device's processors with a context of its own; it does not become current by itself.
pub unsafe fn creates_green(
    door: Door,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(door, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let handle = unsafe { got(code, out) };
    if handle != 0 {
        place::remember(handle as usize, device as i8);
        made(door, handle, device);
    }
    code
}

/// The ordinary handle of a green context, by which it is made current.
pub unsafe fn shows_green(
    door: Door,
    out: Out,
    green: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(door, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let handle = unsafe { got(code, out) };
    if let Some(device) = place::of(green).filter(|_| handle != 0) {
        place::remember(handle as usize, device);
    }
    code
}

/// A context goes, with everything in it. (A primary one does not go this way.)
pub unsafe fn destroys_context(door: Door, handle: usize, call: impl FnOnce() -> c_int) -> c_int {
    let before = || {
        if !place::is_primary(handle) {
            note(door, Kind::Destroy, What::Context, |e| {
                e.addr = handle as u64;
                e.device = place::of(handle).unwrap_or(place::UNKNOWN);
            });
        }
    };
    let code = pass_after(door, before, call);
    if code == 0 {
        place::forget(handle);
        if place::current().handle == handle {
            place::pop();
        }
    }
    code
}

/// `cuCtxSetCurrent`.
pub unsafe fn sets_context(door: Door, handle: usize, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(door, call);
    if code == 0 {
        place::set_context(handle);
    }
    code
}

/// `cuCtxPushCurrent`.
pub unsafe fn pushes_context(door: Door, handle: usize, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(door, call);
    if code == 0 {
        place::push(handle);
    }
    code
}

/// `cuCtxPopCurrent`.
pub unsafe fn pops_context(door: Door, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(door, call);
    if code == 0 {
        place::pop();
    }
    code
}

/// References to each device's primary context that calls have taken, less those they have given back.
static RETAINED: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
/// The runtime has been used: it keeps primary contexts as long as it likes.
static RUNTIME: AtomicBool = AtomicBool::new(false);

/// Is this a door of the runtime's (or of a library's above it)?
pub(super) fn is_runtime(door: Door) -> bool {
    door.api < Api::cuCtxCreate as u16
}

/// A call came in by this door.
pub(super) fn entered(door: Door) {
    if is_runtime(door) && !RUNTIME.load(Ordering::Relaxed) {
        RUNTIME.store(true, Ordering::Relaxed);
    }
}

fn retained(device: c_int) -> Option<&'static AtomicU32> {
    RETAINED.get(usize::try_from(device).ok()?)
}

/// A reference to a device's primary context.
pub unsafe fn retains_primary(
    door: Door,
    out: Out,
    device: c_int,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, _) = pass(door, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let handle = unsafe { got(code, out) };
    if let Some(count) = retained(device).filter(|_| handle != 0) {
        place::remember_primary(handle as usize, device as i8);
        let first = count.fetch_add(1, Ordering::Relaxed) == 0;
        if first {
            made(door, handle, device);
        }
    }
    code
}

/// The reference goes; the last one takes the context with it, unless the runtime is there, too.
pub unsafe fn releases_primary(door: Door, device: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let fewer = |n: u32| n.checked_sub(1);
    let before = retained(device)
        .and_then(|count| count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).ok());
    let is_last = before == Some(1) && !RUNTIME.load(Ordering::Relaxed);
    let note = || {
        if is_last {
            reset(door, device as i8);
        }
    };
    pass_after(door, note, call)
}

/// All of a device's primary context goes: of the current device, or of a given one.
pub unsafe fn resets(door: Door, device: Option<c_int>, call: impl FnOnce() -> c_int) -> c_int {
    let before = || {
        let device = device.map_or_else(|| place::current().device, |d| d as i8);
        if let Some(count) = retained(c_int::from(device)) {
            count.store(0, Ordering::Relaxed);
        }
        reset(door, device);
    };
    pass_after(door, before, call)
}

fn reset(door: Door, device: i8) {
    let handle = place::primary(device) as u64;
    note(door, Kind::Reset, What::Device, |e| (e.device, e.extra) = (device, handle));
    if handle != 0 {
        note(door, Kind::Destroy, What::Context, |e| (e.device, e.addr) = (device, handle));
    }
}

//! What calls do to memory: one function for each role of the table.
//!
//! A role gets the hook's call, what the row says of its arguments, and the real call. It passes
//! the call on, and records what became of it if the call is the program's own. (A call of the
//! program's may make others inside CUDA.) A free is recorded *before* the real call, an
//! allocation *after* it. So an address that is used again never seems to exist twice. The real
//! function's answer is passed on untouched.
//!
//! What PyTorch's allocator gets is recorded as its segments, in
//! [`crate::pytorch::allocator`]'s terms. That it makes them of physical memory and mappings is
//! not recorded beside that, so nothing is counted twice.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_format::event::{
    Event, FLAG_FAILED, FLAG_OF_BLOCKS, FLAG_SMALL, HandleEvent, Kind, Layer, MemoryEvent,
    OUT_OF_MEMORY, ObjectEvent, RangeEvent, RefusalEvent, SegmentEvent, What,
};

use crate::cuda::calls::{pass, pass_after};
pub use crate::cuda::contexts::*;
use crate::cuda::devices::note_entered;
use crate::cuda::notes::{failed, layer_of, note, note_on, of_door};
use crate::cuda::place;
use crate::cuda::records::{
    Extent, GraphAllocation, GraphNode, MemoryProperties, NodeMemory, PitchedPtr, PoolProperties,
};
use crate::cuda::records::{Out, Ptr};
use crate::cuda::table::Api;
use crate::cuda::under_way::{piece_begins, pieces_end};
use crate::pytorch::{allocator, captures, pinned};

use crate::os::message;
use crate::record::Recorder;
use crate::record::guard::event;
use crate::record::guard::{self, Local};
use crate::record::hook::{HookCall, got};
use crate::stack::Site;

// --- allocations and frees -----------------------------------------------------------------------

/// An allocation, before the call and when it has returned.
#[derive(Clone, Copy)]
struct Allocated {
    what: What,
    code: c_int,
    addr: u64,
    size: usize,
    stream: usize,
    pool: usize,
}

impl Allocated {
    /// What is asked for.
    fn asked(what: What, size: usize, stream: usize) -> Allocated {
        Allocated { what, code: 0, addr: 0, size, stream, pool: 0 }
    }

    /// Passes the call on. What it gave is where `out` points.
    unsafe fn by(self, hook: HookCall, out: Out, call: impl FnOnce() -> c_int) -> c_int {
        let (code, own) = pass(hook, call);
        if own {
            // SAFETY: the caller's out-parameter, of the call that has just returned.
            let addr = unsafe { got(code, out) };
            allocated(hook, Allocated { code, addr, ..self });
        }
        code
    }
}

fn allocated(hook: HookCall, it: Allocated) {
    let of_others = matches!(it.what, What::Imported | What::View | What::Array);
    if it.size == 0 && !of_others || it.code == 0 && it.addr == 0 {
        return;
    }
    if it.code == 0 {
        note_entered(hook, place::current().device);
    }
    guard::observe(|recorder, local| {
        let event = if hook.api == Api::cudaMalloc as u16 && allocator::is_caller(hook.caller) {
            segment(recorder, local, it)
        } else {
            let context = place::current();
            let (device, inside) = match it.what {
                What::Pool if it.pool != 0 => (place::device_of(it.pool), it.pool),
                What::Pool => (place::of_stream(it.stream), 0),
                _ => (context.device, context.handle),
            };
            let of_blocks = layer_of(it.what) == Layer::Host && pinned::under_way();
            let (addr, size, stream) = (it.addr, it.size as u64, it.stream as u64);
            let said = match it.code {
                0 => MemoryEvent { addr, size, inside: inside as u64, stream }.event(Kind::Alloc),
                code => Event { stream, ..refused(Kind::Alloc, size, code) },
            };
            Event {
                device,
                flags: if of_blocks { FLAG_OF_BLOCKS } else { 0 },
                stack: recorder.stacks.capture_call(&local.stacks, Site::Alloc, hook.caller),
                ..of_door(hook, local, about(it.what, said))
            }
        };
        if it.code == 0 {
            recorder.write(&event);
        } else {
            failed(recorder, Event { flags: event.flags | FLAG_FAILED, ..event });
        }
    });
}

/// The same of memory of another sort.
fn about(what: What, said: Event) -> Event {
    Event { what, layer: layer_of(what), ..said }
}

/// A call that failed.
fn refused(kind: Kind, asked: u64, code: c_int) -> Event {
    let refusal = RefusalEvent { asked, answer: code as u64, free: 0 };
    Event { flags: FLAG_FAILED, ..refusal.event(kind) }
}

/// PyTorch's allocator got a segment for the request that is under way.
fn segment(recorder: &Recorder, local: &Local, it: Allocated) -> Event {
    captures::resolve(recorder, local);
    let request = allocator::doing(recorder, local, -1);
    // PyTorch asks the driver for exactly 2 MiB for requests of at most 1 MiB and never otherwise.
    let flags = if it.size == 2 << 20 { FLAG_SMALL } else { 0 };
    let (addr, size, stream) = (it.addr, it.size as u64, request.stream);
    let segment = SegmentEvent { addr, size, reservation: 0, stream };
    Event {
        flags,
        stack: request.stack,
        pool: request.pool,
        device: request.device,
        ..event(local, segment.event(Kind::SegmentAlloc))
    }
}

/// Memory (or a handle to it) of a size that is known before the call.
pub unsafe fn allocates(
    hook: HookCall,
    what: What,
    out: Out,
    size: usize,
    stream: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    unsafe { Allocated::asked(what, size, stream).by(hook, out, call) }
}

/// Memory from a pool that is named.
pub unsafe fn allocates_from(
    hook: HookCall,
    out: Out,
    size: usize,
    pool: usize,
    stream: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    unsafe { Allocated { pool, ..Allocated::asked(What::Pool, size, stream) }.by(hook, out, call) }
}

/// Memory in rows: the call says how far apart they are.
pub unsafe fn allocates_rows(
    hook: HookCall,
    out: Out,
    pitch: *mut usize,
    height: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, own) = pass(hook, call);
    if own {
        // SAFETY: the caller's out-parameters, of the call that has just returned.
        let (addr, pitch) = unsafe { (got(code, out), got(code, pitch)) };
        let size = (pitch as usize).saturating_mul(height);
        // A request that failed has no pitch; that it failed is worth an event all the same.
        let size = if code == 0 { size } else { height.max(1) };
        allocated(hook, Allocated { code, addr, ..Allocated::asked(What::Device, size, 0) });
    }
    code
}

/// Memory in rows and slices.
pub unsafe fn allocates_slices(
    hook: HookCall,
    out: *mut PitchedPtr,
    extent: Extent,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, own) = pass(hook, call);
    if own && code == 0 && !out.is_null() {
        // SAFETY: the caller's out-parameter, which a successful call has filled.
        let PitchedPtr { addr, pitch, .. } = unsafe { *out };
        let size = pitch.saturating_mul(extent.height).saturating_mul(extent.depth);
        let addr = addr as u64;
        allocated(hook, Allocated { addr, ..Allocated::asked(What::Device, size, 0) });
    }
    code
}

/// An array; what is counted are its elements, since how they are laid out is the device's secret.
pub unsafe fn allocates_array(
    hook: HookCall,
    out: Out,
    size: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    unsafe { allocates(hook, What::Array, out, size, 0, call) }
}

/// Memory that another process holds; how much is not known.
pub unsafe fn imports(hook: HookCall, out: Out, call: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the caller's out-parameter.
    unsafe { allocates(hook, What::Imported, out, 0, 0, call) }
}

/// Memory of the program's own is page-locked.
pub unsafe fn registers(
    hook: HookCall,
    addr: Ptr,
    size: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let mut at = addr;
    // SAFETY: `at` is ours and outlives the call.
    unsafe { allocates(hook, What::Registered, &raw mut at, size, 0, call) }
}

/// Memory (or a handle to it) goes back.
pub unsafe fn frees(
    hook: HookCall,
    what: What,
    addr: usize,
    stream: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let before = || {
        if addr != 0 {
            freed(hook, what, addr, stream);
        }
    };
    let code = pass_after(hook, before, call);
    // `cudaFree(0)` is how programs ask for a context.
    if addr == 0 && code == 0 && hook.api == Api::cudaFree as u16 {
        note_entered(hook, place::current().device);
    }
    code
}

fn freed(hook: HookCall, what: What, addr: usize, stream: usize) {
    guard::observe(|recorder, local| {
        let framework = hook.api == Api::cudaFree as u16 && allocator::is_caller(hook.caller);
        if framework {
            captures::resolve(recorder, local);
        }
        let stack = match local.request.get() {
            Some(request) if framework => request.stack,
            _ if framework => recorder.stack_of_free(local),
            _ => recorder.stack_of_freeing_call(local, hook.caller),
        };
        let (addr, stream) = (addr as u64, stream as u64);
        let event = if framework {
            let segment = SegmentEvent { addr, size: 0, reservation: 0, stream };
            event(local, segment.event(Kind::SegmentFree))
        } else {
            let gone = MemoryEvent { addr, size: 0, inside: 0, stream };
            of_door(hook, local, about(what, gone.event(Kind::FreeRequested)))
        };
        recorder.write(&Event { stack, ..event });
    });
}

// --- physical memory and addresses ---------------------------------------------------------------

/// Physical memory.
pub unsafe fn creates_physical(
    hook: HookCall,
    out: *mut u64,
    size: usize,
    properties: *const MemoryProperties,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, own) = pass(hook, call);
    if own {
        // SAFETY: the caller's own parameters, of the call that has just returned.
        let (handle, device) = unsafe { (got(code, out), PoolProperties::device(properties)) };
        if let (0, Some(device)) = (code, device) {
            note_entered(hook, device as i8);
        }
        let size = size as u64;
        let said = if code == 0 {
            HandleEvent { handle, size, mappings: 0, references: 1 }.event(Kind::HandleCreate)
        } else {
            refused(Kind::HandleCreate, size, code)
        };
        match device {
            Some(device) => note_on(hook, device as i8, said),
            None => note(hook, Event { layer: Layer::Host, ..said }),
        }
    }
    if allocator::is_caller(hook.caller) {
        piece(code);
    }
    code
}

/// PyTorch's allocator has asked for a piece of a segment. Where there is no memory it gives back
/// what it got; after any other failure it keeps that, and raises.
fn piece(code: c_int) {
    if code == 0 {
        piece_begins();
    } else if code as u64 == OUT_OF_MEMORY {
        guard::observe(|recorder, local| {
            let request = allocator::doing(recorder, local, -1);
            let said = event(local, refused(Kind::SegmentMap, 0, code));
            let (layer, device, stack) = (Layer::Framework, request.device, request.stack);
            failed(recorder, Event { layer, device, stack, ..said });
        });
    } else {
        pieces_end(u32::MAX);
    }
}

/// A handle to what has no memory of this process's own: physical memory of another process's, or
/// something through which several devices write together.
pub unsafe fn names_physical(
    hook: HookCall,
    what: What,
    out: *mut u64,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let made = |handle| {
        let physical = HandleEvent { handle, size: 0, mappings: 0, references: 1 };
        Event { what, ..physical.event(Kind::HandleCreate) }
    };
    // SAFETY: the caller's out-parameter.
    unsafe { gives(hook, out, made, call) }
}

/// Passes a call on that gives a handle: what is written down of that is what `said` says.
unsafe fn gives<T: Copy>(
    hook: HookCall,
    out: *const T,
    said: impl FnOnce(u64) -> Event,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, own) = pass(hook, call);
    if own && code == 0 {
        // SAFETY: the caller's out-parameter, of the call that has just returned.
        note(hook, said(unsafe { got(code, out) }));
    }
    code
}

/// A handle gains or loses a reference.
fn physical(handle: u64, kind: Kind) -> Event {
    HandleEvent { handle, size: 0, mappings: 0, references: 0 }.event(kind)
}

/// One more reference to what is mapped somewhere.
pub unsafe fn retains_physical(
    hook: HookCall,
    out: *mut u64,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    unsafe { gives(hook, out, |handle| physical(handle, Kind::HandleRetain), call) }
}

/// One reference fewer.
pub unsafe fn releases_physical(
    hook: HookCall,
    handle: u64,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let before = || note(hook, physical(handle, Kind::HandleRelease));
    let code = pass_after(hook, before, call);
    if allocator::is_caller(hook.caller) {
        pieces_end(1);
    }
    code
}

/// A reserved range of addresses goes back.
pub unsafe fn unreserves(
    hook: HookCall,
    addr: usize,
    size: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let before = || {
        let range = RangeEvent { addr: addr as u64, size: size as u64 };
        note(hook, range.event(Kind::Unreserve));
    };
    pass_after(hook, before, call)
}

// --- objects -------------------------------------------------------------------------------------

/// Something whose size nobody says.
pub unsafe fn creates(hook: HookCall, what: What, out: Out, call: impl FnOnce() -> c_int) -> c_int {
    let made = |handle| {
        let object = ObjectEvent { handle, context: place::current().handle as u64 };
        Event { what, ..object.event(Kind::Create) }
    };
    // SAFETY: the caller's out-parameter.
    unsafe { gives(hook, out, made, call) }
}

/// It goes.
pub unsafe fn destroys(
    hook: HookCall,
    what: What,
    handle: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let object = ObjectEvent { handle: handle as u64, context: 0 };
    let before = || note(hook, Event { what, ..object.event(Kind::Destroy) });
    let code = pass_after(hook, before, call);
    if code == 0 && what == What::MemoryPool {
        place::forget(handle);
    }
    code
}

/// A pool, on a device or with the host (or wherever an imported one is).
pub unsafe fn creates_pool(
    hook: HookCall,
    out: Out,
    device: Option<c_int>,
    call: impl FnOnce() -> c_int,
) -> c_int {
    // SAFETY: the caller's out-parameter.
    let code = unsafe { creates(hook, What::MemoryPool, out, call) };
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let pool = unsafe { got(code, out) };
    place::remember(pool as usize, device.map_or(place::UNKNOWN, |d| d as i8));
    code
}

/// A stream, on the current device.
pub unsafe fn creates_stream(hook: HookCall, out: Out, call: impl FnOnce() -> c_int) -> c_int {
    let (code, _) = pass(hook, call);
    // SAFETY: the caller's out-parameter, of the call that has just returned.
    let stream = unsafe { got(code, out) };
    place::remember(stream as usize, place::current().device);
    if code == 0 {
        note_entered(hook, place::current().device);
    }
    code
}

/// A stream goes.
pub unsafe fn destroys_stream(
    hook: HookCall,
    stream: usize,
    call: impl FnOnce() -> c_int,
) -> c_int {
    place::forget(stream);
    pass(hook, call).0
}

/// A node of a graph, of whatever kind.
pub unsafe fn adds_node(
    hook: HookCall,
    node: *mut GraphNode,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, own) = pass(hook, call);
    if own && code == 0 {
        // SAFETY: the caller's parameter, which a successful call has read and filled.
        match unsafe { GraphNode::memory(node) } {
            Some(NodeMemory::Allocation(allocation)) => promised(hook, allocation),
            Some(NodeMemory::Free(addr)) => freed(hook, What::GraphNode, addr, 0),
            None => {}
        }
    }
    code
}

/// An address that an allocation node of a graph will have.
pub unsafe fn promises(
    hook: HookCall,
    node: *mut GraphAllocation,
    call: impl FnOnce() -> c_int,
) -> c_int {
    let (code, own) = pass(hook, call);
    if own
        && code == 0
        // SAFETY: the caller's parameter, which a successful call has filled.
        && let Some(node) = unsafe { node.as_ref() }
    {
        promised(hook, node);
    }
    code
}

fn promised(hook: HookCall, node: &GraphAllocation) {
    let (addr, size) = (node.addr as u64, node.size as u64);
    let promise = MemoryEvent { addr, size, inside: 0, stream: 0 };
    let said = about(What::GraphNode, promise.event(Kind::Alloc));
    match node.device() {
        Some(device) => note_on(hook, device as i8, said),
        None => note(hook, said),
    }
}

// --- interfaces of 32-bit days -------------------------------------------------------------------

/// An interface with addresses and sizes of 32 bits: passed on, not recorded, and reported once.
pub unsafe fn passes_old(hook: HookCall, call: impl FnOnce() -> c_int) -> c_int {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        let name = crate::cuda::table::name(hook.api);
        message!("{name} has addresses of 32 bits and is not recorded; {name}_v2 is");
    }
    call()
}

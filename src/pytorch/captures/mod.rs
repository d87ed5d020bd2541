//! Frees that wait for the end of a graph capture.
//!
//! A block that other streams use is given back for good when they are done. For this
//! PyTorch's allocator records CUDA events, which it can't while a graph is captured. So it
//! keeps such a block until the first request after the capture. Then it records an event
//! on each stream that used the block before or after the capture. A block that was used
//! only inside is complete at once, without any call that could be seen. (Checked against
//! its own recorder, PyTorch 2.6 to 2.15.)
//!
//! Three things are therefore known here:
//! - which streams use which block ([`uses`], from `recordStream`, found by
//!   [`Methods`]) that isn't their own ([`own`]);
//! - whether a capture is under way. PyTorch calls the allocator's `markCaptureBegin` (from 2.13;
//!   before, every begin of allocations to a pool counts as one), and while one is under way, the
//!   allocator asks `cudaStreamGetCaptureInfo` about the current stream;
//! - which block's events are those that a request records.
//!
//! The last can be ambiguous. Blocks are gone through in the order of their frees, as PyTorch
//! up to 2.8 does it. Later releases take the order of a hash of their own pointers, which is
//! not known outside. So the order may differ between several blocks that become free
//! together, or that wait for the same stream.
//!
//! Frees and requests come under PyTorch's lock for the device. Where they don't, one
//! thread gives way: a lock is only tried.

mod own;
mod uses;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memtrace_format::event::{CompletedEvent, Event, WaitEvent};

use crate::gauges::waiting;
use crate::hot::HOT;
use crate::os::address::Address;
use crate::os::locks::ForkLock;
use crate::pytorch::library;
use crate::pytorch::methods::{DataPtr, Methods};
use crate::pytorch::names;
use crate::pytorch::streams::{self, CudaStream};
use crate::record::Recorder;
use crate::record::guard::event;
use crate::record::guard::{self, Local};
use crate::stack::Site;
use uses::Use;

/// Devices of a machine.
const DEVICES: usize = 64;

/// Captures (or what counts as one) that are under way, by device: counts, behind which nothing is
/// read.
static UNDER_WAY: [AtomicUsize; DEVICES] = [const { AtomicUsize::new(0) }; DEVICES];
/// PyTorch marks captures, which distinguishes them from other allocations to a pool.
/// Set before our functions are called.
static HAS_MARKS: AtomicBool = AtomicBool::new(false);

fn begins(device: i8) {
    if let Some(n) = UNDER_WAY.get(device as usize) {
        n.fetch_add(1, Ordering::AcqRel);
    }
}

fn ends(device: i8) {
    let less = |n: usize| n.checked_sub(1);
    if let Some(n) = UNDER_WAY.get(device as usize) {
        // An end without a beginning changes nothing.
        let _ = n.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
    }
}

/// Is this thread at work for a capture?
fn capturing(local: &Local, device: i8) -> bool {
    let under_way = UNDER_WAY.get(device as usize).is_some_and(|n| n.load(Ordering::Acquire) > 0);
    under_way && (!HAS_MARKS.load(Ordering::Relaxed) || local.capturing.get())
}

/// Notes the answer that the allocator got when it asked whether the current stream captures.
pub fn note_status(local: &Local, status: c_int) {
    const NONE: c_int = 0; // cudaStreamCaptureStatusNone
    local.capturing.set(status != NONE);
}

/// Allocations to a pool begin, which used to be the same.
pub(crate) fn begins_pool(device: c_int) {
    if !HAS_MARKS.load(Ordering::Relaxed) {
        begins(device as i8);
    }
}

// --- the allocator's functions -------------------------------------------------------------------

type RecordStream = unsafe extern "C-unwind" fn(*mut c_void, *const DataPtr, CudaStream);
type End = unsafe extern "C-unwind" fn(*mut c_void, c_int, u64, u64);
type Mark = unsafe extern "C-unwind" fn(*mut c_void, c_int);

static RECORD_STREAM: Address = Address::new();
static END: Address = Address::new();
static MARK_BEGIN: Address = Address::new();
static MARK_END: Address = Address::new();

/// Puts our functions into a copy of the allocator's table.
pub(crate) fn watch(methods: &mut Methods) {
    let keep = |place: &'static Address| {
        |real: usize| {
            place.set(real as *mut c_void);
        }
    };
    methods.replace(names::RECORD_STREAM, record_stream as *const (), keep(&RECORD_STREAM));
    if methods.find(names::BEGIN_CAPTURE).is_some() {
        HAS_MARKS.store(true, Ordering::Relaxed);
        methods.replace(names::BEGIN_CAPTURE, mark_begin as *const (), keep(&MARK_BEGIN));
        methods.replace(names::END_CAPTURE, mark_end as *const (), keep(&MARK_END));
    } else {
        methods.replace(names::END_POOL, end as *const (), keep(&END));
    }
}

unsafe extern "C-unwind" fn record_stream(
    this: *mut c_void,
    data: *const DataPtr,
    stream: CudaStream,
) {
    guard::local(|local| {
        local.capturing.set(false);
        // SAFETY: the address came from the slot that this function stands
        // in; the arguments are the caller's.
        unsafe {
            let real: RecordStream = std::mem::transmute(RECORD_STREAM.get());
            real(this, data, stream);
        }
        local.observe(|_, local| {
            // SAFETY: the caller's, of the call that has just returned.
            let Some(block) = (unsafe { data.as_ref() }) else { return };
            // Another deleter is another allocator's.
            if block.addr != 0 && library::contains(block.delete) {
                let captured = capturing(local, (block.device >> 8) as i8);
                let how = if captured { Use::Captured } else { Use::Outside };
                uses::note(block.addr as u64, how, streams::raw(local, stream));
            }
        });
    });
}

/// (this, device, the two numbers of the pool)
unsafe extern "C-unwind" fn end(this: *mut c_void, device: c_int, first: u64, second: u64) {
    // SAFETY: as in `record_stream`.
    unsafe {
        let real: End = std::mem::transmute(END.get());
        real(this, device, first, second);
    }
    ends(device as i8);
}

unsafe extern "C-unwind" fn mark_begin(this: *mut c_void, device: c_int) {
    // SAFETY: as in `record_stream`.
    unsafe {
        let real: Mark = std::mem::transmute(MARK_BEGIN.get());
        real(this, device);
    }
    begins(device as i8);
}

unsafe extern "C-unwind" fn mark_end(this: *mut c_void, device: c_int) {
    // SAFETY: as in `record_stream`.
    unsafe {
        let real: Mark = std::mem::transmute(MARK_END.get());
        real(this, device);
    }
    ends(device as i8);
}

// --- frees that wait -----------------------------------------------------------------------------

/// A block that was given back during a capture.
struct Deferred {
    addr: u64,
    bytes: u64,
    /// Streams that used it, on which no event has been recorded yet.
    streams: Vec<u64>,
    /// Events that have.
    events: Vec<u64>,
}

static DEFERRED: [ForkLock<Vec<Deferred>>; DEVICES] =
    [const { ForkLock::new(Vec::new()) }; DEVICES];

/// In a forked child, none of the parent's blocks waits.
pub fn forget_others() {
    HOT.deferred.store(0, Ordering::Release);
    for mut list in DEFERRED.iter().filter_map(ForkLock::try_lock) {
        list.clear();
    }
}

/// A block was handed out.
#[inline]
pub(crate) fn handed_out(local: &Local, addr: u64, stream: u64) {
    own::note(addr, stream);
    local.capturing.set(false);
}

/// A block was given back, and no event recorded: does it wait for a capture's end?
#[inline]
pub(crate) fn taken_back(local: &Local, addr: u64, bytes: u64, device: i8) -> bool {
    if !uses::any() {
        local.capturing.set(false);
        return false;
    }
    let uses = uses::take(addr);
    let during = uses.any() && local.recorded_len.get() == 0 && capturing(local, device);
    local.capturing.set(false);
    during
        && DEFERRED.get(device as usize).is_some_and(|list| {
            let Some(mut list) = list.try_lock() else { return false };
            list.push(Deferred { addr, bytes, streams: uses.outside(), events: Vec::new() });
            HOT.deferred.fetch_add(1, Ordering::AcqRel);
            waiting::add(device as usize, bytes, &[addr]);
            true
        })
}

/// The allocator is about to do something that it does when what has waited for a capture has been
/// seen to. To be called before that is written down.
#[inline]
pub(crate) fn resolve(recorder: &Recorder, local: &Local) {
    if HOT.deferred.load(Ordering::Relaxed) > 0 {
        resolve_devices(recorder, local, true);
    }
}

/// More events than a thread remembers are recorded at once: whose are those so far?
#[cold]
pub(crate) fn resolve_some() {
    if HOT.deferred.load(Ordering::Relaxed) > 0 {
        guard::observe(|recorder, local| resolve_devices(recorder, local, false));
    }
}

#[cold]
fn resolve_devices(recorder: &Recorder, local: &Local, all_recorded: bool) {
    // A request is about the current device. Without one it is `empty_cache`, which goes through
    // all of them; traces are by device, so that it doesn't matter which is first.
    let only = local.request.get().map(|_| streams::current(local, -1).1);
    for (device, list) in DEFERRED.iter().enumerate() {
        let device = device as i8;
        if only.is_some_and(|only| only != device) || capturing(local, device) {
            continue;
        }
        let Some(mut list) = list.try_lock() else { continue };
        if !list.is_empty() {
            take_recorded(recorder, local, device, &mut list);
            if all_recorded {
                complete(recorder, local, device, &mut list);
            }
        }
    }
}

/// Finds out for which block each event is.
fn take_recorded(recorder: &Recorder, local: &Local, device: i8, list: &mut [Deferred]) {
    let mut at = 0;
    for (ev, stream) in local.take_recorded() {
        // A block's events come together.
        let wants = |i: &usize| list[*i].streams.contains(&stream);
        let Some(next) = std::iter::once(at).chain(0..list.len()).find(wants) else { continue };
        at = next;
        let block = &mut list[at];
        block.streams.retain(|s| *s != stream);
        block.events.push(ev);
        let wait = WaitEvent { block: block.addr, handle: ev, stream };
        recorder.write(&Event { device, ..event(local, wait.event()) });
    }
}

/// What has no event is complete.
fn complete(recorder: &Recorder, local: &Local, device: i8, list: &mut Vec<Deferred>) {
    let request = local.request.get();
    let stack =
        request.map_or_else(|| recorder.stacks.capture(&local.stacks, Site::Alloc), |r| r.stack);
    for block in list.drain(..) {
        HOT.deferred.fetch_sub(1, Ordering::AcqRel);
        if block.events.is_empty() {
            let free = CompletedEvent { block: block.addr };
            recorder.write(&Event { stack, device, ..event(local, free.event()) });
        } else {
            waiting::add(device as usize, block.bytes, &block.events);
        }
        waiting::reached(block.addr);
    }
}

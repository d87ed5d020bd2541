//! PyTorch's caching allocator, watched from outside while it stays in place.
//!
//! Three stable interfaces of `libc10_cuda.so` give its trace entry for entry. (Checked on PyTorch
//! 2.6, 2.11 and 2.15 against its own recorder in the same process.)
//! - it reports every block it hands out or takes back to `c10::reportMemoryUsageToProfiler`, and
//!   every failure to `c10::reportOutOfMemoryToProfiler`. The calls go through its PLT, in the
//!   calling thread and under the device's lock. They have the block's address, its rounded size
//!   and its device. We define these symbols;
//! - slot 2 of the allocator's vtable is `allocate(size_t)` in every 2.x. It knows the size that
//!   was asked for, and the stack can be taken there, before any lock. We put our own function
//!   there, in a copy of the table; the object itself stays;
//! - its calls into the CUDA runtime are known by their return address ([`crate::pytorch::sites`]).
//!   An event it records belongs to the block whose free it reports next: that free waits.
//!
//! It must never keep an exception from passing: an out-of-memory error is
//! thrown through our `allocate`.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memtrace_format::event::{
    BlockEvent, Event, FLAG_PENDING, FLAG_SIZE_IS_ROUNDED, Kind, OomEvent, Pool, StackId, WaitEvent,
};

use crate::gauges;
use crate::libraries::loaded;
use crate::libraries::scopes;
use crate::os::address::Address;
use crate::os::locks::Turn;
use crate::os::sync::{atomics, of_process};
use crate::pair::Pair;
use crate::pytorch::methods::{Allocate, Methods, copy_of_table};
use crate::pytorch::names::{self, ALLOCATE_SLOT, C10_CUDA, CUDA, LEADING};
use crate::pytorch::{callbacks, captures, changes, library, pools, quick, streams};
use crate::real::Real;
use crate::record::Recorder;
use crate::record::guard::event;
use crate::record::guard::{self, Local, Request};
use crate::stack::Site;

/// Whether these interfaces are hooked.
static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Does this return address lie in PyTorch's allocator library? The first time that it does, the
/// library's interfaces are hooked: it may be loaded long after the first CUDA call.
pub fn is_caller(address: usize) -> bool {
    let is_it = library::contains(address) || !library::is_known() && library::is_at(address);
    is_it && attach() && library::contains(address)
}

/// Learns where the library lies and hooks its interfaces, if it is loaded.
#[inline]
pub fn attach() -> bool {
    ATTACHED.load(Ordering::Acquire) || open()
}

#[cold]
#[inline(never)]
fn open() -> bool {
    if !library::locate() {
        return false;
    }
    ATTACHED.store(true, Ordering::Release);
    replace_allocate();
    streams::attach();
    callbacks::attach();
    true
}

// --- the request that is under way ---------------------------------------------------------------

/// What PyTorch is about in this thread.
#[derive(Clone, Copy)]
pub struct Doing {
    /// Bytes asked for; 0 where the request came by a function that we don't hook.
    pub size: u64,
    /// Raw handle of the current stream.
    pub stream: u64,
    /// Device of the current stream.
    pub device: i8,
    /// Where.
    pub stack: StackId,
    /// From which pool it is served.
    pub pool: Pool,
}

/// The request under way in this thread and its stream on `device` (−1: the current one).
pub fn doing(recorder: &Recorder, local: &Local, device: i8) -> Doing {
    let (stream, device) = streams::current(local, device);
    let request = local.request.get();
    let stack =
        request.map_or_else(|| recorder.stacks.capture(&local.stacks, Site::Alloc), |r| r.stack);
    Doing { size: request.map_or(0, |r| r.size), stream, device, stack, pool: local.pool.get() }
}

// --- allocate(size_t) ----------------------------------------------------------------------------

static REAL_ALLOCATE: Address = Address::new();
static OUR_TABLE: Address = Address::new();
static SWAPPING: Turn = Turn::new(());
/// `c10::cuda::CUDACachingAllocator::allocator`, the exported pointer to the allocator in use.
static ALLOCATOR: Address = Address::new();

/// Puts our `allocate` into the table of the allocator object in use, unless it is there already.
fn replace_allocate() {
    let name = names::ALLOCATOR;
    let find = || scopes::loaded_symbol(name.library, name.symbol);
    let at = ALLOCATOR.get_or(|| find().map_or(ptr::null_mut(), NonNull::as_ptr));
    if at.is_null() {
        return;
    }
    // SAFETY: the symbol is an `std::atomic<CUDAAllocator*>`, which has the layout of a pointer.
    // The object it points to begins with a vtable pointer; it is static and never freed.
    unsafe {
        let object = *at.cast::<*mut usize>();
        if object.is_null() || *object == OUR_TABLE.get() as usize {
            return;
        }
        // One thread is enough.
        if is_native(*object)
            && let Some(_turn) = SWAPPING.try_lock()
            && is_native(*object)
        {
            swap_table(object);
        }
    }
}

/// Only the allocator that lives in `libc10_cuda.so` reports its blocks; a
/// table elsewhere is somebody else's.
unsafe fn is_native(table: usize) -> bool {
    // SAFETY: the caller promises a table.
    let allocate = unsafe { *(table as *const usize).add(ALLOCATE_SLOT) };
    library::contains(allocate)
}

/// Is PyTorch's own allocator in use, so that whatever else allocates does it on its behalf?
pub fn native_in_charge() -> bool {
    attach();
    let object = ALLOCATOR.get();
    // SAFETY: see `replace_allocate`.
    !object.is_null()
        && unsafe {
            let object = *object.cast::<*const usize>();
            !object.is_null() && (*object == OUR_TABLE.get() as usize || is_native(*object))
        }
}

unsafe fn swap_table(object: *mut usize) {
    // SAFETY: see `replace_allocate`.
    unsafe {
        let table = *object as *const usize;
        let (mut copy, words) = copy_of_table(table, library::end());
        let real = copy[LEADING + ALLOCATE_SLOT];
        copy[LEADING + ALLOCATE_SLOT] = allocate as *const () as usize;
        if REAL_ALLOCATE.set(real as *mut c_void) as usize != real {
            return; // an allocator of another class, whose function isn't the one that ours calls
        }
        if let Some(library) = loaded::loaded(C10_CUDA) {
            let mut methods = Methods::of(&mut copy[LEADING..words], &library);
            pools::watch(&mut methods);
            captures::watch(&mut methods);
        }
        let ours = OUR_TABLE.set(Box::leak(copy).as_mut_ptr().add(LEADING).cast());
        AtomicUsize::from_ptr(object).store(ours as usize, Ordering::Release);
    }
}

/// Clears the request however `allocate` ends, also by an exception.
struct Ended<'a>(&'a Local);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.request.set(None);
    }
}

unsafe extern "C-unwind" fn allocate(
    result: *mut c_void,
    this: *mut c_void,
    size: usize,
) -> *mut c_void {
    guard::local(|local| {
        local.observe(|recorder, local| {
            let stack = recorder.stacks.capture(&local.stacks, Site::Alloc);
            local.request.set(Some(Request { size: size as u64, stack }));
            local.pool.set(Pool::DEFAULT);
        });
        let _ended = Ended(local);
        // SAFETY: the address came from the slot that this function stands
        // in; the arguments are the caller's.
        unsafe {
            let real: Allocate = std::mem::transmute(REAL_ALLOCATE.get());
            real(result, this, size)
        }
    })
}

// --- reports -------------------------------------------------------------------------------------

/// `c10::Device` as it is passed: type in the low byte (1 is CUDA), index in the next.
type Device = u16;

/// `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t,
/// Device)`: a block handed out (`change` is its rounded size) or taken back (minus that).
///
/// # Safety
/// Called by PyTorch's allocator.
#[unsafe(export_name = names::report_usage!())]
pub unsafe extern "C-unwind" fn report_memory_usage(
    addr: *mut c_void,
    change: i64,
    allocated: usize,
    reserved: usize,
    device: Device,
) {
    if device & 0xff == CUDA {
        guard::observe(|recorder, local| {
            let device = (device >> 8) as i8;
            if let Some(gauge) = gauges::of(device as usize) {
                gauge.set(allocated as u64, reserved as u64);
            }
            changes::block(local, addr as u64, change, device);
            quick::event(local);
            if change > 0 {
                // A request by another function, or the allocator's first.
                if local.request.get().is_none() {
                    attach();
                    replace_allocate();
                }
                let ticket = handed_out(recorder, local, addr as u64, change as u64, device);
                recorder.mailbox.allocated(allocated as u64, ticket);
            } else {
                taken_back(recorder, local, addr as u64, change.unsigned_abs(), device);
            }
        });
    }
    forward_usage(addr, change, allocated, reserved, device);
}

/// Reports a block to PyTorch's profiler that was handed out (`change` is
/// its size) or taken back (minus that).
pub fn report_to_profiler(addr: u64, change: i64, allocated: usize, reserved: usize, device: i8) {
    let device = u16::from(device as u8) << 8 | CUDA;
    forward_usage(addr as *mut c_void, change, allocated, reserved, device);
}

#[inline]
fn forward_usage(
    addr: *mut c_void,
    change: i64,
    allocated: usize,
    reserved: usize,
    device: Device,
) {
    static REAL: Real = Real::new();
    let name = names::REPORT_USAGE;
    if let Some(real) = REAL.find(name.text, name.library) {
        // SAFETY: libc10 exports this name with this signature in every 2.x.
        unsafe {
            type Report = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, Device);
            let real: Report = std::mem::transmute(real);
            real(addr, change, allocated, reserved, device);
        }
    }
}

fn handed_out(recorder: &Recorder, local: &Local, addr: u64, block: u64, device: i8) -> u64 {
    captures::resolve(recorder, local);
    local.recorded_len.set(0);
    let asked = doing(recorder, local, device);
    captures::handed_out(local, addr, asked.stream);
    let (size, flags) =
        if asked.size == 0 { (block, FLAG_SIZE_IS_ROUNDED) } else { (asked.size, 0) };
    let block = BlockEvent { addr, asked: size, size: block, stream: asked.stream };
    recorder.write(&Event {
        flags,
        stack: asked.stack,
        pool: local.pool.replace(Pool::DEFAULT),
        device,
        ..event(local, block.event(Kind::Alloc))
    })
}

fn taken_back(recorder: &Recorder, local: &Local, addr: u64, block: u64, device: i8) {
    let deferred = captures::taken_back(local, addr, block, device);
    let pending = deferred || local.recorded_len.get() > 0;
    let back = BlockEvent { addr, asked: block, size: block, stream: 0 };
    recorder.write(&Event {
        flags: if pending { FLAG_PENDING } else { 0 },
        stack: recorder.stack_of_free(local),
        device,
        ..event(local, back.event(Kind::FreeRequested))
    });
    if pending && !deferred {
        let mut events = [0; guard::MAX_WAITS];
        let n = local.recorded_len.get().min(events.len());
        for (event, recorded) in events.iter_mut().zip(&local.recorded) {
            *event = recorded.get().0;
        }
        gauges::waiting::add(device as usize, block, &events[..n]);
    }
    for (handle, stream) in local.take_recorded() {
        let wait = WaitEvent { block: addr, handle, stream };
        recorder.write(&Event { device, ..event(local, wait.event()) });
    }
}

/// `c10::reportOutOfMemoryToProfiler(int64_t, size_t, size_t, Device)`.
///
/// # Safety
/// Called by PyTorch's allocator.
#[unsafe(export_name = names::report_out_of_memory!())]
pub unsafe extern "C-unwind" fn report_out_of_memory(
    size: i64,
    allocated: usize,
    reserved: usize,
    device: Device,
) {
    static REAL: Real = Real::new();
    if device & 0xff == CUDA {
        guard::observe(|recorder, local| {
            captures::resolve(recorder, local);
            let asked = doing(recorder, local, (device >> 8) as i8);
            let failed = OomEvent { asked: size as u64, free: local.device_free.get() };
            let ticket = recorder.write(&Event {
                stream: asked.stream,
                stack: asked.stack,
                pool: local.pool.replace(Pool::DEFAULT),
                device: (device >> 8) as i8,
                ..event(local, failed.event())
            });
            recorder.mailbox.out_of_memory(ticket);
            quick::failed(local);
        });
    }
    let name = names::REPORT_OUT_OF_MEMORY;
    if let Some(real) = REAL.find(name.text, name.library) {
        // SAFETY: libc10 exports this name with this signature in every 2.x.
        unsafe {
            type Report = unsafe extern "C-unwind" fn(i64, usize, usize, Device);
            let real: Report = std::mem::transmute(real);
            real(size, allocated, reserved, device);
        }
    }
}

// --- reservations of expandable segments ---------------------------------------------------------

const RESERVATIONS: usize = 1024;
of_process! {
    /// First addresses and lengths.
    static RESERVED: [Pair; RESERVATIONS] = atomics![Pair::new(); RESERVATIONS];
}
static RESERVED_LEN: AtomicUsize = AtomicUsize::new(0);

/// Remembers a range of reserved addresses. PyTorch makes a handful in the life of a
/// process; a longer list forgets the oldest.
pub fn remember_reservation(addr: u64, size: u64) {
    let i = RESERVED_LEN.fetch_add(1, Ordering::Relaxed) % RESERVATIONS;
    RESERVED[i].put(RESERVED[i].key(), addr, size);
}

/// First address of the reservation that holds this one; 0 if none is known.
pub fn reservation_of(addr: u64) -> u64 {
    let n = RESERVED_LEN.load(Ordering::Acquire);
    (n.saturating_sub(RESERVATIONS)..n)
        .rev()
        .filter_map(|i| RESERVED[i % RESERVATIONS].both())
        .find(|(start, size)| (*start..start + size).contains(&addr))
        .map_or(0, |(start, _)| start)
}

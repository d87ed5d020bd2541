//! The functions that `torch._C._CUDAPluggableAllocator` takes.
//!
//! Their signatures are PyTorch's (`torch/csrc/cuda/CUDAPluggableAllocator.h`): a
//! pool's id is a pair of numbers in two registers, a filter a `std::function` by
//! hidden reference, which the caller keeps.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_caching::{Misuse, Route};
use memtrace_format::event::StackId;

use super::device::route;
use super::throw::{self, Exception};
use super::{
    DeviceAllocator, Locked, Refusal, allocator_of, allocators, device_allocator,
    existing_allocator, is_one_lost, stack, warn, without_panic,
};
use crate::os::message;
use crate::pytorch::allocator;
use crate::pytorch::pools::Function;
use crate::stack::Site;

// --- memtrace as an allocator --- For torch.cuda.memory.CUDAPluggableAllocator and
// torch.cuda.MemPool. The signatures are PyTorch's; streams are cudaStream_t. memtrace.install() in
// Python wires all of them, and gives back what PyTorch refuses under a pluggable allocator.

/// Devices that PyTorch knows, from when its allocator comes up.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memtrace_init(_device_count: c_int) {
    crate::record::switch::wake();
}

/// Memory of a device for a stream; null for no bytes. Where there is none, PyTorch gets its own
/// exception if this is its allocator; everybody else gets null.
///
/// # Safety
/// `stream` is null or a stream of that device's.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_malloc(
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    if size == 0 {
        return std::ptr::null_mut();
    }
    let stream = stream.addr() as u64;
    crate::record::switch::wake();
    let stack = stack(Site::Alloc);
    let result = match device_allocator(device) {
        Some(mut allocator) => {
            // May throw: nothing is begun yet.
            allocator.algorithm.device_mut().choose(stream);
            without_panic(|| allocator.malloc(size as u64, stream, stack))
        }
        None => Err(Refusal::error(format!("there is no device {device}"))),
    };
    match result {
        Ok(addr) => addr as *mut c_void,
        Err(refusal) => {
            // SAFETY: nothing is held any more.
            unsafe { refuse(device, &refusal) };
            std::ptr::null_mut()
        }
    }
}

/// Throws, if somebody can catch it.
unsafe fn refuse(device: c_int, refusal: &Refusal) {
    if allocator::native_in_charge() {
        // PyTorch asks on behalf of a pool of its own, and knows what to do without memory.
        if refusal.kind != Exception::OutOfMemory {
            warn(refusal);
        }
        return;
    }
    if let Some([segment, allowed, free]) = refusal.observed {
        super::ask::observe(device, segment, allowed, free);
    }
    // SAFETY: the caller's.
    unsafe { throw::throw(refusal.kind, &refusal.text) };
    if refusal.kind != Exception::OutOfMemory {
        warn(refusal);
    }
}

/// Gives memory back. What was not handed out here, or was given back
/// already, is left alone, and reported.
///
/// # Safety
/// Nobody uses the memory but work on `stream` and on streams that were named for it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_free(
    addr: *mut c_void,
    _size: usize,
    device: c_int,
    _stream: *mut c_void,
) {
    if addr.is_null() {
        return;
    }
    let stack = stack(Site::Free);
    // A caller that is not PyTorch may pass another device: then the other allocators are asked.
    let freed = existing_allocator(device)
        .is_some_and(|allocator| free(allocator, addr as u64, stack))
        || allocator_of(addr as u64).is_some_and(|allocator| free(allocator, addr as u64, stack));
    if !freed && !is_one_lost() {
        static WARNED: AtomicU32 = AtomicU32::new(0);
        if WARNED.fetch_add(1, Ordering::Relaxed) < 10 {
            message!(
                "memtrace_free: invalid device pointer: {addr:p} was not handed out, or was given back already; nothing is done"
            );
        }
    }
}

fn free(mut allocator: Locked, addr: u64, stack: StackId) -> bool {
    without_panic(|| Ok(allocator.free(addr, stack))).unwrap_or_else(|refusal| {
        warn(&refusal);
        true
    })
}

/// `torch.cuda.empty_cache()`: gives everything cached back to the devices.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_reset() {
    let stack = stack(Site::Free);
    for mut allocator in allocators() {
        let done = catch_unwind(AssertUnwindSafe(|| {
            allocator.algorithm.sink_mut().stack = stack;
            allocator.algorithm.empty_cache();
        }));
        if done.is_err() {
            crate::record::switch::switch_off("an internal error");
        }
    }
}

/// `torch.cuda.set_per_process_memory_fraction()`.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_memory_fraction(fraction: f64, device: c_int) {
    let result = device_allocator(device)
        .ok_or(Misuse::Fraction)
        .and_then(|mut allocator| allocator.algorithm.set_memory_fraction(fraction));
    if result.is_err() {
        let text = format!("invalid fraction:{fraction}. Please set within [0, 1].");
        // SAFETY: nothing is held any more.
        unsafe { refuse(device, &Refusal::error(text)) };
    }
}

/// Where the segment begins that a block lies in, and how long it is.
///
/// # Safety
/// `size` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_base_alloc(
    addr: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let found = allocator_of(addr as u64).and_then(|allocator| {
        allocator.pointers.get(addr as u64).and_then(|id| allocator.algorithm.segment_of(id))
    });
    let (base, bytes) = found.unwrap_or((addr as u64, 0));
    if !size.is_null() {
        // SAFETY: the caller's promise.
        unsafe { *size = bytes as usize };
    }
    base as *mut c_void
}

/// Another stream uses the block at this address. Memory that was not allocated here is ignored.
///
/// # Safety
/// `stream` is a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_record_stream(addr: *mut c_void, stream: *mut c_void) {
    let stream = stream.addr() as u64;
    if let Some(mut allocator) = allocator_of(addr as u64) {
        let allocator = &mut *allocator;
        allocator.algorithm.device_mut().note_stream(stream);
        allocator.pointers.record_stream(&mut allocator.algorithm, addr as u64, stream);
    }
}

/// Sends what `filter` wants to a pool: for a graph's capture, or for as long as a `MemPool` is in
/// use. The filter is a `const std::function<bool(cudaStream_t)> *`; null for all streams.
///
/// # Safety
/// `filter` is null or a live function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_begin_allocate_to_pool(
    device: c_int,
    first: u64,
    second: u64,
    filter: *const c_void,
) {
    let id = (first, second);
    // SAFETY: the caller's promise.
    let filter = (!filter.is_null()).then(|| unsafe { Function::copy(filter.cast()) }).flatten();
    change(device, |allocator| {
        let way = if filter.is_some() { Route::Ask(route(id)) } else { Route::All };
        allocator.algorithm.begin_allocate_to_pool(id, way)?;
        if let Some(filter) = filter {
            allocator.algorithm.device_mut().route(id, filter);
        }
        // Whether the stream is being captured is asked for as long as this lasts.
        allocator.algorithm.capture_begins();
        Ok(())
    });
}

/// Sends nothing there any more.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_end_allocate_to_pool(
    device: c_int,
    first: u64,
    second: u64,
) {
    let id = (first, second);
    change(device, |allocator| {
        allocator.algorithm.end_allocate_to_pool(id)?;
        allocator.algorithm.device_mut().unroute(id);
        allocator.algorithm.capture_ends();
        Ok(())
    });
}

/// A pool is held once less.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn memtrace_release_pool(device: c_int, first: u64, second: u64) {
    change(device, |allocator| allocator.algorithm.release_pool((first, second)));
}

fn change(device: c_int, f: impl FnOnce(&mut DeviceAllocator) -> Result<(), Misuse>) {
    let result = match device_allocator(device) {
        Some(mut allocator) => {
            without_panic(|| f(&mut allocator).map_err(|misuse| Refusal::error(misuse.to_string())))
        }
        None => Err(Refusal::error(format!("there is no device {device}"))),
    };
    if let Err(refusal) = result {
        // SAFETY: nothing is held any more.
        unsafe { refuse(device, &refusal) };
    }
}

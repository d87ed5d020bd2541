//! PyTorch's allocator of page-locked host memory: what was asked of it.
//!
//! It rounds requests up, to powers of two mostly, and keeps what it is given back. So the driver
//! is asked for 32 GiB where the program wanted 20, and doesn't hear of a block that is handed out
//! a second time. What was asked for is known in `allocate(size_t)`, slot 2 of every
//! `c10::Allocator`'s table in every 2.x. A block's end is known by the function with which its
//! `c10::DataPtr` is deleted; we put our own in front of it.
//!
//! Whoever wants the allocator asks a function for it: `at::getHostAllocator` or, up to PyTorch
//! 2.7, `at::cuda::getCachingHostAllocator`. We define both, hand on the real answer, and replace
//! the function in its table. So nothing is asked of PyTorch that the program doesn't ask itself.
//! (Checked on PyTorch 2.6, 2.11 and 2.15.)
//!
//! It must never keep an exception from passing: a failure to allocate is
//! thrown through our `allocate`.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_format::event::{Event, HostBlockEvent, HostFreeEvent};

use crate::libraries::loaded;
use crate::os::address::Address;
use crate::os::signals;
use crate::pytorch::methods::{Allocate, DataPtr, copy_of_table};
use crate::pytorch::names::{self, ALLOCATE_SLOT, CUDA, LEADING, TORCH_CUDA};
use crate::real::Real;
use crate::record::guard;
use crate::record::guard::event;
use crate::stack::Site;

type Delete = unsafe extern "C-unwind" fn(*mut c_void);

static OUR_TABLE: Address = Address::new();
static REAL_ALLOCATE: Address = Address::new();
/// What PyTorch deletes its blocks with: one function for all of them.
static REAL_DELETE: Address = Address::new();

thread_local! {
    /// A request of this thread's is under way.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Is the calling thread inside a request to PyTorch's allocator of page-locked memory?
pub fn under_way() -> bool {
    ASKED.get()
}

/// `at::getHostAllocator(c10::DeviceType)`.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(export_name = names::host_allocator!())]
pub unsafe extern "C-unwind" fn get_host_allocator(device: i8) -> *mut c_void {
    static REAL: Real = Real::new();
    let name = names::HOST_ALLOCATOR;
    let Some(real) = REAL.find_anywhere(name.text, name.library) else {
        return std::ptr::null_mut();
    };
    // SAFETY: exported by libtorch_cpu under this name with this signature since
    // 2.8; a `c10::DeviceType` is a byte.
    let found = unsafe {
        let real: unsafe extern "C-unwind" fn(i8) -> *mut c_void = std::mem::transmute(real);
        real(device)
    };
    if device as u16 == CUDA {
        watch(found);
    }
    found
}

/// `at::cuda::getCachingHostAllocator()`.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(export_name = names::caching_host_allocator!())]
pub unsafe extern "C-unwind" fn get_caching_host_allocator() -> *mut c_void {
    static REAL: Real = Real::new();
    let name = names::CACHING_HOST_ALLOCATOR;
    let Some(real) = REAL.find_anywhere(name.text, name.library) else {
        return std::ptr::null_mut();
    };
    // SAFETY: exported by libtorch_cuda under this name with this signature up to 2.7.
    let found = unsafe {
        let real: unsafe extern "C-unwind" fn() -> *mut c_void = std::mem::transmute(real);
        real()
    };
    watch(found);
    found
}

/// Puts our `allocate` into the table of this allocator, unless it is there already.
fn watch(allocator: *mut c_void) {
    let object = allocator.cast::<usize>();
    // SAFETY: an object that PyTorch has just answered with; it begins with the
    // pointer to its table, and lives for ever.
    if object.is_null() || unsafe { *object } == OUR_TABLE.get() as usize {
        return;
    }
    guard::nested(|| signals::uncancelled(|| swap_table(object)));
}

#[cold]
fn swap_table(object: *mut usize) {
    let Some(library) = loaded::loaded(TORCH_CUDA) else { return };
    // SAFETY: see `watch`; a table has the slot of every `c10::Allocator`.
    unsafe {
        let table = *object as *const usize;
        // Somebody else's allocator may be in PyTorch's place.
        let code = library.text_start..library.text_end;
        let real = *table.add(ALLOCATE_SLOT);
        if !code.contains(&real) {
            return;
        }
        let (mut copy, _) = copy_of_table(table, library.end);
        copy[LEADING + ALLOCATE_SLOT] = allocate as *const () as usize;
        REAL_ALLOCATE.set(real as *mut c_void);
        // Of two threads that come here at once, each has a copy; the first one's serves.
        let ours = OUR_TABLE.set(Box::leak(copy).as_mut_ptr().add(LEADING).cast());
        AtomicUsize::from_ptr(object).store(ours as usize, Ordering::Release);
    }
}

/// The request has ended, also by an exception.
struct Ended;

impl Drop for Ended {
    fn drop(&mut self) {
        ASKED.set(false);
    }
}

unsafe extern "C-unwind" fn allocate(
    result: *mut c_void,
    this: *mut c_void,
    size: usize,
) -> *mut c_void {
    ASKED.set(true);
    let ended = Ended;
    // SAFETY: the address came from the slot that this function stands in;
    // the arguments are the caller's.
    let returned = unsafe {
        let real: Allocate = std::mem::transmute(REAL_ALLOCATE.get());
        real(result, this, size)
    };
    drop(ended);
    // SAFETY: the real function has put its result there.
    if let Some(data) = unsafe { result.cast::<DataPtr>().as_mut() } {
        handed_out(data, size);
    }
    returned
}

fn handed_out(data: &mut DataPtr, size: usize) {
    if data.addr == 0 || data.context == 0 || data.delete == 0 {
        return;
    }
    if REAL_DELETE.set(data.delete as *mut c_void) as usize != data.delete {
        return; // its end would not be seen
    }
    let written = guard::observe(|recorder, local| {
        let (addr, asked, handle) = (data.addr as u64, size as u64, data.context as u64);
        let block = HostBlockEvent { addr, asked, handle };
        let stack = recorder.stacks.capture(&local.stacks, Site::Alloc);
        recorder.write(&Event { stack, ..event(local, block.event()) });
    });
    if written.is_some() {
        data.delete = delete as *const () as usize;
    }
}

/// Takes a block back.
unsafe extern "C-unwind" fn delete(block: *mut c_void) {
    guard::observe(|recorder, local| {
        recorder.write(&Event {
            stack: recorder.stack_of_free(local),
            ..event(local, HostFreeEvent { handle: block as u64 }.event())
        });
    });
    // SAFETY: PyTorch's own function, of the type that a `c10::DataPtr` keeps,
    // and the block that it was kept with.
    unsafe {
        let real: Delete = std::mem::transmute(REAL_DELETE.get());
        real(block);
    }
}

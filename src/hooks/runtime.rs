//! Handlers for the CUDA runtime. Each has the arguments of its row in the table, and who called.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_ulonglong};

use memtrace_format::event::{Event, Kind, Layer};

use super::table::{Api, Handle, Out, Ptr, real};
use super::{Asked, allocation, driver, event, free, sites, torch};
use crate::record::guard::{self, MAX_WAITS};
use crate::stack::Site;

macro_rules! forward {
    ($name:ident ( $($arg:expr),* )) => {
        // SAFETY: the arguments are the caller's own, passed on unchanged.
        unsafe { real::$name($($arg),*) }
    };
}

pub(super) extern "C" fn cudaGetDeviceCount(count: *mut c_int, _caller: usize) -> c_int {
    crate::wake();
    forward!(cudaGetDeviceCount(count))
}

pub(super) extern "C" fn cudaSetDevice(device: c_int, _caller: usize) -> c_int {
    crate::wake();
    let code = forward!(cudaSetDevice(device));
    if code == 0 {
        guard::local(|l| l.device.set(device as i8));
    }
    code
}

pub(super) extern "C" fn cudaMalloc(out: Out, size: usize, caller: usize) -> c_int {
    let asked = Asked { api: Api::cudaMalloc, caller, layer: Layer::Device, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cudaMalloc(out, size)) }
}

pub(super) extern "C" fn cudaMallocPitch(
    out: Out,
    pitch: *mut usize,
    width: usize,
    height: usize,
    caller: usize,
) -> c_int {
    // The real size is pitch × height; the pitch is known after the call.
    let mut code = 0;
    let size = width.saturating_mul(height);
    let asked = Asked { api: Api::cudaMallocPitch, caller, layer: Layer::Device, size, stream: 0 };
    let call = || {
        code = forward!(cudaMallocPitch(out, pitch, width, height));
        code
    };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, call) }
}

pub(super) extern "C" fn cudaMallocManaged(
    out: Out,
    size: usize,
    flags: c_uint,
    caller: usize,
) -> c_int {
    let asked =
        Asked { api: Api::cudaMallocManaged, caller, layer: Layer::Device, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cudaMallocManaged(out, size, flags)) }
}

pub(super) extern "C" fn cudaMallocAsync(
    out: Out,
    size: usize,
    stream: Handle,
    caller: usize,
) -> c_int {
    let asked = Asked { api: Api::cudaMallocAsync, caller, layer: Layer::Device, size, stream };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cudaMallocAsync(out, size, stream)) }
}

pub(super) extern "C" fn cudaMallocFromPoolAsync(
    out: Out,
    size: usize,
    pool: Handle,
    stream: Handle,
    caller: usize,
) -> c_int {
    let api = Api::cudaMallocFromPoolAsync;
    let asked = Asked { api, caller, layer: Layer::Device, size, stream };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cudaMallocFromPoolAsync(out, size, pool, stream)) }
}

pub(super) extern "C" fn cudaFree(addr: Ptr, caller: usize) -> c_int {
    crate::wake();
    free(Api::cudaFree, caller, Layer::Device, addr as usize, 0);
    guard::nested(|| forward!(cudaFree(addr)))
}

pub(super) extern "C" fn cudaFreeAsync(addr: Ptr, stream: Handle, caller: usize) -> c_int {
    free(Api::cudaFreeAsync, caller, Layer::Device, addr as usize, stream);
    guard::nested(|| forward!(cudaFreeAsync(addr, stream)))
}

pub(super) extern "C" fn cudaMallocHost(out: Out, size: usize, caller: usize) -> c_int {
    let asked = Asked { api: Api::cudaMallocHost, caller, layer: Layer::Host, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cudaMallocHost(out, size)) }
}

pub(super) extern "C" fn cudaHostAlloc(
    out: Out,
    size: usize,
    flags: c_uint,
    caller: usize,
) -> c_int {
    let asked = Asked { api: Api::cudaHostAlloc, caller, layer: Layer::Host, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cudaHostAlloc(out, size, flags)) }
}

pub(super) extern "C" fn cudaFreeHost(addr: Ptr, caller: usize) -> c_int {
    free(Api::cudaFreeHost, caller, Layer::Host, addr as usize, 0);
    guard::nested(|| forward!(cudaFreeHost(addr)))
}

pub(super) extern "C" fn cudaHostRegister(
    addr: Ptr,
    size: usize,
    flags: c_uint,
    caller: usize,
) -> c_int {
    let asked = Asked { api: Api::cudaHostRegister, caller, layer: Layer::Host, size, stream: 0 };
    let mut at = addr;
    // SAFETY: `at` is ours and holds the address that is registered.
    unsafe { allocation(asked, &raw mut at, || real::cudaHostRegister(addr, size, flags)) }
}

pub(super) extern "C" fn cudaHostUnregister(addr: Ptr, caller: usize) -> c_int {
    free(Api::cudaHostUnregister, caller, Layer::Host, addr as usize, 0);
    guard::nested(|| forward!(cudaHostUnregister(addr)))
}

pub(super) extern "C" fn cudaMemGetInfo(
    free: *mut usize,
    total: *mut usize,
    caller: usize,
) -> c_int {
    let code = forward!(cudaMemGetInfo(free, total));
    if code == 0 && !free.is_null() && torch::is_caller(caller) {
        // SAFETY: the real function succeeded with this out-parameter.
        guard::local(|l| l.device_free.set(unsafe { *free } as u64));
    }
    code
}

/// PyTorch's allocator records one event for each stream that a freed block was used on, then reports the free.
pub(super) extern "C" fn cudaEventRecord(ev: Handle, stream: Handle, caller: usize) -> c_int {
    let code = forward!(cudaEventRecord(ev, stream));
    if code == 0 && sites::is_allocator(caller) {
        guard::local(|l| {
            let n = l.recorded_len.get();
            if n < MAX_WAITS {
                l.recorded[n].set(ev as u64);
                l.recorded_len.set(n + 1);
            }
        });
    }
    code
}

pub(super) extern "C" fn cudaEventQuery(ev: Handle, caller: usize) -> c_int {
    let code = forward!(cudaEventQuery(ev));
    event_ready(code, ev, caller);
    code
}

pub(super) extern "C" fn cudaEventSynchronize(ev: Handle, caller: usize) -> c_int {
    let code = forward!(cudaEventSynchronize(ev));
    event_ready(code, ev, caller);
    code
}

/// An event that PyTorch's allocator asked about has completed.
fn event_ready(code: c_int, ev: Handle, caller: usize) {
    if code != 0 || !sites::is_allocator(caller) {
        return;
    }
    guard::observe(|recorder, local| {
        let request = local.request.get();
        recorder.write(&Event {
            extra: ev as u64,
            stack: request.map_or_else(|| recorder.stacks.capture(Site::Alloc), |r| r.stack),
            ..event(local, Kind::EventReady, Layer::Framework)
        });
    });
}

pub(super) extern "C" fn cudaGetDriverEntryPoint(
    name: *const i8,
    out: Out,
    flags: c_ulonglong,
    status: *mut c_int,
    caller: usize,
) -> c_int {
    let code = forward!(cudaGetDriverEntryPoint(name, out, flags, status));
    // SAFETY: name and out are the caller's, as the real function has just used them.
    unsafe { driver::hand_out(code, name, out, caller) }
}

pub(super) extern "C" fn cudaGetDriverEntryPointByVersion(
    name: *const i8,
    out: Out,
    version: c_uint,
    flags: c_ulonglong,
    status: *mut c_int,
    caller: usize,
) -> c_int {
    let code = forward!(cudaGetDriverEntryPointByVersion(name, out, version, flags, status));
    // SAFETY: name and out are the caller's, as the real function has just used them.
    unsafe { driver::hand_out(code, name, out, caller) }
}

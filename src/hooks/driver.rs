//! Handlers for the CUDA driver, and the mappings of PyTorch's expandable segments.
//!
//! PyTorch's allocator maps a range piece by piece (`cuMemMap`), then makes the whole range accessible
//! (`cuMemSetAccess`, once more for each peer device) and writes one trace entry for it. It gets these
//! functions by name from the runtime, so [`hand_out`] answers that look-up with our own.

#![allow(non_snake_case)]

use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};

use memtrace_format::event::{Event, FLAG_SMALL, Kind, Layer};
use memtrace_format::replay::PAGE;

use super::table::{Api, Handle, Out, Ptr, exports, real};
use super::{Asked, allocation, event, free, torch};
use crate::record::guard;

macro_rules! forward {
    ($name:ident ( $($arg:expr),* )) => {
        // SAFETY: the arguments are the caller's own, passed on unchanged.
        unsafe { real::$name($($arg),*) }
    };
}

/// Replaces a driver function that PyTorch's allocator has just looked up by ours, keeping `code`.
///
/// # Safety
/// `name` is a C string and `out` was filled by the real look-up if `code` is 0.
pub unsafe fn hand_out(code: c_int, name: *const i8, out: Out, caller: usize) -> c_int {
    if code != 0 || name.is_null() || out.is_null() || !torch::is_caller(caller) {
        return code;
    }
    // SAFETY: promised by the caller.
    let (name, found) = unsafe { (CStr::from_ptr(name), *out) };
    let ours = match name.to_bytes() {
        b"cuMemAddressReserve" => exports::cuMemAddressReserve as *mut c_void,
        b"cuMemMap" => exports::cuMemMap as *mut c_void,
        b"cuMemSetAccess" => exports::cuMemSetAccess as *mut c_void,
        b"cuMemUnmap" => exports::cuMemUnmap as *mut c_void,
        _ => return code,
    };
    if !found.is_null() {
        // SAFETY: promised by the caller.
        unsafe { *out = ours };
    }
    code
}

pub(super) extern "C" fn cuMemAlloc_v2(out: Out, size: usize, caller: usize) -> c_int {
    let asked = Asked { api: Api::cuMemAlloc_v2, caller, layer: Layer::Device, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cuMemAlloc_v2(out, size)) }
}

pub(super) extern "C" fn cuMemAllocPitch_v2(
    out: Out,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
    caller: usize,
) -> c_int {
    let size = width.saturating_mul(height);
    let asked =
        Asked { api: Api::cuMemAllocPitch_v2, caller, layer: Layer::Device, size, stream: 0 };
    let call = || forward!(cuMemAllocPitch_v2(out, pitch, width, height, element));
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, call) }
}

pub(super) extern "C" fn cuMemAllocManaged(
    out: Out,
    size: usize,
    flags: c_uint,
    caller: usize,
) -> c_int {
    let asked =
        Asked { api: Api::cuMemAllocManaged, caller, layer: Layer::Device, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cuMemAllocManaged(out, size, flags)) }
}

pub(super) extern "C" fn cuMemAllocAsync(
    out: Out,
    size: usize,
    stream: Handle,
    caller: usize,
) -> c_int {
    let asked = Asked { api: Api::cuMemAllocAsync, caller, layer: Layer::Device, size, stream };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cuMemAllocAsync(out, size, stream)) }
}

pub(super) extern "C" fn cuMemAllocFromPoolAsync(
    out: Out,
    size: usize,
    pool: Handle,
    stream: Handle,
    caller: usize,
) -> c_int {
    let api = Api::cuMemAllocFromPoolAsync;
    let asked = Asked { api, caller, layer: Layer::Device, size, stream };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cuMemAllocFromPoolAsync(out, size, pool, stream)) }
}

pub(super) extern "C" fn cuMemFree_v2(addr: Ptr, caller: usize) -> c_int {
    free(Api::cuMemFree_v2, caller, Layer::Device, addr as usize, 0);
    forward!(cuMemFree_v2(addr))
}

pub(super) extern "C" fn cuMemFreeAsync(addr: Ptr, stream: Handle, caller: usize) -> c_int {
    free(Api::cuMemFreeAsync, caller, Layer::Device, addr as usize, stream);
    forward!(cuMemFreeAsync(addr, stream))
}

pub(super) extern "C" fn cuMemAllocHost_v2(out: Out, size: usize, caller: usize) -> c_int {
    let asked = Asked { api: Api::cuMemAllocHost_v2, caller, layer: Layer::Host, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cuMemAllocHost_v2(out, size)) }
}

pub(super) extern "C" fn cuMemHostAlloc(
    out: Out,
    size: usize,
    flags: c_uint,
    caller: usize,
) -> c_int {
    let asked = Asked { api: Api::cuMemHostAlloc, caller, layer: Layer::Host, size, stream: 0 };
    // SAFETY: `out` is the caller's.
    unsafe { allocation(asked, out, || real::cuMemHostAlloc(out, size, flags)) }
}

pub(super) extern "C" fn cuMemFreeHost(addr: Ptr, caller: usize) -> c_int {
    free(Api::cuMemFreeHost, caller, Layer::Host, addr as usize, 0);
    forward!(cuMemFreeHost(addr))
}

pub(super) extern "C" fn cuMemHostRegister_v2(
    addr: Ptr,
    size: usize,
    flags: c_uint,
    caller: usize,
) -> c_int {
    let asked =
        Asked { api: Api::cuMemHostRegister_v2, caller, layer: Layer::Host, size, stream: 0 };
    let mut at = addr;
    // SAFETY: `at` is ours and holds the address that is registered.
    unsafe { allocation(asked, &raw mut at, || real::cuMemHostRegister_v2(addr, size, flags)) }
}

pub(super) extern "C" fn cuMemHostUnregister(addr: Ptr, caller: usize) -> c_int {
    free(Api::cuMemHostUnregister, caller, Layer::Host, addr as usize, 0);
    forward!(cuMemHostUnregister(addr))
}

pub(super) extern "C" fn cuMemAddressReserve(
    out: Out,
    size: usize,
    align: usize,
    addr: Ptr,
    flags: c_ulonglong,
    _caller: usize,
) -> c_int {
    let code = forward!(cuMemAddressReserve(out, size, align, addr, flags));
    if code == 0 && !out.is_null() {
        // SAFETY: the real function succeeded with this out-parameter.
        torch::remember_reservation(unsafe { *out } as u64, size as u64);
    }
    code
}

pub(super) extern "C" fn cuMemMap(
    addr: Ptr,
    size: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
    caller: usize,
) -> c_int {
    let code = forward!(cuMemMap(addr, size, offset, handle, flags));
    if code == 0 && torch::is_caller(caller) {
        guard::local(|l| {
            let (bytes, piece) = l.mapped.get();
            l.mapped.set((bytes + size as u64, piece.max(size as u64)));
        });
    }
    code
}

pub(super) extern "C" fn cuMemSetAccess(
    addr: Ptr,
    size: usize,
    access: *const c_void,
    count: usize,
    caller: usize,
) -> c_int {
    let code = forward!(cuMemSetAccess(addr, size, access, count));
    if code != 0 || !torch::is_caller(caller) {
        return code;
    }
    guard::observe(|recorder, local| {
        let (bytes, piece) = local.mapped.replace((0, 0));
        if bytes == 0 {
            return; // access for a peer device, to memory that was mapped before
        }
        let request = torch::doing(recorder, local, -1);
        recorder.write(&Event {
            flags: if piece == PAGE { FLAG_SMALL } else { 0 },
            addr: addr as u64,
            size: size as u64,
            extra: torch::reservation_of(addr as u64),
            stream: request.stream,
            stack: request.stack,
            device: request.device,
            ..event(local, Kind::SegmentMap, Layer::Framework)
        });
    });
    code
}

pub(super) extern "C" fn cuMemUnmap(addr: Ptr, size: usize, caller: usize) -> c_int {
    if torch::is_caller(caller) {
        guard::observe(|recorder, local| {
            let request = torch::doing(recorder, local, -1);
            recorder.write(&Event {
                addr: addr as u64,
                size: size as u64,
                stack: request.stack,
                ..event(local, Kind::SegmentUnmap, Layer::Framework)
            });
        });
    }
    forward!(cuMemUnmap(addr, size))
}

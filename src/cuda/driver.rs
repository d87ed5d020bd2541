//! Handlers for the CUDA driver that no role describes: mappings, which are PyTorch's expandable
//! segments if its allocator makes them, and look-ups by name.
//!
//! PyTorch's allocator maps a range piece by piece (`cuMemMap`), then makes the whole range
//! accessible (`cuMemSetAccess`, once more for each peer device) and writes one trace entry for it.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_ulonglong, c_void};

use memtrace_format::event::{Event, FLAG_SMALL, Kind, MappingEvent, RangeEvent, SegmentEvent};
use memtrace_state::PAGE;

use crate::cuda::calls::{pass, pass_after};
use crate::cuda::notes::note;
use crate::cuda::real::forward;
use crate::cuda::records::{Out, Ptr};
use crate::cuda::table::Hooks;
use crate::cuda::{devices, procs, under_way};
use crate::pytorch::{allocator, captures};
use crate::record::guard;
use crate::record::guard::event;
use crate::record::hook::HookCall;

pub(super) fn cuMemGetInfo_v2(hook: HookCall, free: *mut usize, total: *mut usize) -> c_int {
    let before = under_way::at_rest();
    let (code, own) = pass(hook, || forward!(hook, cuMemGetInfo_v2(free, total)));
    if own {
        // SAFETY: the caller's out-parameters, of the call that has just returned.
        unsafe { devices::queries_free(hook, code, (free, total), before) };
    }
    code
}

pub(super) fn cuMemAddressReserve(
    hook: HookCall,
    out: Out,
    size: usize,
    align: usize,
    addr: Ptr,
    flags: c_ulonglong,
) -> c_int {
    let (code, own) =
        pass(hook, || forward!(hook, cuMemAddressReserve(out, size, align, addr, flags)));
    if own && code == 0 && !out.is_null() {
        // SAFETY: the real function succeeded with this out-parameter.
        let addr = unsafe { *out } as u64;
        allocator::remember_reservation(addr, size as u64);
        note(hook, RangeEvent { addr, size: size as u64 }.event(Kind::Reserve));
    }
    code
}

pub(super) fn cuMemMap(
    hook: HookCall,
    addr: Ptr,
    size: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> c_int {
    let _under_way = under_way::UnderWay::begin();
    let (code, own) = pass(hook, || forward!(hook, cuMemMap(addr, size, offset, handle, flags)));
    let by_torch = allocator::is_caller(hook.caller);
    if by_torch && code != 0 {
        under_way::pieces_end(u32::MAX); // PyTorch gives up, and keeps what it has
    }
    if !own {
        return code;
    }
    if code == 0 && by_torch {
        guard::local(|l| {
            let (bytes, piece) = l.mapped.get();
            l.mapped.set((bytes + size as u64, piece.max(size as u64)));
        });
    } else if code == 0 {
        let (addr, size, offset) = (addr as u64, size as u64, offset as u64);
        note(hook, MappingEvent { addr, size, handle, offset }.event());
    }
    code
}

pub(super) fn cuMemSetAccess(
    hook: HookCall,
    addr: Ptr,
    size: usize,
    access: *const c_void,
    count: usize,
) -> c_int {
    let _under_way = under_way::UnderWay::begin();
    let code = forward!(hook, cuMemSetAccess(addr, size, access, count));
    if allocator::is_caller(hook.caller) {
        if code == 0 {
            mapped(addr as u64, size as u64);
        }
        under_way::pieces_end(u32::MAX);
    }
    code
}

/// PyTorch's allocator has made a range accessible.
fn mapped(addr: u64, size: u64) {
    guard::observe(|recorder, local| {
        let (bytes, piece) = local.mapped.replace((0, 0));
        if bytes == 0 {
            return; // access for a peer device, to memory that was mapped before
        }
        captures::resolve(recorder, local);
        let request = allocator::doing(recorder, local, -1);
        let reservation = allocator::reservation_of(addr);
        let pages = SegmentEvent { addr, size, reservation, stream: request.stream };
        recorder.write(&Event {
            flags: if piece == PAGE { FLAG_SMALL } else { 0 },
            stack: request.stack,
            pool: request.pool,
            device: request.device,
            ..event(local, pages.event(Kind::SegmentMap))
        });
    });
}

pub(super) fn cuMemUnmap(hook: HookCall, addr: Ptr, size: usize) -> c_int {
    let _under_way = under_way::UnderWay::begin();
    let before = || unmapped(hook, addr, size);
    let code = pass_after(hook, before, || forward!(hook, cuMemUnmap(addr, size)));
    if code == 0 && allocator::is_caller(hook.caller) {
        under_way::piece_begins(); // until PyTorch releases it
    }
    code
}

fn unmapped(hook: HookCall, addr: Ptr, size: usize) {
    let (addr, size) = (addr as u64, size as u64);
    if allocator::is_caller(hook.caller) {
        guard::observe(|recorder, local| {
            captures::resolve(recorder, local);
            let request = allocator::doing(recorder, local, -1);
            let pages = SegmentEvent { addr, size, reservation: 0, stream: 0 };
            let pages = event(local, pages.event(Kind::SegmentUnmap));
            recorder.write(&Event { stack: request.stack, ..pages });
        });
    }
    note(hook, RangeEvent { addr, size }.event(Kind::Unmap));
}

macro_rules! looks_up {
    ($name:ident ($($status:ident)?)) => {
        pub(super) fn $name(
            hooks: &Hooks,
            hook: HookCall,
            name: *const c_char,
            out: Out,
            version: c_int,
            flags: u64,
            $($status: *mut c_int,)?
        ) -> c_int {
            let code = forward!(hook, $name(name, out, version, flags $(, $status)?));
            let (version, per_thread) = (u32::try_from(version).ok(), procs::is_per_thread(flags, false));
            // SAFETY: name and out are the caller's, as the real function has just used them.
            unsafe { procs::hand_out(hooks, code, name, out, version, per_thread) }
        }
    };
}

looks_up!(cuGetProcAddress());
looks_up!(cuGetProcAddress_v2(status));

//! Handlers for the CUDA runtime that no role describes: what PyTorch's
//! allocator asks and records, and look-ups.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use memtrace_format::event::{Event, ReadyEvent};

use crate::cuda::real::forward;
use crate::cuda::records::{Handle, Out, Ptr};
use crate::cuda::table::Hooks;
use crate::cuda::{devices, place, procs, under_way};
use crate::pytorch::{allocator, captures, sites};
use crate::record::guard::event;
use crate::record::guard::{self, MAX_WAITS};
use crate::record::hook::HookCall;
use crate::stack::Site;

/// The number of devices; PyTorch's first call, which wakes the recorder.
pub(super) fn cudaGetDeviceCount(hook: HookCall, count: *mut c_int) -> c_int {
    crate::record::switch::wake();
    forward!(hook, cudaGetDeviceCount(count))
}

pub(super) fn cudaSetDevice(hook: HookCall, device: c_int) -> c_int {
    crate::record::switch::wake();
    let code = forward!(hook, cudaSetDevice(device));
    if code == 0 {
        place::set_device(device as i8);
        devices::note_entered(hook, device as i8);
    }
    code
}

pub(super) fn cudaMemGetInfo(hook: HookCall, free: *mut usize, total: *mut usize) -> c_int {
    let before = under_way::at_rest();
    let code = forward!(hook, cudaMemGetInfo(free, total));
    if code == 0 && !free.is_null() && allocator::is_caller(hook.caller) {
        // SAFETY: the real function succeeded with this out-parameter.
        guard::local(|l| l.device_free.set(unsafe { *free } as u64));
    }
    // SAFETY: the caller's out-parameters, of the call that has just returned.
    unsafe { devices::queries_free(hook, code, (free, total), before) };
    code
}

/// PyTorch's allocator records one event for each stream that a freed block
/// was used on, then reports the free.
pub(super) fn cudaEventRecord(hook: HookCall, ev: Handle, stream: Handle) -> c_int {
    let code = forward!(hook, cudaEventRecord(ev, stream));
    if code == 0 && sites::is_allocator(hook.caller) {
        guard::local(|l| {
            let n = l.recorded_len.get();
            if n == MAX_WAITS {
                captures::resolve_some();
            }
            let n = l.recorded_len.get();
            if n < MAX_WAITS {
                l.recorded[n].set((ev as u64, stream as u64));
                l.recorded_len.set(n + 1);
            }
        });
    }
    code
}

pub(super) fn cudaEventQuery(hook: HookCall, ev: Handle) -> c_int {
    let code = forward!(hook, cudaEventQuery(ev));
    event_ready(code, ev, hook.caller);
    code
}

pub(super) fn cudaEventSynchronize(hook: HookCall, ev: Handle) -> c_int {
    let code = forward!(hook, cudaEventSynchronize(ev));
    event_ready(code, ev, hook.caller);
    code
}

/// An event that PyTorch's allocator asked about has completed.
fn event_ready(code: c_int, ev: Handle, caller: usize) {
    if code != 0 || !sites::is_allocator(caller) {
        return;
    }
    crate::gauges::waiting::reached(ev as u64);
    guard::observe(|recorder, local| {
        captures::resolve(recorder, local);
        let request = local.request.get();
        let ready = ReadyEvent { handle: ev as u64 };
        recorder.write(&Event {
            stack: request
                .map_or_else(|| recorder.stacks.capture(&local.stacks, Site::Alloc), |r| r.stack),
            ..event(local, ready.event())
        });
    });
}

/// The allocator asks so whether a graph is being captured.
macro_rules! queries_capture {
    ($name:ident ($($arg:ident),*)) => {
        #[allow(clippy::too_many_arguments, reason = "NVIDIA's prototype, and the hook's call")]
        pub(super) fn $name(hook: HookCall, stream: Handle, status: *mut c_int, $($arg: Ptr),*) -> c_int {
            let code = forward!(hook, $name(stream, status, $($arg),*));
            if code == 0 && !status.is_null() {
                // SAFETY: the real function succeeded with this out-parameter.
                let status = unsafe { *status };
                if sites::is_allocator(hook.caller) {
                    guard::local(|local| captures::note_status(local, status));
                }
            }
            code
        }
    };
}

queries_capture!(cudaStreamGetCaptureInfo(id, graph, dependencies, edges, count));
queries_capture!(cudaStreamGetCaptureInfo_v2(id, graph, dependencies, count));
queries_capture!(cudaStreamGetCaptureInfo_v3(id, graph, dependencies, edges, count));

/// A look-up through the runtime, which asks for the version that it was built with.
macro_rules! looks_up {
    ($name:ident ($version:expr, $per_thread:expr $(, $arg:ident : $ty:ty)*)) => {
        pub(super) fn $name(
            hooks: &Hooks,
            hook: HookCall,
            name: *const c_char,
            out: Out,
            $($arg: $ty,)*
            flags: c_ulonglong,
            status: *mut c_int,
        ) -> c_int {
            let code = forward!(hook, $name(name, out $(, $arg)*, flags, status));
            let per_thread = procs::is_per_thread(flags, $per_thread);
            // SAFETY: name and out are the caller's, as the real function has just used them.
            unsafe { procs::hand_out(hooks, code, name, out, $version, per_thread) }
        }
    };
}

looks_up!(cudaGetDriverEntryPoint(None, false));
looks_up!(cudaGetDriverEntryPoint_ptsz(None, true));
looks_up!(cudaGetDriverEntryPointByVersion(Some(version), false, version: c_uint));
looks_up!(cudaGetDriverEntryPointByVersion_ptsz(Some(version), true, version: c_uint));

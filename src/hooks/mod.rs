//! The doors: where memory passes by. A hook is guard, record, forward; nothing else.
//!
//! A free is recorded before the real free and an allocation after the real allocation, so an address that
//! is used again never seems to be allocated twice. The real function's return code is passed on untouched.

pub mod driver;
pub mod resolve;
pub mod runtime;
pub mod sites;
pub mod table;
pub mod torch;

use std::ffi::c_int;

use memtrace_format::event::{Event, FLAG_FAILED, FLAG_SMALL, Kind, Layer, What};

use crate::record::guard::{self, Local};
use crate::record::{Recorder, clock};
use crate::stack::Site;
use table::{Api, Out};

/// An event of this thread, here and now, with everything unsaid at zero.
pub fn event(local: &Local, kind: Kind, layer: Layer) -> Event {
    Event {
        kind,
        layer,
        device: if layer == Layer::Host { -1 } else { local.device.get() },
        flags: 0,
        api: 0,
        what: What::Device,
        time_ns: clock::now_ns(),
        addr: 0,
        size: 0,
        extra: 0,
        stream: 0,
        stack: 0,
        thread: local.tid(),
    }
}

/// What a hook knows about an allocation that it passes on.
#[derive(Clone, Copy)]
pub struct Asked {
    /// The entry point.
    pub api: Api,
    /// Who called it.
    pub caller: usize,
    /// Device or host memory, if it isn't PyTorch's allocator that asks.
    pub layer: Layer,
    /// Bytes.
    pub size: usize,
    /// Raw stream handle.
    pub stream: usize,
}

/// Forwards an allocation and records what came of it.
///
/// # Safety
/// `out` is the caller's out-parameter of the real function, or null.
pub unsafe fn allocation(asked: Asked, out: Out, call: impl FnOnce() -> c_int) -> c_int {
    crate::wake();
    if guard::inside() {
        return call();
    }
    let code = guard::nested(call);
    guard::observe(|recorder, local| {
        // SAFETY: the real function succeeded with this out-parameter, so it can be read.
        let addr = if code == 0 && !out.is_null() { unsafe { *out as u64 } } else { 0 };
        if asked.size == 0 || (code == 0 && addr == 0) {
            return;
        }
        let event = match asked.api {
            Api::cudaMalloc if torch::is_caller(asked.caller) => {
                segment(recorder, local, asked, addr)
            }
            _ => Event {
                api: asked.api as u16,
                addr,
                size: asked.size as u64,
                stream: asked.stream as u64,
                stack: recorder.stacks.capture(Site::Alloc),
                ..event(local, Kind::Alloc, asked.layer)
            },
        };
        let flags = event.flags | if code == 0 { 0 } else { FLAG_FAILED };
        recorder.write(&Event { flags, ..event });
    });
    code
}

/// PyTorch's allocator got a segment for the request that is under way.
fn segment(recorder: &Recorder, local: &Local, asked: Asked, addr: u64) -> Event {
    let request = torch::doing(recorder, local, -1);
    // PyTorch asks the driver for exactly 2 MiB for requests of at most 1 MiB and never otherwise.
    let flags = if asked.size == 2 << 20 { FLAG_SMALL } else { 0 };
    Event {
        flags,
        addr,
        size: asked.size as u64,
        stream: request.stream,
        stack: request.stack,
        device: request.device,
        ..event(local, Kind::SegmentAlloc, Layer::Framework)
    }
}

/// Records that memory is about to be given back. Call before the real function.
pub fn free(api: Api, caller: usize, layer: Layer, addr: usize, stream: usize) {
    if addr == 0 {
        return;
    }
    guard::observe(|recorder, local| {
        let framework = api == Api::cudaFree && torch::is_caller(caller);
        let (kind, layer) = if framework {
            (Kind::SegmentFree, Layer::Framework)
        } else {
            (Kind::FreeRequested, layer)
        };
        let stack = match local.request.get() {
            Some(request) if framework => request.stack,
            _ => recorder.stack_of_free(),
        };
        recorder.write(&Event {
            api: api as u16,
            addr: addr as u64,
            stream: stream as u64,
            stack,
            ..event(local, kind, layer)
        });
    });
}

//! Streams, their attributes, host functions in them, and events.

use crate::constants as c;
use crate::gpu::boundary::{Api, In, Out};
use crate::gpu::work::{self, Action, HostFunction};
use crate::gpu::{Error, Result, context};
use core::ffi::c_void;

/// A function that `cuStreamAddCallback` calls, with the stream, its error and the caller's own
/// word.
pub type Callback = unsafe extern "C" fn(u64, i32, *mut c_void);

/// A new stream.
pub fn create(api: Api, out: Out<u64>, flags: u32, priority: i32) -> Result {
    api.needs_context()?;
    out.check()?;
    let device = context::bind()?;
    out.set(work::work().create_stream(device, flags, priority)?)
}

/// All work of a stream is over.
pub fn synchronize(api: Api, stream: u64) -> Result {
    api.device()?;
    work::synchronize_stream(stream)
}

/// Whether all work of a stream is over.
pub fn query(api: Api, stream: u64) -> Result {
    api.device()?;
    work::query_stream(stream)
}

/// The range of priorities.
pub fn priorities(api: Api, least: Out<i32>, greatest: Out<i32>) -> Result {
    api.needs_context()?;
    least.give(work::PRIORITIES.0);
    greatest.give(work::PRIORITIES.1);
    Ok(())
}

/// A function that runs in this thread, before the call returns.
pub fn launch_host(
    api: Api,
    stream: u64,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> Result {
    api.needs_context()?;
    let function = function.ok_or(Error::INVALID_VALUE)?;
    work::submit(stream, Action::Host { function, data: data.expose_provenance() })
}

/// The older form of the same, which is no part of a graph.
pub(crate) fn add_callback(
    api: Api,
    stream: u64,
    callback: Option<Callback>,
    data: *mut c_void,
    flags: u32,
) -> Result {
    api.needs_context()?;
    let callback = callback.ok_or(Error::INVALID_VALUE)?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    api.device()?;
    work::work().refuse_while_capturing(stream)?;
    // SAFETY: the program gave the function and its argument for exactly this call.
    unsafe { callback(stream, 0, data) };
    Ok(())
}

/// Attaching managed memory to a stream changes nothing: it stays with the host.
pub fn attach(stream: u64, addr: u64) -> Result {
    let _ = work::work().stream(stream)?;
    if addr == 0 { Err(Error::INVALID_VALUE) } else { Ok(()) }
}

/// Attributes concern how kernels run, so they are taken and of no effect.
fn attribute_is_known(number: i32) -> Result {
    match number {
        c::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
        | c::CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY
        | c::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP
        | c::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN
        | c::CU_LAUNCH_ATTRIBUTE_PRIORITY => Ok(()),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// The size of `CUstreamAttrValue`.
const ATTRIBUTE_VALUE: usize = 64;

/// Sets an attribute.
pub fn set_attribute(stream: u64, number: i32, value: In<u8>) -> Result {
    attribute_is_known(number)?;
    let mut work = work::work();
    let stream = work.stream(stream)?;
    if number == c::CU_LAUNCH_ATTRIBUTE_PRIORITY {
        stream.priority = value.cast::<i32>().get()?;
    }
    value.get().map(|_| ())
}

/// Gives an attribute.
pub fn get_attribute(stream: u64, number: i32, value: Out<u8>) -> Result {
    attribute_is_known(number)?;
    let priority = work::work().stream(stream)?.priority;
    value.clear(ATTRIBUTE_VALUE)?;
    if number == c::CU_LAUNCH_ATTRIBUTE_PRIORITY {
        value.cast().set(priority)?;
    }
    Ok(())
}

/// Gives one stream the attributes of another.
pub fn copy_attributes(dst: u64, src: u64) -> Result {
    let mut work = work::work();
    let priority = work.stream(src)?.priority;
    work.stream(dst)?.priority = priority;
    Ok(())
}

/// A new event.
pub fn create_event(api: Api, out: Out<u64>, flags: u32) -> Result {
    api.needs_context()?;
    out.check()?;
    let device = context::bind()?;
    out.set(work::work().create_event(device, flags)?)
}

/// `CU_EVENT_RECORD_EXTERNAL`, `CU_EVENT_WAIT_EXTERNAL`: a node of its own in a captured graph.
const EXTERNAL: u32 = 1;

/// Records an event in a stream.
pub fn record(api: Api, event: u64, stream: u64, flags: u32) -> Result {
    api.needs_context()?;
    context::bind()?;
    match flags {
        0 => work::work().record(event, stream),
        EXTERNAL => {
            work::work().check_event(event)?;
            work::submit(stream, Action::Record(event))
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

/// Makes a stream wait for an event.
pub fn wait(api: Api, stream: u64, event: u64, flags: u32) -> Result {
    api.needs_context()?;
    context::bind()?;
    match flags {
        0 => work::work().wait(stream, event),
        EXTERNAL => {
            work::work().check_event(event)?;
            work::submit(stream, Action::Wait(event))
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

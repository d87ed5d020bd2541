//! Streams, and host functions in them.

use super::Code;
use crate::constants as c;
use crate::gpu::border::{In, Out, runtime};
use crate::gpu::work::{self, Action, HostFunction};
use crate::gpu::{Error, Result, context};
use core::ffi::c_void;

/// `cudaStreamCallback_t`.
pub type Callback = unsafe extern "C" fn(u64, Code, *mut c_void);

pub(crate) fn create(flags: u32, priority: i32) -> Result<u64> {
    let device = context::bind()?;
    work::work().create_stream(device, flags, priority)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreate(out: Out<u64>) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(0, 0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithFlags(out: Out<u64>, flags: u32) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(flags, 0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithPriority(out: Out<u64>, flags: u32, priority: i32) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(flags, priority)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(stream: u64) -> Code {
    runtime(|| work::work().destroy_stream(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize(stream: u64) -> Code {
    runtime(|| {
        context::bind()?;
        work::synchronize_stream(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(stream: u64) -> Code {
    runtime(|| {
        context::bind()?;
        work::query_stream(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetPriority(stream: u64, priority: Out<i32>) -> Code {
    runtime(|| priority.set(work::work().stream(stream)?.priority))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetFlags(stream: u64, flags: Out<u32>) -> Code {
    runtime(|| flags.set(work::work().stream(stream)?.flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetId(stream: u64, id: Out<u64>) -> Code {
    runtime(|| id.set(work::work().stream(stream)?.id))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetDevice(stream: u64, device: Out<i32>) -> Code {
    runtime(|| device.set(work::work().stream(stream)?.device as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamWaitEvent(stream: u64, event: u64, flags: u32) -> Code {
    runtime(|| super::event::wait(stream, event, flags))
}

/// The function runs in this thread, before the call returns.
#[unsafe(no_mangle)]
pub extern "C" fn cudaLaunchHostFunc(
    stream: u64,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> Code {
    runtime(|| {
        let function = function.ok_or(Error::INVALID_VALUE)?;
        work::submit(stream, Action::Host { function, data: data.expose_provenance() })
    })
}

/// The function runs in this thread, before the call returns.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamAddCallback(
    stream: u64,
    callback: Option<Callback>,
    data: *mut c_void,
    flags: u32,
) -> Code {
    runtime(|| {
        let callback = callback.ok_or(Error::INVALID_VALUE)?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        context::bind()?;
        work::work().refuse_while_capturing(stream)?;
        // SAFETY: the program gave the function and its argument for exactly this call.
        unsafe { callback(stream, 0, data) };
        Ok(())
    })
}

/// Attaching managed memory to a stream changes nothing: it stays with the host.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamAttachMemAsync(
    stream: u64,
    addr: u64,
    _length: u64,
    _flags: u32,
) -> Code {
    runtime(|| {
        let _ = work::work().stream(stream)?;
        if addr == 0 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    })
}

/// Attributes concern how kernels run, so they are taken and of no effect.
pub(crate) fn attribute_is_known(number: i32) -> Result {
    match number {
        c::cudaLaunchAttributeAccessPolicyWindow
        | c::cudaLaunchAttributeSynchronizationPolicy
        | c::cudaLaunchAttributeMemSyncDomainMap
        | c::cudaLaunchAttributeMemSyncDomain
        | c::cudaLaunchAttributePriority => Ok(()),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// The size of `cudaLaunchAttributeValue`.
const ATTRIBUTE_VALUE: usize = 64;

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSetAttribute(stream: u64, number: i32, value: In<u8>) -> Code {
    runtime(|| {
        attribute_is_known(number)?;
        let mut work = work::work();
        let stream = work.stream(stream)?;
        if number == c::cudaLaunchAttributePriority {
            stream.priority = value.cast::<i32>().get()?;
        }
        value.get().map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetAttribute(stream: u64, number: i32, value: Out<u8>) -> Code {
    runtime(|| {
        attribute_is_known(number)?;
        let priority = work::work().stream(stream)?.priority;
        value.clear(ATTRIBUTE_VALUE)?;
        if number == c::cudaLaunchAttributePriority {
            value.cast().set(priority)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCopyAttributes(dst: u64, src: u64) -> Code {
    runtime(|| {
        let mut work = work::work();
        let priority = work.stream(src)?.priority;
        work.stream(dst)?.priority = priority;
        Ok(())
    })
}

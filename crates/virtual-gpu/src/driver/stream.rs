//! Streams, events, capture, and words written by streams.

use super::{Code, current};
use crate::constants as c;
use crate::gpu::border::{In, Out, driver};
use crate::gpu::work::{self, Action, HostFunction, Mode};
use crate::gpu::{Error, Result, context};
use crate::runtime::capture::{InfoOut, exchange_mode, info, update};
use crate::runtime::event::{self, record, wait};
use crate::runtime::stream::{self, Callback, attribute_is_known};
use core::ffi::c_void;

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(out: Out<u64>, flags: u32) -> Code {
    driver(|| {
        current()?;
        out.check()?;
        out.set(stream::create(flags, 0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(out: Out<u64>, flags: u32, priority: i32) -> Code {
    driver(|| {
        current()?;
        out.check()?;
        out.set(stream::create(flags, priority)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: u64) -> Code {
    driver(|| work::work().destroy_stream(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: u64) -> Code {
    driver(|| {
        current()?;
        work::synchronize_stream(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: u64) -> Code {
    driver(|| {
        current()?;
        work::query_stream(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: u64, priority: Out<i32>) -> Code {
    driver(|| priority.set(work::work().stream(stream)?.priority))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: u64, flags: Out<u32>) -> Code {
    driver(|| flags.set(work::work().stream(stream)?.flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetId(stream: u64, id: Out<u64>) -> Code {
    driver(|| id.set(work::work().stream(stream)?.id))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetDevice(stream: u64, device: Out<i32>) -> Code {
    driver(|| device.set(work::work().stream(stream)?.device as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCtx(stream: u64, out: Out<u64>) -> Code {
    driver(|| out.set(work::work().stream(stream)?.context))
}

/// No stream belongs to a green context.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCtx_v2(stream: u64, out: Out<u64>, green: Out<u64>) -> Code {
    driver(|| {
        out.give(work::work().stream(stream)?.context);
        green.give(0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) -> Code {
    driver(|| {
        current()?;
        wait(stream, event, flags)
    })
}

/// The function runs in this thread, before the call returns.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: u64,
    function: Option<HostFunction>,
    data: *mut c_void,
) -> Code {
    driver(|| {
        current()?;
        let function = function.ok_or(Error::INVALID_VALUE)?;
        work::submit(stream, Action::Host { function, data: data.expose_provenance() })
    })
}

/// The function runs in this thread, before the call returns.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamAddCallback(
    stream: u64,
    callback: Option<Callback>,
    data: *mut c_void,
    flags: u32,
) -> Code {
    driver(|| {
        current()?;
        let callback = callback.ok_or(Error::INVALID_VALUE)?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        work::work().refuse_while_capturing(stream)?;
        // SAFETY: the program gave the function and its argument for exactly this call.
        unsafe { callback(stream, 0, data) };
        Ok(())
    })
}

/// Attaching managed memory to a stream changes nothing: it stays with the host.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamAttachMemAsync(
    stream: u64,
    addr: u64,
    _length: u64,
    _flags: u32,
) -> Code {
    driver(|| {
        let _ = work::work().stream(stream)?;
        if addr == 0 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    })
}

/// The size of `CUstreamAttrValue`.
const ATTRIBUTE_VALUE: usize = 64;

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSetAttribute(stream: u64, number: i32, value: In<u8>) -> Code {
    driver(|| {
        attribute_is_known(number)?;
        let mut work = work::work();
        let stream = work.stream(stream)?;
        if number == c::CU_LAUNCH_ATTRIBUTE_PRIORITY {
            stream.priority = value.cast::<i32>().get()?;
        }
        value.get().map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetAttribute(stream: u64, number: i32, value: Out<u8>) -> Code {
    driver(|| {
        attribute_is_known(number)?;
        let priority = work::work().stream(stream)?.priority;
        value.clear(ATTRIBUTE_VALUE)?;
        if number == c::CU_LAUNCH_ATTRIBUTE_PRIORITY {
            value.cast().set(priority)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCopyAttributes(dst: u64, src: u64) -> Code {
    driver(|| {
        let mut work = work::work();
        let priority = work.stream(src)?.priority;
        work.stream(dst)?.priority = priority;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(out: Out<u64>, flags: u32) -> Code {
    driver(|| {
        current()?;
        out.check()?;
        out.set(event::create(flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: u64) -> Code {
    driver(|| work::work().destroy_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: u64, stream: u64) -> Code {
    driver(|| {
        current()?;
        record(event, stream, 0)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) -> Code {
    driver(|| {
        current()?;
        record(event, stream, flags)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: u64) -> Code {
    driver(|| work::query_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: u64) -> Code {
    driver(|| work::synchronize_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) -> Code {
    driver(|| milliseconds.set(work::work().elapsed(start, end)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: u64, mode: i32) -> Code {
    driver(|| {
        current()?;
        work::work().begin_capture(stream, Mode::from_code(mode)?, None)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCaptureToGraph(
    stream: u64,
    graph: u64,
    nodes: In<u64>,
    _edges: u64,
    count: usize,
    mode: i32,
) -> Code {
    driver(|| {
        current()?;
        let into = Some((graph, nodes.list(count)));
        work::work().begin_capture(stream, Mode::from_code(mode)?, into)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: u64, graph: Out<u64>) -> Code {
    driver(|| {
        let ended = work::end_capture(stream);
        graph.give(*ended.as_ref().unwrap_or(&0));
        ended.map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: u64, status: Out<i32>) -> Code {
    driver(|| {
        current()?;
        status.set(work::work().capture_status(stream)? as i32)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v2(
    stream: u64,
    status: Out<i32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const u64>,
    count: Out<usize>,
) -> Code {
    let edges = Out::nowhere();
    driver(|| info(stream, &InfoOut { status, id, graph, nodes, edges, count }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: u64,
    status: Out<i32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const u64>,
    edges: Out<*const u64>,
    count: Out<usize>,
) -> Code {
    driver(|| info(stream, &InfoOut { status, id, graph, nodes, edges, count }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamUpdateCaptureDependencies(
    stream: u64,
    nodes: In<u64>,
    count: usize,
    flags: u32,
) -> Code {
    driver(|| update(stream, nodes, count, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamUpdateCaptureDependencies_v2(
    stream: u64,
    nodes: In<u64>,
    _edges: u64,
    count: usize,
    flags: u32,
) -> Code {
    driver(|| update(stream, nodes, count, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) -> Code {
    driver(|| exchange_mode(mode))
}

fn write(stream: u64, addr: u64, value: u64, len: u8) -> Result {
    context::current()?;
    if !addr.is_multiple_of(len.into()) {
        return Err(Error::INVALID_VALUE);
    }
    let action = Action::Write { addr, value, len };
    action.check()?;
    work::submit(stream, action)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue32_v2(stream: u64, addr: u64, value: u32, _flags: u32) -> Code {
    driver(|| write(stream, addr, value.into(), 4))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue64_v2(stream: u64, addr: u64, value: u64, _flags: u32) -> Code {
    driver(|| write(stream, addr, value, 8))
}

/// Whatever a stream waits for on the device, another stream would have written: it is taken to be there.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue32_v2(
    stream: u64,
    _addr: u64,
    _value: u32,
    _flags: u32,
) -> Code {
    driver(|| {
        current()?;
        work::submit(stream, Action::Empty)
    })
}

/// As [`cuStreamWaitValue32_v2`].
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue64_v2(
    stream: u64,
    _addr: u64,
    _value: u64,
    _flags: u32,
) -> Code {
    driver(|| {
        current()?;
        work::submit(stream, Action::Empty)
    })
}

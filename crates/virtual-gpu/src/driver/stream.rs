//! Streams, events, capture, and words written by streams.

use super::{Code, current};
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::call::capture::{self, InfoOut};
use crate::gpu::call::stream::{self, Callback};
use crate::gpu::work::{self, Action, HostFunction};
use crate::gpu::{Error, Result};
use core::ffi::c_void;

entries! {
    fn cuStreamCreate(out: Out<u64>, flags: u32) => |api| stream::create(api, out, flags, 0);
    fn cuStreamCreateWithPriority(out: Out<u64>, flags: u32, priority: i32) =>
        |api| stream::create(api, out, flags, priority);
    fn cuStreamDestroy_v2(stream: u64) => |_| work::work().destroy_stream(stream);
    fn cuStreamSynchronize(stream: u64) => |api| stream::synchronize(api, stream);
    fn cuStreamQuery(stream: u64) => |api| stream::query(api, stream);
    fn cuStreamGetPriority(stream: u64, priority: Out<i32>) =>
        |_| priority.set(work::work().stream(stream)?.priority);
    fn cuStreamGetFlags(stream: u64, flags: Out<u32>) =>
        |_| flags.set(work::work().stream(stream)?.flags);
    fn cuStreamGetId(stream: u64, id: Out<u64>) => |_| id.set(work::work().stream(stream)?.id);
    fn cuStreamGetDevice(stream: u64, device: Out<i32>) =>
        |_| device.set(work::work().stream(stream)?.device as i32);
    fn cuStreamGetCtx(stream: u64, out: Out<u64>) =>
        |_| out.set(work::work().stream(stream)?.context);
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) =>
        |api| stream::wait(api, stream, event, flags);
    fn cuLaunchHostFunc(stream: u64, function: Option<HostFunction>, data: *mut c_void) =>
        |api| stream::launch_host(api, stream, function, data);
    fn cuStreamAddCallback(
        stream: u64,
        callback: Option<Callback>,
        data: *mut c_void,
        flags: u32,
    ) => |api| stream::add_callback(api, stream, callback, data, flags);
    fn cuStreamAttachMemAsync(stream: u64, addr: u64, _length: u64, _flags: u32) =>
        |_| stream::attach(stream, addr);
    fn cuStreamSetAttribute(stream: u64, number: i32, value: In<u8>) =>
        |_| stream::set_attribute(stream, number, value);
    fn cuStreamGetAttribute(stream: u64, number: i32, value: Out<u8>) =>
        |_| stream::get_attribute(stream, number, value);
    fn cuStreamCopyAttributes(dst: u64, src: u64) => |_| stream::copy_attributes(dst, src);
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) =>
        |api| stream::priorities(api, least, greatest);

    fn cuEventCreate(out: Out<u64>, flags: u32) => |api| stream::create_event(api, out, flags);
    fn cuEventDestroy_v2(event: u64) => |_| work::work().destroy_event(event);
    fn cuEventRecord(event: u64, stream: u64) => |api| stream::record(api, event, stream, 0);
    fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) =>
        |api| stream::record(api, event, stream, flags);
    fn cuEventQuery(event: u64) => |_| work::query_event(event);
    fn cuEventSynchronize(event: u64) => |_| work::synchronize_event(event);
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) =>
        |_| milliseconds.set(work::work().elapsed(start, end)?);

    fn cuStreamBeginCapture_v2(stream: u64, mode: i32) =>
        |api| capture::begin(api, stream, mode, None);
    fn cuStreamBeginCaptureToGraph(
        stream: u64,
        graph: u64,
        nodes: In<u64>,
        _edges: u64,
        count: usize,
        mode: i32,
    ) => |api| capture::begin(api, stream, mode, Some((graph, nodes.list(count))));
    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) => |_| capture::end(stream, graph);
    fn cuStreamIsCapturing(stream: u64, status: Out<i32>) =>
        |api| capture::status(api, stream, status);
    fn cuStreamGetCaptureInfo_v2(
        stream: u64,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<u64>,
        nodes: Out<*const u64>,
        count: Out<usize>,
    ) => |_| {
        let edges = Out::null();
        capture::info(stream, &InfoOut { status, id, graph, nodes, edges, count })
    };
    fn cuStreamGetCaptureInfo_v3(
        stream: u64,
        status: Out<i32>,
        id: Out<u64>,
        graph: Out<u64>,
        nodes: Out<*const u64>,
        edges: Out<*const u64>,
        count: Out<usize>,
    ) => |_| capture::info(stream, &InfoOut { status, id, graph, nodes, edges, count });
    fn cuStreamUpdateCaptureDependencies(
        stream: u64,
        nodes: In<u64>,
        count: usize,
        flags: u32,
    ) => |_| capture::update(stream, nodes, count, flags);
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: u64,
        nodes: In<u64>,
        _edges: u64,
        count: usize,
        flags: u32,
    ) => |_| capture::update(stream, nodes, count, flags);
    fn cuThreadExchangeStreamCaptureMode(mode: Out<i32>) => |_| capture::exchange_mode(mode);

    fn cuStreamWriteValue32_v2(stream: u64, addr: u64, value: u32, _flags: u32) =>
        |_| write(stream, addr, value.into(), 4);
    fn cuStreamWriteValue64_v2(stream: u64, addr: u64, value: u64, _flags: u32) =>
        |_| write(stream, addr, value, 8);
    fn cuStreamWaitValue32_v2(stream: u64, _addr: u64, _value: u32, _flags: u32) =>
        |_| take_as_written(stream);
    fn cuStreamWaitValue64_v2(stream: u64, _addr: u64, _value: u64, _flags: u32) =>
        |_| take_as_written(stream);
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

fn write(stream: u64, addr: u64, value: u64, len: u8) -> Result {
    current()?;
    if !addr.is_multiple_of(len.into()) {
        return Err(Error::INVALID_VALUE);
    }
    let action = Action::Write { addr, value, len };
    action.check()?;
    work::submit(stream, action)
}

/// Whatever a stream waits for on the device, another stream would have written: it is taken to be
/// there.
fn take_as_written(stream: u64) -> Result {
    current()?;
    work::submit(stream, Action::Empty)
}

//! Stream capture.

use super::Code;
use crate::constants as c;
use crate::gpu::border::{In, Out, runtime};
use crate::gpu::work::{self, Mode, Status};
use crate::gpu::{Error, Result, context, thread};
use crate::libs::versions::runtime_major;

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamBeginCapture(stream: u64, mode: i32) -> Code {
    runtime(|| {
        context::bind()?;
        work::work().begin_capture(stream, Mode::from_code(mode)?, None)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamBeginCaptureToGraph(
    stream: u64,
    graph: u64,
    nodes: In<u64>,
    _edges: u64,
    count: usize,
    mode: i32,
) -> Code {
    runtime(|| {
        context::bind()?;
        let into = Some((graph, nodes.list(count)));
        work::work().begin_capture(stream, Mode::from_code(mode)?, into)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamEndCapture(stream: u64, graph: Out<u64>) -> Code {
    runtime(|| {
        let ended = work::end_capture(stream);
        graph.give(*ended.as_ref().unwrap_or(&0));
        ended.map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamIsCapturing(stream: u64, status: Out<i32>) -> Code {
    runtime(|| {
        context::bind()?;
        status.set(work::work().capture_status(stream)? as i32)
    })
}

/// Where the parts of the answer go; what the caller's version does not have is null.
pub(crate) struct InfoOut {
    pub status: Out<i32>,
    pub id: Out<u64>,
    pub graph: Out<u64>,
    pub nodes: Out<*const u64>,
    pub edges: Out<*const u64>,
    pub count: Out<usize>,
}

pub(crate) fn info(stream: u64, out: &InfoOut) -> Result {
    let mut work = work::work();
    let status = work.capture_status(stream)?;
    out.status.set(status as i32)?;
    if status != Status::Active {
        return Ok(());
    }
    if let Some(info) = work.capture_info(stream)? {
        out.id.give(info.id);
        out.graph.give(info.graph);
        out.nodes.give(info.nodes);
        out.edges.give(info.edges);
        out.count.give(info.count);
    }
    Ok(())
}

/// As CUDA 13 declares it.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetCaptureInfo(
    stream: u64,
    status: Out<i32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const u64>,
    edges: Out<*const u64>,
    count: Out<usize>,
) -> Code {
    runtime(|| info(stream, &InfoOut { status, id, graph, nodes, edges, count }))
}

/// What CUDA 12 calls the same.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetCaptureInfo_v3(
    stream: u64,
    status: Out<i32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const u64>,
    edges: Out<*const u64>,
    count: Out<usize>,
) -> Code {
    runtime(|| info(stream, &InfoOut { status, id, graph, nodes, edges, count }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamGetCaptureInfo_v2(
    stream: u64,
    status: Out<i32>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const u64>,
    count: Out<usize>,
) -> Code {
    let edges = Out::nowhere();
    runtime(|| info(stream, &InfoOut { status, id, graph, nodes, edges, count }))
}

pub(crate) fn update(stream: u64, nodes: In<u64>, count: usize, flags: u32) -> Result {
    let replace = match flags as i32 {
        c::cudaStreamAddCaptureDependencies => false,
        c::cudaStreamSetCaptureDependencies => true,
        _ => return Err(Error::INVALID_VALUE),
    };
    work::work().update_frontier(stream, nodes.list(count), replace)
}

/// CUDA 12 has no edges here, and the count in their place.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamUpdateCaptureDependencies(
    stream: u64,
    nodes: In<u64>,
    edges_or_count: u64,
    count_or_flags: u64,
    flags: u32,
) -> Code {
    runtime(|| {
        if runtime_major() == 12 {
            update(stream, nodes, edges_or_count as usize, count_or_flags as u32)
        } else {
            update(stream, nodes, count_or_flags as usize, flags)
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamUpdateCaptureDependencies_v2(
    stream: u64,
    nodes: In<u64>,
    _edges: u64,
    count: usize,
    flags: u32,
) -> Code {
    runtime(|| update(stream, nodes, count, flags))
}

pub(crate) fn exchange_mode(mode: Out<i32>) -> Result {
    let wanted = mode.get()?;
    Mode::from_code(wanted)?;
    mode.set(thread::with(|thread| thread.capture_mode.replace(wanted)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: Out<i32>) -> Code {
    runtime(|| exchange_mode(mode))
}

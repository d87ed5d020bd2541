//! Functions that have other parameters in CUDA 12 than in 13, under one name.
//!
//! Most of them got the list of what edges carry, which CUDA 12 has in the functions that end in
//! `_v2`. A further major version is a further arm of each `match`.

use super::Code;
use super::node::add_any;
use crate::gpu::boundary::{Api, In, Out, runtime};
use crate::gpu::call::capture::{self, InfoOut};
use crate::gpu::call::copy;
use crate::gpu::call::graph::{change_edges, give_edges, give_list};
use crate::gpu::program::toolkit;
use crate::gpu::work;
use memtrace_devices::Toolkit;

/// CUDA 12 has the index of a failed copy before the stream.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyBatchAsync(
    dsts: In<u64>,
    srcs: In<u64>,
    sizes: In<u64>,
    count: usize,
    _attributes: u64,
    _attribute_starts: u64,
    _attribute_count: usize,
    stream_or_failure: u64,
    stream_of_12: u64,
) -> Code {
    runtime(|| {
        let stream = match toolkit() {
            Toolkit::Cuda12 => stream_of_12,
            Toolkit::Cuda13 => stream_or_failure,
        };
        copy::batch(Api::Runtime, [dsts, srcs, sizes], count, stream)
    })
}

/// CUDA 12 has nothing behind the id: what lies in the registers there is not for us to write to.
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
    runtime(|| {
        let (graph, nodes, edges, count) = match toolkit() {
            Toolkit::Cuda12 => (Out::null(), Out::null(), Out::null(), Out::null()),
            Toolkit::Cuda13 => (graph, nodes, edges, count),
        };
        capture::info(stream, &InfoOut { status, id, graph, nodes, edges, count })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamUpdateCaptureDependencies(
    stream: u64,
    nodes: In<u64>,
    edges_or_count: u64,
    count_or_flags: u64,
    flags: u32,
) -> Code {
    runtime(|| {
        let (count, flags) = match toolkit() {
            Toolkit::Cuda12 => (edges_or_count, count_or_flags as u32),
            Toolkit::Cuda13 => (count_or_flags, flags),
        };
        capture::update(stream, nodes, count as usize, flags)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    edges_or_count: u64,
    count_or_params: u64,
    params: Out<u8>,
) -> Code {
    runtime(|| {
        let (count, params) = match toolkit() {
            // SAFETY: in CUDA 12 this parameter is the pointer to the node's parameters.
            Toolkit::Cuda12 => (edges_or_count, unsafe { Out::from_address(count_or_params) }),
            Toolkit::Cuda13 => (count_or_params, params),
        };
        add_any(out, graph, before.list(count as usize), params)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddNode_v2(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    _edges: u64,
    count: usize,
    params: Out<u8>,
) -> Code {
    runtime(|| add_any(out, graph, before.list(count), params))
}

/// CUDA 12 has the count where 13 has the edges.
fn counted(edges_or_count: u64, count: Out<usize>) -> Out<usize> {
    match toolkit() {
        // SAFETY: in CUDA 12 this parameter is the pointer to the count.
        Toolkit::Cuda12 => unsafe { Out::from_address(edges_or_count) },
        Toolkit::Cuda13 => count,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphNodeGetDependencies(
    node: u64,
    nodes: Out<u64>,
    edges_or_count: u64,
    count: Out<usize>,
) -> Code {
    runtime(|| give_list(&work::work().nodes_before(node)?, nodes, counted(edges_or_count, count)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphNodeGetDependentNodes(
    node: u64,
    nodes: Out<u64>,
    edges_or_count: u64,
    count: Out<usize>,
) -> Code {
    runtime(|| give_list(&work::work().nodes_behind(node)?, nodes, counted(edges_or_count, count)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphGetEdges(
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    edges_or_count: u64,
    count: Out<usize>,
) -> Code {
    runtime(|| give_edges(graph, from, to, counted(edges_or_count, count)))
}

/// The count of a list of edges, which CUDA 13 has one parameter later.
fn length(edges_or_count: u64, count: usize) -> usize {
    match toolkit() {
        Toolkit::Cuda12 => edges_or_count as usize,
        Toolkit::Cuda13 => count,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddDependencies(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    edges_or_count: u64,
    count: usize,
) -> Code {
    runtime(|| change_edges(from, to, length(edges_or_count, count), true))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphRemoveDependencies(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    edges_or_count: u64,
    count: usize,
) -> Code {
    runtime(|| change_edges(from, to, length(edges_or_count, count), false))
}

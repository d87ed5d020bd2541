//! Nodes of graphs, where the runtime's parameters are not the driver's: kernels and copies. And
//! those whose driver function is not offered.

use super::Code;
use super::copy::{Copy3D, volume};
use crate::gpu::Result;
use crate::gpu::boundary::{In, Out, runtime};
use crate::gpu::call::node::{self, Fill, Host, Kernel, UNION, add};
use crate::gpu::work::{self, Action};
use crate::layout;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddKernelNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Kernel>,
) -> Code {
    runtime(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddMemcpyNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Copy3D>,
) -> Code {
    runtime(|| add(out, graph, before.list(count), volume(&params.get()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddMemcpyNode1D(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    dst: u64,
    src: u64,
    size: u64,
    _kind: i32,
) -> Code {
    runtime(|| add(out, graph, before.list(count), Action::copy(dst, src, size)))
}

/// A node of any kind.
pub(super) fn add_any(out: Out<u64>, graph: u64, before: Vec<u64>, params: Out<u8>) -> Result {
    use layout::all::cudaGraphNodeParams as fields;
    let copy =
        |params: Out<u8>| volume(&params.at::<Copy3D>(fields::memcpy_copyParams.offset).get()?);
    let kernel = |params: Out<u8>| params.at::<Kernel>(UNION).get()?.action();
    node::add_any(out, graph, before, params, copy, kernel)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphKernelNodeGetParams(node: u64, params: Out<Kernel>) -> Code {
    runtime(|| params.set(Kernel::of(work::work().action(node)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphKernelNodeSetParams(node: u64, params: In<Kernel>) -> Code {
    runtime(|| node::set(node, params.get()?.action()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecKernelNodeSetParams(
    exec: u64,
    node: u64,
    params: In<Kernel>,
) -> Code {
    runtime(|| node::set_in_exec(exec, node, params.get()?.action()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphMemsetNodeSetParams(node: u64, params: In<Fill>) -> Code {
    runtime(|| node::set(node, params.get()?.action()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecMemcpyNodeSetParams1D(
    exec: u64,
    node: u64,
    dst: u64,
    src: u64,
    size: u64,
    _kind: i32,
) -> Code {
    runtime(|| node::set_in_exec(exec, node, Ok(Action::copy(dst, src, size))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecHostNodeSetParams(exec: u64, node: u64, params: In<Host>) -> Code {
    runtime(|| node::set_in_exec(exec, node, params.get()?.action()))
}

/// A node that is switched off would still be done, so switching is not offered.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphNodeGetEnabled(_exec: u64, node: u64, enabled: Out<u32>) -> Code {
    runtime(|| {
        work::work().action(node).map(|_| ())?;
        enabled.set(1)
    })
}

//! Nodes of graphs. Their parameters are the runtime's, but for copies and the second version of kernels.

use super::copy::Copy3D;
use super::{Code, current};
use crate::gpu::Result;
use crate::gpu::border::{In, Out, driver};
use crate::gpu::work::{self, Action};
use crate::layout::cuda13;
use crate::runtime::graph::give_list;
use crate::runtime::node::{self as runtime, Allocation, Fill, Host, Kernel, add};

/// `CUDA_KERNEL_NODE_PARAMS` as of CUDA 12: a kernel may stand in for the function.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelV2 {
    params: Kernel,
    kernel: u64,
    context: u64,
}

const _: () = {
    assert!(size_of::<KernelV2>() == cuda13::CUDA_KERNEL_NODE_PARAMS_v2_st::SIZE);
    assert!(size_of::<Fill>() == cuda13::CUDA_MEMSET_NODE_PARAMS_st::SIZE);
    assert!(size_of::<Host>() == cuda13::CUDA_HOST_NODE_PARAMS_st::SIZE);
};

impl KernelV2 {
    fn action(self) -> Result<Action> {
        current()?;
        let Self { mut params, kernel, .. } = self;
        if params.function == 0 {
            params.function = kernel;
        }
        params.action()
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddKernelNode_v2(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<KernelV2>,
) -> Code {
    driver(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddMemcpyNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Copy3D>,
    _context: u64,
) -> Code {
    driver(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddMemsetNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Fill>,
    _context: u64,
) -> Code {
    driver(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddHostNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Host>,
) -> Code {
    driver(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddEmptyNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
) -> Code {
    driver(|| add(out, graph, before.list(count), Action::Empty))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddChildGraphNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    child: u64,
) -> Code {
    driver(|| runtime::add_child(out, graph, before.list(count), child))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphChildGraphNodeGetGraph(node: u64, out: Out<u64>) -> Code {
    driver(|| out.set(runtime::child(node)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddEventRecordNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    event: u64,
) -> Code {
    driver(|| runtime::add_event(out, graph, before.list(count), event, Action::Record))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddEventWaitNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    event: u64,
) -> Code {
    driver(|| runtime::add_event(out, graph, before.list(count), event, Action::Wait))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddMemAllocNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: Out<Allocation>,
) -> Code {
    driver(|| runtime::add_memory(out, graph, before.list(count), params))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddMemFreeNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    addr: u64,
) -> Code {
    driver(|| add(out, graph, before.list(count), Action::Free(addr)))
}

fn add_any(out: Out<u64>, graph: u64, before: Vec<u64>, params: Out<u8>) -> Result {
    use cuda13::CUgraphNodeParams_st as fields;
    let copy =
        |params: Out<u8>| params.at::<Copy3D>(fields::memcpy_copyParams.offset).get()?.action();
    let kernel = |params: Out<u8>| params.at::<KernelV2>(fields::kernel.offset).get()?.action();
    runtime::add_any(out, graph, before, params, copy, kernel)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: Out<u8>,
) -> Code {
    driver(|| add_any(out, graph, before.list(count), params))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddNode_v2(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    _edges: u64,
    count: usize,
    params: Out<u8>,
) -> Code {
    driver(|| add_any(out, graph, before.list(count), params))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphKernelNodeGetParams_v2(node: u64, params: Out<KernelV2>) -> Code {
    driver(|| {
        let found = Kernel::of(work::work().action(node)?)?;
        params.set(KernelV2 { params: found, kernel: 0, context: 0 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphKernelNodeSetParams_v2(node: u64, params: In<KernelV2>) -> Code {
    driver(|| {
        let action = params.get()?.action()?;
        work::work().set_action(node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecKernelNodeSetParams_v2(
    exec: u64,
    node: u64,
    params: In<KernelV2>,
) -> Code {
    driver(|| {
        let action = params.get()?.action()?;
        work::work().set_exec_action(exec, node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecMemcpyNodeSetParams(
    exec: u64,
    node: u64,
    params: In<Copy3D>,
    _context: u64,
) -> Code {
    driver(|| {
        let action = params.get()?.action()?;
        work::work().set_exec_action(exec, node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecMemsetNodeSetParams(
    exec: u64,
    node: u64,
    params: In<Fill>,
    _context: u64,
) -> Code {
    driver(|| {
        let action = params.get()?.action()?;
        work::work().set_exec_action(exec, node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetType(node: u64, kind: Out<i32>) -> Code {
    driver(|| kind.set(work::work().action(node)?.node_type()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeFindInClone(out: Out<u64>, node: u64, clone: u64) -> Code {
    driver(|| out.set(work::work().node_in_copy(node, clone)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroyNode(node: u64) -> Code {
    driver(|| runtime::destroy(node))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetDependencies(
    node: u64,
    nodes: Out<u64>,
    count: Out<usize>,
) -> Code {
    driver(|| give_list(&work::work().nodes_before(node)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetDependencies_v2(
    node: u64,
    nodes: Out<u64>,
    _edges: u64,
    count: Out<usize>,
) -> Code {
    driver(|| give_list(&work::work().nodes_before(node)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetDependentNodes(
    node: u64,
    nodes: Out<u64>,
    count: Out<usize>,
) -> Code {
    driver(|| give_list(&work::work().nodes_behind(node)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetDependentNodes_v2(
    node: u64,
    nodes: Out<u64>,
    _edges: u64,
    count: Out<usize>,
) -> Code {
    driver(|| give_list(&work::work().nodes_behind(node)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetEdges(
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    count: Out<usize>,
) -> Code {
    driver(|| runtime::give_edges(graph, from, to, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetEdges_v2(
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    _edges: u64,
    count: Out<usize>,
) -> Code {
    driver(|| runtime::give_edges(graph, from, to, count))
}

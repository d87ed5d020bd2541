//! Nodes of graphs. The runtime describes copies and kernels in other records.

use super::copy::Copy3D;
use super::{Code, current};
use crate::gpu::Result;
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::call::graph::give_list;
use crate::gpu::call::node::{self, Allocation, Fill, Host, Kernel, add};
use crate::gpu::work::{self, Action};
use crate::layout::all;

/// `CUDA_KERNEL_NODE_PARAMS` as of CUDA 12: a kernel may stand in for the function.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelV2 {
    params: Kernel,
    kernel: u64,
    context: u64,
}

const _: () = {
    assert!(size_of::<KernelV2>() == all::CUDA_KERNEL_NODE_PARAMS_v2_st::SIZE);
    assert!(size_of::<Fill>() == all::CUDA_MEMSET_NODE_PARAMS_st::SIZE);
    assert!(size_of::<Host>() == all::CUDA_HOST_NODE_PARAMS_st::SIZE);
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

fn add_any(out: Out<u64>, graph: u64, before: Vec<u64>, params: Out<u8>) -> Result {
    use all::CUgraphNodeParams_st as fields;
    let copy =
        |params: Out<u8>| params.at::<Copy3D>(fields::memcpy_copyParams.offset).get()?.action();
    let kernel = |params: Out<u8>| params.at::<KernelV2>(fields::kernel.offset).get()?.action();
    node::add_any(out, graph, before, params, copy, kernel)
}

entries! {
    fn cuGraphAddKernelNode_v2(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: In<KernelV2>,
    ) => |_| add(out, graph, before.list(count), params.get()?.action()?);
    // A context comes behind these two.
    fn cuGraphAddMemcpyNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: In<Copy3D>,
    ) => |_| add(out, graph, before.list(count), params.get()?.action()?);
    fn cuGraphAddMemsetNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: In<Fill>,
    ) => |_| add(out, graph, before.list(count), params.get()?.action()?);
    fn cuGraphAddHostNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: In<Host>,
    ) => |_| add(out, graph, before.list(count), params.get()?.action()?);
    fn cuGraphAddEmptyNode(out: Out<u64>, graph: u64, before: In<u64>, count: usize) =>
        |_| add(out, graph, before.list(count), Action::Empty);
    fn cuGraphAddChildGraphNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        child: u64,
    ) => |_| node::add_child(out, graph, before.list(count), child);
    fn cuGraphChildGraphNodeGetGraph(node: u64, out: Out<u64>) => |_| out.set(node::child(node)?);
    fn cuGraphAddEventRecordNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        event: u64,
    ) => |_| node::add_event(out, graph, before.list(count), event, Action::Record);
    fn cuGraphAddEventWaitNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        event: u64,
    ) => |_| node::add_event(out, graph, before.list(count), event, Action::Wait);
    fn cuGraphAddMemAllocNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: Out<Allocation>,
    ) => |_| node::add_memory(out, graph, before.list(count), params);
    fn cuGraphAddMemFreeNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        addr: u64,
    ) => |_| add(out, graph, before.list(count), Action::Free(addr));
    fn cuGraphAddNode(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        count: usize,
        params: Out<u8>,
    ) => |_| add_any(out, graph, before.list(count), params);
    fn cuGraphAddNode_v2(
        out: Out<u64>,
        graph: u64,
        before: In<u64>,
        _edges: u64,
        count: usize,
        params: Out<u8>,
    ) => |_| add_any(out, graph, before.list(count), params);

    fn cuGraphKernelNodeSetParams_v2(node: u64, params: In<KernelV2>) =>
        |_| node::set(node, params.get()?.action());
    fn cuGraphExecKernelNodeSetParams_v2(exec: u64, node: u64, params: In<KernelV2>) =>
        |_| node::set_in_exec(exec, node, params.get()?.action());
    // A context comes behind these two.
    fn cuGraphExecMemcpyNodeSetParams(exec: u64, node: u64, params: In<Copy3D>) =>
        |_| node::set_in_exec(exec, node, params.get()?.action());
    fn cuGraphExecMemsetNodeSetParams(exec: u64, node: u64, params: In<Fill>) =>
        |_| node::set_in_exec(exec, node, params.get()?.action());

    fn cuGraphNodeGetType(node: u64, kind: Out<i32>) =>
        |_| kind.set(work::work().action(node)?.node_type());
    fn cuGraphNodeFindInClone(out: Out<u64>, node: u64, clone: u64) =>
        |_| out.set(work::work().node_in_copy(node, clone)?);
    fn cuGraphDestroyNode(node: u64) => |_| node::destroy(node);
    fn cuGraphNodeGetDependencies(node: u64, nodes: Out<u64>, count: Out<usize>) =>
        |_| give_list(&work::work().nodes_before(node)?, nodes, count);
    fn cuGraphNodeGetDependencies_v2(
        node: u64,
        nodes: Out<u64>,
        _edges: u64,
        count: Out<usize>,
    ) => |_| give_list(&work::work().nodes_before(node)?, nodes, count);
    fn cuGraphNodeGetDependentNodes(node: u64, nodes: Out<u64>, count: Out<usize>) =>
        |_| give_list(&work::work().nodes_behind(node)?, nodes, count);
    fn cuGraphNodeGetDependentNodes_v2(
        node: u64,
        nodes: Out<u64>,
        _edges: u64,
        count: Out<usize>,
    ) => |_| give_list(&work::work().nodes_behind(node)?, nodes, count);
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphKernelNodeGetParams_v2(node: u64, params: Out<KernelV2>) -> Code {
    driver(|| {
        let found = Kernel::of(work::work().action(node)?)?;
        params.set(KernelV2 { params: found, kernel: 0, context: 0 })
    })
}

#[cfg(test)]
mod layouts {
    use cudarc::driver::sys;
    use memtrace_layouts::same_layout;

    use super::KernelV2;

    same_layout!(
        KernelV2 =
            sys::CUDA_KERNEL_NODE_PARAMS_v2 { params: func..extra, kernel: kern, context: ctx }
    );
}

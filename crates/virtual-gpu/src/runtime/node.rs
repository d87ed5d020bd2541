//! Nodes of graphs: adding them, asking for and changing their parameters, their order.
//!
//! CUDA 12 and 13 differ where edges may carry data: 13 has that list in the plain functions, 12 in
//! those that end in `_v2`.

use super::Code;
use super::copy::{Copy3D, volume};
use super::graph::{edges, give_list};
use super::launch::Dim3;
use super::pool::PoolProperties;
use crate::constants as c;
use crate::gpu::border::{In, Out, runtime};
use crate::gpu::kernels::Launch;
use crate::gpu::work::{self, Action, HostFunction, Place, Shape};
use crate::gpu::{Error, Result, context};
use crate::layout;
use crate::libs::versions::runtime_major;

/// `cudaKernelNodeParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Kernel {
    pub(crate) function: u64,
    grid: Dim3,
    block: Dim3,
    shared: u32,
    arguments: u64,
    extra: u64,
}

/// `cudaMemsetParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Fill {
    dst: u64,
    pitch: u64,
    value: u32,
    unit: u32,
    width: u64,
    height: u64,
}

/// `cudaHostNodeParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Host {
    function: Option<HostFunction>,
    data: usize,
}

/// `cudaMemAllocNodeParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Allocation {
    pool: PoolProperties,
    rest_of_pool: [u64; 9],
    accesses: u64,
    access_count: usize,
    size: u64,
    addr: u64,
}

/// What a conditional node is made of.
#[repr(C)]
#[derive(Clone, Copy)]
struct Conditional {
    handle: u64,
    kind: i32,
    bodies: u32,
    graphs: *const u64,
}

const _: () = {
    assert!(size_of::<Kernel>() == layout::cuda13::cudaKernelNodeParams::SIZE);
    assert!(size_of::<Fill>() == layout::cuda13::cudaMemsetParams::SIZE);
    assert!(size_of::<Allocation>() == layout::cuda13::cudaGraphNodeParams::alloc.size);
    assert!(layout::cuda12::cudaGraphNodeParams::alloc.offset == UNION);
    // A node of any kind has the fields of a kernel in the order of `Kernel`.
    let shared = layout::cuda13::cudaGraphNodeParams::kernel_sharedMemBytes.offset;
    assert!(shared == UNION + core::mem::offset_of!(Kernel, shared));
};

/// Where the parameters of one kind begin in `cudaGraphNodeParams`.
const UNION: usize = layout::cuda13::cudaGraphNodeParams::kernel.offset;

impl Kernel {
    pub(crate) fn action(&self) -> Result<Action> {
        let (grid, block) = (self.grid.into(), self.block.into());
        let launch = Launch::new(self.function, grid, block, self.shared.into());
        launch.check(context::bind()?)?;
        Ok(launch.action())
    }

    pub(crate) fn of(action: &Action) -> Result<Self> {
        let Action::Kernel { function, grid, block, shared } = *action else {
            return Err(Error::INVALID_VALUE);
        };
        let (grid, block) = (grid.into(), block.into());
        Ok(Self { function, grid, block, shared, arguments: 0, extra: 0 })
    }
}

impl Fill {
    pub(crate) fn action(&self) -> Result<Action> {
        if ![1, 2, 4].contains(&self.unit) {
            return Err(Error::INVALID_VALUE);
        }
        let width = self.width.checked_mul(self.unit.into()).ok_or(Error::INVALID_VALUE)?;
        Ok(Action::Fill {
            dst: Place::plane(self.dst, self.pitch),
            pattern: self.value.to_le_bytes(),
            unit: self.unit as u8,
            shape: Shape::plane(width, self.height),
        })
    }
}

impl Host {
    pub(crate) fn action(&self) -> Result<Action> {
        let function = self.function.ok_or(Error::INVALID_VALUE)?;
        Ok(Action::Host { function, data: self.data })
    }
}

/// Adds a node and says which.
pub(crate) fn add(out: Out<u64>, graph: u64, before: Vec<u64>, action: Action) -> Result {
    out.check()?;
    action.check()?;
    out.set(work::work().add_node(graph, action, before)?)
}

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

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddMemsetNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Fill>,
) -> Code {
    runtime(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddHostNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: In<Host>,
) -> Code {
    runtime(|| add(out, graph, before.list(count), params.get()?.action()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddEmptyNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
) -> Code {
    runtime(|| add(out, graph, before.list(count), Action::Empty))
}

/// The child graph is copied, so that the caller's stays its own.
pub(crate) fn add_child(out: Out<u64>, graph: u64, before: Vec<u64>, child: u64) -> Result {
    let copy = work::work().clone_graph(child)?;
    add(out, graph, before, Action::Child(copy))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddChildGraphNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    child: u64,
) -> Code {
    runtime(|| add_child(out, graph, before.list(count), child))
}

/// The child graph of a node.
pub(crate) fn child(node: u64) -> Result<u64> {
    match work::work().action(node)? {
        Action::Child(graph) => Ok(*graph),
        _ => Err(Error::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphChildGraphNodeGetGraph(node: u64, out: Out<u64>) -> Code {
    runtime(|| out.set(child(node)?))
}

pub(crate) fn add_event(
    out: Out<u64>,
    graph: u64,
    before: Vec<u64>,
    event: u64,
    action: fn(u64) -> Action,
) -> Result {
    work::work().check_event(event)?;
    add(out, graph, before, action(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddEventRecordNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    event: u64,
) -> Code {
    runtime(|| add_event(out, graph, before.list(count), event, Action::Record))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddEventWaitNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    event: u64,
) -> Code {
    runtime(|| add_event(out, graph, before.list(count), event, Action::Wait))
}

/// Adds memory of the graph and writes its address into the caller's parameters.
pub(crate) fn add_memory(
    out: Out<u64>,
    graph: u64,
    before: Vec<u64>,
    params: Out<Allocation>,
) -> Result {
    out.check()?;
    let mut wanted = params.get()?;
    let device = wanted.pool.location.device()?;
    let (node, addr) = work::work().add_memory(graph, device, wanted.size, before)?;
    wanted.addr = addr;
    params.set(wanted)?;
    out.set(node)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddMemAllocNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    params: Out<Allocation>,
) -> Code {
    runtime(|| add_memory(out, graph, before.list(count), params))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddMemFreeNode(
    out: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    addr: u64,
) -> Code {
    runtime(|| add(out, graph, before.list(count), Action::Free(addr)))
}

/// A node whose bodies are graphs that the caller fills; their handles stay where it is told they are.
fn add_conditional(out: Out<u64>, graph: u64, before: Vec<u64>, params: Out<u8>) -> Result {
    out.check()?;
    let place = params.at::<Conditional>(UNION);
    let mut wanted = place.get()?;
    let bodies: Box<[u64]> = (0..wanted.bodies).map(|_| work::work().create_graph()).collect();
    let node = work::work().add_node(graph, Action::Conditional(bodies.to_vec()), before)?;
    // The caller reads the list for as long as it likes.
    wanted.graphs = Box::leak(bodies).as_ptr();
    place.set(wanted)?;
    out.set(node)
}

/// Adds a node of any kind. The record begins with the kind; how it describes copies and kernels differs
/// between the two APIs.
pub(crate) fn add_any(
    out: Out<u64>,
    graph: u64,
    before: Vec<u64>,
    params: Out<u8>,
    copy: fn(Out<u8>) -> Result<Action>,
    kernel: fn(Out<u8>) -> Result<Action>,
) -> Result {
    let address = |params: Out<u8>| params.at::<u64>(UNION).get();
    match params.cast::<i32>().get()? {
        c::cudaGraphNodeTypeKernel => add(out, graph, before, kernel(params)?),
        c::cudaGraphNodeTypeMemcpy => add(out, graph, before, copy(params)?),
        c::cudaGraphNodeTypeMemset => {
            add(out, graph, before, params.at::<Fill>(UNION).get()?.action()?)
        }
        c::cudaGraphNodeTypeHost => {
            add(out, graph, before, params.at::<Host>(UNION).get()?.action()?)
        }
        c::cudaGraphNodeTypeGraph => add_child(out, graph, before, address(params)?),
        c::cudaGraphNodeTypeEmpty => add(out, graph, before, Action::Empty),
        c::cudaGraphNodeTypeWaitEvent => {
            add_event(out, graph, before, address(params)?, Action::Wait)
        }
        c::cudaGraphNodeTypeEventRecord => {
            add_event(out, graph, before, address(params)?, Action::Record)
        }
        c::cudaGraphNodeTypeMemAlloc => add_memory(out, graph, before, params.at(UNION)),
        c::cudaGraphNodeTypeMemFree => add(out, graph, before, Action::Free(address(params)?)),
        c::cudaGraphNodeTypeConditional => add_conditional(out, graph, before, params),
        _ => Err(Error::NOT_SUPPORTED),
    }
}

/// The runtime's node of any kind.
fn add_any_of_runtime(out: Out<u64>, graph: u64, before: Vec<u64>, params: Out<u8>) -> Result {
    use layout::cuda13::cudaGraphNodeParams as fields;
    let copy =
        |params: Out<u8>| volume(&params.at::<Copy3D>(fields::memcpy_copyParams.offset).get()?);
    let kernel = |params: Out<u8>| params.at::<Kernel>(UNION).get()?.action();
    add_any(out, graph, before, params, copy, kernel)
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
        if runtime_major() == 12 {
            let before = before.list(edges_or_count as usize);
            // SAFETY: in CUDA 12 this parameter is the pointer to the node's parameters.
            let params = unsafe { Out::from_address(count_or_params) };
            add_any_of_runtime(out, graph, before, params)
        } else {
            add_any_of_runtime(out, graph, before.list(count_or_params as usize), params)
        }
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
    runtime(|| add_any_of_runtime(out, graph, before.list(count), params))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphKernelNodeGetParams(node: u64, params: Out<Kernel>) -> Code {
    runtime(|| params.set(Kernel::of(work::work().action(node)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphKernelNodeSetParams(node: u64, params: In<Kernel>) -> Code {
    runtime(|| {
        let action = params.get()?.action()?;
        work::work().set_action(node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecKernelNodeSetParams(
    exec: u64,
    node: u64,
    params: In<Kernel>,
) -> Code {
    runtime(|| {
        let action = params.get()?.action()?;
        work::work().set_exec_action(exec, node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphMemsetNodeSetParams(node: u64, params: In<Fill>) -> Code {
    runtime(|| {
        let action = params.get()?.action()?;
        work::work().set_action(node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecMemsetNodeSetParams(exec: u64, node: u64, params: In<Fill>) -> Code {
    runtime(|| {
        let action = params.get()?.action()?;
        work::work().set_exec_action(exec, node, action)
    })
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
    runtime(|| work::work().set_exec_action(exec, node, Action::copy(dst, src, size)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecHostNodeSetParams(exec: u64, node: u64, params: In<Host>) -> Code {
    runtime(|| {
        let action = params.get()?.action()?;
        work::work().set_exec_action(exec, node, action)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphNodeGetType(node: u64, kind: Out<i32>) -> Code {
    runtime(|| kind.set(work::work().action(node)?.node_type()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphNodeFindInClone(out: Out<u64>, node: u64, clone: u64) -> Code {
    runtime(|| out.set(work::work().node_in_copy(node, clone)?))
}

pub(crate) fn destroy(node: u64) -> Result {
    let due = work::work().destroy_node(node)?;
    due.call();
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphDestroyNode(node: u64) -> Code {
    runtime(|| destroy(node))
}

/// CUDA 12 has the count where 13 has the edges.
fn counted(edges_or_count: u64, count: Out<usize>) -> Out<usize> {
    if runtime_major() == 12 {
        // SAFETY: in CUDA 12 this parameter is the pointer to the count.
        unsafe { Out::from_address(edges_or_count) }
    } else {
        count
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

pub(crate) fn give_edges(graph: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) -> Result {
    let all = work::work().graph_edges(graph)?;
    let room = if from.is_null() { 0 } else { count.get()? };
    for (side, out) in [(0, from), (1, to)] {
        let ends: Vec<u64> =
            all.iter().map(|edge| if side == 0 { edge.0 } else { edge.1 }).collect();
        if out.is_null() {
            count.set(ends.len())?;
        } else {
            count.set(room)?;
            give_list(&ends, out, count)?;
        }
    }
    Ok(())
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

/// CUDA 12 has the count where 13 has the edges.
fn change(from: In<u64>, to: In<u64>, edges_or_count: u64, count: usize, add: bool) -> Result {
    let count = if runtime_major() == 12 { edges_or_count as usize } else { count };
    work::work().change_edges(&edges(from, to, count), add)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphAddDependencies(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    edges_or_count: u64,
    count: usize,
) -> Code {
    runtime(|| change(from, to, edges_or_count, count, true))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphRemoveDependencies(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    edges_or_count: u64,
    count: usize,
) -> Code {
    runtime(|| change(from, to, edges_or_count, count, false))
}

//! Nodes of graphs: what they are made of, adding them, changing them.

use super::pool::PoolProperties;
use crate::constants as c;
use crate::gpu::boundary::Out;
use crate::gpu::kernels::Launch;
use crate::gpu::work::{self, Action, HostFunction, Rows, Shape};
use crate::gpu::{Error, Result, context};
use crate::layout;

/// `CUDA_KERNEL_NODE_PARAMS` of CUDA 11, and the runtime's record to this day.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The kernel.
    pub function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    arguments: u64,
    extra: u64,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
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

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Host {
    function: Option<HostFunction>,
    data: usize,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
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
    assert!(size_of::<Kernel>() == layout::all::cudaKernelNodeParams::SIZE);
    assert!(size_of::<Fill>() == layout::all::cudaMemsetParams::SIZE);
    assert!(size_of::<Allocation>() == layout::all::cudaGraphNodeParams::alloc.size);
    // A node of any kind has the fields of a kernel in the order of `Kernel`.
    let shared = layout::all::cudaGraphNodeParams::kernel_sharedMemBytes.offset;
    assert!(shared == UNION + core::mem::offset_of!(Kernel, shared));
};

/// Where the parameters of one kind begin in `CUgraphNodeParams`.
pub const UNION: usize = layout::all::cudaGraphNodeParams::alloc.offset;

impl Kernel {
    /// The launch, which is checked.
    pub fn action(&self) -> Result<Action> {
        let launch = Launch::new(self.function, self.grid, self.block, self.shared.into());
        launch.check(context::bind()?)?;
        Ok(launch.action())
    }

    /// The parameters of a node, which must be a kernel's.
    pub fn of(action: &Action) -> Result<Self> {
        let Action::Kernel { function, grid, block, shared } = *action else {
            return Err(Error::INVALID_VALUE);
        };
        Ok(Self { function, grid, block, shared, arguments: 0, extra: 0 })
    }
}

impl Fill {
    /// The fill.
    pub fn action(&self) -> Result<Action> {
        if ![1, 2, 4].contains(&self.unit) {
            return Err(Error::INVALID_VALUE);
        }
        let width = self.width.checked_mul(self.unit.into()).ok_or(Error::INVALID_VALUE)?;
        Ok(Action::Fill {
            dst: Rows::plane(self.dst, self.pitch),
            pattern: self.value.to_le_bytes(),
            unit: self.unit as u8,
            shape: Shape::plane(width, self.height),
        })
    }
}

impl Host {
    /// The call.
    pub fn action(&self) -> Result<Action> {
        let function = self.function.ok_or(Error::INVALID_VALUE)?;
        Ok(Action::Host { function, data: self.data })
    }
}

/// Adds a node and says which.
pub fn add(out: Out<u64>, graph: u64, before: Vec<u64>, action: Action) -> Result {
    out.check()?;
    action.check()?;
    out.set(work::work().add_node(graph, action, before)?)
}

/// The child graph is copied, so that the caller's stays its own.
pub fn add_child(out: Out<u64>, graph: u64, before: Vec<u64>, child: u64) -> Result {
    let copy = work::work().clone_graph(child)?;
    add(out, graph, before, Action::Child(copy))
}

/// The child graph of a node.
pub fn child(node: u64) -> Result<u64> {
    match work::work().action(node)? {
        Action::Child(graph) => Ok(*graph),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// Adds the record of an event, or a wait for one.
pub fn add_event(
    out: Out<u64>,
    graph: u64,
    before: Vec<u64>,
    event: u64,
    action: fn(u64) -> Action,
) -> Result {
    work::work().check_event(event)?;
    add(out, graph, before, action(event))
}

/// Adds memory of the graph and writes its address into the caller's parameters.
pub fn add_memory(out: Out<u64>, graph: u64, before: Vec<u64>, params: Out<Allocation>) -> Result {
    out.check()?;
    let mut wanted = params.get()?;
    let device = wanted.pool.location.device()?;
    let (node, addr) = work::work().add_memory(graph, device, wanted.size, before)?;
    wanted.addr = addr;
    params.set(wanted)?;
    out.set(node)
}

/// A node whose bodies are graphs that the caller fills. The caller gets the address
/// of their handles, which stay there.
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

/// Adds a node of any kind. The record begins with the kind; how it describes copies and kernels
/// differs between the two APIs.
pub fn add_any(
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

/// Gives a node other work to do.
pub fn set(node: u64, action: Result<Action>) -> Result {
    let action = action?;
    work::work().set_action(node, action)
}

/// Gives a node of an executable graph other work to do.
pub fn set_in_exec(exec: u64, node: u64, action: Result<Action>) -> Result {
    let action = action?;
    work::work().set_exec_action(exec, node, action)
}

/// Destroys a node.
pub fn destroy(node: u64) -> Result {
    let destructors = work::work().destroy_node(node)?;
    destructors.call();
    Ok(())
}

#[cfg(test)]
mod layouts {
    use cudarc::{driver::sys as driver, runtime::sys as runtime};
    use memtrace_layouts::same_layout;

    use super::{Allocation, Conditional, Fill, Host, Kernel};

    same_layout!(
        Kernel = driver::CUDA_KERNEL_NODE_PARAMS_v1 {
            function: func,
            grid: gridDimX..gridDimZ,
            block: blockDimX..blockDimZ,
            shared: sharedMemBytes,
            arguments: kernelParams,
            extra: extra,
        }
    );
    same_layout!(
        Kernel = runtime::cudaKernelNodeParams {
            function: func,
            grid: gridDim,
            block: blockDim,
            shared: sharedMemBytes,
            arguments: kernelParams,
            extra: extra,
        }
    );
    same_layout!(Fill = [driver::CUDA_MEMSET_NODE_PARAMS, runtime::cudaMemsetParams] {
        dst: dst,
        pitch: pitch,
        value: value,
        unit: elementSize,
        width: width,
        height: height,
    });
    same_layout!(Host = [driver::CUDA_HOST_NODE_PARAMS, runtime::cudaHostNodeParams] { function: fn_, data: userData });
    same_layout!(Allocation = [driver::CUDA_MEM_ALLOC_NODE_PARAMS_v1, runtime::cudaMemAllocNodeParams] {
        pool: poolProps.allocType..poolProps.location,
        rest_of_pool: poolProps.win32SecurityAttributes..poolProps.reserved,
        accesses: accessDescs,
        access_count: accessDescCount,
        size: bytesize,
        addr: dptr,
    });
    same_layout!(Conditional => [driver::CUDA_CONDITIONAL_NODE_PARAMS, runtime::cudaConditionalNodeParams] {
        handle: handle,
        kind: type_,
        bodies: size,
        graphs: phGraph_out,
    });
}

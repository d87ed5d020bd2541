//! Graphs as a whole: making, copying, launching, and what they keep alive.

use crate::constants as c;
use crate::gpu::boundary::{Api, In, Out, Text};
use crate::gpu::work::{self, HostFunction};
use crate::gpu::{Error, Result};
use crate::layout::all::cudaGraphInstantiateParams_st as instantiate_params;
use core::ffi::c_void;

/// A new graph.
pub fn create(out: Out<u64>, flags: u32) -> Result {
    out.check()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.set(work::work().create_graph())
}

/// A copy of a graph.
pub fn copy(out: Out<u64>, graph: u64) -> Result {
    out.check()?;
    out.set(work::work().clone_graph(graph)?)
}

/// Launches an executable graph.
pub fn launch(api: Api, exec: u64, stream: u64) -> Result {
    api.needs_context()?;
    work::launch_graph(exec, stream)
}

/// There is nothing to upload.
pub fn upload(exec: u64, stream: u64) -> Result {
    let mut work = work::work();
    work.exec(exec)?;
    work.stream(stream).map(|_| ())
}

/// A handle by which kernels set what a conditional node depends on.
pub fn create_condition(out: Out<u64>, graph: u64) -> Result {
    out.check()?;
    work::work().graph(graph).map(|_| ())?;
    out.set(work::work().new_id())
}

/// Destroys a graph.
pub fn destroy(graph: u64) -> Result {
    let destructors = work::work().destroy_graph(graph)?;
    destructors.call();
    Ok(())
}

/// All flags of an instantiation: freeing on launch, uploading, device launch, node priorities.
const INSTANTIATE: u64 = 15;

/// An executable graph.
pub fn instantiate(out: Out<u64>, graph: u64, flags: u64) -> Result {
    out.check()?;
    if flags & !INSTANTIATE != 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.set(work::work().instantiate(graph, flags)?)
}

/// The same, with parameters in a record, where the outcome goes as well.
pub fn instantiate_with(out: Out<u64>, graph: u64, params: Out<u8>) -> Result {
    let flags = params.at::<u64>(instantiate_params::flags.offset).get()?;
    params.at::<u64>(instantiate_params::errNode_out.offset).set(0)?;
    params.at::<i32>(instantiate_params::result_out.offset).set(0)?;
    instantiate(out, graph, flags)
}

/// Destroys an executable graph.
pub fn destroy_exec(exec: u64) -> Result {
    let destructors = work::work().destroy_exec(exec)?;
    destructors.call();
    Ok(())
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UpdateResult {
    result: i32,
    node: u64,
    from: u64,
}

/// Gives an executable graph the parameters of a graph of the same shape.
pub fn update_exec(exec: u64, graph: u64, out: Out<UpdateResult>) -> Result {
    let (same_shape, destructors) = work::work().update_exec(exec, graph)?;
    destructors.call();
    let result = if same_shape {
        c::cudaGraphExecUpdateSuccess
    } else {
        c::cudaGraphExecUpdateErrorTopologyChanged
    };
    out.give(UpdateResult { result, node: 0, from: 0 });
    if same_shape { Ok(()) } else { Err(Error::GRAPH_EXEC_UPDATE_FAILURE) }
}

/// Gives a list the way the graph queries do: without a place for it, only its length.
pub fn give_list(list: &[u64], out: Out<u64>, count: Out<usize>) -> Result {
    if out.is_null() {
        return count.set(list.len());
    }
    let room = count.get()?;
    // Places beyond the end are null.
    let padded = list.iter().copied().chain(core::iter::repeat(0)).take(room);
    out.fill(&padded.collect::<Vec<u64>>(), room);
    count.set(room.min(list.len()))
}

/// Writes a graph as a drawing for Graphviz.
pub fn debug_print(graph: u64, path: Text) -> Result {
    let text = work::work().dot(graph)?;
    std::fs::write(path.string()?, text).map_err(|_| Error::INVALID_VALUE)
}

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which must be set.
const NO_DESTRUCTOR_SYNC: u32 = 1;

/// Something of the program's that graphs keep alive.
pub fn create_object(
    out: Out<u64>,
    data: *mut c_void,
    destroy: Option<HostFunction>,
    references: u32,
    flags: u32,
) -> Result {
    out.check()?;
    let destroy = destroy.ok_or(Error::INVALID_VALUE)?;
    if flags != NO_DESTRUCTOR_SYNC {
        return Err(Error::INVALID_VALUE);
    }
    out.set(work::work().create_object(destroy, data.expose_provenance(), references)?)
}

/// Gives references back; the last one takes the object with it.
pub fn release_object(object: u64, count: u32) -> Result {
    let destructors = work::work().release_object(object, count)?;
    destructors.call();
    Ok(())
}

/// `CU_GRAPH_USER_OBJECT_MOVE`: the caller's references become the graph's.
const MOVE: u32 = 1;

/// References of a graph.
pub fn retain_for(graph: u64, object: u64, count: u32, flags: u32) -> Result {
    if flags & !MOVE != 0 {
        return Err(Error::INVALID_VALUE);
    }
    work::work().graph_retains(graph, object, count, flags == MOVE)
}

/// Gives a graph's references back.
pub fn release_for(graph: u64, object: u64, count: u32) -> Result {
    let destructors = work::work().graph_releases(graph, object, count)?;
    destructors.call();
    Ok(())
}

/// Adds or removes the edges of a list.
pub fn change_edges(from: In<u64>, to: In<u64>, count: usize, add: bool) -> Result {
    let edges: Vec<(u64, u64)> = from.list(count).into_iter().zip(to.list(count)).collect();
    work::work().change_edges(&edges, add)
}

/// Gives the edges of a graph, as two lists.
pub fn give_edges(graph: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) -> Result {
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

#[cfg(test)]
mod layouts {
    use cudarc::{driver::sys as driver, runtime::sys as runtime};
    use memtrace_layouts::same_layout;

    use super::UpdateResult;

    same_layout!(UpdateResult = [driver::CUgraphExecUpdateResultInfo, runtime::cudaGraphExecUpdateResultInfo] {
        result: result,
        node: errorNode,
        from: errorFromNode,
    });
}

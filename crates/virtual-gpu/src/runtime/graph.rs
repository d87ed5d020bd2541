//! Graphs as a whole: making, copying, launching, and what they keep alive.

use super::Code;
use crate::constants as c;
use crate::gpu::border::{In, Out, Text, runtime};
use crate::gpu::work::{self, HostFunction};
use crate::gpu::{Error, Result};
use crate::layout::cuda13::cudaGraphInstantiateParams_st as instantiate_params;
use core::ffi::c_void;

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphCreate(out: Out<u64>, flags: u32) -> Code {
    runtime(|| {
        out.check()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        out.set(work::work().create_graph())
    })
}

pub(crate) fn destroy(graph: u64) -> Result {
    let due = work::work().destroy_graph(graph)?;
    due.call();
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphDestroy(graph: u64) -> Code {
    runtime(|| destroy(graph))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphClone(out: Out<u64>, graph: u64) -> Code {
    runtime(|| {
        out.check()?;
        out.set(work::work().clone_graph(graph)?)
    })
}

/// All flags of an instantiation: freeing on launch, uploading, device launch, node priorities.
const INSTANTIATE: u64 = 15;

pub(crate) fn instantiate(out: Out<u64>, graph: u64, flags: u64) -> Result {
    out.check()?;
    if flags & !INSTANTIATE != 0 {
        return Err(Error::INVALID_VALUE);
    }
    out.set(work::work().instantiate(graph, flags)?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphInstantiate(out: Out<u64>, graph: u64, flags: u64) -> Code {
    runtime(|| instantiate(out, graph, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphInstantiateWithFlags(out: Out<u64>, graph: u64, flags: u64) -> Code {
    runtime(|| instantiate(out, graph, flags))
}

pub(crate) fn instantiate_with(out: Out<u64>, graph: u64, params: Out<u8>) -> Result {
    let flags = params.at::<u64>(instantiate_params::flags.offset).get()?;
    params.at::<u64>(instantiate_params::errNode_out.offset).set(0)?;
    params.at::<i32>(instantiate_params::result_out.offset).set(0)?;
    instantiate(out, graph, flags)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphInstantiateWithParams(
    out: Out<u64>,
    graph: u64,
    params: Out<u8>,
) -> Code {
    runtime(|| instantiate_with(out, graph, params))
}

pub(crate) fn destroy_exec(exec: u64) -> Result {
    let due = work::work().destroy_exec(exec)?;
    due.call();
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecDestroy(exec: u64) -> Code {
    runtime(|| destroy_exec(exec))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecGetFlags(exec: u64, flags: Out<u64>) -> Code {
    runtime(|| flags.set(work::work().exec(exec)?.flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecGetId(exec: u64, id: Out<u32>) -> Code {
    runtime(|| id.set(work::work().exec(exec)?.id as u32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphLaunch(exec: u64, stream: u64) -> Code {
    runtime(|| work::launch_graph(exec, stream))
}

/// There is nothing to upload.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphUpload(exec: u64, stream: u64) -> Code {
    runtime(|| {
        let mut work = work::work();
        work.exec(exec)?;
        work.stream(stream).map(|_| ())
    })
}

/// `cudaGraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UpdateResult {
    result: i32,
    node: u64,
    from: u64,
}

pub(crate) fn update_exec(exec: u64, graph: u64, out: Out<UpdateResult>) -> Result {
    let (same_shape, due) = work::work().update_exec(exec, graph)?;
    due.call();
    let result = if same_shape {
        c::cudaGraphExecUpdateSuccess
    } else {
        c::cudaGraphExecUpdateErrorTopologyChanged
    };
    out.give(UpdateResult { result, node: 0, from: 0 });
    if same_shape { Ok(()) } else { Err(Error::GRAPH_EXEC_UPDATE_FAILURE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecUpdate(exec: u64, graph: u64, out: Out<UpdateResult>) -> Code {
    runtime(|| update_exec(exec, graph, out))
}

/// Gives a list the way the graph queries do: without a place for it, only its length.
pub(crate) fn give_list(list: &[u64], out: Out<u64>, count: Out<usize>) -> Result {
    if out.is_null() {
        return count.set(list.len());
    }
    let room = count.get()?;
    // Places beyond the end are null.
    let padded = list.iter().copied().chain(core::iter::repeat(0)).take(room);
    out.fill(&padded.collect::<Vec<u64>>(), room);
    count.set(room.min(list.len()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> Code {
    runtime(|| give_list(&work::work().graph_nodes(graph)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> Code {
    runtime(|| give_list(&work::work().graph_roots(graph)?, nodes, count))
}

pub(crate) fn debug_print(graph: u64, path: Text) -> Result {
    let text = work::work().dot(graph)?;
    std::fs::write(path.string()?, text).map_err(|_| Error::INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphDebugDotPrint(graph: u64, path: Text, _flags: u32) -> Code {
    runtime(|| debug_print(graph, path))
}

/// `cudaUserObjectNoDestructorSync`, which must be set.
const NO_DESTRUCTOR_SYNC: u32 = 1;

pub(crate) fn create_object(
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

#[unsafe(no_mangle)]
pub extern "C" fn cudaUserObjectCreate(
    out: Out<u64>,
    data: *mut c_void,
    destroy: Option<HostFunction>,
    references: u32,
    flags: u32,
) -> Code {
    runtime(|| create_object(out, data, destroy, references, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaUserObjectRetain(object: u64, count: u32) -> Code {
    runtime(|| work::work().retain_object(object, count))
}

pub(crate) fn release_object(object: u64, count: u32) -> Result {
    let due = work::work().release_object(object, count)?;
    due.call();
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaUserObjectRelease(object: u64, count: u32) -> Code {
    runtime(|| release_object(object, count))
}

/// `cudaGraphUserObjectMove`: the caller's references become the graph's.
const MOVE: u32 = 1;

pub(crate) fn retain_for(graph: u64, object: u64, count: u32, flags: u32) -> Result {
    if flags & !MOVE != 0 {
        return Err(Error::INVALID_VALUE);
    }
    work::work().graph_retains(graph, object, count, flags == MOVE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphRetainUserObject(
    graph: u64,
    object: u64,
    count: u32,
    flags: u32,
) -> Code {
    runtime(|| retain_for(graph, object, count, flags))
}

pub(crate) fn release_for(graph: u64, object: u64, count: u32) -> Result {
    let due = work::work().graph_releases(graph, object, count)?;
    due.call();
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphReleaseUserObject(graph: u64, object: u64, count: u32) -> Code {
    runtime(|| release_for(graph, object, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphConditionalHandleCreate(
    out: Out<u64>,
    graph: u64,
    _default: u32,
    _flags: u32,
) -> Code {
    runtime(|| {
        out.check()?;
        work::work().graph(graph).map(|_| ())?;
        out.set(work::work().new_id())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphConditionalHandleCreate_v2(
    out: Out<u64>,
    graph: u64,
    _context: u64,
    _default: u32,
    _flags: u32,
) -> Code {
    runtime(|| {
        out.check()?;
        work::work().graph(graph).map(|_| ())?;
        out.set(work::work().new_id())
    })
}

/// A node that is switched off would still be done, so switching is not offered.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphNodeGetEnabled(_exec: u64, node: u64, enabled: Out<u32>) -> Code {
    runtime(|| {
        work::work().action(node).map(|_| ())?;
        enabled.set(1)
    })
}

/// The nodes of an edge list.
pub(crate) fn edges(from: In<u64>, to: In<u64>, count: usize) -> Vec<(u64, u64)> {
    from.list(count).into_iter().zip(to.list(count)).collect()
}

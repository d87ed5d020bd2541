//! Graphs as a whole.

use super::Code;
use crate::gpu::Error;
use crate::gpu::border::{In, Out, Text, driver};
use crate::gpu::work::{self, HostFunction};
use crate::runtime::graph as runtime;
use core::ffi::c_void;

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphCreate(out: Out<u64>, flags: u32) -> Code {
    driver(|| {
        out.check()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        out.set(work::work().create_graph())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: u64) -> Code {
    driver(|| runtime::destroy(graph))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphClone(out: Out<u64>, graph: u64) -> Code {
    driver(|| {
        out.check()?;
        out.set(work::work().clone_graph(graph)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, flags: u64) -> Code {
    driver(|| runtime::instantiate(out, graph, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithParams(out: Out<u64>, graph: u64, params: Out<u8>) -> Code {
    driver(|| runtime::instantiate_with(out, graph, params))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(exec: u64) -> Code {
    driver(|| runtime::destroy_exec(exec))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecGetFlags(exec: u64, flags: Out<u64>) -> Code {
    driver(|| flags.set(work::work().exec(exec)?.flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecGetId(exec: u64, id: Out<u32>) -> Code {
    driver(|| id.set(work::work().exec(exec)?.id as u32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(exec: u64, stream: u64) -> Code {
    driver(|| {
        super::current()?;
        work::launch_graph(exec, stream)
    })
}

/// There is nothing to upload.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(exec: u64, stream: u64) -> Code {
    driver(|| {
        let mut work = work::work();
        work.exec(exec)?;
        work.stream(stream).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecUpdate_v2(
    exec: u64,
    graph: u64,
    out: Out<runtime::UpdateResult>,
) -> Code {
    driver(|| runtime::update_exec(exec, graph, out))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> Code {
    driver(|| runtime::give_list(&work::work().graph_nodes(graph)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) -> Code {
    driver(|| runtime::give_list(&work::work().graph_roots(graph)?, nodes, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDebugDotPrint(graph: u64, path: Text, _flags: u32) -> Code {
    driver(|| runtime::debug_print(graph, path))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuUserObjectCreate(
    out: Out<u64>,
    data: *mut c_void,
    destroy: Option<HostFunction>,
    references: u32,
    flags: u32,
) -> Code {
    driver(|| runtime::create_object(out, data, destroy, references, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuUserObjectRetain(object: u64, count: u32) -> Code {
    driver(|| work::work().retain_object(object, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuUserObjectRelease(object: u64, count: u32) -> Code {
    driver(|| runtime::release_object(object, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32) -> Code {
    driver(|| runtime::retain_for(graph, object, count, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphReleaseUserObject(graph: u64, object: u64, count: u32) -> Code {
    driver(|| runtime::release_for(graph, object, count))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphConditionalHandleCreate(
    out: Out<u64>,
    graph: u64,
    _context: u64,
    _default: u32,
    _flags: u32,
) -> Code {
    driver(|| {
        out.check()?;
        work::work().graph(graph).map(|_| ())?;
        out.set(work::work().new_id())
    })
}

/// The edges of a list.
fn change(from: In<u64>, to: In<u64>, count: usize, add: bool) -> Code {
    driver(|| work::work().change_edges(&runtime::edges(from, to, count), add))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddDependencies(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
) -> Code {
    change(from, to, count, true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphAddDependencies_v2(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    _edges: u64,
    count: usize,
) -> Code {
    change(from, to, count, true)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphRemoveDependencies(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
) -> Code {
    change(from, to, count, false)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphRemoveDependencies_v2(
    _graph: u64,
    from: In<u64>,
    to: In<u64>,
    _edges: u64,
    count: usize,
) -> Code {
    change(from, to, count, false)
}

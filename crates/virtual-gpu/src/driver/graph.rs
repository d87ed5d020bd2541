//! Graphs as a whole.

use crate::gpu::boundary::{In, Out, Text};
use crate::gpu::call::graph::{self, UpdateResult, give_list};
use crate::gpu::work::{self, HostFunction};
use core::ffi::c_void;

entries! {
    fn cuGraphCreate(out: Out<u64>, flags: u32) => |_| graph::create(out, flags);
    fn cuGraphDestroy(graph: u64) => |_| graph::destroy(graph);
    fn cuGraphClone(out: Out<u64>, graph: u64) => |_| graph::copy(out, graph);
    fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, flags: u64) =>
        |_| graph::instantiate(out, graph, flags);
    fn cuGraphInstantiateWithParams(out: Out<u64>, graph: u64, params: Out<u8>) =>
        |_| graph::instantiate_with(out, graph, params);
    fn cuGraphExecDestroy(exec: u64) => |_| graph::destroy_exec(exec);
    fn cuGraphExecGetFlags(exec: u64, flags: Out<u64>) =>
        |_| flags.set(work::work().exec(exec)?.flags);
    fn cuGraphExecGetId(exec: u64, id: Out<u32>) =>
        |_| id.set(work::work().exec(exec)?.id as u32);
    fn cuGraphLaunch(exec: u64, stream: u64) => |api| graph::launch(api, exec, stream);
    fn cuGraphUpload(exec: u64, stream: u64) => |_| graph::upload(exec, stream);
    fn cuGraphExecUpdate_v2(exec: u64, graph: u64, out: Out<UpdateResult>) =>
        |_| graph::update_exec(exec, graph, out);
    fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) =>
        |_| give_list(&work::work().graph_nodes(graph)?, nodes, count);
    fn cuGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) =>
        |_| give_list(&work::work().graph_roots(graph)?, nodes, count);
    fn cuGraphDebugDotPrint(graph: u64, path: Text, _flags: u32) =>
        |_| graph::debug_print(graph, path);

    fn cuUserObjectCreate(
        out: Out<u64>,
        data: *mut c_void,
        destroy: Option<HostFunction>,
        references: u32,
        flags: u32,
    ) => |_| graph::create_object(out, data, destroy, references, flags);
    fn cuUserObjectRetain(object: u64, count: u32) =>
        |_| work::work().retain_object(object, count);
    fn cuUserObjectRelease(object: u64, count: u32) =>
        |_| graph::release_object(object, count);
    fn cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32) =>
        |_| graph::retain_for(graph, object, count, flags);
    fn cuGraphReleaseUserObject(graph: u64, object: u64, count: u32) =>
        |_| graph::release_for(graph, object, count);
    // The context, the value to begin with, and flags come behind.
    fn cuGraphConditionalHandleCreate(out: Out<u64>, graph: u64) =>
        |_| graph::create_condition(out, graph);

    fn cuGraphAddDependencies(_graph: u64, from: In<u64>, to: In<u64>, count: usize) =>
        |_| graph::change_edges(from, to, count, true);
    fn cuGraphAddDependencies_v2(
        _graph: u64,
        from: In<u64>,
        to: In<u64>,
        _edges: u64,
        count: usize,
    ) => |_| graph::change_edges(from, to, count, true);
    fn cuGraphRemoveDependencies(_graph: u64, from: In<u64>, to: In<u64>, count: usize) =>
        |_| graph::change_edges(from, to, count, false);
    fn cuGraphRemoveDependencies_v2(
        _graph: u64,
        from: In<u64>,
        to: In<u64>,
        _edges: u64,
        count: usize,
    ) => |_| graph::change_edges(from, to, count, false);
    fn cuGraphGetEdges(graph: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) =>
        |_| graph::give_edges(graph, from, to, count);
    fn cuGraphGetEdges_v2(
        graph: u64,
        from: Out<u64>,
        to: Out<u64>,
        _edges: u64,
        count: Out<usize>,
    ) => |_| graph::give_edges(graph, from, to, count);
}

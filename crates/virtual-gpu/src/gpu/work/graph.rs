//! Graphs: nodes, what each depends on, and executable copies.
//!
//! A graph is a list of nodes in the order of their making; each names the nodes before it. An
//! executable graph owns a copy, and launching it does the actions of all nodes in that order.
//! Child graphs and the bodies of conditional nodes are graphs that their node owns.

use super::object::Destructors;
use super::{Action, Work, work};
use crate::gpu::{Error, Result, context, memory};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

/// Addresses that belong to a graph and its copies; the last of them gives them up.
pub struct GraphMemory(u64);

impl Drop for GraphMemory {
    fn drop(&mut self) {
        // The only failure is that a device reset has taken it already.
        let _ = memory::ledger().disown_graph_range(self.0);
    }
}

/// A node.
#[derive(Clone)]
pub struct Node {
    handle: u64,
    /// The node that this is a copy of, in the graph that was copied.
    origin: u64,
    action: Action,
    before: Vec<u64>,
}

/// A graph.
#[derive(Default)]
pub struct Graph {
    /// Ascending by handle.
    nodes: Vec<Node>,
    pub(super) objects: Vec<(u64, u32)>,
    memory: Vec<Arc<GraphMemory>>,
}

/// An executable graph.
pub struct Exec {
    graph: u64,
    /// The actions of all nodes, children included, once they have been asked for.
    actions: Option<Arc<[Action]>>,
    /// Instantiation flags.
    pub flags: u64,
    /// Different from that of every other graph.
    pub id: u64,
}

impl Graph {
    fn place(&self, node: u64) -> Option<usize> {
        self.nodes.binary_search_by_key(&node, |node| node.handle).ok()
    }

    /// All of `targets` are among `from` and what they depend on.
    pub(super) fn reaches(&self, from: &[u64], targets: &[u64]) -> bool {
        let mut missing: HashSet<u64> = targets.iter().copied().collect();
        let mut seen: HashSet<u64> = from.iter().copied().collect();
        let mut next: Vec<u64> = from.to_vec();
        while let Some(node) = next.pop() {
            missing.remove(&node);
            if missing.is_empty() {
                break;
            }
            if let Some(place) = self.place(node) {
                next.extend(self.nodes[place].before.iter().filter(|node| seen.insert(**node)));
            }
        }
        missing.is_empty()
    }
}

/// `cudaGraphLaunch`.
pub fn launch(exec: u64, stream: u64) -> Result {
    context::bind()?;
    let actions = {
        let mut work = work();
        if work.stream(stream)?.capture.is_some() {
            let graph = work.exec(exec)?.graph;
            let copy = work.clone_graph(graph)?;
            work.add_captured(stream, Action::Child(copy))?;
            return Ok(());
        }
        if work.capturing > 0 {
            work.refuse_implicit(stream)?;
        }
        work.actions(exec)?
    };
    actions.iter().try_for_each(Action::perform)
}

impl Work {
    /// A new, empty graph.
    pub fn create_graph(&mut self) -> u64 {
        self.graphs.insert(Graph::default())
    }

    /// The graph behind a handle.
    pub fn graph(&self, graph: u64) -> Result<&Graph> {
        self.graphs.get(graph).ok_or(Error::INVALID_VALUE)
    }

    pub(super) fn graph_mut(&mut self, graph: u64) -> Result<&mut Graph> {
        self.graphs.get_mut(graph).ok_or(Error::INVALID_VALUE)
    }

    /// Adds a node behind others of the same graph.
    pub fn add_node(&mut self, graph: u64, action: Action, before: Vec<u64>) -> Result<u64> {
        let found = self.graph(graph)?;
        if before.iter().any(|node| found.place(*node).is_none()) {
            return Err(Error::INVALID_VALUE);
        }
        if let Action::Child(child) = action {
            self.graph(child)?;
        }
        let handle = self.nodes.insert(graph);
        let node = Node { handle, origin: handle, action, before };
        self.graph_mut(graph)?.nodes.push(node);
        Ok(handle)
    }

    /// Adds memory that exists while the graph runs, from this node on. Gives its address.
    pub fn add_memory(
        &mut self,
        graph: u64,
        device: usize,
        size: u64,
        before: Vec<u64>,
    ) -> Result<(u64, u64)> {
        self.graph(graph)?;
        let addr = memory::ledger().allocate_graph_range(device, size)?;
        let owned = Arc::new(GraphMemory(addr));
        let node = self.add_node(graph, Action::Allocate(addr), before)?;
        self.graph_mut(graph)?.memory.push(owned);
        Ok((node, addr))
    }

    /// The same for a capturing stream.
    pub fn capture_memory(&mut self, stream: u64, device: usize, size: u64) -> Result<u64> {
        let info = self.capture_info(stream)?.ok_or(Error::ILLEGAL_STATE)?;
        let before = self.stream(stream)?.frontier.clone();
        let capture = self.stream(stream)?.capture.ok_or(Error::ILLEGAL_STATE)?;
        self.active(capture)?;
        let (node, addr) = self.add_memory(info.graph, device, size, before)?;
        self.stream(stream)?.set_frontier(vec![node]);
        Ok(addr)
    }

    fn node(&self, node: u64) -> Result<&Node> {
        let graph = *self.nodes.get(node).ok_or(Error::INVALID_VALUE)?;
        let graph = self.graph(graph)?;
        graph.place(node).map(|place| &graph.nodes[place]).ok_or(Error::INVALID_VALUE)
    }

    fn node_mut(&mut self, node: u64) -> Result<&mut Node> {
        let graph = *self.nodes.get(node).ok_or(Error::INVALID_VALUE)?;
        let graph = self.graph_mut(graph)?;
        let place = graph.place(node).ok_or(Error::INVALID_VALUE)?;
        Ok(&mut graph.nodes[place])
    }

    /// What a node does.
    pub fn action(&self, node: u64) -> Result<&Action> {
        self.node(node).map(|node| &node.action)
    }

    /// Gives a node other parameters of the same kind.
    pub fn set_action(&mut self, node: u64, action: Action) -> Result {
        let node = self.node_mut(node)?;
        if node.action.node_type() != action.node_type() {
            return Err(Error::INVALID_VALUE);
        }
        node.action = action;
        Ok(())
    }

    /// The same for a node's copy in an executable graph.
    pub fn set_exec_action(&mut self, exec: u64, node: u64, action: Action) -> Result {
        let graph = self.exec(exec)?.graph;
        let copy = self.node_in_copy(node, graph)?;
        self.set_action(copy, action)?;
        self.exec_mut(exec)?.actions = None;
        Ok(())
    }

    /// `cudaGraphNodeFindInClone`.
    pub fn node_in_copy(&self, node: u64, copy: u64) -> Result<u64> {
        let mut nodes = self.graph(copy)?.nodes.iter();
        nodes.find(|copy| copy.origin == node).map(|copy| copy.handle).ok_or(Error::INVALID_VALUE)
    }

    /// All nodes of a graph.
    pub fn graph_nodes(&self, graph: u64) -> Result<Vec<u64>> {
        Ok(self.graph(graph)?.nodes.iter().map(|node| node.handle).collect())
    }

    /// The nodes that depend on nothing.
    pub fn graph_roots(&self, graph: u64) -> Result<Vec<u64>> {
        let nodes = self.graph(graph)?.nodes.iter();
        Ok(nodes.filter(|node| node.before.is_empty()).map(|node| node.handle).collect())
    }

    /// All edges of a graph, as (from, to).
    pub fn graph_edges(&self, graph: u64) -> Result<Vec<(u64, u64)>> {
        let nodes = self.graph(graph)?.nodes.iter();
        Ok(nodes.flat_map(|to| to.before.iter().map(move |from| (*from, to.handle))).collect())
    }

    /// The nodes that a node depends on.
    pub fn nodes_before(&self, node: u64) -> Result<Vec<u64>> {
        self.node(node).map(|node| node.before.clone())
    }

    /// The nodes that depend on a node.
    pub fn nodes_behind(&self, node: u64) -> Result<Vec<u64>> {
        let graph = *self.nodes.get(node).ok_or(Error::INVALID_VALUE)?;
        let edges = self.graph_edges(graph)?;
        Ok(edges.into_iter().filter(|edge| edge.0 == node).map(|edge| edge.1).collect())
    }

    /// `cudaGraphAddDependencies`, `cudaGraphRemoveDependencies`.
    pub fn change_edges(&mut self, edges: &[(u64, u64)], add: bool) -> Result {
        for (from, to) in edges {
            if self.nodes.get(*from) != self.nodes.get(*to) {
                return Err(Error::INVALID_VALUE);
            }
            let before = &mut self.node_mut(*to)?.before;
            match (add, before.iter().position(|node| node == from)) {
                (true, None) => before.push(*from),
                (false, Some(place)) => {
                    before.remove(place);
                }
                _ => return Err(Error::INVALID_VALUE),
            }
        }
        Ok(())
    }

    /// `cudaGraphDestroyNode`.
    pub fn destroy_node(&mut self, node: u64) -> Result<Destructors> {
        let graph = *self.nodes.get(node).ok_or(Error::INVALID_VALUE)?;
        let found = self.graph_mut(graph)?;
        let place = found.place(node).ok_or(Error::INVALID_VALUE)?;
        let gone = found.nodes.remove(place);
        for other in &mut found.nodes {
            other.before.retain(|before| *before != node);
        }
        self.nodes.remove(node);
        Ok(self.destroy_owned(&gone.action))
    }

    fn destroy_owned(&mut self, action: &Action) -> Destructors {
        let owned = match action {
            Action::Child(graph) => core::slice::from_ref(graph),
            Action::Conditional(bodies) => bodies,
            _ => &[],
        };
        owned.iter().fold(Destructors::default(), |destructors, graph| {
            destructors.and(self.destroy_graph(*graph).unwrap_or_default())
        })
    }

    /// `cudaGraphDestroy`.
    pub fn destroy_graph(&mut self, graph: u64) -> Result<Destructors> {
        let gone = self.graphs.remove(graph).ok_or(Error::INVALID_VALUE)?;
        let mut destructors = Destructors::default();
        for node in &gone.nodes {
            self.nodes.remove(node.handle);
            destructors = destructors.and(self.destroy_owned(&node.action));
        }
        for (object, count) in gone.objects {
            destructors = destructors.and(self.release_object(object, count).unwrap_or_default());
        }
        Ok(destructors)
    }

    fn clone_action(&mut self, action: &Action) -> Result<Action> {
        Ok(match action {
            Action::Child(graph) => Action::Child(self.clone_graph(*graph)?),
            Action::Conditional(bodies) => Action::Conditional(
                bodies.iter().map(|body| self.clone_graph(*body)).collect::<Result<_>>()?,
            ),
            other => other.clone(),
        })
    }

    /// `cudaGraphClone`.
    pub fn clone_graph(&mut self, graph: u64) -> Result<u64> {
        let found = self.graph(graph)?;
        let (nodes, objects) = (found.nodes.clone(), found.objects.clone());
        let memory = found.memory.clone();
        let copy = self.graphs.insert(Graph { memory, ..Graph::default() });
        let mut copies: Vec<(u64, u64)> = Vec::with_capacity(nodes.len());
        for node in nodes {
            let handle = self.nodes.insert(copy);
            copies.push((node.handle, handle));
            let action = self.clone_action(&node.action)?;
            let node = Node { handle, origin: node.handle, action, before: node.before };
            self.graph_mut(copy)?.nodes.push(node);
        }
        // Both columns ascend, as handles do.
        for node in &mut self.graph_mut(copy)?.nodes {
            for before in &mut node.before {
                if let Ok(place) = copies.binary_search_by_key(before, |pair| pair.0) {
                    *before = copies[place].1;
                }
            }
        }
        for (object, count) in objects {
            self.retain_object(object, count)?;
            self.graph_mut(copy)?.objects.push((object, count));
        }
        Ok(copy)
    }

    fn collect_actions(&self, graph: u64, all: &mut Vec<Action>) -> Result {
        for node in &self.graph(graph)?.nodes {
            all.push(node.action.clone());
            match &node.action {
                Action::Child(child) => self.collect_actions(*child, all)?,
                Action::Conditional(bodies) => {
                    if let Some(body) = bodies.first() {
                        self.collect_actions(*body, all)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn actions(&mut self, exec: u64) -> Result<Arc<[Action]>> {
        let found = self.exec(exec)?;
        if let Some(actions) = &found.actions {
            return Ok(Arc::clone(actions));
        }
        let mut all = Vec::new();
        self.collect_actions(found.graph, &mut all)?;
        let all: Arc<[Action]> = all.into();
        self.exec_mut(exec)?.actions = Some(Arc::clone(&all));
        Ok(all)
    }

    /// `cudaGraphInstantiate`.
    pub fn instantiate(&mut self, graph: u64, flags: u64) -> Result<u64> {
        let graph = self.clone_graph(graph)?;
        let id = self.issue();
        Ok(self.execs.insert(Exec { graph, actions: None, flags, id }))
    }

    /// The executable graph behind a handle.
    pub fn exec(&self, exec: u64) -> Result<&Exec> {
        self.execs.get(exec).ok_or(Error::INVALID_VALUE)
    }

    fn exec_mut(&mut self, exec: u64) -> Result<&mut Exec> {
        self.execs.get_mut(exec).ok_or(Error::INVALID_VALUE)
    }

    /// `cudaGraphExecDestroy`.
    pub fn destroy_exec(&mut self, exec: u64) -> Result<Destructors> {
        let gone = self.execs.remove(exec).ok_or(Error::INVALID_VALUE)?;
        self.destroy_graph(gone.graph)
    }

    /// `cudaGraphExecUpdate`: takes over the parameters of a graph of the same
    /// shape. False if the shape is another.
    pub fn update_exec(&mut self, exec: u64, graph: u64) -> Result<(bool, Destructors)> {
        let old = self.exec(exec)?.graph;
        let shape = |graph: &Graph| -> Vec<(i32, usize)> {
            graph.nodes.iter().map(|node| (node.action.node_type(), node.before.len())).collect()
        };
        if shape(self.graph(old)?) != shape(self.graph(graph)?) {
            return Ok((false, Destructors::default()));
        }
        let copy = self.clone_graph(graph)?;
        let found = self.exec_mut(exec)?;
        found.graph = copy;
        found.actions = None;
        Ok((true, self.destroy_graph(old)?))
    }

    /// A new conditional handle, or the id of something.
    pub fn new_id(&mut self) -> u64 {
        self.issue()
    }

    /// `cudaGraphDebugDotPrint`: the graph in the language of Graphviz.
    pub fn dot(&self, graph: u64) -> Result<String> {
        let mut text = String::from("digraph virtual_gpu {\n");
        for node in &self.graph(graph)?.nodes {
            // Writing to a string can't fail.
            let _ = writeln!(text, "  \"{:x}\" [label=\"{:?}\"];", node.handle, node.action);
            for before in &node.before {
                let _ = writeln!(text, "  \"{before:x}\" -> \"{:x}\";", node.handle);
            }
        }
        text.push_str("}\n");
        Ok(text)
    }
}

//! Capture: work of streams becomes a graph.
//!
//! A capture begins in one stream. Other streams join when they wait for an event that was recorded
//! in it, and must have been waited for in turn when it ends. What would make the host depend on
//! work that is only being written down is refused and spoils the capture.

use super::graph::Graph;
use super::{Action, NON_BLOCKING, Work, work};
use crate::gpu::{Error, Result, thread};

/// `cudaStreamCaptureMode`: who may make calls that could disturb a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Nobody.
    Global,
    /// Other threads.
    ThreadLocal,
    /// Everybody.
    Relaxed,
}

impl Mode {
    /// From the number in the headers.
    pub fn from_code(code: i32) -> Result<Self> {
        match code {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

/// `cudaStreamCaptureStatus`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// Not capturing.
    None = 0,
    /// Capturing.
    Active = 1,
    /// Capturing, but an error has spoilt it.
    Invalidated = 2,
}

/// A capture in progress.
pub struct Capture {
    id: u64,
    graph: u64,
    /// The graph was made for the capture, and goes with it if it fails.
    own_graph: bool,
    origin: u64,
    mode: Mode,
    thread: usize,
    valid: bool,
}

/// What `cudaStreamGetCaptureInfo` says of a stream that is capturing.
pub struct Info {
    /// Unique among the captures of this process.
    pub id: u64,
    /// The graph that is being made.
    pub graph: u64,
    /// Where the handles of the nodes lie that the next node will depend on.
    /// Good until the stream is used again.
    pub nodes: *const u64,
    /// As many edges, all without data.
    pub edges: *const u64,
    /// How many.
    pub count: usize,
}

/// What calls do first that could disturb a capture: allocations, queries, synchronous
/// copies. The mode of the thread and of the captures decide; a refused call spoils
/// the captures that it would disturb.
pub fn guard() -> Result {
    let mut work = work();
    if work.capturing == 0 {
        return Ok(());
    }
    let own = thread::id();
    let careful = match Mode::from_code(thread::with(|thread| thread.capture_mode.get()))? {
        Mode::Relaxed => return Ok(()),
        mode => mode,
    };
    let mut refused = false;
    for capture in work.captures.values_mut() {
        let mine = capture.thread == own && capture.mode != Mode::Relaxed;
        let global = careful == Mode::Global && capture.mode == Mode::Global;
        if mine || global {
            capture.valid = false;
            refused = true;
        }
    }
    if refused { Err(Error::CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// `cudaStreamEndCapture`: the graph, or why there is none.
pub fn end_capture(stream: u64) -> Result<u64> {
    let mut work = work();
    let ended = work.end_capture(stream);
    let destructors = core::mem::take(&mut work.destructors);
    drop(work);
    destructors.call();
    ended
}

impl Work {
    /// Err if the capture has been spoilt.
    pub(super) fn active(&self, capture: u64) -> Result {
        match self.captures.get(capture) {
            Some(found) if found.valid => Ok(()),
            _ => Err(Error::CAPTURE_INVALIDATED),
        }
    }

    pub(super) fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(capture) {
            capture.valid = false;
        }
    }

    /// The legacy stream waits for all blocking streams, so it can't be used while one of them
    /// captures.
    pub(super) fn refuse_implicit(&mut self, stream: u64) -> Result {
        let found = self.stream(stream)?;
        let (device, legacy) = (found.device, stream <= super::LEGACY);
        if !legacy {
            return Ok(());
        }
        let blocking =
            |stream: &super::Stream| stream.device == device && stream.flags & NON_BLOCKING == 0;
        let spoilt: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, stream)| blocking(stream))
            .filter_map(|(_, stream)| stream.capture)
            .collect();
        for capture in &spoilt {
            self.invalidate(*capture);
        }
        if spoilt.is_empty() { Ok(()) } else { Err(Error::CAPTURE_IMPLICIT) }
    }

    /// A call that can't be made on a capturing stream, and spoils the capture.
    pub fn refuse_while_capturing(&mut self, stream: u64) -> Result {
        if let Some(capture) = self.stream(stream)?.capture {
            self.invalidate(capture);
            return Err(Error::CAPTURE_UNSUPPORTED);
        }
        if self.capturing > 0 {
            self.refuse_implicit(stream)?;
        }
        Ok(())
    }

    /// `cudaStreamBeginCapture`, into a new graph or into one that there is.
    pub fn begin_capture(
        &mut self,
        stream: u64,
        mode: Mode,
        into: Option<(u64, Vec<u64>)>,
    ) -> Result {
        if stream <= super::LEGACY {
            return Err(Error::CAPTURE_UNSUPPORTED);
        }
        if self.stream(stream)?.capture.is_some() {
            return Err(Error::ILLEGAL_STATE);
        }
        let own_graph = into.is_none();
        let (graph, nodes) = match into {
            Some((graph, nodes)) => {
                self.graph(graph)?;
                (graph, nodes)
            }
            None => (self.graphs.insert(Graph::default()), Vec::new()),
        };
        let id = self.issue();
        let thread = thread::id();
        let (origin, valid) = (stream, true);
        let capture =
            self.captures.insert(Capture { id, graph, own_graph, origin, mode, thread, valid });
        self.capturing += 1;
        let found = self.stream(stream)?;
        found.capture = Some(capture);
        found.set_frontier(nodes);
        Ok(())
    }

    /// A stream is drawn into a capture.
    pub(super) fn join(&mut self, stream: u64, capture: u64, nodes: Vec<u64>) -> Result {
        self.active(capture)?;
        if stream <= super::LEGACY {
            self.invalidate(capture);
            return Err(Error::CAPTURE_IMPLICIT);
        }
        let found = self.stream(stream)?;
        found.capture = Some(capture);
        found.set_frontier(nodes);
        Ok(())
    }

    /// Work on a capturing stream becomes a node.
    pub(super) fn add_captured(&mut self, stream: u64, action: Action) -> Result<u64> {
        let found = self.stream(stream)?;
        let capture = found.capture.ok_or(Error::ILLEGAL_STATE)?;
        let before = found.frontier.clone();
        self.active(capture)?;
        let graph = self.captures.get(capture).ok_or(Error::ILLEGAL_STATE)?.graph;
        let node = self.add_node(graph, action, before)?;
        self.stream(stream)?.set_frontier(vec![node]);
        Ok(node)
    }

    fn leave_capture(&mut self, capture: u64) {
        let per_thread = self.defaults.iter_mut().flatten();
        for stream in self.streams.values_mut().chain(per_thread) {
            if stream.capture == Some(capture) {
                stream.capture = None;
                stream.set_frontier(Vec::new());
            }
        }
    }

    /// Nothing that was drawn in has been left hanging: all of it lies before the origin's end.
    fn joined(&self, capture: u64, origin: u64, graph: u64) -> bool {
        let mut ends = Vec::new();
        let mut last = Vec::new();
        let per_thread = self.defaults.iter().map(|pair| (super::PER_THREAD, &pair[1]));
        for (handle, stream) in self.streams.iter().chain(per_thread) {
            if stream.capture == Some(capture) {
                if handle == origin {
                    last.clone_from(&stream.frontier);
                } else {
                    ends.extend_from_slice(&stream.frontier);
                }
            }
        }
        self.graphs.get(graph).is_some_and(|graph| graph.reaches(&last, &ends))
    }

    /// Ends a capture. The graph of one that failed is gone, and some
    /// destructors may have to be called for it.
    pub(super) fn end_capture(&mut self, stream: u64) -> Result<u64> {
        let capture = self.stream(stream)?.capture.ok_or(Error::ILLEGAL_STATE)?;
        let found = self.captures.get(capture).ok_or(Error::ILLEGAL_STATE)?;
        let (graph, own_graph, origin) = (found.graph, found.own_graph, found.origin);
        let failure = if origin != stream {
            Some(Error::CAPTURE_UNMATCHED)
        } else if found.mode != Mode::Relaxed && found.thread != thread::id() {
            Some(Error::CAPTURE_WRONG_THREAD)
        } else if !found.valid {
            Some(Error::CAPTURE_INVALIDATED)
        } else if !self.joined(capture, origin, graph) {
            Some(Error::CAPTURE_UNJOINED)
        } else {
            None
        };
        if let Some(error @ (Error::CAPTURE_UNMATCHED | Error::CAPTURE_WRONG_THREAD)) = failure {
            self.invalidate(capture);
            return Err(error);
        }
        self.leave_capture(capture);
        self.captures.remove(capture);
        self.capturing -= 1;
        let Some(error) = failure else { return Ok(graph) };
        if own_graph && let Ok(destructors) = self.destroy_graph(graph) {
            self.destructors = core::mem::take(&mut self.destructors).and(destructors);
        }
        Err(error)
    }

    /// `cudaStreamIsCapturing`.
    pub fn capture_status(&mut self, stream: u64) -> Result<Status> {
        let capture = self.stream(stream)?.capture;
        Ok(match capture {
            None => Status::None,
            Some(capture) if self.active(capture).is_ok() => Status::Active,
            Some(_) => Status::Invalidated,
        })
    }

    /// `cudaStreamGetCaptureInfo`, for a stream that is capturing.
    pub fn capture_info(&mut self, stream: u64) -> Result<Option<Info>> {
        let Some(capture) = self.stream(stream)?.capture else { return Ok(None) };
        let Some((id, graph)) = self.captures.get(capture).map(|found| (found.id, found.graph))
        else {
            return Ok(None);
        };
        let found = self.stream(stream)?;
        Ok(Some(Info {
            id,
            graph,
            nodes: found.frontier.as_ptr(),
            edges: found.edges.as_ptr(),
            count: found.frontier.len(),
        }))
    }

    /// `cudaStreamUpdateCaptureDependencies`: replaces what the next node
    /// will depend on, or adds to it.
    pub fn update_frontier(&mut self, stream: u64, nodes: Vec<u64>, replace: bool) -> Result {
        let capture = self.stream(stream)?.capture.ok_or(Error::ILLEGAL_STATE)?;
        self.active(capture)?;
        if nodes.iter().any(|node| self.nodes.get(*node).is_none()) {
            return Err(Error::INVALID_VALUE);
        }
        let found = self.stream(stream)?;
        let mut all = if replace { Vec::new() } else { core::mem::take(&mut found.frontier) };
        all.extend(nodes);
        found.set_frontier(all);
        Ok(())
    }
}

//! Stream capture.

use crate::constants as c;
use crate::gpu::boundary::{Api, In, Out};
use crate::gpu::work::{self, Mode, Status};
use crate::gpu::{Error, Result, thread};

/// Begins to capture, into a graph of the caller's behind these nodes, or into a new one.
pub fn begin(api: Api, stream: u64, mode: i32, into: Option<(u64, Vec<u64>)>) -> Result {
    api.device()?;
    work::work().begin_capture(stream, Mode::from_code(mode)?, into)
}

/// Ends it. The graph is null if there is none.
pub fn end(stream: u64, graph: Out<u64>) -> Result {
    let ended = work::end_capture(stream);
    graph.give(*ended.as_ref().unwrap_or(&0));
    ended.map(|_| ())
}

/// Whether a stream is being captured.
pub fn status(api: Api, stream: u64, status: Out<i32>) -> Result {
    api.device()?;
    status.set(work::work().capture_status(stream)? as i32)
}

/// Where the parts of the answer go; what the caller's version does not have is null.
pub struct InfoOut {
    /// Whether the stream is being captured: the only part that is always given.
    pub status: Out<i32>,
    /// The capture's number.
    pub id: Out<u64>,
    /// Its graph.
    pub graph: Out<u64>,
    /// The nodes behind which the next one comes.
    pub nodes: Out<*const u64>,
    /// What their edges carry.
    pub edges: Out<*const u64>,
    /// How many nodes.
    pub count: Out<usize>,
}

/// What is known of a capture.
pub fn info(stream: u64, out: &InfoOut) -> Result {
    let mut work = work::work();
    let status = work.capture_status(stream)?;
    out.status.set(status as i32)?;
    if status != Status::Active {
        return Ok(());
    }
    if let Some(info) = work.capture_info(stream)? {
        out.id.give(info.id);
        out.graph.give(info.graph);
        out.nodes.give(info.nodes);
        out.edges.give(info.edges);
        out.count.give(info.count);
    }
    Ok(())
}

/// Changes the nodes behind which the next one comes.
pub fn update(stream: u64, nodes: In<u64>, count: usize, flags: u32) -> Result {
    let replace = match flags as i32 {
        c::cudaStreamAddCaptureDependencies => false,
        c::cudaStreamSetCaptureDependencies => true,
        _ => return Err(Error::INVALID_VALUE),
    };
    work::work().update_frontier(stream, nodes.list(count), replace)
}

/// Gives the thread another mode of capture, and the caller the old one.
pub fn exchange_mode(mode: Out<i32>) -> Result {
    let wanted = mode.get()?;
    Mode::from_code(wanted)?;
    mode.set(thread::with(|thread| thread.capture_mode.replace(wanted)))
}

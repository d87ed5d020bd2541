//! Streams, events, capture and graphs: who waits for whom.
//!
//! There is nothing to wait for, so work is over the moment it is submitted. With `lazy`,
//! events stay unfinished until the host next waits for anything. A real card lies between the
//! two. The difference shows where memory is reused across streams. Host functions and
//! callbacks run in the thread that submits them.
//!
//! Time is counted, not measured: every launch takes [`LAUNCH_NANOSECONDS`]. Programs that choose
//! by timing (auto-tuners) then choose the same in every run.
//!
//! A capturing stream does nothing: its work becomes nodes of a graph, and
//! is done when the graph is launched.

mod action;
mod capture;
mod event;
mod graph;
mod object;

pub use action::{Action, HostFunction, Rows, Shape};
pub use capture::{Mode, Status, end_capture, guard};
pub use event::{query as query_event, record_now, synchronize as synchronize_event};
pub use graph::{GraphMemory, launch as launch_graph};
pub use object::Destructors;

use super::handle::Table;
use super::{Error, Result, config::machine, context, kinds, memory, thread};
use capture::Capture;
use event::Event;
use graph::{Exec, Graph};
use object::Object;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What every launch is taken to last: as long as a kernel of a training step. An auto-tuner
/// repeats a launch until enough time has passed, which must not take for ever.
const LAUNCH_NANOSECONDS: u64 = 100_000;

/// `cudaStreamLegacy` and `cudaStreamPerThread`, which are numbers and not handles.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;
/// `cudaStreamNonBlocking`.
const NON_BLOCKING: u32 = 1;

/// The lowest and the highest priority of a stream.
pub const PRIORITIES: (i32, i32) = (0, -5);

/// A stream.
pub struct Stream {
    /// Its device.
    pub device: usize,
    /// The context that it belongs to.
    pub context: u64,
    /// Within [`PRIORITIES`].
    pub priority: i32,
    /// Creation flags.
    pub flags: u32,
    /// Different from that of every other stream of this process, ever.
    pub id: u64,
    /// The capture it takes part in.
    capture: Option<u64>,
    /// The nodes that its next node will depend on.
    frontier: Vec<u64>,
    /// As many zeros: none of our edges carries data.
    edges: Vec<u64>,
}

/// All streams, events, captures and graphs.
pub struct Work {
    streams: Table<Stream>,
    /// For each device, its legacy and its per-thread default stream.
    defaults: Vec<[Stream; 2]>,
    events: Table<Event>,
    captures: Table<Capture>,
    /// Captures that have not ended.
    capturing: usize,
    graphs: Table<Graph>,
    /// The graph of each node.
    nodes: Table<u64>,
    execs: Table<Exec>,
    objects: Table<Object>,
    /// Destructors to call when the lock is free.
    destructors: Destructors,
    /// How often the host has waited.
    waits: u64,
    issued: u64,
}

/// The work, locked.
pub fn work() -> MutexGuard<'static, Work> {
    static WORK: OnceLock<Mutex<Work>> = OnceLock::new();
    WORK.get_or_init(|| Mutex::new(Work::new(machine().count())))
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// A launch of a library's own kernel.
pub fn launch(stream: u64) -> Result {
    submit(stream, Action::kernel())
}

/// Puts work on a stream: it is done at once, or becomes a node if the stream is capturing.
pub fn submit(stream: u64, action: Action) -> Result {
    context::bind()?;
    let ready = work().admit(stream, action)?;
    ready.map_or(Ok(()), |action| action.perform())
}

/// The host has waited for something: all work is over.
fn waited(work: &mut Work) {
    work.waits += 1;
}

/// `cudaStreamSynchronize`.
pub fn synchronize_stream(stream: u64) -> Result {
    let mut work = work();
    work.refuse_while_capturing(stream)?;
    waited(&mut work);
    drop(work);
    memory::ledger().synchronize_pools();
    Ok(())
}

/// `cudaDeviceSynchronize`.
pub fn synchronize_device() -> Result {
    guard()?;
    waited(&mut work());
    memory::ledger().synchronize_pools();
    Ok(())
}

/// `cudaStreamQuery`.
pub fn query_stream(stream: u64) -> Result {
    work().refuse_while_capturing(stream)
}

/// Everything on a device that is not memory goes.
pub fn reset(device: usize) {
    let mut work = work();
    work.streams.retain(|_, stream| stream.device != device);
    work.events.retain(|_, event| event.device != device);
}

impl Stream {
    fn new(device: usize, context: u64, id: u64) -> Self {
        Self {
            device,
            context,
            priority: 0,
            flags: 0,
            id,
            capture: None,
            frontier: Vec::new(),
            edges: Vec::new(),
        }
    }

    fn set_frontier(&mut self, nodes: Vec<u64>) {
        self.edges = vec![0; nodes.len()];
        self.frontier = nodes;
    }
}

impl Work {
    fn new(devices: usize) -> Self {
        let stream =
            |device, id| Stream::new(device, context::primary(device).unwrap_or_default(), id);
        Self {
            streams: Table::new(kinds::STREAM),
            defaults: (0..devices).map(|device| [stream(device, 1), stream(device, 2)]).collect(),
            events: Table::new(kinds::EVENT),
            captures: Table::new(kinds::CAPTURE),
            capturing: 0,
            graphs: Table::new(kinds::GRAPH),
            nodes: Table::new(kinds::NODE),
            execs: Table::new(kinds::EXEC),
            objects: Table::new(kinds::OBJECT),
            destructors: Destructors::default(),
            waits: 0,
            issued: 2,
        }
    }

    fn issue(&mut self) -> u64 {
        self.issued += 1;
        self.issued
    }

    /// The stream behind a handle, the default streams included.
    pub fn stream(&mut self, handle: u64) -> Result<&mut Stream> {
        let default = match handle {
            0 | LEGACY => 0,
            PER_THREAD => 1,
            _ => return self.streams.get_mut(handle).ok_or(Error::INVALID_HANDLE),
        };
        let pair = self.defaults.get_mut(thread::current_device());
        pair.map(|pair| &mut pair[default]).ok_or(Error::INVALID_DEVICE)
    }

    /// A new stream in the current context.
    pub fn create_stream(&mut self, device: usize, flags: u32, priority: i32) -> Result<u64> {
        if flags & !NON_BLOCKING != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let context = thread::current().map_or(0, |top| top.context);
        let mut stream = Stream::new(device, context, self.issue());
        stream.flags = flags;
        stream.priority = priority.clamp(PRIORITIES.1, PRIORITIES.0);
        Ok(self.streams.insert(stream))
    }

    /// `cudaStreamDestroy`: not for default streams.
    pub fn destroy_stream(&mut self, handle: u64) -> Result {
        let gone = self.streams.remove(handle).ok_or(Error::INVALID_HANDLE)?;
        if let Some(capture) = gone.capture {
            self.invalidate(capture);
        }
        Ok(())
    }

    /// Gives the work back if it is to be done now; keeps it as a node if the stream is capturing.
    fn admit(&mut self, stream: u64, action: Action) -> Result<Option<Action>> {
        let found = self.stream(stream)?;
        if found.capture.is_some() {
            self.add_captured(stream, action)?;
            return Ok(None);
        }
        if self.capturing > 0 {
            self.refuse_implicit(stream)?;
        }
        Ok(Some(action))
    }
}

#[cfg(test)]
mod tests;

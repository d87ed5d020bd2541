//! Events: marks in streams.

use super::{LAUNCH_NANOSECONDS, Work, waited, work};
use crate::gpu::config::machine;
use crate::gpu::{Error, Result, launches, memory};

/// `cudaEventDisableTiming`, `cudaEventInterprocess`.
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
const ALL_FLAGS: u32 = 7;

/// When an event was recorded.
#[derive(Clone, Copy)]
struct Mark {
    launches: u64,
    waits: u64,
}

/// An event.
pub struct Event {
    pub(super) device: usize,
    flags: u32,
    mark: Option<Mark>,
    /// Recorded in a capturing stream: the capture and the nodes before it.
    pub(super) captured: Option<(u64, Vec<u64>)>,
}

/// Records an event outside any capture.
pub fn record_now(event: u64) {
    let mut work = work();
    let mark = work.now();
    if let Some(event) = work.events.get_mut(event) {
        event.mark = Some(mark);
        event.captured = None;
    }
}

/// `cudaEventQuery`.
pub fn query(event: u64) -> Result {
    super::guard()?;
    let work = work();
    let found = work.settled_event(event)?;
    let unfinished = |mark: Mark| machine().lazy && mark.waits == work.waits;
    if found.mark.is_some_and(unfinished) { Err(Error::NOT_READY) } else { Ok(()) }
}

/// `cudaEventSynchronize`.
pub fn synchronize(event: u64) -> Result {
    super::guard()?;
    let mut work = work();
    work.settled_event(event)?;
    waited(&mut work);
    drop(work);
    memory::ledger().synchronize_pools();
    Ok(())
}

impl Work {
    fn now(&self) -> Mark {
        Mark { launches: launches(), waits: self.waits }
    }

    /// A new event.
    pub fn create_event(&mut self, device: usize, flags: u32) -> Result<u64> {
        if flags & !ALL_FLAGS != 0 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(self.events.insert(Event { device, flags, mark: None, captured: None }))
    }

    /// The event of another process: over, as far as this one knows.
    pub fn import_event(&mut self, device: usize) -> u64 {
        let flags = INTERPROCESS | DISABLE_TIMING;
        self.events.insert(Event { device, flags, mark: None, captured: None })
    }

    /// `cudaIpcGetEventHandle` is allowed for it: gives its device.
    pub fn exportable_event(&self, event: u64) -> Result<usize> {
        let found = self.event(event)?;
        if found.flags & INTERPROCESS == 0 {
            return Err(Error::INVALID_HANDLE);
        }
        Ok(found.device)
    }

    pub(super) fn event(&self, event: u64) -> Result<&Event> {
        self.events.get(event).ok_or(Error::INVALID_HANDLE)
    }

    /// The event exists.
    pub fn check_event(&self, event: u64) -> Result {
        self.event(event).map(|_| ())
    }

    /// The event, if it may be asked whether it is over: not while it belongs to a capture.
    pub(super) fn settled_event(&self, event: u64) -> Result<&Event> {
        let found = self.event(event)?;
        let captured = found.captured.as_ref();
        if captured.is_some_and(|(capture, _)| self.captures.get(*capture).is_some()) {
            return Err(Error::CAPTURED_EVENT);
        }
        Ok(found)
    }

    /// `cudaEventDestroy`.
    pub fn destroy_event(&mut self, event: u64) -> Result {
        self.events.remove(event).map(|_| ()).ok_or(Error::INVALID_HANDLE)
    }

    /// `cudaEventRecord`: in a capturing stream the event stands for the nodes so far.
    pub fn record(&mut self, event: u64, stream: u64) -> Result {
        let mark = self.now();
        let found = self.stream(stream)?;
        let device = found.device;
        let captured = found.capture.map(|capture| (capture, found.frontier.clone()));
        match captured {
            Some((capture, _)) => self.active(capture)?,
            None if self.capturing > 0 => self.refuse_implicit(stream)?,
            None => {}
        }
        let event = self.events.get_mut(event).ok_or(Error::INVALID_HANDLE)?;
        if event.device != device {
            return Err(Error::INVALID_HANDLE);
        }
        event.mark = captured.is_none().then_some(mark);
        event.captured = captured;
        Ok(())
    }

    /// `cudaStreamWaitEvent`: an event of a capture draws the stream into it.
    pub fn wait(&mut self, stream: u64, event: u64) -> Result {
        let found = self.event(event)?;
        let recorded = found.mark.is_some();
        let captured = found.captured.clone();
        let captured = captured.filter(|(capture, _)| self.captures.get(*capture).is_some());
        let own = self.stream(stream)?.capture;
        match (own, captured) {
            (None, None) => Ok(()),
            (Some(own), None) => {
                self.active(own)?;
                if recorded {
                    self.invalidate(own);
                    return Err(Error::CAPTURE_ISOLATION);
                }
                Ok(())
            }
            (None, Some((capture, nodes))) => self.join(stream, capture, nodes),
            (Some(own), Some((capture, nodes))) if own == capture => {
                self.active(own)?;
                let found = self.stream(stream)?;
                let mut frontier = core::mem::take(&mut found.frontier);
                frontier.extend(nodes);
                frontier.sort_unstable();
                frontier.dedup();
                found.set_frontier(frontier);
                Ok(())
            }
            (Some(own), Some((capture, _))) => {
                self.invalidate(own);
                self.invalidate(capture);
                Err(Error::CAPTURE_MERGE)
            }
        }
    }

    /// `cudaEventElapsedTime`, milliseconds.
    pub fn elapsed(&self, start: u64, end: u64) -> Result<f32> {
        let mark = |event| -> Result<Mark> {
            let found = self.settled_event(event)?;
            if found.flags & DISABLE_TIMING != 0 {
                return Err(Error::INVALID_HANDLE);
            }
            found.mark.ok_or(Error::INVALID_HANDLE)
        };
        let (start, end) = (mark(start)?, mark(end)?);
        if machine().lazy && (start.waits == self.waits || end.waits == self.waits) {
            return Err(Error::NOT_READY);
        }
        let launches = end.launches as f64 - start.launches as f64;
        // Two marks are never at the same moment: programs divide by what lies between them.
        let nanoseconds = (launches * LAUNCH_NANOSECONDS as f64) + 1000.0;
        Ok((nanoseconds / 1e6) as f32)
    }
}

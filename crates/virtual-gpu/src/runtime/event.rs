//! Events.

use super::Code;
use crate::gpu::border::{Out, runtime};
use crate::gpu::work::{self, Action};
use crate::gpu::{Error, Result, context};

/// `cudaEventRecordExternal`, `cudaEventWaitExternal`: a node of its own in a captured graph.
const EXTERNAL: u32 = 1;

pub(crate) fn create(flags: u32) -> Result<u64> {
    let device = context::bind()?;
    work::work().create_event(device, flags)
}

pub(crate) fn record(event: u64, stream: u64, flags: u32) -> Result {
    context::bind()?;
    match flags {
        0 => work::work().record(event, stream),
        EXTERNAL => {
            work::work().check_event(event)?;
            work::submit(stream, Action::Record(event))
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

pub(crate) fn wait(stream: u64, event: u64, flags: u32) -> Result {
    context::bind()?;
    match flags {
        0 => work::work().wait(stream, event),
        EXTERNAL => {
            work::work().check_event(event)?;
            work::submit(stream, Action::Wait(event))
        }
        _ => Err(Error::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreate(out: Out<u64>) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreateWithFlags(out: Out<u64>, flags: u32) -> Code {
    runtime(|| {
        out.check()?;
        out.set(create(flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventDestroy(event: u64) -> Code {
    runtime(|| work::work().destroy_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: u64, stream: u64) -> Code {
    runtime(|| record(event, stream, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecordWithFlags(event: u64, stream: u64, flags: u32) -> Code {
    runtime(|| record(event, stream, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: u64) -> Code {
    runtime(|| work::query_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: u64) -> Code {
    runtime(|| work::synchronize_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) -> Code {
    runtime(|| milliseconds.set(work::work().elapsed(start, end)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) -> Code {
    runtime(|| milliseconds.set(work::work().elapsed(start, end)?))
}

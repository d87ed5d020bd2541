//! Streams and events with the settings that nearly everybody wants. All else about them is the
//! driver's.

use super::Code;
use crate::gpu::boundary::{Api, Out, runtime};
use crate::gpu::call::stream;

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreate(out: Out<u64>) -> Code {
    runtime(|| stream::create(Api::Runtime, out, 0, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreate(out: Out<u64>) -> Code {
    runtime(|| stream::create_event(Api::Runtime, out, 0))
}

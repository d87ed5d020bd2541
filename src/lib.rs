//! `libmemtrace.so`: the flight recorder for GPU memory, preloaded into somebody else's process.
//!
//! It has three states. It is *asleep* until the first CUDA call, with no thread, no file and no
//! allocation, because a preloaded library is loaded into every shell and helper on the way. It is
//! *on* from then. It is *off* for ever after an internal error, and in the last moments of the
//! process. A forked child starts asleep again, with a recorder of its own.
//!
//! It must never change what the program does. No hook takes a lock of ours or the GIL, and no
//! panic crosses the boundary. No return code, exit code or message of the program's changes.

#![cfg_attr(not(test), warn(clippy::disallowed_types))]

pub mod allocator;
pub mod api;
pub mod config;
pub mod cuda;
pub mod debug;
pub mod gauges;
pub mod hot;
pub mod labels;
mod naked;
pub mod nccl;
pub mod pair;
pub mod process;
pub mod pytorch;
pub mod real;
pub mod record;

// The crates that know nothing of the recorder, by the names of what they are about.
pub use memtrace_libraries as libraries;
pub use memtrace_os as os;
pub use memtrace_stack as stack;

use config::Config;
use os::message;
use process::{Process, background, life, tree};
use record::switch;

/// Makes the recorder, its thread, and what else there is to begin.
#[unsafe(export_name = "memtrace_turn_on")]
fn turn_on() {
    let Some(process) = Process::new(Config::from_env()) else {
        message!(
            "there is no memory to record in (ulimit -v, ulimit -d): nothing is recorded; the program goes on"
        );
        return;
    };
    let process: &'static Process = Box::leak(Box::new(process));
    let recorder = &process.recorder;
    // In this order: what is on can be asked for a snapshot.
    process.remember();
    switch::set(recorder);
    pytorch::settings::note(recorder);
    if let Some(labels) = labels::store::existing() {
        labels.mirror_all(recorder);
    }
    tree::began(recorder);
    background::start(process);
    pytorch::allocator::attach();
    pytorch::callbacks::attach();
    cuda::interposers::find(&cuda::hooks::HOOKS);
    life::register();
}

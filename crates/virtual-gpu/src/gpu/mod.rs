//! The GPU itself: devices, memory, contexts, streams, graphs, kernels. No API names in here.
//!
//! `call` has the functions that the runtime and the driver API share; all else is the machine.
//!
//! The three APIs above it (`runtime`, `driver`, `nvml`) and the libraries beside it (`libs`) are
//! thin. They check the arguments, ask this module, and put the answer into the caller's layout.
//!
//! It must never compute a result, or crash on a bad argument. It must never depend on time,
//! address randomisation or thread timing: two equal runs give equal addresses, to the byte. It
//! must never call an exported function of this library, which a recorder may have hooked.
//!
//! Locks: `work` (streams, events, graphs), `kernels` and `context` each have one. They
//! may take the lock of `memory` while they hold theirs, never the other way round.
//! Callbacks of the program run with none held.
#![allow(
    clippy::missing_errors_doc,
    reason = "an error is what CUDA's manual gives for the call that it serves"
)]

pub mod address;
pub mod array;
pub mod attributes;
pub mod boundary;
pub mod call;
mod card;
pub mod config;
pub mod contents;
pub mod context;
mod dlopen;
mod elf;
pub mod error;
pub mod file;
pub mod handle;
pub mod heap;
pub mod kernels;
pub mod life;
pub mod limits;
pub mod log;
pub mod memory;
pub mod program;
pub mod space;
mod stats;
pub mod thread;
pub mod work;

use config::Gpu;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
pub use error::{Error, Result};

/// Kinds of handles. 0 to 31 are the GPU's own.
pub mod kinds {
    /// Memory pools.
    pub const POOL: u8 = 1;
    /// Physical memory.
    pub const PHYSICAL: u8 = 2;
    /// Streams.
    pub const STREAM: u8 = 3;
    /// Events.
    pub const EVENT: u8 = 4;
    /// Captures in progress.
    pub const CAPTURE: u8 = 5;
    /// Graphs.
    pub const GRAPH: u8 = 6;
    /// Nodes of graphs.
    pub const NODE: u8 = 7;
    /// Executable graphs.
    pub const EXEC: u8 = 8;
    /// User objects.
    pub const OBJECT: u8 = 9;
    /// Contexts.
    pub const CONTEXT: u8 = 10;
    /// Loaded modules, libraries and registered fat binaries.
    pub const MODULE: u8 = 11;
    /// Kernels and functions.
    pub const KERNEL: u8 = 12;
    /// Arrays.
    pub const ARRAY: u8 = 13;
    /// Linkers of the driver API.
    pub const LINK: u8 = 14;
    /// Who wants to hear of errors.
    pub const LISTENER: u8 = 15;
}

static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// How many pieces of device work there have been: the clock of the virtual GPU.
pub fn launches() -> u64 {
    LAUNCHES.load(Relaxed)
}

/// The GPUs that CUDA sees.
pub fn count() -> usize {
    config::machine().count()
}

/// The GPU with this CUDA number.
pub fn device(ordinal: usize) -> Result<&'static Gpu> {
    config::machine().device(ordinal).ok_or(Error::INVALID_DEVICE)
}

/// A device that a caller names by its CUDA number.
pub fn ordinal(number: i32) -> Result<usize> {
    let device = usize::try_from(number).map_err(|_| Error::INVALID_DEVICE)?;
    self::device(device).map(|_| device)
}

/// The CUDA number of the GPU at a PCI address, written in any of the usual ways.
pub fn device_by_pci(text: &str) -> Result<usize> {
    let mut parts = text.split([':', '.']).map(|part| u32::from_str_radix(part, 16));
    let mut next = || parts.next().ok_or(Error::INVALID_VALUE)?.map_err(|_| Error::INVALID_VALUE);
    let (first, second) = (next()?, next()?);
    // With a function behind a dot and no domain, the first part is the bus already.
    let bus = if text.matches(':').count() == 1 { first } else { second };
    let found = config::machine().devices().position(|gpu| gpu.pci_bus() == bus);
    found.ok_or(Error::INVALID_DEVICE)
}

/// The device that calls of this thread go to.
pub fn current_device() -> usize {
    thread::current_device()
}

/// Makes sure that the device's primary context exists and has been paid for.
pub fn touch(device: usize) -> Result {
    context::touch(device)
}

/// One piece of device work on a stream: for the libraries' device maths. Answers a runtime code.
pub fn launch(stream: *mut c_void) -> i32 {
    boundary::runtime(|| work::launch(stream.addr() as u64))
}

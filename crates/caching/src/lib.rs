//! PyTorch's caching allocator, over any device.
//!
//! An exact re-implementation of the algorithm behind `torch.cuda` (the `native` backend of PyTorch
//! 2.15). The same requests get the same addresses, the same events in the same order and the same
//! statistics. Over a [`Counter`] it answers what would have happened with other settings or on a
//! smaller card. Over a [`Script`] it repeats a recorded history and so proves that it is exact.
//!
//! What it must never do: guess. Where PyTorch's behaviour is a matter of hash
//! order, the order is PyTorch's (`visit.rs`); where it is a matter of chance, the
//! tests say so. Each operation costs O(log n).
//!
//! The facts: observed on the unmodified 2.15 binary, as vectors in `tests/data/allocator` and by
//! differential runs in `tests/e2e/allocator_differential.py`.

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod allocator;
mod blocks;
mod check;
pub mod conf;
mod counter;
mod deferred;
mod driver;
mod event;
mod expandable;
mod fit;
mod free;
mod pointers;
mod pool;
mod private;
mod script;
mod segments;
pub mod settings;
pub mod sizes;
mod snapshot;
pub mod stats;
mod tokens;
mod visit;

pub use allocator::{Allocation, Allocator, FailureCause, Misuse, OutOfMemory, Route};
pub use blocks::BlockId;
pub use counter::Counter;
pub use deferred::Pending;
pub use driver::{AfterCapture, Driver};
pub use event::{Action, Event, Sink};
pub use pointers::Pointers;
pub use script::{Ready, Script, Step};
pub use settings::Settings;

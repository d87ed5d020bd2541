//! Which GPU the virtual one is, and how a user names it.
//!
//! There are two users. The virtual GPU asks for every number that differs from card to card. It
//! must answer `cudaGetDeviceProperties`, attribute queries and `cudaMemGetInfo` as that card
//! would, since programs size their work by the answers. The command line asks for a name (`h100`,
//! `l4*2,lazy`, `sm_90,80GiB,132SM`) to become such a card, or a sentence that says why it can't.
//!
//! Three kinds of numbers, kept apart because they come from different places:
//! * what depends on the architecture alone ([`Limits`]): CUDA's documented limits per compute
//!   capability;
//! * what NVIDIA prints about a card ([`Profile`]): multiprocessors, clocks, bus, caches, ids;
//! * what only a running card shows: usable memory and the memory that a context takes. Usable
//!   memory is below the data sheet's, because ECC and firmware keep some. Each states its source,
//!   and an estimate says that it is one.
//!
//! This crate computes nothing about CUDA and touches no device; it must stay free of dependencies,
//! as it is loaded into other people's processes.
#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod limits;
mod profiles;
mod spec;
mod toolkit;

pub use limits::Limits;
pub use profiles::{Profile, find, profiles};
pub use spec::{MAX_DEVICES, Placement, Spec, SpecError};
pub use toolkit::{Toolkit, UnknownToolkit};

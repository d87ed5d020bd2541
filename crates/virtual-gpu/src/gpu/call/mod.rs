//! Functions that the driver and the runtime API share: one body for both.
//!
//! A body checks the arguments in the order in which CUDA checks them. Then it asks the machine,
//! and puts the answer where the caller wants it. It gets the [`Api`](super::boundary::Api) that
//! was called if a context has to be there. Records are the driver's; the runtime's have the same
//! layout. What differs between the two is not here but in `driver` and `runtime`.
//!
//! `driver` declares the functions with their names and parameters; the table `api/behaviour.tsv`
//! says which of the runtime's are their twins.

pub mod capture;
pub mod copy;
pub mod device;
pub mod graph;
pub mod kernel;
pub mod library;
pub mod logs;
pub mod memory;
pub mod node;
pub mod pool;
pub mod stream;

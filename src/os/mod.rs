//! What we ask of the operating system, and how: in somebody else's process, where each of these calls can do harm.
//!
//! The lowest room. It knows nothing of events, stacks or CUDA, and uses nothing of the rooms above.

pub mod address;
pub mod age;
pub mod checked;
pub mod clock;
pub mod descriptors;
pub mod errno;
pub mod futex;
pub mod locks;
pub mod memory;
pub mod message;
pub mod signals;
pub mod space;
pub mod sync;
#[cfg(test)]
pub mod testing;
pub mod threads;
pub mod truncated;

pub(crate) use message::message;

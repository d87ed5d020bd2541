//! The libraries that are loaded into this process: what they define, what they want, and what stands behind ours.
//!
//! Their own tables are read, in memory that may turn out to be anything ([`crate::os::checked`]): the loader is not asked, because
//! its lock may be held by whoever waits for this thread, and because what it answers depends on who asks.

pub mod elf;
pub mod links;
pub mod list;
pub mod loaded;
pub mod next;
pub mod objects;
pub mod scopes;

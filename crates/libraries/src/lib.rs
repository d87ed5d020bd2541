//! The libraries that are loaded into this process: what they define, what they want, and what
//! stands behind ours.
//!
//! Who observes a program from inside must ask this all the time, and can't ask the loader: its
//! lock may be held by whoever waits for this thread, or for ever in the child of a fork, and what
//! it answers depends on who asks and on who has put himself before it. So the loader's list
//! ([`list`], [`links`]) and the libraries' own tables ([`elf`]) are read, in memory that may turn
//! out to be anything ([`memtrace_os::checked`]), and from them follows what the loader would say
//! ([`scopes`], [`objects`], [`loaded`]). Only where a program is being loaded, or a function is
//! that of the next library with this name, the loader is asked itself, past everybody who
//! interposes it ([`next`]).
//!
//! [`loading`] comes first: as a preloaded library is loaded, or at the beginning of a program.

#![cfg_attr(not(test), warn(clippy::disallowed_types))]

pub mod elf;
pub mod links;
pub mod list;
pub mod loaded;
pub mod next;
pub mod objects;
pub mod scopes;

/// What is learnt while nobody else runs: where names are looked up that all have in common, that
/// the loader's lock is free, and which functions there are that a forked child must call. Once a
/// process image.
pub fn loading() {
    next::loading();
    list::loading();
    loaded::loading();
}

/// The same, in whichever test comes first.
#[cfg(test)]
fn as_loaded() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(loading);
}

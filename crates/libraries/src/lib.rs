//! The libraries that are loaded into this process: what they define, what they want, and what
//! stands behind ours.
//!
//! Who observes a program from inside must ask this all the time, and can't ask the loader. Its
//! lock may be held by whoever waits for this thread, or for ever in the child of a fork. What it
//! answers depends on who asks and on who has put himself before it.
//!
//! So the loader's list ([`list`], [`links`]) and the libraries' own tables ([`elf`]) are read, in
//! memory that may turn out to be anything ([`memtrace_os::checked`]). What the loader would say
//! follows from them ([`scopes`], [`objects`], [`loaded`]). The loader itself is asked in two
//! cases: where a program is being loaded, and for the next library's function of some name. That
//! goes past everybody who interposes the loader ([`next`]).
//!
//! [`loading`] comes first: as a preloaded library is loaded, or at the beginning of a program.

#![cfg_attr(not(test), warn(clippy::disallowed_types))]

pub mod elf;
mod gate;
pub mod links;
pub mod list;
pub mod loaded;
pub mod next;
pub mod objects;
pub mod scopes;

/// What is learnt while nobody else runs: the scope that all have in common, that the loader's lock
/// is free, and which functions a forked child must call. Once a process image.
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

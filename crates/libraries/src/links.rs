//! The loader's list of loaded objects, as it shows it to debuggers.

use std::ffi::{c_char, c_int};

/// An entry, as `link.h` has it.
#[repr(C)]
pub struct Link {
    /// What is added to the addresses in its file.
    pub base: usize,
    /// Its path; empty for the program.
    pub name: *const c_char,
    /// Its dynamic section.
    pub dynamic: usize,
    next: *const Link,
}

/// What the loader keeps for debuggers.
#[repr(C)]
struct Debug {
    version: c_int,
    first: *const Link,
    breakpoint: usize,
    state: c_int,
}

unsafe extern "C" {
    static _r_debug: Debug;
}

/// More entries than this are a circle.
const MOST: usize = 1 << 16;

/// The entries; those that a program begins with come first. Calls nothing, and takes no lock.
pub fn links() -> impl Iterator<Item = &'static Link> {
    // SAFETY: the loader's list, whose entries describe loaded libraries
    // and are gone after those alone.
    let after = |link: *const Link| unsafe { link.as_ref() };
    // SAFETY: the loader's word, which it changes as a whole.
    let first = unsafe { (&raw const _r_debug.first).read_volatile() };
    std::iter::successors(after(first), move |link| after(link.next)).take(MOST)
}

/// Is no thread loading or unloading a library, as far as the loader says?
pub fn is_consistent() -> bool {
    const CONSISTENT: c_int = 0;
    // SAFETY: the loader's word, which it changes as a whole.
    unsafe { (&raw const _r_debug.state).read_volatile() == CONSISTENT }
}

//! Whose call it is: the program's, or one that CUDA makes inside a call of the program's.
//!
//! A runtime call that calls the driver is one event, that of the call which the program made. But
//! a signal can interrupt a thread anywhere, also inside CUDA, and what its handler calls is the
//! program's own. A runtime call is hardly ever CUDA's: only a library that stands for it calls its
//! own public functions. A driver call is CUDA's if it returns into CUDA. That is the library that
//! the program's call went to, or one that has a name of NVIDIA's. Another tool may have put its
//! own function in between; then the stack is followed out of that tool's library.
//!
//! A handler's call can be recorded inside a real call, where nothing of ours is held. Where it has
//! interrupted the recorder, or work of ours, it is counted ([`guard::count_if_missed`]). One case
//! can't be known. A handler may call a runtime function that has no hook; the driver call behind
//! it is taken for a part of the call that was interrupted.
//!
//! It must use little of the program's stack: a hook may run on a fiber's, of a few
//! kilobytes. So what is rarely asked is a function of its own, never inlined. Inlined, it
//! would take its part of that stack in every call.

use std::ffi::c_int;
use std::ops::Range;

use crate::cuda::lines::Line;
use crate::cuda::table::{ENTRY_POINTS, EntryPoint};
use crate::cuda::{devices, resolve};
use crate::libraries::loaded;
use crate::libraries::objects;
use crate::os::locks::Turn;
use crate::record::guard;
use crate::record::hook::{HookCall, Tier};
use crate::stack;

/// Runs `f` also where CUDA has come to one of our hooks inside a call of the program's.
pub(super) fn also_inside(f: impl FnOnce()) {
    if guard::is_calling() { guard::as_if_outside(f) } else { f() }
}

/// A call of the runtime inside a real call is the program's own, from a signal handler. But
/// another tool's library that stands for CUDA may call its own functions by symbol, and so may
/// a runtime; that is part of the call.
pub(super) fn of_runtime(hook: HookCall, f: impl FnOnce() -> c_int) -> c_int {
    if guard::is_calling() && !is_part(hook) { guard::as_if_outside(f) } else { f() }
}

/// Does the library that the program's call went to, or the one that has
/// the real function, call itself?
#[cold]
#[inline(never)]
fn is_part(hook: HookCall) -> bool {
    objects::is_one_library(hook.caller, guard::called())
        || objects::is_one_library(hook.caller, hook.real)
}

/// A call of the driver may be CUDA's own.
pub(super) fn of_driver(hook: HookCall, f: impl FnOnce() -> c_int) -> c_int {
    if guard::is_calling() && !is_by_cuda(hook) { guard::as_if_outside(f) } else { f() }
}

fn note_call(hook: HookCall) {
    crate::record::switch::wake();
    devices::note_call(hook);
}

/// Passes a call on. Says, too, whether the call is the program's own.
pub(super) fn pass(hook: HookCall, call: impl FnOnce() -> c_int) -> (c_int, bool) {
    note_call(hook);
    if guard::inside() {
        (inside(hook, call), false)
    } else {
        (guard::calling(hook.real, call), true)
    }
}

/// Passes a call on that gives something back, which `before` writes down.
pub(super) fn pass_after(
    hook: HookCall,
    before: impl FnOnce(),
    call: impl FnOnce() -> c_int,
) -> c_int {
    note_call(hook);
    if guard::inside() {
        return inside(hook, call);
    }
    before();
    guard::calling(hook.real, call)
}

/// Passes a call on that is not written down: it is CUDA's, or it is a handler's that has
/// interrupted us, and is counted, once.
#[cold]
#[inline(never)]
fn inside(hook: HookCall, call: impl FnOnce() -> c_int) -> c_int {
    if guard::is_calling() {
        return call();
    }
    guard::count_if_missed(|| hook.tier != Tier::Driver || !is_by_cuda(hook));
    guard::unrecorded(hook.real, call)
}

// --- who calls -----------------------------------------------------------------------------------

/// What kind of library calls the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
enum LibraryKind {
    /// It has a name of NVIDIA's.
    Nvidias = 1,
    /// It has functions of these names itself: it may stand between CUDA and us.
    Tools,
    /// Any other.
    Programs,
}

/// Libraries that have been looked at, and the kind of each ([`LibraryKind`]).
static KNOWN: [Line; 16] = [const { Line::new() }; 16];
static WRITING: Turn = Turn::new(());

/// A library was unloaded: another one may come to lie in its place.
pub fn forget() {
    KNOWN.iter().for_each(Line::forget);
}

/// Does CUDA make this call, inside another one?
#[cold]
#[inline(never)]
fn is_by_cuda(hook: HookCall) -> bool {
    let (library, kind) = library_of(hook.caller);
    match kind {
        LibraryKind::Nvidias => true,
        _ if library.contains(&guard::called()) || library.contains(&hook.real) => true,
        LibraryKind::Tools => stack::aside(|| is_through(&library)),
        LibraryKind::Programs => false,
    }
}

/// Has the call come out of CUDA into this library?
fn is_through(library: &Range<usize>) -> bool {
    let outside = stack::first_outside(|pc| library.contains(&(pc as usize)));
    outside.is_some_and(|pc| {
        let (library, kind) = library_of(pc as usize);
        kind == LibraryKind::Nvidias || library.contains(&guard::called())
    })
}

fn library_of(caller: usize) -> (Range<usize>, LibraryKind) {
    if let Some((library, kind)) = KNOWN.iter().find_map(|line| line.of(caller)) {
        let is = |w: &LibraryKind| *w as usize == kind;
        let known = [LibraryKind::Nvidias, LibraryKind::Tools].into_iter().find(is);
        return (library, known.unwrap_or(LibraryKind::Programs));
    }
    stack::aside(|| find_out(caller))
}

#[cold]
fn find_out(caller: usize) -> (Range<usize>, LibraryKind) {
    let Some(range) = loaded::range_of(caller) else {
        return (caller..caller + 1, LibraryKind::Programs); // code that was made as the program ran
    };
    let defines = |row: &EntryPoint| loaded::defines(caller, row.symbol);
    let kind = if resolve::is_nvidias(caller) {
        LibraryKind::Nvidias
    } else if ENTRY_POINTS.iter().skip(1).any(defines) {
        LibraryKind::Tools
    } else {
        LibraryKind::Programs
    };
    if let Some(_turn) = WRITING.try_lock()
        && let Some(line) = KNOWN.iter().find(|line| line.is_free())
    {
        line.write(range.clone(), kind as usize);
    }
    (range, kind)
}

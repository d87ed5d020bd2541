//! Which of PyTorch's blocks are workspaces of cuBLAS's.
//!
//! PyTorch takes a workspace for each thread and stream that first multiplies there, and before 2.15 keeps it for ever. It is in
//! no tensor, so a tracker that sees it come in a backward pass would take it for a gradient that stays. But PyTorch hands it to
//! cuBLAS at once, by a public function, which is the door here: if it is the block that the calling thread took last, it is one.
//!
//! A handle is good for the cuBLAS that made it alone, and a process may have two (PyTorch's and another framework's, each with
//! its own CUDA). So the call goes to the one that the loader would have found for its caller; and who asks a library's handle
//! for the function gets that library's own (`lookup.rs`).
//!
//! Must never keep a library from being unloaded, nor call into one that was.

#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::resolve;
use super::table::{Api, Door, Handle, Ptr};
use crate::labels::changes;
use crate::stack::rules;

/// Callers that are told apart; for those beyond it is looked up at each call.
const PLACES: usize = 16;

/// A library that calls one of these functions: its first address, the one after the last, which function, and where its calls
/// go.
type Caller = [AtomicUsize; 4];

static CALLERS: [Caller; PLACES] = [const { [const { AtomicUsize::new(0) }; 4] }; PLACES];

/// Does what a call to this function goes to depend on its caller?
pub fn has(api: Api) -> bool {
    matches!(api, Api::cublasSetWorkspace_v2 | Api::cublasLtMatmul)
}

/// A library was closed: another may come to lie in its place.
pub fn forget() {
    for [start, end, ..] in &CALLERS {
        end.store(0, Ordering::Release);
        start.store(0, Ordering::Release);
    }
}

/// The function that a call from this door goes to.
fn real(door: Door) -> Option<usize> {
    for [start, end, api, function] in &CALLERS {
        // The end is written last.
        let end = end.load(Ordering::Acquire);
        let is_it = (start.load(Ordering::Relaxed)..end).contains(&door.caller);
        if is_it && api.load(Ordering::Relaxed) == door.api as usize {
            return Some(function.load(Ordering::Relaxed));
        }
    }
    look(door)
}

#[cold]
fn look(door: Door) -> Option<usize> {
    let found = resolve::behind(door.api, door.caller)? as usize;
    let Some(library) = rules::library_at(door.caller as u64) else { return Some(found) };
    let from = library.start as usize;
    for [start, end, api, function] in &CALLERS {
        if start.compare_exchange(0, from, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            api.store(door.api as usize, Ordering::Relaxed);
            function.store(found, Ordering::Relaxed);
            end.store(library.end as usize, Ordering::Release);
            break;
        }
    }
    Some(found)
}

/// A function that is handed a workspace.
macro_rules! takes_a_workspace {
    ($name:ident ( $workspace:ident ; $($arg:ident : $ty:ty),* )) => {
        pub(super) fn $name(door: Door, $($arg: $ty),*) -> c_int {
            let Some(real) = real(door) else { return resolve::MISSING };
            changes::workspace($workspace as u64);
            // SAFETY: NVIDIA's own function of this name, whose prototype its headers give; the arguments are the caller's.
            unsafe {
                std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> c_int>(real)($($arg),*)
            }
        }
    };
}

takes_a_workspace!(cublasSetWorkspace_v2(workspace; of: Handle, workspace: Ptr, size: usize));
takes_a_workspace!(cublasLtMatmul(
    workspace; of: Handle, computation: Ptr, alpha: Ptr, a: Ptr, a_layout: Ptr, b: Ptr, b_layout: Ptr, beta: Ptr, c: Ptr,
    c_layout: Ptr, d: Ptr, d_layout: Ptr, algorithm: Ptr, workspace: Ptr, size: usize, stream: Handle
));

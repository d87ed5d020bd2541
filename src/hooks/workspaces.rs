//! Which of PyTorch's blocks are workspaces of cuBLAS's.
//!
//! PyTorch takes a workspace for each thread and stream that first multiplies there, and before 2.15 keeps it for ever. It is in
//! no tensor, so a tracker that sees it come in a backward pass would take it for a gradient that stays. But PyTorch hands it to
//! cuBLAS at once, by a public function, which is the door here: if it is the block that the calling thread took last, it is one.
//!
//! A handle is good for the cuBLAS that made it alone, and a process may have two (PyTorch's and another framework's, each opened
//! privately). So the call goes to the one that the loader would have found for its caller.

#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::resolve;
use super::table::{Door, Handle, Ptr};
use crate::labels::changes;
use crate::stack::rules;

/// Libraries that are told apart; for those beyond it is looked up at each call.
const PLACES: usize = 8;

/// For each library that calls a function: its first address, the one after the last, and where its calls go.
struct Callers([[AtomicUsize; 3]; PLACES]);

impl Callers {
    const fn new() -> Self {
        Callers([const { [const { AtomicUsize::new(0) }; 3] }; PLACES])
    }

    /// The function that a call from this door goes to.
    fn real(&self, door: Door) -> Option<usize> {
        for [start, end, function] in &self.0 {
            // The end is written last.
            let end = end.load(Ordering::Acquire);
            if (start.load(Ordering::Relaxed)..end).contains(&door.caller) {
                return Some(function.load(Ordering::Relaxed));
            }
        }
        self.look(door)
    }

    #[cold]
    fn look(&self, door: Door) -> Option<usize> {
        let found = resolve::behind(door.api, door.caller)? as usize;
        let Some(library) = rules::library_at(door.caller as u64) else { return Some(found) };
        let from = library.start as usize;
        for [start, end, function] in &self.0 {
            if start.compare_exchange(0, from, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                function.store(found, Ordering::Relaxed);
                end.store(library.end as usize, Ordering::Release);
                break;
            }
        }
        Some(found)
    }
}

/// A function that is handed a workspace.
macro_rules! takes_a_workspace {
    ($name:ident ( $workspace:ident ; $($arg:ident : $ty:ty),* )) => {
        pub(super) fn $name(door: Door, $($arg: $ty),*) -> c_int {
            static CALLERS: Callers = Callers::new();
            let Some(real) = CALLERS.real(door) else { return resolve::MISSING };
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

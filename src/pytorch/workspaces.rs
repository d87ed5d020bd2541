//! Which of PyTorch's blocks are workspaces of cuBLAS's.
//!
//! PyTorch takes a workspace for each thread and stream that first multiplies there, and before 2.15 keeps it for ever. It is in
//! no tensor, so a tracker that sees it come in a backward pass would take it for a gradient that stays. But PyTorch hands it to
//! cuBLAS at once, by a public function, which is the door here: if it is the block that the calling thread took last, it is one.
//!
//! A handle is good for the cuBLAS that made it alone, and a process may have two (PyTorch's and another framework's, each with
//! its own CUDA): each call goes to the one that its caller is bound to (`routes.rs`).

#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::c_int;

use crate::cuda::table::{Door, Handle, Ptr, real};
use crate::pytorch::changes;

/// A function that is handed a workspace.
macro_rules! takes_a_workspace {
    ($name:ident ( $workspace:ident ; $($arg:ident : $ty:ty),* )) => {
        pub(crate) fn $name(door: Door, $($arg: $ty),*) -> c_int {
            changes::workspace($workspace as u64);
            // SAFETY: the arguments are the caller's own, passed on unchanged.
            unsafe { real::$name(door, $($arg),*) }
        }
    };
}

takes_a_workspace!(cublasSetWorkspace_v2(workspace; of: Handle, workspace: Ptr, size: usize));
takes_a_workspace!(cublasLtMatmul(
    workspace; of: Handle, computation: Ptr, alpha: Ptr, a: Ptr, a_layout: Ptr, b: Ptr, b_layout: Ptr, beta: Ptr, c: Ptr,
    c_layout: Ptr, d: Ptr, d_layout: Ptr, algorithm: Ptr, workspace: Ptr, size: usize, stream: Handle
));

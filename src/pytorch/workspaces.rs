//! Which of PyTorch's blocks are workspaces of cuBLAS's.
//!
//! PyTorch takes a workspace for each thread and stream that first multiplies there, and
//! before 2.15 keeps it for ever. It is in no tensor, so a tracker that sees it come in a
//! backward pass would take it for a gradient that stays. But PyTorch hands it to cuBLAS at
//! once, by a public function, which is hooked here. If it is the block that the calling
//! thread took last, it is a workspace.
//!
//! A handle is good only for the cuBLAS that made it. A process may have two, PyTorch's and another
//! framework's, each with its own CUDA. So each call goes to the one that its caller is bound to.

use std::ffi::{c_int, c_void};

use crate::pytorch::changes;
use crate::record::hook::HookCall;

/// A function that is handed a workspace.
pub fn takes_workspace(_: HookCall, workspace: *mut c_void, call: impl FnOnce() -> c_int) -> c_int {
    changes::workspace(workspace as u64);
    call()
}

/// cuBLAS's rows of the table of entry points: put behind those that stand there already, and
/// handed on to the next macro of the list.
macro_rules! rows {
    ([$next:ident $($later:ident)*] { $($before:tt)* }) => {
        $next! { [$($later)*] {
            $($before)*
            "libcublas.so" Library cublas {
                cublasSetWorkspace_v2(of: Handle, workspace: Ptr, size: usize) => takes_workspace(workspace);
            }
            "libcublasLt.so" Library cublas {
                cublasLtMatmul(
                    of: Handle, computation: Ptr, alpha: Ptr, a: Ptr, a_layout: Ptr, b: Ptr, b_layout: Ptr, beta: Ptr, c: Ptr, c_layout: Ptr,
                    d: Ptr, d_layout: Ptr, algorithm: Ptr, workspace: Ptr, size: usize, stream: Handle,
                ) => takes_workspace(workspace);
            }
        } }
    };
}
pub(crate) use rows;

//! The CUDA driver API (`cu…`), as the public header declares it.
//!
//! Each function checks what the caller gave, asks [`gpu`](crate::gpu), and answers with a
//! `CUresult`; none holds state of its own. Names, parameters and meaning are NVIDIA's and
//! in NVIDIA's manual, so they are not described again here. A comment says where the
//! virtual GPU does less or otherwise. What the runtime API shares is declared with
//! `entries!`, and its body is in [`gpu::call`].
//!
//! Unlike the runtime, the driver makes no context by itself: `cuInit` and a current context must
//! be there, or the call is refused. Of a function with several versions the newest is written
//! here. Older ones with the same binary interface are made from it; others are not supported.
#![allow(missing_docs, reason = "named and documented by NVIDIA")]
#![allow(non_snake_case, reason = "NVIDIA's names")]

pub mod array;
pub mod context;
pub mod copy;
pub mod device;
pub mod entry;
pub mod fill;
pub mod function;
pub mod graph;
pub mod link;
pub mod logs;
pub mod memory;
pub mod module;
pub mod node;
pub mod pointer;
pub mod pool;
pub mod stream;
pub mod tensor;
pub mod vmm;

/// `CUresult`.
pub type Code = i32;

use crate::gpu::{self, Result, ordinal};

/// The device of the current context, without which most calls are refused.
fn current() -> Result<usize> {
    gpu::context::current().map(|current| current.device)
}

#[cfg(test)]
mod tests;

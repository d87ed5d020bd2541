//! The CUDA runtime API (`cuda…`), versions 12 and 13, as the public headers declare it.
//!
//! Each function checks what the caller gave, asks [`gpu`](crate::gpu), and answers with a
//! `cudaError_t`; none holds state of its own. Names, parameters and meaning are NVIDIA's and in
//! NVIDIA's manual, so they are not described again here; a comment stands where the virtual GPU
//! does less or otherwise.
//!
//! Version 12 and 13 share most of the binary interface. Where one name means two things, the layout
//! follows the runtime that the program is linked with.
#![allow(missing_docs, reason = "named and documented by NVIDIA")]
#![allow(non_snake_case, reason = "NVIDIA's names")]

pub mod array;
pub mod capture;
pub mod copy;
pub mod device;
pub mod entry;
pub mod error;
pub mod event;
pub mod function;
pub mod graph;
pub mod ipc;
pub mod launch;
pub mod library;
pub mod logs;
pub mod memory;
pub mod node;
pub mod pool;
pub mod properties;
pub mod register;
pub mod stream;

/// `cudaError_t`.
pub type Code = i32;

use crate::gpu::ordinal;

#[cfg(test)]
mod tests;

//! The CUDA runtime API (`cuda…`), versions 12 and 13, as the public headers declare it.
//!
//! Each function checks what the caller gave, asks [`gpu`](crate::gpu), and answers with a
//! `cudaError_t`; none holds state of its own. Names, parameters and meaning are NVIDIA's
//! and in NVIDIA's manual, so they are not described again here. A comment says where the
//! virtual GPU does less or otherwise.
//!
//! What is here differs from the driver's. Most functions don't: they are declared once, in
//! `driver`, and named as twins in `api/behaviour.tsv`.
//!
//! Version 12 and 13 share most of the binary interface. Where one name means two things, the
//! runtime that the program is linked with decides (`by_toolkit`, `properties`).
#![allow(missing_docs, reason = "named and documented by NVIDIA")]
#![allow(non_snake_case, reason = "NVIDIA's names")]

pub mod array;
pub mod by_toolkit;
pub mod copy;
pub mod device;
pub mod entry;
pub mod error;
pub mod function;
pub mod launch;
pub mod memory;
pub mod node;
pub mod properties;
pub mod register;
pub mod stream;

/// `cudaError_t`.
pub type Code = i32;

use crate::gpu::ordinal;

#[cfg(test)]
mod tests;

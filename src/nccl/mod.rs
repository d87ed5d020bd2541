//! NCCL: for which of its communicators memory is taken.

pub mod communicators;

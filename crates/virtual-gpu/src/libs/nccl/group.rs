//! Groups: operations that are one.
//!
//! Within a group, what this rank receives from a peer is what the peer sends in *its* group. By
//! the rule of `collective` that is what this rank sends. PyTorch's gather into a list is a group
//! of broadcasts, one from each rank: each of them gets what this rank gave in its own.

use super::{NCCL, Status};
use crate::constants::ncclInvalidUsage;
use crate::gpu::boundary::Out;
use crate::gpu::contents;
use core::cell::RefCell;
use core::ffi::c_void;

/// An operation whose effect depends on the rest of its group. Addresses and bytes.
#[derive(Clone, Copy)]
pub enum Operation {
    /// Of the root, if that is this rank, to this rank's buffer.
    Broadcast { from: Option<u64>, to: u64, bytes: u64 },
    /// To a peer, or to itself.
    Send { from: u64, bytes: u64, to_self: bool },
    /// From a peer.
    Receive { to: u64, bytes: u64 },
}

struct Group {
    depth: u32,
    operations: Vec<Operation>,
}

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, operations: Vec::new() }) };
}

/// Performs an operation: now, or with its group.
pub fn perform(operation: Operation) {
    // A thread that is ending has no group any more.
    let alone = GROUP.try_with(|group| {
        let mut group = group.borrow_mut();
        if group.depth > 0 {
            group.operations.push(operation);
        }
        group.depth == 0
    });
    if alone.unwrap_or(true) {
        settle(&[operation]);
    }
}

/// What a group of operations does to this rank's memory.
fn settle(operations: &[Operation]) {
    for operation in operations {
        match *operation {
            Operation::Broadcast { from: Some(from), to, bytes } => contents::copy(to, from, bytes),
            Operation::Broadcast { from: None, to, bytes } => {
                // Alone, the peer's buffer is this rank's own, and holds what it holds.
                if operations.len() > 1 {
                    receive(to, bytes, operations.iter().find_map(|o| o.given_to_all(bytes)));
                }
            }
            Operation::Receive { to, bytes } => {
                let own = operations.iter().find_map(|o| o.sent(bytes, true));
                let any = || operations.iter().find_map(|o| o.sent(bytes, false));
                receive(to, bytes, own.or_else(any));
            }
            Operation::Send { .. } => {}
        }
    }
}

fn receive(to: u64, bytes: u64, from: Option<u64>) {
    match from {
        Some(from) => contents::copy(to, from, bytes),
        None => contents::forget(to, bytes),
    }
}

impl Operation {
    fn given_to_all(&self, wanted: u64) -> Option<u64> {
        match *self {
            Self::Broadcast { from, bytes, .. } if bytes == wanted => from,
            _ => None,
        }
    }

    fn sent(&self, wanted: u64, only_to_self: bool) -> Option<u64> {
        match *self {
            Self::Send { from, bytes, to_self } if bytes == wanted => {
                (to_self || !only_to_self).then_some(from)
            }
            _ => None,
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> i32 {
    // As above.
    let _ = GROUP.try_with(|group| group.borrow_mut().depth += 1);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> i32 {
    NCCL.answer(|| {
        let operations = GROUP.try_with(|group| -> Status<Vec<Operation>> {
            let mut group = group.borrow_mut();
            group.depth = group.depth.checked_sub(1).ok_or(ncclInvalidUsage)?;
            let ended = group.depth == 0;
            Ok(if ended { core::mem::take(&mut group.operations) } else { Vec::new() })
        });
        settle(&operations.unwrap_or_else(|_| Ok(Vec::new()))?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupSimulateEnd(_estimate: Out<c_void>) -> i32 {
    // No estimate of time is made, and none is written.
    ncclGroupEnd()
}

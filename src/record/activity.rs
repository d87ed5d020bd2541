//! What a thread is doing, as labels keep it: words that lie with the others of
//! a thread ([`super::guard::Local`]).
//!
//! Only the words are here, so that the recorder need not know who fills them: [`crate::labels`].

use std::cell::Cell;

/// What a thread is at.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Work {
    /// Anything outside a backward pass.
    Forward,
    /// Gradients.
    Backward,
    /// A module's forward inside a backward pass: a checkpoint computes it again.
    Again,
    /// The node that puts a gradient into its place, hooks on it included. Known while a tracker
    /// asks ([`crate::pytorch::changes`]).
    Accumulate,
    /// Nobody has looked yet.
    Unknown,
}

/// What a thread knows of its operators ([`crate::pytorch::operators`]).
pub struct Operators {
    /// Those that run inside each other.
    pub depth: Cell<u32>,
    /// The thread's number there, plus 1.
    pub thread: Cell<u32>,
    /// The one that it began last.
    pub begun: Begun,
}

/// What a thread knows of the operator that it begins ([`crate::pytorch::quick`]).
pub struct Begun {
    /// The thread's two words of dispatch keys, in PyTorch; null if nobody has looked.
    pub keys: Cell<*const u64>,
    /// Its state of hooks on saved tensors, in PyTorch; null if nobody has looked.
    pub hooks: Cell<*const usize>,
    /// The record of the operator that began last, if it began this way; else [`Begun::NONE`].
    pub record: Cell<u64>,
}

impl Begun {
    /// No record.
    pub const NONE: u64 = u64::MAX;
}

impl Operators {
    /// Nothing yet.
    #[allow(clippy::new_without_default, reason = "made in one place, where it must be constant")]
    pub const fn new() -> Operators {
        let (keys, hooks) = (Cell::new(std::ptr::null()), Cell::new(std::ptr::null()));
        let begun = Begun { keys, hooks, record: Cell::new(Begun::NONE) };
        Operators { depth: Cell::new(0), thread: Cell::new(0), begun }
    }
}

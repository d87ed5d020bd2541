//! What is asked of the operating system, and how: in somebody else's process, where each of these
//! calls can do harm.
//!
//! A program that is observed has its own `errno`, its own signals, descriptors and limits, and may
//! fork at any moment. It may ask for something in a signal handler, on a stack of a few hundred
//! bytes, under any lock. So what lies here keeps to this:
//!
//! * `errno` is the program's ([`errno`]), and so are its signals and its cancellations
//!   ([`signals`]);
//! * a lock that a thread of the parent held is free in a forked child ([`locks`], by the age of
//!   the process, [`age`]);
//! * where a thread must sleep, it sleeps on a word ([`futex`]);
//! * what is looked up once is an [`address`] for which nobody waits;
//! * memory that may not be there is read by the kernel, which can't fault ([`checked`]);
//! * a file that is mapped has room before it is written to ([`space`]), and is replaced where
//!   somebody cuts it short ([`truncated`]);
//! * memory of our own comes from the kernel, not from the program's allocator ([`sync`],
//!   [`memory`]);
//! * what is said is said in one write ([`message`]).
//!
//! It knows nothing of events, stacks or CUDA. Its lock-free parts use the atomics of [`sync`],
//! which are loom's in a model.

#![cfg_attr(not(test), warn(clippy::disallowed_types))]

pub mod address;
pub mod age;
pub mod checked;
pub mod clock;
pub mod descriptors;
pub mod errno;
pub mod futex;
pub mod locks;
pub mod memory;
pub mod message;
pub mod signals;
pub mod space;
pub mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod threads;
pub mod truncated;

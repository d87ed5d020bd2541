//! Hooks on CUDA's entry points, where memory is taken and given back. A hook is
//! guard, record, forward; nothing else.
//!
//! [`table`] lists the entry points, and [`roles`] says what each does to memory. [`lookup`] gives
//! a program that asks for a function by name the same hook. [`routes`] finds the real function
//! behind a hook, and [`place`] knows which device a call is about.

pub mod answers;
pub mod callers;
pub mod calls;
pub mod choose;
pub mod closing;
pub mod contexts;
pub mod deepbind;
pub mod devices;
pub mod driver;
pub mod entry;
pub mod hooks;
pub mod interposers;
pub mod lines;
pub mod lookup;
pub mod notes;
pub mod place;
pub mod procs;
pub mod real;
pub mod records;
pub mod resolve;
pub mod roles;
pub mod routes;
pub mod runtime;
pub mod shared_names;
pub mod table;
pub mod under_way;

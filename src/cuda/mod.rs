//! CUDA's entry points: where memory passes by. A hook is guard, record, forward; nothing else.
//!
//! [`table`] lists the entry points, [`roles`] says what each does to memory, [`lookup`] sees to it
//! that a program that asks for a function by name is shown the same one, [`routes`] which real
//! function is behind it, and [`place`] knows which device a call is about.

pub mod answers;
pub mod callers;
pub mod calls;
pub mod choose;
pub mod closing;
pub mod contexts;
pub mod deepbind;
pub mod devices;
pub mod driver;
pub mod hooks;
pub mod interposers;
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

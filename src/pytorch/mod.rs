//! PyTorch, watched from outside while it stays as it is: its allocators, its streams and captures,
//! its settings, its operators and backward passes.
//!
//! [`names`] is what is known of it; [`allocator`] is where its blocks are seen,
//! [`callbacks`] where it says what it is doing.

pub mod allocator;
pub mod backward;
pub mod callbacks;
pub mod captures;
pub mod changes;
pub mod journal;
pub mod label_log;
pub mod library;
pub mod methods;
pub mod modules;
pub mod names;
pub mod operators;
pub mod pinned;
pub mod pools;
pub mod quick;
pub mod record_functions;
pub mod settings;
pub mod sites;
pub mod streams;
pub mod workspaces;

//! Declares functions of the driver API, and with each its twins of the runtime API.
//!
//! A twin does what the driver's function does, with the same parameters. Which functions are twins
//! is written in `api/behaviour.tsv` (class `twin`); `build.rs` makes the macro `twins!` from those
//! rows. So there is one declaration and one body for both. [`Api`](crate::gpu::boundary::Api) adds
//! the rest: the runtime wakes CUDA, numbers errors its own way, keeps the last one and makes
//! contexts.

/// One function of one API: see [`answer`](crate::gpu::boundary::answer) for `$how`.
macro_rules! entry {
    ($api:ident $how:ident $name:ident
        [$(#[$doc:meta])*] ($($arg:ident: $type:ty),*) $body:expr
    ) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $type),*) -> i32 {
            use $crate::gpu::boundary::{self, Api};
            boundary::$how(Api::$api, stringify!($name), $body)
        }
    };
}

/// Functions as the driver declares them. A body is a closure of the
/// [`Api`](crate::gpu::boundary::Api) that was called.
macro_rules! entries {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) => $body:expr;)*) => {
        $(
            entry! { Driver answer $name [$(#[$doc])*] ($($arg: $type),*) $body }
            twins! { answer $name [$(#[$doc])*] ($($arg: $type),*) $body }
        )*
    };
}

/// The same for functions that only look things up: they may be called before CUDA is awake.
macro_rules! queries {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) => $body:expr;)*) => {
        $(
            entry! { Driver answer_query $name [$(#[$doc])*] ($($arg: $type),*) $body }
            twins! { answer_query $name [$(#[$doc])*] ($($arg: $type),*) $body }
        )*
    };
}

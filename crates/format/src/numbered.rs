//! Enumerations whose variants stand in files as numbers.

/// An enumeration with a number for each variant. It has the list of its
/// variants and the way back from a number.
macro_rules! numbered {
    (
        $(#[$doc:meta])*
        pub enum $name:ident { $($(#[$about:meta])* $variant:ident = $n:literal,)* }
    ) => {
        $(#[$doc])*
        #[repr(u8)]
        pub enum $name { $($(#[$about])* $variant = $n,)* }

        impl $name {
            /// All of them, in the order of their numbers.
            pub const ALL: &[$name] = &[$($name::$variant,)*];

            /// The one with this number, if there is one.
            pub const fn from_u8(n: u8) -> Option<$name> {
                match n {
                    $($n => Some($name::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use numbered;

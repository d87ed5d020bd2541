//! The public CUDA APIs with no GPU behind them.
//!
//! One shared library, preloaded into a program, has the functions that NVIDIA documents: the
//! runtime, the driver, NVML, and the libraries above them as far as PyTorch imports them. It
//! accounts for device memory to the byte, and computes nothing. So an unmodified program goes
//! through a training run on a machine without a GPU, and its use of memory can be watched.
//!
//! It stands *above* the static CUDA runtimes and instead of NVIDIA's libraries, which are
//! never entered. No undocumented table is given out, and no handshake is imitated.
//! Everything that is virtual says so; everything that is not supported says its name once
//! and answers its API's own "not supported".
//!
//! Layers: `gpu` is the machine, without any API's name in it. `runtime`, `driver` and `nvml` put
//! the three APIs on top of it, `libs` the mathematical and communication libraries. What no file
//! writes by hand is made by `build.rs` from the tables in `api/`.
//!
//! # How to add a function of CUDA
//!
//! Every public function is exported already; one that nobody wrote says that it is not supported.
//! * Of the driver, or of both APIs: its declaration goes into `entries!` of a file of `driver`.
//!   Its body goes into a file of `gpu/call` if it takes more than a line. If the runtime has a
//!   twin, a row of class `twin` in `api/behaviour.tsv`. Three files at most.
//! * Of the runtime alone, because the driver has other parameters or another answer: a file of
//!   `runtime`, with a line that says what differs.
//! * Of the libraries: a row of another class in `api/behaviour.tsv` (see `build.rs`), or a file of
//!   `libs`.
//!
//! # How to add a major version of CUDA
//!
//! 1. A member of `Toolkit` in `crates/devices/src/toolkit.rs`. The compiler then asks for its
//!    answers there, and in the next file.
//! 2. `runtime/by_toolkit.rs`: functions whose parameters are other ones under the same name.
//! 3. `scripts/gen_cuda_api.py` with its headers writes `api/*.tsv`. The build then stops at each
//!    twin whose parameters parted, and at each field of `layout::all` that moved.
//! 4. `runtime/properties.rs`: its layout of `cudaDeviceProp`, if that is another one.
//! 5. `crates/cli/src/stand_ins.rs` for libraries whose numbers don't follow the toolkit's.
//!
//! Until then a program that is built for it is refused when CUDA wakes, with a line that says so
//! (`gpu/program.rs`).

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]
// APIs have the parameters that they have, and their C names.
#![allow(clippy::too_many_arguments, non_snake_case)]

pub mod gpu;

include!(concat!(env!("OUT_DIR"), "/twins.rs"));
#[macro_use]
mod entries;
mod driver;
mod libs;
mod nvml;
mod runtime;
mod stub;

/// Enumerators of the public headers, by name.
#[allow(missing_docs, non_upper_case_globals, dead_code, clippy::unreadable_literal)]
pub mod constants {
    include!(concat!(env!("OUT_DIR"), "/constants.rs"));

    /// The name of a status, as a C string that lives for ever.
    pub(crate) fn status_name(prefix: &str, status: i32) -> *const core::ffi::c_char {
        let own = |name: &core::ffi::CStr| name.to_bytes().starts_with(prefix.as_bytes());
        let found = STATUS_NAMES.iter().find(|(value, name)| *value == status && own(name));
        found.map_or(c"unknown status", |(_, name)| name).as_ptr()
    }
}

/// Sizes and field offsets of the records of the public headers, for each major version of CUDA.
#[allow(missing_docs, non_snake_case, non_upper_case_globals, dead_code)]
pub mod layout {
    /// Where a field lies in its record, in bytes.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Field {
        /// From the beginning of the record.
        pub offset: usize,
        /// Its size.
        pub size: usize,
    }

    include!(concat!(env!("OUT_DIR"), "/layout.rs"));
}

/// Functions of the APIs that are not written by hand.
#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks,
    unused_imports,
    unused_parens,
    unused_variables
)]
mod stubs {
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}

/// The driver's functions by name and version, as `cuGetProcAddress` gives them out.
pub mod entry {
    use core::ffi::c_void;

    struct Entry {
        name: &'static str,
        /// The CUDA version in which this interface appeared.
        version: u32,
        symbol: &'static str,
        plain: unsafe extern "C" fn(),
        per_thread: unsafe extern "C" fn(),
    }

    include!(concat!(env!("OUT_DIR"), "/entry.rs"));

    /// The newest interface of a driver function that is not newer than `version` (12040 is CUDA
    /// 12.4), for the per-thread default stream if asked so. A name with its suffix
    /// (`cuMemAlloc_v2`) means that one interface, whatever the version.
    pub fn lookup(name: &str, version: u32, per_thread: bool) -> Option<*const c_void> {
        let first = ENTRIES.partition_point(|entry| entry.name < name);
        let last = ENTRIES.partition_point(|entry| entry.name <= name);
        let found = if first < last {
            ENTRIES[first..last].iter().rfind(|entry| entry.version <= version)?
        } else {
            ENTRIES.iter().find(|entry| entry.symbol == name)?
        };
        let function = if per_thread { found.per_thread } else { found.plain };
        Some(function as *const c_void)
    }

    /// There is a driver function of that name, in whatever version.
    pub fn exists(name: &str) -> bool {
        ENTRIES.iter().any(|entry| entry.name == name)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn versions_choose_interfaces() {
            let at = |version| lookup("cuEventElapsedTime", version, false);
            assert_eq!(at(1000), None, "older than its first version");
            assert_ne!(at(12_040), None);
            assert_ne!(at(12_080), at(12_040), "the second interface came with 12.8");
            assert_eq!(at(13_020), at(12_080));
            assert_eq!(lookup("cuEventElapsedTime_v2", 1000, false), at(13_020));
            assert_eq!(lookup("cuNoSuchThing", 13_020, false), None);
        }

        #[test]
        fn per_thread_variants_are_other_functions() {
            let plain = lookup("cuStreamSynchronize", 13_020, false);
            assert_ne!(plain, lookup("cuStreamSynchronize", 13_020, true));
            assert_eq!(lookup("cuInit", 13_020, false), lookup("cuInit", 13_020, true));
        }
    }
}

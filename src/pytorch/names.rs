//! What of PyTorch is known by name or by place, and of which releases
//! that is known. All of it stands here.
//!
//! PyTorch promises none of it. So each name says with which releases it was checked.
//! `tests/e2e/test_pytorch_names.py` looks for it in the libraries of the release that the tests
//! run with, and fails by name where one is lost.
//!
//! For a new release, run that test with it, and add the release to [`RELEASES`] and to those of
//! each name. Where a name or a place has moved, add the new one beside the old one. What is
//! known by its place in a record can't be looked up: the tests beside PyTorch's own recorder
//! and callbacks (`tests/e2e`) show it.

use std::ffi::CStr;

/// The releases that everything here was checked with, unless it says otherwise.
pub const RELEASES: [&str; 3] = ["2.6", "2.11", "2.15"];

/// `libc10.so`: what PyTorch has for all kinds of devices.
pub const C10: &str = "libc10.so";
/// `libc10_cuda.so`: the allocator of CUDA's memory, and streams.
pub const C10_CUDA: &str = "libc10_cuda.so";
/// `libtorch_cpu.so`: operators and their callbacks.
pub const TORCH_CPU: &str = "libtorch_cpu.so";
/// `libtorch_cuda.so`: the allocator of page-locked memory.
pub const TORCH_CUDA: &str = "libtorch_cuda.so";
/// `libtorch_python.so`: PyTorch's functions in Python.
pub const TORCH_PYTHON: &str = "libtorch_python.so";

/// A function or a variable that a library of PyTorch's exports.
#[derive(Clone, Copy)]
pub struct Name {
    /// The mangled name.
    pub text: &'static str,
    /// The same for the loader.
    pub symbol: &'static CStr,
    /// Start of the file name of the library that has it.
    pub library: &'static str,
    /// The releases that it was seen in.
    pub releases: &'static [&'static str],
}

const fn name(
    symbol: &'static CStr,
    library: &'static str,
    releases: &'static [&'static str],
) -> Name {
    match symbol.to_str() {
        Ok(text) => Name { text, symbol, library, releases },
        Err(_) => panic!("a mangled name is ASCII"),
    }
}

/// Names, a constant for each. One that we define, too, is also a macro, for the
/// attribute that says under which name.
macro_rules! names {
    ($( $(#[$doc:meta])* $name:ident $( / $export:ident )? = $mangled:literal in $library:ident, $releases:expr; )*) => {
        $(
            $(#[$doc])*
            pub const $name: Name = name(
                match CStr::from_bytes_with_nul(concat!($mangled, "\0").as_bytes()) {
                    Ok(symbol) => symbol,
                    Err(_) => panic!("a name has no zero in it"),
                },
                $library,
                &$releases,
            );
            $( names!(@export $export $mangled); )?
        )*
        /// All of them.
        #[cfg(test)]
        const ALL: &[Name] = &[$($name),*];
    };
    (@export $export:ident $mangled:literal) => {
        macro_rules! $export {
            () => {
                $mangled
            };
        }
        pub(crate) use $export;
    };
}

names! {
    // --- its allocator ---------------------------------------------------------------------------

    /// `c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, Device)`.
    REPORT_USAGE / report_usage = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE" in C10, RELEASES;
    /// `c10::reportOutOfMemoryToProfiler(int64_t, size_t, size_t, Device)`.
    REPORT_OUT_OF_MEMORY / report_out_of_memory = "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE" in C10, RELEASES;
    /// `c10::cuda::CUDACachingAllocator::allocator`, an
    /// `std::atomic<CUDAAllocator*>`: the allocator in use.
    ALLOCATOR = "_ZN3c104cuda20CUDACachingAllocator9allocatorE" in C10_CUDA, RELEASES;
    /// `c10::CachingAllocator::AcceleratorAllocatorConfig::parseArgs(std::string const&)`.
    PARSE_STRING / parse_string =
        "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig9parseArgsERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" in C10, ["2.11", "2.15"];
    /// `c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::parseArgs(char
    /// const*)`; null: the variable isn't set.
    PARSE_WORDS / parse_words = "_ZN3c104cuda20CUDACachingAllocator19CUDAAllocatorConfig9parseArgsEPKc" in C10_CUDA, ["2.6"];

    // --- its allocator of page-locked memory -----------------------------------------------------

    /// `at::getHostAllocator(c10::DeviceType)`, since 2.8; a `c10::DeviceType` is a byte.
    HOST_ALLOCATOR / host_allocator = "_ZN2at16getHostAllocatorEN3c1010DeviceTypeE" in TORCH_CPU, ["2.11", "2.15"];
    /// `at::cuda::getCachingHostAllocator()`, up to 2.7.
    CACHING_HOST_ALLOCATOR / caching_host_allocator = "_ZN2at4cuda23getCachingHostAllocatorEv" in TORCH_CUDA, ["2.6"];

    // --- streams ---------------------------------------------------------------------------------

    /// `c10::cuda::setCurrentCUDAStream(CUDAStream)`; a 16-byte trivial
    /// class is passed in two registers.
    SET_CURRENT_STREAM / set_current_stream = "_ZN3c104cuda20setCurrentCUDAStreamENS0_10CUDAStreamE" in C10_CUDA, RELEASES;
    /// `c10::cuda::getCurrentCUDAStream(signed char)`; a 16-byte trivial
    /// class is returned in two registers.
    CURRENT_STREAM = "_ZN3c104cuda20getCurrentCUDAStreamEa" in C10_CUDA, RELEASES;
    /// `c10::cuda::CUDAStream::stream() const`.
    RAW_STREAM = "_ZNK3c104cuda10CUDAStream6streamEv" in C10_CUDA, RELEASES;

    // --- what it calls around its work (`ATen/record_function.h`) --------------------------------

    /// `at::addGlobalCallback(RecordFunctionCallback)`; a trivially copyable class of 40 bytes is
    /// passed on the stack, as a C record is.
    ADD_CALLBACK = "_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE" in TORCH_CPU, RELEASES;
    /// `at::removeCallback(uint64_t)`.
    REMOVE_CALLBACK = "_ZN2at14removeCallbackEm" in TORCH_CPU, RELEASES;
    /// `at::RecordFunction::name() const`.
    FUNCTION_NAME = "_ZNK2at14RecordFunction4nameEv" in TORCH_CPU, RELEASES;
    /// `at::RecordFunction::currentThreadId()`.
    THREAD_ID = "_ZN2at14RecordFunction15currentThreadIdEv" in TORCH_CPU, RELEASES;
    /// `at::sequence_number::peek()`.
    SEQUENCE_NUMBER = "_ZN2at15sequence_number4peekEv" in TORCH_CPU, RELEASES;
    /// `at::RecordFunction::before(std::string, int64_t)` with the C++ library's older strings,
    /// which wheels of `PyPI`'s have up to 2.6.
    OLDER_STRINGS = "_ZN2at14RecordFunction6beforeESsl" in TORCH_CPU, ["2.6"];
    /// `at::getStepCallbacksUnlessEmpty(RecordScope)`.
    STEP_CALLBACKS / step_callbacks = "_ZN2at27getStepCallbacksUnlessEmptyENS_11RecordScopeE" in TORCH_CPU, RELEASES;
    /// `c10::impl::raw_local_dispatch_key_set`, thread-local: two words, included and excluded
    /// keys, zero in a thread's usual state.
    DISPATCH_KEYS = "_ZN3c104impl26raw_local_dispatch_key_setE" in C10, RELEASES;
    /// `c10::impl::tls_is_dispatch_key_excluded(DispatchKey)`, of an enumeration of 16 bits.
    IS_KEY_EXCLUDED = "_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE" in C10, RELEASES;
    /// `at::SavedTensorDefaultHooks::get_tls_state()`: a reference to a state that
    /// begins with a stack in a `std::deque`.
    SAVED_TENSOR_HOOKS = "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv" in TORCH_CPU, RELEASES;

    // --- its exceptions --------------------------------------------------------------------------

    /// `c10::Error::Error(SourceLocation, std::string)`.
    ERROR = "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" in C10, ["2.11", "2.15"];
    /// The same with the C++ library's older strings.
    ERROR_OF_OLDER_STRING = "_ZN3c105ErrorC1ENS_14SourceLocationESs" in C10, ["2.6"];
    /// The type of a `c10::Error`, and its table.
    ERROR_TYPE = "_ZTIN3c105ErrorE" in C10, RELEASES;
    /// See [`ERROR_TYPE`].
    ERROR_TABLE = "_ZTVN3c105ErrorE" in C10, RELEASES;
    /// The type of a `c10::OutOfMemoryError`, a class that older releases define in a
    /// header alone: it is where it is used.
    OUT_OF_MEMORY_TYPE = "_ZTIN3c1016OutOfMemoryErrorE" in C10_CUDA, RELEASES;
    /// See [`OUT_OF_MEMORY_TYPE`]. In 2.15 it is libc10's.
    OUT_OF_MEMORY_TABLE = "_ZTVN3c1016OutOfMemoryErrorE" in C10_CUDA, ["2.6", "2.11"];
    /// `c10::cuda::c10_cuda_check_implementation(error, file, function, line, with device
    /// assertions, log)`: how PyTorch's own calls of CUDA are checked.
    CHECK = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jbPNS0_19CUDAErrorLogCaptureE" in C10_CUDA, ["2.15"];
    /// The same without a place for a log.
    CHECK_WITHOUT_LOG = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb" in C10_CUDA, ["2.11"];
    /// The same, and the line is signed.
    CHECK_OF_SIGNED_LINE = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib" in C10_CUDA, ["2.6"];
}

// --- functions in the allocator's table ----------------------------------------------------------

/// `c10::Allocator::allocate` is the third function of every allocator's table, in every 2.x.
pub const ALLOCATE_SLOT: usize = 2;
/// Offset-to-top and type information stand before a table's first
/// function, in every C++ of this platform.
pub const LEADING: usize = 2;
/// More functions than any allocator of any release has had (57 in 2.15).
pub const SLOTS: usize = 96;
/// The class of the allocator that keeps blocks. The one behind
/// cudaMallocAsync has no pools and no waiting frees.
pub const CLASS: &str = "NativeCachingAllocator::";
/// Functions of that class, by their names in the library's own symbol
/// table: (device, pool, filter).
pub const BEGIN_POOL: &str = "beginAllocateToPool";
/// (device, pool)
pub const END_POOL: &str = "endAllocateToPool";
/// (data, stream)
pub const RECORD_STREAM: &str = "recordStream";
/// (device), since 2.13.
pub const BEGIN_CAPTURE: &str = "markCaptureBegin";
/// (device), since 2.13.
pub const END_CAPTURE: &str = "markCaptureEnd";
/// Part of the name of every function of that library that records or asks
/// for events of the program's.
pub const PROGRAMS: &str = "CUDAGuardImpl";

// --- numbers and places --------------------------------------------------------------------------

/// `c10::DeviceType::CUDA`, in every 2.x.
pub const CUDA: u16 = 1;

/// The numbers that PyTorch gives the streams of its own pools, in every 2.x. A number is a
/// position in a pool (of 32), a pool (one for each priority, from 1 to 4), and a last bit that is
/// set. The default stream has 0 (`c10/core/Stream.h`).
pub fn stream_ids() -> impl Iterator<Item = u64> {
    (1..=4).flat_map(|pool| (0..32).map(move |place| place << 5 | pool << 1 | 1))
}

/// `RecordScope::FUNCTION`,
pub const OPERATOR: usize = 0;
/// `BACKWARD_FUNCTION`,
pub const BACKWARD: usize = 1;
/// `USER_SCOPE`,
pub const USER: usize = 7;
/// and how many scopes there are, from the public headers of all three releases.
pub const SCOPES: usize = 10;

/// `RecordFunction::fn_`: a union of a string and a reference, and after it which of them is there.
pub const FUNCTION_AT: usize = 160;
/// That is a schema, an operator's.
pub const SCHEMA: u8 = 1;
/// `RecordFunction::sequence_nr_`, where a string has 32 bytes.
pub const SEQUENCE_AT: usize = 200;
/// `RecordFunction::fwd_thread_id_`, likewise.
pub const FORWARD_THREAD_AT: usize = 304;
/// A string of the C++ library: where it is, its length, and 16 bytes for a short one.
pub const STRING: usize = 32;
/// The older kind is one word, with its length three words before its characters.
pub const OLDER_STRING: usize = 8;

/// The node of autograd's that puts a gradient into its place.
pub const ACCUMULATE: &[u8] = b"torch::autograd::AccumulateGrad";
/// The beginning of the name of autograd's own threads.
pub const AUTOGRAD_THREAD: &[u8] = b"pt_autograd";
/// What the names of an operator's functions begin with, before the length
/// and the name of its structure…
pub const OPERATORS: &[u8] = b"_ZN2at4_ops";
/// …and what follows in that of the function which is called.
pub const CALL: &[u8] = b"4callE";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_was_checked_with_a_release_that_is_known() {
        for name in ALL {
            assert!(name.text.starts_with("_Z"), "{} is not mangled", name.text);
            assert!(!name.releases.is_empty(), "{} was never seen", name.text);
            let unknown = name.releases.iter().find(|release| !RELEASES.contains(release));
            assert_eq!(unknown, None, "{}: not in RELEASES", name.text);
        }
    }
}

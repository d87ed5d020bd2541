//! Settings of PyTorch's allocator, heard where PyTorch reads them: at its start from a variable, later from the program
//! (`torch.cuda.memory._set_allocator_settings`).
//!
//! Which variable counts depends on the release: `PYTORCH_CUDA_ALLOC_CONF` alone in 2.6, also empty before any other name in 2.11.
//! The words that PyTorch's own parser gets are the ones that hold. Its two doors are called through the PLT; a release that has
//! neither leaves us with the variable that we read ourselves.
//!
//! The parser refuses by an exception, which passes through here; what it refused is not remembered.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, TryLockError};

use memtrace_format::settings;
use serde_json::Value;

use super::{resolve, torch};

/// What PyTorch has read.
#[derive(Clone, Default)]
struct Read {
    /// The last words.
    last: String,
    /// Words that stand for everything that holds.
    all: String,
}

static READ: Mutex<Option<Read>> = Mutex::new(None);

/// The settings that hold, as a snapshot lists them, and as words. `otherwise`: those that we know ourselves.
pub fn in_force(otherwise: &str) -> (Value, String) {
    let read = READ.try_lock().ok().and_then(|read| read.clone());
    let own = || Read { last: otherwise.to_owned(), all: otherwise.to_owned() };
    let Read { last, all } = read.unwrap_or_else(own);
    let mut settings = settings::from_conf(&all);
    settings["PYTORCH_CUDA_ALLOC_CONF"] = last.into();
    (settings, all)
}

/// Remembers what has been read. Waits for nobody: a fork may have left the lock to a thread that is no more.
fn remember(text: &str) {
    const TRIES: usize = 1000;
    let mut lock = (0..TRIES).find_map(|_| match READ.try_lock() {
        Ok(lock) => Some(lock),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    if let Some(read) = lock.as_deref_mut() {
        let all = settings::after(read.as_ref().map_or("", |read| &read.all), text);
        *read = Some(Read { last: text.to_owned(), all });
    }
}

/// The beginning of libstdc++'s `std::string`.
#[repr(C)]
pub struct Text {
    at: *const u8,
    len: usize,
}

/// `c10::CachingAllocator::AcceleratorAllocatorConfig::parseArgs(std::string const&)`.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(export_name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig9parseArgsERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE")]
pub unsafe extern "C-unwind" fn parse_string(this: *mut c_void, text: *const Text) {
    static REAL: resolve::Real = resolve::Real::new();
    let name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig9parseArgsERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
    let Some(real) = REAL.find(name, torch::C10) else { return };
    // SAFETY: libc10 exports this name with this signature. The string is the caller's, and it is there during the call.
    unsafe {
        type Parse = unsafe extern "C-unwind" fn(*mut c_void, *const Text);
        std::mem::transmute::<*mut c_void, Parse>(real)(this, text);
        if let Some(text) = text.as_ref().filter(|text| !text.at.is_null()) {
            remember(&String::from_utf8_lossy(std::slice::from_raw_parts(text.at, text.len)));
        }
    }
}

/// `c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::parseArgs(char const*)`, up to 2.6; null: the variable isn't set.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(export_name = "_ZN3c104cuda20CUDACachingAllocator19CUDAAllocatorConfig9parseArgsEPKc")]
pub unsafe extern "C-unwind" fn parse_words(this: *mut c_void, text: *const c_char) {
    static REAL: resolve::Real = resolve::Real::new();
    let name = "_ZN3c104cuda20CUDACachingAllocator19CUDAAllocatorConfig9parseArgsEPKc";
    let Some(real) = REAL.find(name, torch::LIBRARY) else { return };
    // SAFETY: libc10_cuda exports this name with this signature. Null, or a C string of the caller's.
    unsafe {
        type Parse = unsafe extern "C-unwind" fn(*mut c_void, *const c_char);
        std::mem::transmute::<*mut c_void, Parse>(real)(this, text);
        let text = if text.is_null() { c"" } else { CStr::from_ptr(text) };
        remember(&text.to_string_lossy());
    }
}

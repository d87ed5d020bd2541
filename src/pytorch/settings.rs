//! Settings of PyTorch's allocator, noted where PyTorch reads them: at its start from a variable,
//! later from the program (`torch.cuda.memory._set_allocator_settings`).
//!
//! Which variable counts depends on the release: `PYTORCH_CUDA_ALLOC_CONF` alone in 2.6, also empty
//! before any other name in 2.11. The words that PyTorch's own parser gets are the ones that hold.
//! Its two functions are called through the PLT, so we define them. A release that has neither
//! leaves us with the variable that we read ourselves.
//!
//! The parser refuses by an exception, which passes through here; what it
//! refused is not remembered.
//!
//! What was read is noted in the black box, too: who reads that has the
//! environment of another process.

use std::ffi::{CStr, c_char, c_void};

use memtrace_caching::conf;
use memtrace_format::blackbox::Read;
use serde_json::Value;

use crate::config::Config;
use crate::os::locks::{ForkLock, Guard};
use crate::pytorch::names;
use crate::real::Real;
use crate::record::Recorder;

/// What PyTorch has read.
static READ: ForkLock<Option<Read>> = ForkLock::new(None);

/// Of 2.6.
static WORDS: Real = Real::new();

fn words() -> Option<*mut c_void> {
    WORDS.find(names::PARSE_WORDS.text, names::PARSE_WORDS.library)
}

fn is_2_6() -> bool {
    words().is_some()
}

/// The names of PyTorch's variable that this release reads.
pub fn names() -> &'static [&'static str] {
    if is_2_6() { &conf::NAMES[..1] } else { &conf::NAMES }
}

/// What this release means by such words, in words that are the same to every one.
pub fn meant(text: &str) -> String {
    if is_2_6() { conf::from_2_6(text) } else { text.to_owned() }
}

/// The settings that hold, as a snapshot lists them, and as words. Where PyTorch's parser
/// wasn't seen: those of the environment.
pub fn in_force(config: &Config) -> (Value, String) {
    let read = READ.try_lock().and_then(|read| read.clone());
    let release = if is_2_6() { "2.6" } else { "" };
    let own = || {
        let (variable, conf) = (config.allocator_variable, &config.allocator_conf);
        let (last, all) = conf::read_by(release, variable, conf);
        Read { last: last.to_owned(), all }
    };
    let Read { last, all } = read.unwrap_or_else(own);
    let mut settings = conf::from_conf(&all);
    settings["PYTORCH_CUDA_ALLOC_CONF"] = last.into();
    (settings, all)
}

/// What has been read, for this thread alone. Waits for nobody for long: a handler
/// of a signal may have come in between.
fn locked() -> Option<Guard<'static, Option<Read>>> {
    const TRIES: usize = 1000;
    (0..TRIES).find_map(|_| {
        let lock = READ.try_lock();
        if lock.is_none() {
            std::thread::yield_now();
        }
        lock
    })
}

/// Remembers what has been read, and what it means in words of later releases.
pub fn remember(text: &str, meant: &str) {
    let mut lock = locked();
    let new = lock.as_deref_mut().map(|read| {
        let all = conf::after(read.as_ref().map_or("", |read| &read.all), meant);
        &*read.insert(Read { last: text.to_owned(), all })
    });
    if let Some(recorder) = crate::record::switch::recorder() {
        recorder.blackbox.note_settings(new);
    }
}

/// Recording begins: notes what was read before. A forked child has it from its parent.
pub fn note(recorder: &Recorder) {
    match locked().as_deref() {
        Some(None) => {}
        Some(Some(read)) => recorder.blackbox.note_settings(Some(read)),
        None => recorder.blackbox.note_settings(None),
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
#[unsafe(export_name = names::parse_string!())]
pub unsafe extern "C-unwind" fn parse_string(this: *mut c_void, text: *const Text) {
    static REAL: Real = Real::new();
    let name = names::PARSE_STRING;
    let Some(real) = REAL.find(name.text, name.library) else { return };
    // SAFETY: libc10 exports this name with this signature. The string is the
    // caller's, and it is there during the call.
    unsafe {
        type Parse = unsafe extern "C-unwind" fn(*mut c_void, *const Text);
        std::mem::transmute::<*mut c_void, Parse>(real)(this, text);
        if let Some(text) = text.as_ref().filter(|text| !text.at.is_null()) {
            let text = String::from_utf8_lossy(std::slice::from_raw_parts(text.at, text.len));
            remember(&text, &text);
        }
    }
}

/// `c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::parseArgs(char
/// const*)`, up to 2.6; null: the variable isn't set.
///
/// # Safety
/// Called by PyTorch.
#[unsafe(export_name = names::parse_words!())]
pub unsafe extern "C-unwind" fn parse_words(this: *mut c_void, text: *const c_char) {
    let Some(real) = words() else { return };
    // SAFETY: libc10_cuda exports this name with this signature. Null, or
    // a C string of the caller's.
    unsafe {
        type Parse = unsafe extern "C-unwind" fn(*mut c_void, *const c_char);
        std::mem::transmute::<*mut c_void, Parse>(real)(this, text);
        let text = if text.is_null() { c"" } else { CStr::from_ptr(text) };
        let text = text.to_string_lossy();
        remember(&text, &conf::from_2_6(&text));
    }
}

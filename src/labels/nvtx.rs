//! NVTX: the ranges that programs and libraries mark for NVIDIA's profilers.
//!
//! NVTX is a set of headers, of which each library that uses it has a copy. At its first
//! range a copy asks the library that `NVTX_INJECTION64_PATH` names to take part. It calls
//! `InitializeInjectionNvtx2` there with a function that gives a table of its entry points,
//! into which we put ours. That is NVTX's documented way for tools
//! (`nvtxDetail/nvtxTypes.h`). `memtrace run` sets the variable to our library if nobody has
//! set it: a profiler that wants NVTX for itself comes first.
//!
//! Push and pop ranges, of the default domain and of others, become ranges of the thread; marks
//! become marks. Ranges by `nvtxRangeStart`, which may end on another thread, don't say what a
//! thread is doing, and are left alone.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use memtrace_format::event::Point;

/// `NVTX_ETID_CALLBACKS`.
const CALLBACKS: u32 = 1;
/// `NVTX_CB_MODULE_CORE` and its functions.
const CORE: c_uint = 1;
const MARK_EX: usize = 1;
const MARK_A: usize = 2;
const MARK_W: usize = 3;
const PUSH_EX: usize = 8;
const PUSH_A: usize = 9;
const PUSH_W: usize = 10;
const POP: usize = 11;
/// `NVTX_CB_MODULE_CORE2` and its functions.
const CORE2: c_uint = 5;
const DOMAIN_MARK_EX: usize = 1;
const DOMAIN_PUSH_EX: usize = 4;
const DOMAIN_POP: usize = 5;
const REGISTER_A: usize = 10;
const REGISTER_W: usize = 11;

/// What NVTX answers when a call did nothing (`NVTX_NO_PUSH_POP_TRACKING` is −2).
const NO_RANGE: c_int = -1;

type Table = *mut *mut *const c_void;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Exports {
    size: usize,
    functions: unsafe extern "C" fn(c_uint, *mut Table, *mut c_uint) -> c_int,
}

/// `nvtxEventAttributes_t`: as far as we read it, in every version since 1.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

/// `NVTX_MESSAGE_TYPE_…`.
const ASCII: i32 = 1;
const UNICODE: i32 = 2;
const REGISTERED: i32 = 3;

/// Called by each copy of NVTX at its first use. Answers 1: we take part.
///
/// # Safety
/// `tables` is NVTX's function of this signature.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(
    tables: Option<unsafe extern "C" fn(u32) -> *const c_void>,
) -> c_int {
    let Some(tables) = tables else { return 0 };
    // SAFETY: NVTX answers with its record of this name, or with null.
    let Some(exports) = (unsafe { tables(CALLBACKS).cast::<Exports>().as_ref() }) else { return 0 };
    if exports.size < size_of::<Exports>() {
        return 0;
    }
    let core: [(usize, *const c_void); 7] = [
        (MARK_EX, mark_ex as _),
        (MARK_A, mark_a as _),
        (MARK_W, mark_w as _),
        (PUSH_EX, push_ex as _),
        (PUSH_A, push_a as _),
        (PUSH_W, push_w as _),
        (POP, pop as _),
    ];
    let domains: [(usize, *const c_void); 5] = [
        (DOMAIN_MARK_EX, domain_mark_ex as _),
        (DOMAIN_PUSH_EX, domain_push_ex as _),
        (DOMAIN_POP, domain_pop as _),
        (REGISTER_A, register_a as _),
        (REGISTER_W, register_w as _),
    ];
    // SAFETY: `exports` is NVTX's.
    unsafe { c_int::from(fill(exports, CORE, &core) && fill(exports, CORE2, &domains)) }
}

unsafe fn fill(exports: &Exports, module: c_uint, ours: &[(usize, *const c_void)]) -> bool {
    let (mut table, mut length) = (std::ptr::null_mut(), 0);
    // SAFETY: NVTX fills both and answers 1; each entry of the table leads to the function
    // pointer that it calls through, or is null.
    unsafe {
        if (exports.functions)(module, &raw mut table, &raw mut length) != 1 || table.is_null() {
            return false;
        }
        for (id, function) in ours.iter().filter(|(id, _)| *id < length as usize) {
            let place = *table.add(*id);
            if !place.is_null() {
                *place = *function;
            }
        }
    }
    true
}

/// A wide string (`wchar_t` has four bytes here) as UTF-8.
unsafe fn wide(text: *const u32) -> String {
    const LONGEST: usize = 256;
    // SAFETY: the caller promises a string that ends with a zero.
    let letters = (0..LONGEST).map(|i| unsafe { *text.add(i) }).take_while(|c| *c != 0);
    letters.map(|c| char::from_u32(c).unwrap_or('\u{fffd}')).collect()
}

unsafe fn with_ascii<T>(text: *const c_char, f: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: NVTX's callers hand in a C string; null is an empty one.
    f(if text.is_null() { b"" } else { unsafe { CStr::from_ptr(text) }.to_bytes() })
}

unsafe fn with_wide<T>(text: *const u32, f: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: NVTX's callers hand in a wide string; null is an empty one.
    f(if text.is_null() { String::new() } else { unsafe { wide(text) } }.as_bytes())
}

unsafe fn with_message<T>(attributes: *const Attributes, f: impl FnOnce(&[u8]) -> T) -> T {
    // SAFETY: NVTX's callers hand in their record; what its message is, it says
    // itself. A registered string is ours.
    unsafe {
        match attributes.as_ref() {
            Some(a) if usize::from(a.size) >= size_of::<Attributes>() => match a.message_type {
                ASCII | REGISTERED => with_ascii(a.message.cast(), f),
                UNICODE => with_wide(a.message.cast(), f),
                _ => f(b""),
            },
            _ => f(b""),
        }
    }
}

/// `observe`'s promise for what happens here: a panic ends nothing.
fn safely<T>(otherwise: T, f: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(otherwise)
}

fn push(name: &[u8]) -> c_int {
    safely(NO_RANGE, || super::push(name) as c_int)
}

fn mark(name: &[u8]) {
    safely((), || super::mark(name, Point::Moment, 0));
}

extern "C" fn pop() -> c_int {
    safely(NO_RANGE, || super::pop().map_or(NO_RANGE, |depth| depth as c_int))
}

unsafe extern "C" fn mark_ex(attributes: *const Attributes) {
    // SAFETY: see `with_message`; so in all that follow.
    unsafe { with_message(attributes, mark) }
}

unsafe extern "C" fn mark_a(text: *const c_char) {
    // SAFETY: see `with_ascii`.
    unsafe { with_ascii(text, mark) }
}

unsafe extern "C" fn mark_w(text: *const u32) {
    // SAFETY: see `with_wide`.
    unsafe { with_wide(text, mark) }
}

unsafe extern "C" fn push_ex(attributes: *const Attributes) -> c_int {
    // SAFETY: see `with_message`.
    unsafe { with_message(attributes, push) }
}

unsafe extern "C" fn push_a(text: *const c_char) -> c_int {
    // SAFETY: see `with_ascii`.
    unsafe { with_ascii(text, push) }
}

unsafe extern "C" fn push_w(text: *const u32) -> c_int {
    // SAFETY: see `with_wide`.
    unsafe { with_wide(text, push) }
}

unsafe extern "C" fn domain_mark_ex(_: *mut c_void, attributes: *const Attributes) {
    // SAFETY: see `with_message`.
    unsafe { with_message(attributes, mark) }
}

unsafe extern "C" fn domain_push_ex(_: *mut c_void, attributes: *const Attributes) -> c_int {
    // SAFETY: see `with_message`.
    unsafe { with_message(attributes, push) }
}

extern "C" fn domain_pop(_: *mut c_void) -> c_int {
    pop()
}

/// A registered string is a copy that lives for ever, as NVTX allows: programs register a handful.
fn register(name: &[u8]) -> *mut c_void {
    safely(std::ptr::null_mut(), || {
        std::ffi::CString::new(name).map_or(std::ptr::null_mut(), |copy| copy.into_raw().cast())
    })
}

unsafe extern "C" fn register_a(_: *mut c_void, text: *const c_char) -> *mut c_void {
    // SAFETY: see `with_ascii`.
    unsafe { with_ascii(text, register) }
}

unsafe extern "C" fn register_w(_: *mut c_void, text: *const u32) -> *mut c_void {
    // SAFETY: see `with_wide`.
    unsafe { with_wide(text, register) }
}

#[cfg(test)]
mod layouts {
    use cudarc::nvtx::sys;
    use memtrace_layouts::same_layout;

    use super::Attributes;

    same_layout!(
        Attributes = sys::nvtxEventAttributes_t {
            version: version,
            size: size,
            category: category,
            color_type: colorType,
            color: color,
            payload_type: payloadType,
            reserved: reserved0,
            payload: payload,
            message_type: messageType,
            message: message,
        }
    );
}

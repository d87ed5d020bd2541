//! The callbacks that PyTorch offers around everything it calls a *record
//! function* (`ATen/record_function.h`).
//!
//! They are kept per scope, so that operators, which are most of them, cost nothing when only other
//! scopes are asked for. Here is how one asks, and how a `RecordFunction` is read; who asks is
//! [`super::callbacks`] and [`super::operators`].
//!
//! It rests on facts from the public headers of PyTorch 2.6, 2.11 and 2.15. The callback is a
//! 40-byte record passed by value. A start callback returns a `unique_ptr` through a hidden
//! pointer. What is read of a `RecordFunction` lies at known places ([`names`]).

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::libraries::scopes;
use crate::os::address::Address;
use crate::pytorch::names::{self, OLDER_STRING, SCOPES, STRING};

/// `at::RecordFunctionCallback`.
#[repr(C)]
struct Callback {
    start: Start,
    end: End,
    probability: f64,
    scopes: [bool; SCOPES],
    needs_inputs: bool,
    needs_outputs: bool,
    needs_ids: bool,
}

const _: () = assert!(size_of::<Callback>() == 40);

/// A callback at the beginning.
pub type Start = unsafe extern "C" fn(*mut *mut c_void, *const u8) -> *mut *mut c_void;
/// A callback at the end.
pub type End = unsafe extern "C" fn(*const u8, *mut c_void);
type Remove = unsafe extern "C" fn(u64);
type Add = unsafe extern "C" fn(Callback) -> u64;
type Name = unsafe extern "C" fn(*const u8) -> *const c_char;
/// A function that answers with a number.
pub type Number = unsafe extern "C" fn() -> u64;

/// The functions of PyTorch's that are asked; empty until it is there.
static NAME: Address = Address::new();
static PEEK: Address = Address::new();
static THREAD: Address = Address::new();
/// How long this PyTorch's strings are. Set before any callback is added.
static STRINGS: AtomicUsize = AtomicUsize::new(STRING);

fn find(name: names::Name) -> Option<*mut c_void> {
    scopes::loaded_symbol(name.library, name.symbol).map(NonNull::as_ptr)
}

/// Learns where PyTorch's functions are, if it is loaded. Says so, to one thread and once.
pub fn learn() -> bool {
    static LEARNT: AtomicBool = AtomicBool::new(false);
    let (Some(_), Some(name), Some(peek), Some(thread)) = (
        find(names::ADD_CALLBACK),
        find(names::FUNCTION_NAME),
        find(names::SEQUENCE_NUMBER),
        find(names::THREAD_ID),
    ) else {
        return false;
    };
    let strings = if find(names::OLDER_STRINGS).is_some() { OLDER_STRING } else { STRING };
    STRINGS.store(strings, Ordering::Relaxed);
    NAME.set(name);
    THREAD.set(thread);
    PEEK.set(peek);
    !LEARNT.swap(true, Ordering::AcqRel)
}

impl Callback {
    fn new(scope: usize, start: Start, end: End) -> Self {
        Callback {
            start,
            end,
            probability: 1.0,
            scopes: std::array::from_fn(|i| i == scope),
            needs_inputs: false,
            needs_outputs: false,
            needs_ids: false,
        }
    }
}

/// Has PyTorch call us around every function of this scope. Returns what [`remove`]
/// takes; `None` if that is not there.
pub fn add(scope: usize, start: Start, end: End) -> Option<u64> {
    if PEEK.get().is_null() {
        return None;
    }
    let add = find(names::ADD_CALLBACK)?;
    find(names::REMOVE_CALLBACK)?;
    // SAFETY: libtorch_cpu exports this name with this signature in 2.6 to 2.15; a trivially
    // copyable class of 40 bytes is passed on the stack, as a C record is.
    Some(unsafe { std::mem::transmute::<*mut c_void, Add>(add)(Callback::new(scope, start, end)) })
}

/// Ends what [`add`] began.
pub fn remove(handle: u64) {
    if let Some(remove) = find(names::REMOVE_CALLBACK) {
        // SAFETY: libtorch_cpu exports this name with this signature; the handle is one of its own.
        unsafe { std::mem::transmute::<*mut c_void, Remove>(remove)(handle) }
    }
}

/// The name of what runs.
///
/// # Safety
/// `function` is a live `RecordFunction`, and the name is not kept for longer.
pub unsafe fn name<'a>(function: *const u8) -> &'a CStr {
    // SAFETY: promised by the caller; a name is a C string or null.
    unsafe {
        let name = std::mem::transmute::<*mut c_void, Name>(NAME.get())(function);
        if name.is_null() { c"" } else { CStr::from_ptr(name) }
    }
}

/// The function that says which number the next node gets that the calling thread makes.
#[inline]
pub fn counter() -> Option<Number> {
    let peek = PEEK.get();
    // SAFETY: null, or what libtorch_cpu exports under this name with this signature.
    unsafe { std::mem::transmute::<*mut c_void, Option<Number>>(peek) }
}

/// PyTorch's own number of the calling thread; 0 before [`learn`].
pub fn thread() -> u64 {
    let asked = THREAD.get();
    // SAFETY: libtorch_cpu exports this name with this signature.
    if asked.is_null() { 0 } else { unsafe { std::mem::transmute::<*mut c_void, Number>(asked)() } }
}

/// How long a string of the C++ library is in this PyTorch.
pub fn string_size() -> usize {
    STRINGS.load(Ordering::Relaxed)
}

/// Where a string of PyTorch's has its characters, and how many.
///
/// # Safety
/// There is a `std::string` at this address.
pub unsafe fn string(at: *const u8) -> (*const c_char, usize) {
    // SAFETY: promised by the caller. The older kind has its length three
    // words before its characters.
    unsafe {
        let text = at.cast::<*const c_char>().read_unaligned();
        let length = if string_size() == STRING { at.add(8) } else { text.cast::<u8>().sub(24) };
        (text, length.cast::<usize>().read_unaligned())
    }
}

/// Answers with an empty `unique_ptr`.
///
/// # Safety
/// `result` is the hidden pointer that PyTorch has handed a callback at a beginning.
pub unsafe fn nothing(result: *mut *mut c_void) -> *mut *mut c_void {
    // SAFETY: the hidden pointer of a C++ call leads to room for the result.
    unsafe { result.write(std::ptr::null_mut()) };
    result
}

//! PyTorch's exceptions, thrown from here.
//!
//! A function that PyTorch calls for memory has no other way to say that there is none: what it
//! returns is used as it is. So `c10::OutOfMemoryError` is made by its own constructor, which
//! libc10 exports, and thrown by the C++ runtime. It unwinds through frames of ours that have
//! nothing left to do; no panic of Rust's ever does.
//!
//! Only a caller in one of PyTorch's libraries gets an exception. Any
//! other (C, `ctypes`) could not catch one.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use crate::libraries::objects;
use crate::libraries::scopes;
use crate::pytorch::names::{self, C10, C10_CUDA, LEADING, Name};
use crate::stack;

/// What is thrown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Exception {
    /// `c10::OutOfMemoryError`: `torch.cuda.OutOfMemoryError` in Python.
    OutOfMemory,
    /// `c10::Error`: `RuntimeError` in Python.
    Error,
    /// What PyTorch makes of an error of the CUDA runtime's:
    /// `torch.AcceleratorError` in Python, with its code.
    Cuda(c_int),
}

/// `c10::SourceLocation`.
#[repr(C)]
struct Location {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// Room for a `std::string` of either kind that libstdc++ has; the older
/// one, of wheels up to 2.6, is one word.
type Text = [usize; 4];

/// Of a `c10::Error`, and its name for each kind of string, with what
/// makes and ends a string of that kind.
const CONSTRUCTORS: [[&CStr; 3]; 2] = [
    [
        names::ERROR.symbol,
        c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_",
        c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev",
    ],
    [names::ERROR_OF_OLDER_STRING.symbol, c"_ZNSsC1EPKcRKSaIcE", c"_ZNSsD1Ev"],
];

type Construct = unsafe extern "C-unwind" fn(*mut c_void, Location, *mut Text);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *const c_void, *const c_void) -> !;
type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;
/// The last argument is an allocator, of which nothing is read.
type MakeText = unsafe extern "C-unwind" fn(*mut Text, *const c_char, *const u8);
type EndText = unsafe extern "C-unwind" fn(*mut Text);

/// Larger than any `c10::Error` has been (some 120 bytes).
const ROOM: usize = 512;

/// The functions and addresses that throwing takes.
struct Thrower {
    construct: Construct,
    table: *const *const c_void,
    info: *const c_void,
    throw: Throw,
    exception: Allocate,
    make_text: MakeText,
    end_text: EndText,
}

fn find(library: &str, name: &CStr) -> Option<*mut c_void> {
    scopes::loaded_symbol(library, name).map(std::ptr::NonNull::as_ptr)
}

impl Thrower {
    fn find(kind: Exception) -> Option<Thrower> {
        let (info, table) = match kind {
            Exception::OutOfMemory => (names::OUT_OF_MEMORY_TYPE, names::OUT_OF_MEMORY_TABLE),
            Exception::Error | Exception::Cuda(_) => (names::ERROR_TYPE, names::ERROR_TABLE),
        };
        // A class that is defined in a header alone has its tables where it is used.
        let c10 = |name| find(C10, name).or_else(|| find(C10_CUDA, name));
        let (construct, [_, make, end]) =
            CONSTRUCTORS.iter().find_map(|names| Some((c10(names[0])?, names)))?;
        let cxx = |name| find("libstdc++.so", name);
        // SAFETY: the C++ ABI and libc10's mangled names say what these are.
        unsafe {
            Some(Thrower {
                construct: std::mem::transmute::<*mut c_void, Construct>(construct),
                table: c10(table.symbol)?.cast::<*const c_void>().add(LEADING).cast_const(),
                info: c10(info.symbol)?,
                throw: std::mem::transmute::<*mut c_void, Throw>(cxx(c"__cxa_throw")?),
                exception: std::mem::transmute::<*mut c_void, Allocate>(cxx(
                    c"__cxa_allocate_exception",
                )?),
                make_text: std::mem::transmute::<*mut c_void, MakeText>(cxx(make)?),
                end_text: std::mem::transmute::<*mut c_void, EndText>(cxx(end)?),
            })
        }
    }
}

/// Throws, if the caller is PyTorch and this PyTorch's exceptions can be made; else returns.
///
/// # Safety
/// To be called at the end of a function that PyTorch calls, where nothing
/// is held that must be given back.
pub unsafe fn throw(kind: Exception, message: &str) {
    if !caller_is_pytorch() {
        return;
    }
    if let Exception::Cuda(code) = kind {
        // SAFETY: the caller's.
        unsafe { check(code) };
    }
    let Some(thrower) = Thrower::find(kind) else { return };
    let Ok(text) = CString::new(message.replace('\0', " ")) else { return };
    // SAFETY: the string is made and ended by libstdc++, with room for either kind; the
    // constructor of an error takes it by value, which is an address, and may take its text
    // away. The table makes a plain error one of its kind: no class derived from it adds
    // anything. The runtime frees the exception.
    unsafe {
        let mut string: Text = [0; 4];
        (thrower.make_text)(&raw mut string, text.as_ptr(), &0);
        drop(text);
        let location =
            Location { function: c"memtrace_malloc".as_ptr(), file: c"memtrace".as_ptr(), line: 0 };
        let exception = (thrower.exception)(ROOM);
        (thrower.construct)(exception, location, &raw mut string);
        (thrower.end_text)(&raw mut string);
        exception.cast::<*const *const c_void>().write(thrower.table);
        (thrower.throw)(exception, thrower.info, *thrower.table);
    }
}

/// `c10::cuda::c10_cuda_check_implementation(error, file, function, line, with device
/// assertions)`: how PyTorch's own calls of CUDA are checked. Its last argument, of the newest, is
/// a place for a log; the line has been signed.
const CHECKS: [Name; 3] = [names::CHECK, names::CHECK_WITHOUT_LOG, names::CHECK_OF_SIGNED_LINE];

/// Throws what PyTorch throws for an error of the runtime's; returns if this
/// PyTorch has another function for that.
unsafe fn check(code: c_int) {
    type Check =
        unsafe extern "C-unwind" fn(c_int, *const c_char, *const c_char, u32, bool, *const c_void);
    let found = CHECKS.iter().find_map(|name| find(name.library, name.symbol));
    if let Some(found) = found {
        // SAFETY: libc10_cuda exports it under one of these names, with this signature; the older
        // ones don't look at the last argument, and the newest takes none.
        unsafe {
            let check = std::mem::transmute::<*mut c_void, Check>(found);
            check(
                code,
                c"memtrace".as_ptr(),
                c"memtrace_malloc".as_ptr(),
                0,
                true,
                std::ptr::null(),
            );
        }
    }
}

/// Is the code that called into this library PyTorch's?
fn caller_is_pytorch() -> bool {
    let caller = stack::first_outside(|_| false);
    let path = caller.and_then(objects::name_at);
    let file = path.and_then(|path| path.to_bytes().rsplit(|b| *b == b'/').next());
    file.is_some_and(|f| f.starts_with(b"libtorch") || f.starts_with(b"libc10"))
}

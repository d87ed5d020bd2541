//! Functions behind ours: of the C library itself, or of the next interposer.
//!
//! `dlsym` is ours, too, and is called before anything of ours has run. So the C library's own is
//! found in its symbol table, with no state but one word.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use super::elf::Tables;
use super::links::links;
use memtrace_os::address::Address;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// The C library's `dlsym` and `dlvsym`.
static OWN: Address = Address::new();
static OWN_VERSIONED: Address = Address::new();
/// The `dlclose` behind ours.
static NEXT_DLCLOSE: Address = Address::new();

/// When this library is loaded: a program may close a library where nothing can be looked up.
pub fn loading() {
    behind(&NEXT_DLCLOSE, c"dlclose");
}

/// The function behind ours: the next interposer's, or the C library's.
pub fn behind(place: &Address, name: &CStr) -> *mut c_void {
    place.get_or(|| {
        // SAFETY: a look-up by name. Found nothing, it is because this library was opened late, and
        // then nobody is behind it.
        let found = unsafe { really(libc::RTLD_NEXT, name, None) };
        let in_c = || in_c_library(name).map_or(std::ptr::null_mut(), NonNull::as_ptr);
        if found.is_null() { in_c() } else { found }
    })
}

/// The C library's own function of this name, in which an interposer, which may
/// not know who is asking, plays no part.
pub fn of_c_library(place: &Address, name: &CStr) -> *mut c_void {
    place.get_or(|| in_c_library(name).unwrap_or_else(|| std::process::abort()).as_ptr())
}

/// A symbol (in a version, if one is wanted) as the loader has it, and not as we (or another
/// interposer) would show it. What is next is next to this library.
///
/// # Safety
/// `handle` is an open library's, or one of `dlsym`'s own values.
pub unsafe fn really(handle: *mut c_void, name: &CStr, version: Option<&CStr>) -> *mut c_void {
    // SAFETY: the C library's functions; the rest is promised by the caller.
    unsafe {
        if let Some(version) = version {
            let own: Dlvsym = std::mem::transmute(of_c_library(&OWN_VERSIONED, c"dlvsym"));
            own(handle, name.as_ptr(), version.as_ptr())
        } else {
            let own: Dlsym = std::mem::transmute(of_c_library(&OWN, c"dlsym"));
            own(handle, name.as_ptr())
        }
    }
}

/// The C library's `dlclose` (or the next interposer's).
///
/// # Safety
/// As the C library documents.
pub unsafe fn close(handle: *mut c_void) -> c_int {
    // SAFETY: a function of this name; the rest is promised by the caller.
    unsafe {
        let next = behind(&NEXT_DLCLOSE, c"dlclose");
        let next: Option<extern "C" fn(*mut c_void) -> c_int> = std::mem::transmute(next);
        // If no C library has it, nothing can have been opened either.
        let Some(next) = next else { return -1 };
        next(handle)
    }
}

/// A function of the C library, by its own symbol table: `dlsym` can't find itself. Calls nothing:
/// a sanitizer's runtime asks for `dlsym` when its own functions, which stand in front of the C
/// library's, can't be called yet. So the libraries are gone through as debuggers do, by the list
/// that the loader keeps for them; those that a program begins with come first.
pub fn in_c_library(name: &CStr) -> Option<NonNull<c_void>> {
    links().find_map(|library| {
        // SAFETY: the name of a loaded library.
        let path = unsafe { CStr::from_ptr(library.name) }.to_bytes();
        let file = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
        // Until glibc 2.34 some of these functions had a library of their own.
        let is_one = file.starts_with(b"libc.so") || file.starts_with(b"libdl.so");
        // SAFETY: the C library is never unloaded.
        let tables = || unsafe { Tables::at(library.base, library.dynamic) };
        is_one.then(tables).flatten()?.symbol(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_librarys_own_table_is_read_right() {
        for name in [c"dlsym", c"dlvsym", c"malloc", c"getpid"] {
            let found = in_c_library(name).expect("glibc has it").as_ptr();
            let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
            // SAFETY: dladdr fills the record if it knows the address.
            let said = unsafe {
                assert_ne!(libc::dladdr(found, info.as_mut_ptr()), 0);
                CStr::from_ptr(info.assume_init().dli_sname).to_owned()
            };
            assert!(said.to_bytes().ends_with(name.to_bytes()), "{said:?} for {name:?}");
        }
        assert_eq!(in_c_library(c"no such function"), None);
    }
}

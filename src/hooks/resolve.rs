//! Where the real functions are.
//!
//! First whatever the loader would have found without us (`RTLD_NEXT`: the next interposer, or CUDA's
//! library in the global scope). Python opens PyTorch's libraries privately, where that can't see; so then
//! the library itself, found by its file name among the loaded ones. A found address is kept for ever.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::hooks::elf::Tables;
use crate::hooks::lookup;
use crate::hooks::table::{Api, ENTRY_POINTS, EntryPoint, ROWS};
use crate::message;

/// What an entry point answers when the real function is nowhere: both APIs have 500 for a symbol that was
/// not found (`cudaErrorSymbolNotFound`, `CUDA_ERROR_NOT_FOUND`).
pub const MISSING: c_int = 500;

/// The address of a real function, looked up at its first use.
pub struct Real(AtomicPtr<c_void>);

impl Default for Real {
    fn default() -> Self {
        Real::new()
    }
}

impl Real {
    /// Not looked up yet.
    pub const fn new() -> Real {
        Real(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// That of a row of the table.
    pub fn of(api: Api) -> &'static Real {
        static REAL: [Real; ROWS] = [const { Real::new() }; ROWS];
        &REAL[api as usize]
    }

    /// The address; `None`, said once a call, if no loaded library has it.
    pub fn get(&self, api: Api) -> Option<*mut c_void> {
        let found = self.find_row(api);
        if found.is_none() {
            message!(
                "no loaded library has {}: the call fails as if memtrace were not there",
                ENTRY_POINTS[api as usize].name
            );
        }
        found
    }

    /// The address, if a loaded library has it.
    pub fn find_row(&self, api: Api) -> Option<*mut c_void> {
        let row = &ENTRY_POINTS[api as usize];
        self.find(row.name, row.library)
    }

    /// The address, which is this one unless another is known.
    pub fn or_else(&self, found: *mut c_void) -> *mut c_void {
        let none = std::ptr::null_mut();
        match self.0.compare_exchange(none, found, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => found,
            Err(known) => known,
        }
    }

    /// The same, or in whichever loaded library defines it: for what must be passed on.
    pub fn find_anywhere(&self, symbol: &str, library: &str) -> Option<*mut c_void> {
        self.find(symbol, library).or_else(|| {
            let found = anywhere(&CString::new(symbol).ok()?)?.as_ptr();
            self.0.store(found, Ordering::Relaxed);
            Some(found)
        })
    }

    /// The address of `symbol` in a library whose file name begins with `library`.
    #[inline]
    pub fn find(&self, symbol: &str, library: &str) -> Option<*mut c_void> {
        let known = self.0.load(Ordering::Relaxed);
        if known.is_null() { self.look(symbol, library) } else { Some(known) }
    }

    #[cold]
    fn look(&self, symbol: &str, library: &str) -> Option<*mut c_void> {
        let found = lookup(symbol, library)?;
        self.0.store(found, Ordering::Relaxed);
        Some(found)
    }
}

fn lookup(symbol: &str, library: &str) -> Option<*mut c_void> {
    let symbol = CString::new(symbol).ok()?;
    // SAFETY: both arguments are valid.
    let next = unsafe { lookup::really(libc::RTLD_NEXT, &symbol) };
    if !next.is_null() {
        return Some(next);
    }
    loaded_symbol(library, &symbol).map(NonNull::as_ptr)
}

/// What the loader would have found for a caller in this library, without us: another tool's function, else that of the library
/// which the caller's own needs (the loader tells two of different versions apart by their symbols' versions), else
/// whichever there is.
pub fn behind(api: Api, caller: usize) -> Option<*mut c_void> {
    let row = &ENTRY_POINTS[api as usize];
    let symbol = CString::new(row.name).ok()?;
    // SAFETY: a look-up by name.
    let next = NonNull::new(unsafe { lookup::really(libc::RTLD_NEXT, &symbol) });
    let is_tool = |f: &NonNull<c_void>| {
        let path = library_of(f.as_ptr() as usize);
        !path
            .is_some_and(|p| p.rsplit('/').next().is_some_and(|file| file.starts_with(row.library)))
    };
    let found = next.filter(is_tool).or_else(|| needed(row, &symbol, caller)).or(next);
    found.map(NonNull::as_ptr).or_else(|| Real::of(api).get(api))
}

/// The function of this name in the libraries that a caller's own library needs.
fn needed(row: &EntryPoint, symbol: &CStr, caller: usize) -> Option<NonNull<c_void>> {
    let path = CString::new(library_of(caller)?).ok()?;
    // SAFETY: a path of the loader's own, NOLOAD only looks, and the handle is given back: the caller's library keeps open what
    // was found for it.
    let found = unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        let found = NonNull::new(handle).map(|h| lookup::really(h.as_ptr(), symbol));
        if !handle.is_null() {
            crate::life::close(handle);
        }
        NonNull::new(found?)?
    };
    let ours = [row.export.0, row.exported.0].contains(&found.as_ptr().cast_const().cast());
    (!ours).then_some(found)
}

/// A symbol of an already loaded library, found by the start of its file name.
pub fn loaded_symbol(library: &str, symbol: &CStr) -> Option<NonNull<c_void>> {
    let path = loaded(library)?.path;
    // SAFETY: the path is a C string; NOLOAD only looks. The handle stays open: the library stays, too.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if handle.is_null() {
            return None;
        }
        NonNull::new(lookup::really(handle, symbol))
    }
}

/// The path of the library that has this address.
pub fn library_of(address: usize) -> Option<String> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: dladdr takes any address and fills the record if it returns non-zero; the loader's names are C strings.
    unsafe {
        if libc::dladdr(address as *const c_void, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// A loaded library.
pub struct Loaded {
    /// As the loader knows it.
    pub path: CString,
    /// What is added to the addresses in its file.
    pub base: usize,
    /// First address of its code.
    pub text_start: usize,
    /// Address after its code.
    pub text_end: usize,
    /// Address after everything it has mapped.
    pub end: usize,
}

/// The loaded library whose file name begins with `name`.
pub fn loaded(name: &str) -> Option<Loaded> {
    struct Search<'a> {
        name: &'a [u8],
        found: Option<Loaded>,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader hands in a valid record and our own pointer.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the loader's names are C strings.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) };
        let file = path.to_bytes().rsplit(|b| *b == b'/').next().unwrap_or_default();
        if !file.starts_with(search.name) {
            return 0;
        }
        // SAFETY: `dlpi_phnum` headers follow.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let mut loaded = Loaded {
            path: path.to_owned(),
            base: info.dlpi_addr as usize,
            text_start: usize::MAX,
            text_end: 0,
            end: 0,
        };
        for h in headers.iter().filter(|h| h.p_type == libc::PT_LOAD) {
            let start = info.dlpi_addr as usize + h.p_vaddr as usize;
            let end = start + h.p_memsz as usize;
            loaded.end = loaded.end.max(end);
            if h.p_flags & libc::PF_X != 0 {
                loaded.text_start = loaded.text_start.min(start);
                loaded.text_end = loaded.text_end.max(end);
            }
        }
        search.found = Some(loaded);
        1
    }
    let mut search = Search { name: name.as_bytes(), found: None };
    // SAFETY: `visit` matches the prototype and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// A function of the C library, by its own symbol table: `dlsym` can't find itself.
pub fn in_c_library(name: &CStr) -> Option<NonNull<c_void>> {
    // Until glibc 2.34 these functions had a library of their own.
    in_tables(name, &|file, _| file.starts_with(b"libc.so") || file.starts_with(b"libdl.so"))
}

/// A function of whichever loaded library defines it, but for this one.
fn anywhere(name: &CStr) -> Option<NonNull<c_void>> {
    let here = anywhere as *const () as usize;
    in_tables(name, &|_, mapped| !mapped.contains(&here))
}

/// A function by the symbol tables of the loaded libraries that `is_one` accepts by file name and addresses.
fn in_tables(name: &CStr, is_one: &dyn Fn(&[u8], Range<usize>) -> bool) -> Option<NonNull<c_void>> {
    struct Search<'a> {
        name: &'a CStr,
        is_one: &'a dyn Fn(&[u8], Range<usize>) -> bool,
        found: Option<NonNull<c_void>>,
    }
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader hands in a valid record and our own pointer.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the loader's names are C strings.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) };
        let file = path.to_bytes().rsplit(|b| *b == b'/').next().unwrap_or_default();
        if (search.is_one)(file, mapped(info)) {
            // SAFETY: the loader has mapped this library, and its headers describe it.
            search.found =
                unsafe { Tables::of(info).and_then(|tables| tables.symbol(search.name)) };
        }
        c_int::from(search.found.is_some())
    }
    let mut search = Search { name, is_one, found: None };
    // SAFETY: `visit` matches the prototype and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

/// Everything that a library has mapped.
fn mapped(info: &libc::dl_phdr_info) -> Range<usize> {
    let base = info.dlpi_addr as usize;
    // SAFETY: `dlpi_phnum` headers follow.
    let headers =
        unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let parts = headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
    let (start, end) = parts.fold((usize::MAX, 0), |(start, end), h| {
        let first = base + h.p_vaddr as usize;
        (start.min(first), end.max(first + h.p_memsz as usize))
    });
    start..end
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
        let known = in_c_library(c"getpid").map(NonNull::as_ptr);
        assert_eq!(anywhere(c"getpid").map(NonNull::as_ptr), known, "whoever has it");
        assert_eq!(anywhere(c"no such function"), None);
    }
}

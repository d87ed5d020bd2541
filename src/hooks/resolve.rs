//! Where the real functions are.
//!
//! First whatever the loader would have found without us (`RTLD_NEXT`: the next interposer, or CUDA's
//! library in the global scope). Python opens PyTorch's libraries privately, where that can't see; so then
//! the library itself, found by its file name among the loaded ones. A found address is kept for ever.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::hooks::table::{Api, ENTRY_POINTS};
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

    /// The address; `None`, said once a call, if no loaded library has it.
    pub fn get(&self, api: Api) -> Option<*mut c_void> {
        let row = &ENTRY_POINTS[api as usize];
        let found = self.find(row.name, row.library);
        if found.is_none() {
            message!(
                "no loaded library has {}: the call fails as if memtrace were not there",
                row.name
            );
        }
        found
    }

    /// The address of `symbol` in a library whose file name begins with `library`.
    pub fn find(&self, symbol: &str, library: &str) -> Option<*mut c_void> {
        let known = self.0.load(Ordering::Relaxed);
        if !known.is_null() {
            return Some(known);
        }
        let found = lookup(symbol, library)?;
        self.0.store(found, Ordering::Relaxed);
        Some(found)
    }
}

fn lookup(symbol: &str, library: &str) -> Option<*mut c_void> {
    let symbol = CString::new(symbol).ok()?;
    // SAFETY: both arguments are valid.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.as_ptr()) };
    if !next.is_null() {
        return Some(next);
    }
    loaded_symbol(library, &symbol).map(NonNull::as_ptr)
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
        NonNull::new(libc::dlsym(handle, symbol.as_ptr()))
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

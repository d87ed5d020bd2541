//! The functions in the table of one of PyTorch's allocators, by name.
//!
//! But for the first three, a function's place in the table moves from release to release. So it is
//! found by its name: the wheels' `libc10_cuda.so` has its symbol table. Where it hasn't, these
//! functions are not hooked, and that is reported once.

use std::ffi::{OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memtrace_symbols::names_at;

use crate::libraries::loaded::Loaded;
use crate::os::message;
use crate::os::signals;
use crate::pytorch::names::{CLASS, LEADING, SLOTS};

/// `c10::Allocator::allocate`: hidden pointer to the result, this, size.
pub type Allocate = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, usize) -> *mut c_void;

/// `c10::DataPtr`: the address, what gives it back, a context, a device
/// (type and index, a byte each).
#[repr(C)]
pub struct DataPtr {
    /// The address.
    pub addr: usize,
    /// The function that gives it back.
    pub delete: usize,
    /// What that gets.
    pub context: usize,
    /// The device.
    pub device: u64,
}

/// A copy of the table, in which functions can be replaced.
pub struct Methods<'a> {
    slots: &'a mut [usize],
    names: Vec<(usize, String)>,
}

/// A copy of a table with its leading words, and how many words of it are meant.
///
/// # Safety
/// `table` is that of an object of a library that has mapped everything up to `end`.
pub unsafe fn copy_of_table(table: *const usize, end: usize) -> (Box<[usize]>, usize) {
    // What follows a table is other data of the same library.
    let words = LEADING + SLOTS.min(end.saturating_sub(table as usize) / size_of::<usize>());
    let mut copy = vec![0_usize; LEADING + SLOTS].into_boxed_slice();
    // SAFETY: promised by the caller.
    unsafe { std::ptr::copy_nonoverlapping(table.sub(LEADING), copy.as_mut_ptr(), words) };
    (copy, words)
}

impl<'a> Methods<'a> {
    /// Looks up the names of what is in the slots.
    pub fn of(slots: &'a mut [usize], library: &Loaded) -> Methods<'a> {
        let path = Path::new(OsStr::from_bytes(library.path.as_bytes()));
        // What follows the table is other data of the library's.
        let code = library.text_start..library.text_end;
        let mut addresses: Vec<usize> =
            slots.iter().copied().filter(|f| code.contains(f)).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let places: Vec<u64> = addresses.iter().map(|f| (f - library.base) as u64).collect();
        let names = signals::uncancelled(|| names_at(path, &[], &places)).unwrap_or_default();
        if names.iter().all(Option::is_none) {
            message!(
                "this PyTorch's libc10_cuda.so doesn't name its functions: private pools are written as (0, 0), and \
                 frees that wait for the end of a graph capture as complete"
            );
        }
        let both = addresses.into_iter().zip(names);
        Methods { slots, names: both.filter_map(|(f, name)| Some((f, name?))).collect() }
    }

    /// Where the real function of this name is.
    pub fn find(&self, method: &str) -> Option<usize> {
        let is_it = |name: &str| {
            name.split_once(CLASS)
                .and_then(|(_, rest)| rest.strip_prefix(method))
                .is_some_and(|rest| rest.starts_with('('))
        };
        self.names.iter().find(|(_, name)| is_it(name)).map(|(f, _)| *f)
    }

    /// Puts `ours` where the function of this name is; `keep` gets the
    /// real one before anybody can call ours.
    pub fn replace(&mut self, method: &str, ours: *const (), keep: impl FnOnce(usize)) {
        if let Some(real) = self.find(method)
            && let Some(slot) = self.slots.iter_mut().find(|f| **f == real)
        {
            keep(real);
            *slot = ours as usize;
        }
    }
}

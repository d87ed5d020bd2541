//! Functions of other libraries, found by their names when they are first called.
//!
//! The first answer is whatever the loader would have found without us, as in
//! [`crate::libraries::scopes::next`]. Only if that has nothing, the library itself is found by
//! its file name among the loaded ones.

use std::ffi::{CString, c_void};
use std::ptr::NonNull;

use crate::libraries::loaded;
use crate::libraries::scopes;
use crate::os::address::Address;
use crate::stack;

/// The address of a function of a known library's, looked up at its first use.
#[derive(Default)]
pub struct Real(Address);

impl Real {
    /// Not looked up yet.
    pub const fn new() -> Real {
        Real(Address::new())
    }

    /// The same as `find`, or in whichever loaded library defines it: for what must be passed on.
    pub fn find_anywhere(&self, symbol: &str, library: &str) -> Option<*mut c_void> {
        self.find(symbol, library).or_else(|| {
            let found = loaded::anywhere(&CString::new(symbol).ok()?)?.as_ptr();
            Some(self.0.set(found))
        })
    }

    /// The address of `symbol` behind us, or in a library whose file name begins with `library`.
    #[inline]
    pub fn find(&self, symbol: &str, library: &str) -> Option<*mut c_void> {
        self.find_where(symbol, library, |_, _| true)
    }

    /// The same, where what is behind us may be somebody else's function
    /// of that name: `is_it` says.
    #[inline]
    pub fn find_where(
        &self,
        symbol: &str,
        library: &str,
        is_it: fn(&str, usize) -> bool,
    ) -> Option<*mut c_void> {
        let known = self.0.get();
        if known.is_null() { self.look(symbol, library, is_it) } else { Some(known) }
    }

    #[cold]
    fn look(
        &self,
        symbol: &str,
        library: &str,
        is_it: fn(&str, usize) -> bool,
    ) -> Option<*mut c_void> {
        let found = stack::aside(|| first(symbol, library, is_it))?.as_ptr();
        Some(self.0.set(found))
    }
}

fn first(symbol: &str, library: &str, is_it: fn(&str, usize) -> bool) -> Option<NonNull<c_void>> {
    let name = CString::new(symbol).ok()?;
    let next = scopes::next(&name).filter(|f| is_it(symbol, *f));
    // What is remembered must stay.
    let next = next.inspect(|f| loaded::stays(*f)).and_then(|f| NonNull::new(f as *mut c_void));
    next.or_else(|| scopes::loaded_symbol(library, &name))
}

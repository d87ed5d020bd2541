//! An address that is looked up once: a function behind ours, a function or a table of another
//! library's.
//!
//! Nobody waits for anybody: who comes while another one looks has a look, too, and the answer of
//! the first counts for both. So it may be asked in a handler of a signal, and in a forked child
//! whose parent was just looking.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr;

use once_cell::race::OnceNonZeroUsize;

/// See the module's documentation.
#[repr(transparent)]
pub struct Address(OnceNonZeroUsize);

// Code without a stack of its own reads it as a word.
const _: () = assert!(size_of::<Address>() == size_of::<usize>());

impl Address {
    /// Not looked up yet.
    pub const fn new() -> Address {
        Address(OnceNonZeroUsize::new())
    }

    /// Null as long as it isn't known.
    #[inline]
    pub fn get(&self) -> *mut c_void {
        pointer(self.0.get())
    }

    /// Notes what was found, unless it is known or nothing (null) was; says what is known.
    pub fn set(&self, found: *mut c_void) -> *mut c_void {
        self.get_or(|| found)
    }

    /// What is known, or else what `look` finds.
    #[inline]
    pub fn get_or(&self, look: impl FnOnce() -> *mut c_void) -> *mut c_void {
        let look = || NonZeroUsize::new(look() as usize).ok_or(());
        pointer(self.0.get_or_try_init(look).ok())
    }
}

#[inline]
fn pointer(address: Option<NonZeroUsize>) -> *mut c_void {
    address.map_or(ptr::null_mut(), |address| ptr::without_provenance_mut::<c_void>(address.get()))
}

impl Default for Address {
    fn default() -> Self {
        Address::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_answer_counts_and_none_is_no_answer() {
        static KNOWN: Address = Address::new();
        let [one, two] = [0x1000, 0x2000].map(ptr::without_provenance_mut);
        assert!(KNOWN.get().is_null() && KNOWN.set(ptr::null_mut()).is_null());
        // Another one has looked meanwhile.
        let late = KNOWN.get_or(|| {
            KNOWN.set(one);
            two
        });
        assert_eq!((late, KNOWN.set(two), KNOWN.get()), (one, one, one));
    }
}

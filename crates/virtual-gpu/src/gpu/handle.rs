//! Opaque handles.
//!
//! The APIs hand out pointers to hidden structures: streams, events, library handles, descriptors.
//! Here a handle is a number that is never reused and never an address of anything. So a stale,
//! foreign or wrong handle is found by a look-up and answered with the API's own "invalid handle";
//! it never crashes. The same program gets the same numbers in every run, which matters because
//! PyTorch orders its blocks by stream handle.

use core::ffi::c_void;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Handles lie where nothing is ever mapped (see `address`): 128 kinds of 2^35 bytes.
const FIRST: u64 = 0x0400_0000_0000;
const KIND_SHIFT: u32 = 35;
/// Handles are spaced like aligned pointers, for callers that keep flags in the low bits.
const STEP: u64 = 16;

/// Numbers that are already well spread need no strong hash.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

/// A map keyed by handles or addresses.
pub type NumberMap<T> = HashMap<u64, T, BuildHasherDefault<NumberHasher>>;

/// The live objects of one kind, without a lock of its own.
pub struct Table<T> {
    kind: u8,
    issued: u64,
    live: NumberMap<T>,
}

impl<T> Table<T> {
    /// An empty table. `kind` sets its handles apart from every other table's; below 128.
    pub const fn new(kind: u8) -> Self {
        Self { kind, issued: 0, live: HashMap::with_hasher(BuildHasherDefault::new()) }
    }

    /// Adds an object and gives its handle.
    pub fn insert(&mut self, object: T) -> u64 {
        self.issued += 1;
        let handle = FIRST + (u64::from(self.kind) << KIND_SHIFT) + self.issued * STEP;
        self.live.insert(handle, object);
        handle
    }

    /// The object behind a handle, if it lives.
    pub fn get(&self, handle: u64) -> Option<&T> {
        self.live.get(&handle)
    }

    /// The object behind a handle, to be changed.
    pub fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        self.live.get_mut(&handle)
    }

    /// Takes the object out: its handle is stale from here on.
    pub fn remove(&mut self, handle: u64) -> Option<T> {
        self.live.remove(&handle)
    }

    /// All live objects, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.live.iter().map(|(handle, object)| (*handle, object))
    }

    /// All live objects, to be changed.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.live.values_mut()
    }

    /// All live objects with their handles, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.live.iter_mut().map(|(handle, object)| (*handle, object))
    }

    /// Keeps the objects for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(u64, &mut T) -> bool) {
        self.live.retain(|handle, object| keep(*handle, object));
    }
}

/// A [`Table`] behind a lock, to be a `static` of a library's module:
/// `static HANDLES: Registry<Blas> = Registry::new(64);`
///
/// Kinds 0 to 31 belong to the GPU itself, 32 to 127 to the libraries on top of it.
/// A closure given to [`with`](Registry::with) runs under the lock, so it may call into `gpu`, but
/// not into the same registry.
pub struct Registry<T>(Mutex<Table<T>>);

impl<T> Registry<T> {
    /// An empty registry of this kind.
    pub const fn new(kind: u8) -> Self {
        Self(Mutex::new(Table::new(kind)))
    }

    fn table(&self) -> MutexGuard<'_, Table<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an object and gives its handle.
    pub fn insert(&self, object: T) -> *mut c_void {
        core::ptr::without_provenance_mut(self.table().insert(object) as usize)
    }

    /// Looks at or changes the object behind a handle; `None` if there is no such handle.
    pub fn with<R>(&self, handle: *const c_void, use_it: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.table().get_mut(handle.addr() as u64).map(use_it)
    }

    /// Takes the object out; `None` if there is no such handle.
    pub fn remove(&self, handle: *const c_void) -> Option<T> {
        self.table().remove(handle.addr() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_foreign_handles_are_found_out() {
        static A: Registry<i32> = Registry::new(126);
        static B: Registry<i32> = Registry::new(127);
        let (a, b) = (A.insert(1), B.insert(2));
        assert_ne!(a, b);
        assert_eq!(
            A.with(a, |n| {
                *n += 1;
                *n
            }),
            Some(2)
        );
        assert_eq!(A.with(b, |n| *n), None);
        assert_eq!(A.with(core::ptr::null(), |n| *n), None);
        assert_eq!(A.remove(a), Some(2));
        assert_eq!(A.remove(a), None);
        assert_ne!(A.insert(3), a, "a handle is never given twice");
    }

    #[test]
    fn the_last_kind_stays_below_the_first_address() {
        let mut table = Table::new(127);
        let handle = table.insert(());
        assert!(handle + (1 << 34) < super::super::address::HOST && handle.is_multiple_of(STEP));
    }
}

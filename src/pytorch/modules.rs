//! Which module is called, seen where PyTorch calls it: for
//! `memtrace.watch`, without hooks on modules.
//!
//! A hook makes every call of its module take the long way through `torch.nn.Module`, several
//! microseconds of Python. But each call also asks for a compiled form of the module, an attribute
//! that the class `Module` answers with `None`. While something is watched, the class answers with
//! a function of the Python package's, which does nothing but go on with the call. Python calls
//! that function here, by [`called`]. If the module has a name, its range is opened first.
//!
//! It runs with the interpreter's lock held, keeps the caller's references, and hands
//! through what the call returns, an exception (null) included. Names are added and taken
//! away under the same lock, so nobody waits.
//!
//! It rests on Python's documentation of the protocol *vectorcall*. A function gets itself,
//! its arguments, how many are positional (with a flag in the highest bit), and a tuple of
//! the names of the others (or null). `PyObject_VectorcallMethod` takes the same with a
//! method's name, and the object first.

use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::labels::store;
use crate::os::locks::ForkLock;
use crate::pytorch::operators;

/// What is to be done when a module is called.
pub enum Action {
    /// The phase `forward` begins.
    Forward,
    /// This module runs. The label it had last, below the one that it was in.
    Module(Box<[u8]>, AtomicU64),
    /// This module runs, for [`operators`], in the tracker's own numbering.
    Number(u32),
}

/// By the module's address: who asked for it, and what is to be done.
static NAMED: ForkLock<Option<Named>> = ForkLock::new(None);
type Named = HashMap<usize, Vec<(u32, Action)>, BuildHasherDefault<Scatter>>;

/// Addresses are scattered well enough by a multiplication.
#[derive(Default)]
struct Scatter(u64);

impl Hasher for Scatter {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }
    fn write_usize(&mut self, n: usize) {
        self.0 = (self.0 ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

type Object = *mut c_void;
type Call = unsafe extern "C-unwind" fn(Object, *const Object, usize, Object) -> Object;

/// Set before [`called`] is handed out.
static CALL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static METHOD: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Above the number of arguments.
const FLAG: usize = 1 << (usize::BITS - 1);

/// Python's `PyObject_VectorcallMethod`, and the name of the method that goes on with a call.
pub fn begin(call: *mut c_void, method: *mut c_void) {
    METHOD.store(method, Ordering::Relaxed);
    CALL.store(call, Ordering::Release);
}

/// Does this whenever the module at `address` is called, until `watch` is removed.
pub fn add(address: usize, watch: u32, action: Action) {
    NAMED.lock().get_or_insert_default().entry(address).or_default().push((watch, action));
}

/// Ends all that `watch` has added.
pub fn remove(watch: u32) {
    if let Some(named) = &mut *NAMED.lock() {
        named.retain(|_, actions| {
            actions.retain(|(of, _)| *of != watch);
            !actions.is_empty()
        });
    }
}

/// The module at `address` is gone: whatever lies there next is another one.
pub fn forget(address: usize) {
    if let Some(named) = &mut *NAMED.lock() {
        named.remove(&address);
    }
}

fn act(address: usize) {
    let Some(named) = NAMED.try_read() else { return };
    let Some(actions) = named.as_ref().and_then(|named| named.get(&address)) else { return };
    for (_, action) in actions {
        match action {
            Action::Forward => drop(crate::labels::push_phase(store::FORWARD)),
            Action::Module(name, last) => drop(crate::labels::push_module_again(name, last)),
            Action::Number(number) => operators::module(*number),
        }
    }
}

/// So many ranges were open before a call. After it, however it ends, they are again.
struct Opened(u32);

impl Drop for Opened {
    fn drop(&mut self) {
        crate::labels::unwind(self.0);
    }
}

/// See the module's documentation.
///
/// # Safety
/// Called by Python as a function, after [`begin`].
pub unsafe extern "C-unwind" fn called(
    function: Object,
    arguments: *const Object,
    count: usize,
    keywords: Object,
) -> Object {
    let method = METHOD.load(Ordering::Relaxed);
    // SAFETY: `begin` was given this function of Python's; the references
    // are the caller's and outlive the call.
    unsafe {
        let call = std::mem::transmute::<*mut c_void, Call>(CALL.load(Ordering::Acquire));
        if count & !FLAG == 0 {
            return call(method, &raw const function, 1, std::ptr::null_mut()); // an error
        }
        // Python ends a daemon thread by unwinding it (`pthread_exit`), through here.
        let _until_called = Opened(crate::labels::opened());
        act(arguments.read() as usize);
        call(method, arguments, count, keywords)
    }
}

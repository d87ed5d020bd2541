//! From which of its pools PyTorch's allocator serves a request.
//!
//! A program sends allocations into a private pool (a CUDA graph's, or a `MemPool` of its own) by
//! `beginAllocateToPool(device, pool, filter)`. From then on the allocator asks the filter, a
//! `std::function<bool(stream)>`, at every request whether that pool is meant.
//!
//! So we put our own function into that slot of the allocator's table, and hand on a filter of
//! ours. It asks the real one, and remembers a yes for the request that is under way in this
//! thread. The allocator itself asks, when and as often as it would without us.
//!
//! `std::function` is libstdc++'s, whose layout is part of its stable ABI. It has two words of
//! storage, a manager and an invoker. The manager is asked for one of four things: 0 the type, 1
//! the functor, 2 copy, 3 destroy. An exception of the real filter passes through.

use std::ffi::{c_int, c_void};

use memtrace_format::event::Pool;

use crate::os::address::Address;
use crate::os::sync::{AtomicUsize, Ordering, fence};
use crate::pytorch::captures;
use crate::pytorch::methods::Methods;
use crate::pytorch::names;
use crate::record::guard;

type Storage = [usize; 2];
type Manage = unsafe extern "C-unwind" fn(*mut Storage, *const Storage, c_int) -> bool;
type Invoke = unsafe extern "C-unwind" fn(*const Storage, *mut c_void) -> bool;

const TYPE: c_int = 0;
const FUNCTOR: c_int = 1;
const COPY: c_int = 2;
const DESTROY: c_int = 3;

/// `std::function<bool(cudaStream_t)>`, owned.
#[repr(C)]
pub struct Function {
    storage: Storage,
    manage: Option<Manage>,
    invoke: Option<Invoke>,
}

impl Function {
    /// A copy; `None` of an empty one.
    ///
    /// # Safety
    /// `from` is a live `std::function` of this type.
    pub unsafe fn copy(from: *const Function) -> Option<Function> {
        // SAFETY: as promised; a manager copies from one storage into another.
        unsafe {
            let Function { manage: Some(manage), invoke, .. } = *from else { return None };
            let mut storage = [0; 2];
            manage(&raw mut storage, &raw const (*from).storage, COPY);
            Some(Function { storage, manage: Some(manage), invoke })
        }
    }

    /// Asks it about a stream.
    ///
    /// # Safety
    /// What it was made from is still there.
    pub unsafe fn call(&self, stream: *mut c_void) -> bool {
        let mut stream = stream;
        // SAFETY: an invoker takes its function's storage and its argument by reference.
        self.invoke.is_some_and(|invoke| unsafe {
            invoke(&raw const self.storage, (&raw mut stream).cast())
        })
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        if let Some(manage) = self.manage {
            // SAFETY: the function is alive, and not used afterwards. One
            // that was moved from has no manager.
            unsafe { manage(&raw mut self.storage, &raw const self.storage, DESTROY) };
        }
    }
}

/// What the storage of a filter of ours points to.
struct Filter {
    owners: Owners,
    pool: Pool,
    real: Function,
}

/// How many functions share a filter.
struct Owners(AtomicUsize);

impl Owners {
    fn one() -> Owners {
        Owners(AtomicUsize::new(1))
    }

    fn another(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less. Was it the last, after all that the others did?
    fn was_last(&self) -> bool {
        let is_last = self.0.fetch_sub(1, Ordering::Release) == 1;
        if is_last {
            fence(Ordering::Acquire);
        }
        is_last
    }
}

unsafe extern "C-unwind" fn invoke(storage: *const Storage, stream: *mut c_void) -> bool {
    // SAFETY: only our own functions have this invoker, and their storage begins with a live
    // filter; the real filter is called as its caller would have called it.
    unsafe {
        let filter = &*((*storage)[0] as *const Filter);
        let Some(real) = filter.real.invoke else { return false };
        let meant = real(&raw const filter.real.storage, stream);
        if meant {
            guard::local(|l| l.pool.set(filter.pool));
        }
        meant
    }
}

unsafe extern "C-unwind" fn manage(to: *mut Storage, from: *const Storage, what: c_int) -> bool {
    // SAFETY: only our own functions have this manager, and their storage begins with a live
    // filter, which lives as long as one of them.
    unsafe {
        let filter = (*from)[0] as *mut Filter;
        match what {
            TYPE => *to = [0; 2],
            FUNCTOR => *to = *from,
            COPY => {
                (*filter).owners.another();
                *to = *from;
            }
            _ => {
                if (*filter).owners.was_last() {
                    drop(Box::from_raw(filter));
                }
            }
        }
    }
    false
}

type Begin = unsafe extern "C-unwind" fn(*mut c_void, c_int, u64, u64, *mut Function);

static REAL_BEGIN: Address = Address::new();

/// (this, device, the two numbers of the pool, a hidden reference to the filter)
unsafe extern "C-unwind" fn begin(
    this: *mut c_void,
    device: c_int,
    first: u64,
    second: u64,
    filter: *mut Function,
) {
    // SAFETY: the address came from the slot that this function stands in; the arguments are the
    // caller's, or a filter that answers as the caller's does.
    unsafe {
        let real: Begin = std::mem::transmute(REAL_BEGIN.get());
        let Some(copy) = Function::copy(filter) else {
            real(this, device, first, second, filter);
            return captures::begins_pool(device);
        };
        let pool = Pool::of((first, second));
        let ours = Box::new(Filter { owners: Owners::one(), pool, real: copy });
        let storage = [Box::into_raw(ours) as usize, 0];
        let mut ours = Function { storage, manage: Some(manage), invoke: Some(invoke) };
        real(this, device, first, second, &raw mut ours);
        captures::begins_pool(device);
    }
}

/// Puts our function into a copy of the allocator's table.
pub fn watch(methods: &mut Methods) {
    methods.replace(names::BEGIN_POOL, begin as *const (), |real| {
        REAL_BEGIN.set(real as *mut c_void);
    });
}

#[cfg(all(test, loom))]
mod tests {
    /// Seen red: with `Relaxed` where an owner goes, and without the fence behind the last one.
    mod model {
        use super::super::*;
        use loom::cell::UnsafeCell;
        use loom::sync::Arc;
        use loom::thread;

        #[test]
        fn a_filter_goes_once_and_after_its_last_use() {
            loom::model(|| {
                let filter = Arc::new((Owners::one(), UnsafeCell::new(0)));
                filter.0.another();
                let ends = |(owners, filter): &(Owners, UnsafeCell<u32>)| {
                    filter.with(|_| ()); // it is asked
                    let is_last = owners.was_last();
                    if is_last {
                        // SAFETY: loom looks whether another thread uses it.
                        filter.with_mut(|filter| unsafe { *filter += 1 });
                    }
                    is_last
                };
                let other = filter.clone();
                let other = thread::spawn(move || ends(&other));
                let here = ends(&filter);
                assert_ne!(here, other.join().unwrap());
            });
        }
    }
}

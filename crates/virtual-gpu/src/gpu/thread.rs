//! What CUDA keeps for each thread: the last error, the stack of contexts, the mode of capture.
//!
//! All of it is plain data in fixed arrays, so that no destructor runs at a thread's end. Programs
//! call CUDA from destructors of their own, when thread-local objects may be gone already.

use core::cell::{Cell, RefCell};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A small stack. What does not fit is refused.
pub struct Stack<T, const N: usize> {
    items: [Option<T>; N],
    len: usize,
}

impl<T: Copy, const N: usize> Stack<T, N> {
    const fn new() -> Self {
        Self { items: [None; N], len: 0 }
    }

    /// The item last pushed.
    pub fn top(&self) -> Option<T> {
        self.items[..self.len].last().copied().flatten()
    }

    /// Pushes; false if there is no room.
    pub fn push(&mut self, item: Option<T>) -> bool {
        let Some(place) = self.items.get_mut(self.len) else { return false };
        *place = item;
        self.len += 1;
        true
    }

    /// Pops; `None` if there is nothing.
    pub fn pop(&mut self) -> Option<Option<T>> {
        self.len = self.len.checked_sub(1)?;
        self.items[self.len].take().into()
    }

    /// Changes the item on top, pushing it if there is none.
    pub fn set_top(&mut self, item: Option<T>) {
        if self.pop().is_none() && item.is_none() {
            return;
        }
        self.push(item);
    }
}

/// A context that is current: its handle and its device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Current {
    /// The context's handle.
    pub context: u64,
    /// The CUDA number of its device.
    pub device: usize,
}

/// The configuration of a launch in `<<<…>>>` form, on its way to the kernel's stub.
#[derive(Clone, Copy, Debug)]
pub struct Configuration {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads.
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: usize,
    /// The stream's handle.
    pub stream: u64,
}

/// The state of one thread.
pub struct Thread {
    id: Cell<usize>,
    /// The last failure of a runtime call, or 0.
    pub last_error: Cell<i32>,
    /// The device that the runtime uses if no context is current.
    pub device: Cell<usize>,
    /// `cudaStreamCaptureMode`: 0 global, 1 thread-local, 2 relaxed.
    pub capture_mode: Cell<i32>,
    /// Contexts that were pushed.
    pub contexts: RefCell<Stack<Current, 64>>,
    /// Configurations that were pushed.
    pub configurations: RefCell<Stack<Configuration, 16>>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            id: Cell::new(0),
            last_error: Cell::new(0),
            device: Cell::new(0),
            capture_mode: Cell::new(0),
            contexts: RefCell::new(Stack::new()),
            configurations: RefCell::new(Stack::new()),
        }
    };
}

/// The state of this thread.
pub fn with<R>(use_it: impl FnOnce(&Thread) -> R) -> R {
    THREAD.with(use_it)
}

/// The context that is current in this thread.
pub fn current() -> Option<Current> {
    with(|thread| thread.contexts.borrow().top())
}

/// The device that calls of this thread go to.
pub fn current_device() -> usize {
    with(|thread| {
        thread.contexts.borrow().top().map_or_else(|| thread.device.get(), |top| top.device)
    })
}

/// A number that no other thread has or had.
pub fn id() -> usize {
    static ISSUED: AtomicUsize = AtomicUsize::new(0);
    with(|thread| {
        if thread.id.get() == 0 {
            thread.id.set(ISSUED.fetch_add(1, Relaxed) + 1);
        }
        thread.id.get()
    })
}

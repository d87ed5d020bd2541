//! What a thread needs for its stack walks: buffers, the bounds of its stack, and the last stack it took.
//!
//! It is too large for thread-local storage and must not have a destructor there, so the thread keeps a
//! pointer to a mapping of its own, in a variable ([`Mine`]) that the caller has: he has looked up his thread-local
//! variables already, which is a call each time. Nobody is told when a thread ends; but the address of its
//! variable is then free for another thread, and a new thread that finds a block under its own address knows
//! that the owner is gone and takes it over. So there are never more blocks than there were threads at once,
//! more or less, and after a fork the child's thread still has its own.
//!
//! A thread that allocates and frees in turn stands at two places in turn, and each stack is most like the last
//! one of its kind. So a block has a space for each [`Site`].

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::native::{self, Bounds};
use super::python::code::Memo;
use super::python::walk;
use super::splice::{Last, Words};

/// What a thread works with. All zeros is a valid, empty one. What says that a stack is the last one lies together.
#[repr(C, align(64))]
pub struct Scratch {
    /// The last stack that it took.
    pub last: Last,
    /// Its Python frames, and what it remembers of them.
    pub python: walk::Trail,
    /// Its native frames, and what it remembers of them.
    pub native: native::Trail,
    /// The thread's stack.
    pub bounds: Bounds,
    /// Native frames while they are found.
    pub found: native::Found,
    /// What it remembers of code objects.
    pub memo: Memo,
    /// What the last stack is made of.
    pub words: Words,
}

impl Scratch {
    /// Forgets what was remembered of earlier stacks.
    pub fn forget(&mut self) {
        self.python.clear();
        self.native.clear();
        self.memo.clear();
        self.last.clear();
    }
}

/// What a stack is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Site {
    /// Memory is taken.
    Alloc = 0,
    /// Memory is given back.
    Free = 1,
}

/// A thread's block; all blocks are in one list, for ever.
struct Block {
    next: AtomicPtr<Block>,
    owner: AtomicUsize,
    scratch: UnsafeCell<[Scratch; 2]>,
}

static BLOCKS: AtomicPtr<Block> = AtomicPtr::new(std::ptr::null_mut());

/// Where a thread keeps its block; a thread-local variable, of which a thread has only one.
pub struct Mine(Cell<Option<&'static Block>>);

impl Mine {
    /// Nothing yet.
    #[allow(clippy::new_without_default, reason = "made in one place, where it must be constant")]
    pub const fn new() -> Mine {
        Mine(Cell::new(None))
    }

    /// Runs `f` with the calling thread's scratch space for this site; `None` if there is no memory for it. `f` must not
    /// call this.
    #[inline]
    pub fn with<T>(&self, site: Site, f: impl FnOnce(&mut Scratch) -> T) -> Option<T> {
        let block = if let Some(block) = self.0.get() {
            block
        } else {
            let block = take(std::ptr::from_ref(self) as usize)?;
            self.0.set(Some(block));
            block
        };
        // SAFETY: the block is this thread's alone: its owner word has the address of this thread's variable,
        // and the caller promises not to nest.
        let spaces = unsafe { &mut *block.scratch.get() };
        Some(f(&mut spaces[site as usize]))
    }
}

fn blocks() -> impl Iterator<Item = &'static Block> {
    // SAFETY: the pointers are null or a block, and blocks are never freed.
    let follow = |at: &AtomicPtr<Block>| unsafe { at.load(Ordering::Acquire).as_ref() };
    std::iter::successors(follow(&BLOCKS), move |b| follow(&b.next))
}

/// The block of the thread whose variable is at `me`: a dead thread's, or a new one.
#[cold]
fn take(me: usize) -> Option<&'static Block> {
    let inherited = blocks().find(|b| b.owner.load(Ordering::Relaxed) == me);
    let block = match inherited {
        Some(block) => block,
        None => make(me)?,
    };
    // SAFETY: only one live thread can have its variable at this address, and that is the calling one.
    let spaces = unsafe { &mut *block.scratch.get() };
    let bounds = Bounds::of_thread();
    for scratch in spaces {
        scratch.bounds = bounds;
        scratch.forget();
    }
    Some(block)
}

fn make(me: usize) -> Option<&'static Block> {
    // SAFETY: a fresh private mapping.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<Block>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping is zeroed, page-aligned, large enough and never unmapped; all zeros is a block.
    let block = unsafe { &*at.cast::<Block>() };
    block.owner.store(me, Ordering::Relaxed);
    let mut head = BLOCKS.load(Ordering::Relaxed);
    loop {
        block.next.store(head, Ordering::Relaxed);
        let at = std::ptr::from_ref(block).cast_mut();
        match BLOCKS.compare_exchange_weak(head, at, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return Some(block),
            Err(other) => head = other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_block_and_later_threads_inherit_it() {
        thread_local!(static MINE: Mine = const { Mine::new() });
        fn with<T>(f: impl FnOnce(&mut Scratch) -> T) -> Option<T> {
            MINE.with(|mine| mine.with(Site::Alloc, f))
        }
        let address = || with(|s| std::ptr::from_mut(s) as usize).expect("memory");
        assert_eq!(address(), address());
        let mine = address();
        assert_ne!(mine, std::thread::spawn(address).join().expect("no panic"));
        let before = blocks().count();
        for _ in 0..200 {
            let stale = std::thread::spawn(|| {
                with(|s| {
                    let remembered = s.native.frames().len();
                    native::walk(s.bounds, native::registers(), &mut s.native, &mut s.found);
                    assert!(!s.native.frames().is_empty());
                    remembered
                })
            });
            assert_eq!(
                stale.join().expect("no panic"),
                Some(0),
                "nothing of the dead owner is used"
            );
        }
        // Other tests run beside this one; two hundred blocks they don't make.
        assert!(
            blocks().count() < before + 100,
            "{} blocks after 200 threads, {before} before",
            blocks().count()
        );
    }
}

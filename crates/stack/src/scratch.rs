//! What a thread needs for its stack walks: buffers, room to work in, and the last stack it took.
//!
//! It is too large for thread-local storage and must not have a destructor there. So the thread
//! keeps a pointer to a mapping of its own, in a variable ([`Mine`]) that the caller has. The
//! caller has looked up his thread-local variables already, which is a call each time.
//!
//! Nobody says when a thread ends, but the address of its variable is then free for another thread.
//! A new thread that finds a block under its own address knows that the owner is gone, and takes it
//! over. So there are never more blocks than there were threads at once, more or less, and after a
//! fork the child's thread still has its own.
//!
//! A thread that allocates and frees in turn stands at two places in turn, and each stack is most
//! like the last one of its kind. So a block has a space for each [`Site`].

use std::cell::{Cell, UnsafeCell};

use super::list::{List, Node};
use super::native;
use super::python::code::Memo;
use super::python::walk;
use super::registers::stack_pointer;
use super::room::{Large, Room};
use super::splice::{Last, Words};
use memtrace_os::errno;
use memtrace_os::signals;

/// What a thread works with. All zeros is a valid, empty one. What says that a
/// stack is the last one lies together.
#[repr(C, align(64))]
pub struct Scratch {
    /// The last stack that it took.
    pub last: Last,
    /// Its Python frames, and what it remembers of them.
    pub python: walk::Cache,
    /// Its native frames, and what it remembers of them.
    pub native: native::Cache,
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

/// A thread's block, found by the address of its variable.
type Block = Node<Spaces>;

struct Spaces {
    room: Room,
    scratch: UnsafeCell<[Scratch; 2]>,
}

static BLOCKS: List<Spaces> = List::new();

/// Where a thread keeps its block; a thread-local variable, of which a thread has only one.
pub struct Mine {
    block: Cell<Option<&'static Block>>,
    /// Where the thread's own stack has room for a hook: from which address on, and how many bytes.
    roomy: Cell<(usize, usize)>,
}

thread_local! {
    /// The calling thread's, once it has been said where that is ([`Mine::settle`]).
    static SETTLED: Cell<*const Mine> = const { Cell::new(std::ptr::null()) };
    /// What stands in for it before that.
    static SPARE: Mine = const { Mine::new() };
}

/// Runs `f` with what the calling thread needs for its stacks.
#[cold]
pub fn mine<R>(f: impl FnOnce(&Mine) -> R) -> R {
    // SAFETY: null, or what lives as long as the thread, as `settle` was promised.
    match unsafe { SETTLED.get().as_ref() } {
        Some(settled) => f(settled),
        None => SPARE.with(f),
    }
}

impl Mine {
    /// From now on this is the calling thread's.
    ///
    /// # Safety
    /// It lives as long as the thread.
    pub unsafe fn settle(&self) {
        SETTLED.set(self);
    }

    /// Nothing yet.
    #[allow(clippy::new_without_default, reason = "made in one place, where it must be constant")]
    pub const fn new() -> Mine {
        Mine { block: Cell::new(None), roomy: Cell::new((0, 0)) }
    }

    /// The thread's block; `None` if there is no memory for it.
    #[inline]
    fn block(&self) -> Option<&'static Block> {
        self.block.get().or_else(|| take(self))
    }

    /// Runs `f` with the calling thread's scratch space for this site, and its room; `None` if
    /// there is no memory for them. `f` must not call this.
    #[inline]
    pub fn with<T>(&self, site: Site, f: impl FnOnce(&mut Scratch, &Room) -> T) -> Option<T> {
        let block = self.block()?;
        // SAFETY: the block is this thread's alone: its owner word has the address of this thread's
        // variable, and the caller promises not to nest.
        let spaces = unsafe { &mut *block.scratch.get() };
        Some(f(&mut spaces[site as usize], &block.room))
    }

    /// Is the thread on its own stack, with room for a hook?
    #[inline(always)]
    pub fn has_room(&self) -> bool {
        let (low, bytes) = self.roomy.get();
        stack_pointer().wrapping_sub(low) < bytes
    }

    /// Runs `f` on a stack that has room for anything, if there is memory
    /// for one. `errno` stays as it is.
    #[inline]
    pub fn aside<R>(&self, f: impl FnOnce() -> R) -> R {
        let _errno = errno::Kept::now();
        match self.room() {
            Some(room) => room.run(f),
            None => f(),
        }
    }

    /// Is what lies at this address over when everything below the other one is? That
    /// is in the thread's own stack, or nothing is known of it. A signal handler's
    /// stack is over with what it has interrupted.
    pub fn is_left(&self, at: usize, below: usize) -> bool {
        const FAR: usize = 64 << 20;
        match self.block.get() {
            Some(block) if block.room.is_own(below as u64) => {
                !block.room.is_own(at as u64) || at < below
            }
            Some(_) => false,
            None => (1..FAR).contains(&below.wrapping_sub(at)),
        }
    }

    /// Forgets the last stacks of the calling thread, so that the next ones are taken from nothing.
    pub fn forget(&self) {
        for site in [Site::Alloc, Site::Free] {
            self.with(site, |scratch, _| scratch.forget());
        }
    }

    /// The thread has left what it was about, in the middle of it: nothing that it remembers
    /// counts, and it is on no stack of ours.
    #[cold]
    pub fn leave(&self) {
        let Some(block) = self.block.get() else { return };
        block.room.vacate();
        // SAFETY: the block is this thread's alone, and what it was about with it is over.
        for scratch in unsafe { &mut *block.scratch.get() } {
            scratch.forget();
        }
    }

    /// The calling thread's room.
    pub fn room(&self) -> Option<&'static Room> {
        self.block().map(|block| &block.room)
    }
}

/// Runs `f` on a stack of this thread's that is memtrace's own.
#[cold]
#[inline(never)]
pub fn aside<R>(f: impl FnOnce() -> R) -> R {
    mine(|mine| mine.aside(f))
}

/// Runs `f` on a large stack that is taken for it, or, if there is no memory, on one of this
/// thread's. For whatever writes files. The thread that ends a process, or asks for a snapshot, may
/// stand on a fiber's stack or a signal's, of a few kilobytes.
#[cold]
#[inline(never)]
pub fn on_a_large_one<R>(f: impl FnOnce() -> R) -> R {
    let (mut f, mut result) = (Some(f), None);
    let mut work = || result = f.take().map(|f| f());
    match Large::new() {
        Some(stack) => stack.call(&mut work),
        None => aside(&mut work),
    }
    result.unwrap_or_else(|| unreachable!("it was called"))
}

/// The block of the thread whose variable this is: a dead thread's, or a new one.
#[cold]
fn take(mine: &Mine) -> Option<&'static Block> {
    // What finds out about the thread's stack must not be left in the
    // middle: it holds locks of the C library's.
    let _held = signals::Held::all();
    let _errno = errno::Kept::now();
    let me = std::ptr::from_ref(mine) as usize;
    let block = match BLOCKS.of(me) {
        Some(block) => block,
        None => make(me)?,
    };
    mine.block.set(Some(block));
    mine.roomy.set(block.room.enter().roomy());
    // SAFETY: only one live thread can have its variable at this address,
    // and that is the calling one.
    for scratch in unsafe { &mut *block.scratch.get() } {
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
    // SAFETY: the mapping is zeroed, page-aligned, large enough and never
    // unmapped; all zeros is a block.
    let block = unsafe { &*at.cast::<Block>() };
    block.room.furnish();
    BLOCKS.push(block, me);
    Some(block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers::registers;

    #[test]
    fn a_thread_keeps_its_block_and_later_threads_inherit_it() {
        thread_local!(static MINE: Mine = const { Mine::new() });
        fn with<T>(f: impl FnOnce(&mut Scratch, &Room) -> T) -> Option<T> {
            MINE.with(|mine| mine.with(Site::Alloc, f))
        }
        let address = || with(|s, _| std::ptr::from_mut(s) as usize).expect("memory");
        assert_eq!(address(), address());
        let mine = address();
        assert_ne!(mine, std::thread::spawn(address).join().expect("no panic"));
        let before = BLOCKS.all().count();
        for _ in 0..200 {
            let stale = std::thread::spawn(|| {
                with(|s, room| {
                    let remembered = s.native.frames().len();
                    native::walk(room, registers(), &mut s.native, &mut s.found);
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
            BLOCKS.all().count() < before + 100,
            "{} blocks after 200 threads, {before} before",
            BLOCKS.all().count()
        );
    }
}

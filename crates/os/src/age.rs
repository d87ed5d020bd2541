//! Which process this is, in the line of those that it was forked from: a
//! number that costs no system call.
//!
//! It lies in a word that the kernel wipes in the child of a fork, also of one that runs no
//! handlers (`MADV_WIPEONFORK`, since Linux 4.14). Who finds 0 there takes the next number. The
//! number of the process would not do: it takes a system call, and a grandchild may be given that
//! of one who is dead. A kernel that can't wipe leaves it to the handler of a fork ([`forget`]).
//! There, a child that was made by the system call itself, past the C library, takes itself for its
//! parent.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use once_cell::race::OnceRef;

use crate::errno;

/// Where this process's age is; nowhere before the first question. A word that says all by itself:
/// of several who give the first age, one does.
static OWN: OnceRef<AtomicUsize> = OnceRef::new();
/// The last age that was given. Inherited.
static LAST: AtomicU32 = AtomicU32::new(0);
/// The kernel doesn't wipe the word.
static STAYS: AtomicBool = AtomicBool::new(false);

/// Ages are no larger. After so many children of children they begin again.
pub const MOST: u32 = 0xffff;

/// The age of this process: never 0, and that of no process before it in its line.
#[inline]
pub fn age() -> u32 {
    match OWN.get().map(|own| own.load(Ordering::Acquire)) {
        None | Some(0) => begin(),
        Some(age) => age as u32,
    }
}

#[cold]
fn begin() -> u32 {
    // Who comes second leaves a page behind.
    let own = OWN.get_or_init(|| {
        let (word, is_wiped) = word_of_this_process();
        if !is_wiped {
            STAYS.store(true, Ordering::Release);
        }
        word
    });
    // Given before it is shown: should a thread fork in between, the child takes a later one.
    let next = 1 + LAST.fetch_add(1, Ordering::AcqRel) % MOST;
    match own.compare_exchange(0, next as usize, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => next,
        Err(other) => other as u32,
    }
}

/// In a forked child whose kernel wipes nothing: it has no age yet.
pub fn forget() {
    if let Some(own) = OWN.get()
        && STAYS.load(Ordering::Acquire)
    {
        own.store(0, Ordering::Release);
    }
}

/// A word that is 0 in a forked child, before any code runs there, and whether the kernel sees
/// to that. Here it is 0, too, so far.
pub fn word_of_this_process() -> (&'static AtomicUsize, bool) {
    const PAGE: usize = 4096;
    let _errno = errno::Kept::now();
    // SAFETY: a fresh private page that is never unmapped, used as one atomic word.
    unsafe {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let page = libc::mmap(ptr::null_mut(), PAGE, protection, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return (Box::leak(Box::new(AtomicUsize::new(0))), false);
        }
        let is_wiped = libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) == 0;
        (&*page.cast::<AtomicUsize>(), is_wiped)
    }
}

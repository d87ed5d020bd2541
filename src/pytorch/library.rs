//! Where `libc10_cuda.so` lies, the library that PyTorch's allocator and streams are in.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::libraries::loaded;
use crate::libraries::objects;
use crate::pytorch::names::C10_CUDA;

/// Whoever locates it finds the same, and sets the end of the code last.
static TEXT_START: AtomicUsize = AtomicUsize::new(usize::MAX);
static TEXT_END: AtomicUsize = AtomicUsize::new(0);
static LIBRARY_END: AtomicUsize = AtomicUsize::new(0);

/// Is it known where the library lies?
pub fn is_known() -> bool {
    TEXT_END.load(Ordering::Acquire) != 0
}

/// Does this address lie in its code, as far as is known?
pub fn contains(address: usize) -> bool {
    let end = TEXT_END.load(Ordering::Acquire);
    (TEXT_START.load(Ordering::Relaxed)..end).contains(&address)
}

/// The address after all that is mapped of it.
pub fn end() -> usize {
    LIBRARY_END.load(Ordering::Relaxed)
}

/// Is this address in a library of that name? Looks it up, so not for hooks' common path.
#[cold]
#[inline(never)]
pub fn is_at(address: usize) -> bool {
    let path = objects::name_at(address as u64);
    let file = path.and_then(|path| path.to_bytes().rsplit(|b| *b == b'/').next());
    file == Some(C10_CUDA.as_bytes())
}

/// Learns where it lies, if it is loaded.
pub fn locate() -> bool {
    if is_known() {
        return true;
    }
    let Some(library) = loaded::loaded(C10_CUDA) else { return false };
    TEXT_START.store(library.text_start, Ordering::Relaxed);
    LIBRARY_END.store(library.end, Ordering::Relaxed);
    TEXT_END.store(library.text_end, Ordering::Release);
    true
}

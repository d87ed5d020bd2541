//! Other interposers in front of us: libraries that were preloaded before
//! and have functions of the same names.
//!
//! A call then comes to us from there, and not from its true caller. For nearly everything that
//! makes no difference; but PyTorch's allocator is known by the address that its calls return to
//! ([`crate::pytorch::allocator`]). So where a call comes from an interposer, the stack is followed
//! until it leaves that library. If PyTorch's allocator called, that is the caller.
//!
//! Who is in front is looked at once, when the recorder wakes. Without any,
//! which is the rule, a call pays one load.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::table::Hooks;
use crate::libraries::loaded;
use crate::pytorch::allocator;
use crate::stack;

/// How many libraries are remembered.
const PLACES: usize = 8;
/// First address and the one after the last, written by the thread that wakes the recorder, and
/// each of them before [`COUNT`] says that it is there.
static RANGES: [[AtomicUsize; 2]; PLACES] = [const { [const { AtomicUsize::new(0) }; 2] }; PLACES];
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn contains(address: usize) -> bool {
    let known = &RANGES[..COUNT.load(Ordering::Acquire).min(PLACES)];
    known.iter().any(|[start, end]| {
        (start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed)).contains(&address)
    })
}

/// Looks who is in front. Not for hooks' common path.
pub fn find(hooks: &Hooks) {
    let own = loaded::library_of(find as *const () as usize);
    for hook in hooks.iter().filter(|hook| !hook.exported.0.is_null()) {
        let shown = hook.exported.0 as usize;
        if contains(shown) {
            continue;
        }
        let Some(path) = loaded::library_of(shown).filter(|path| Some(path) != own.as_ref()) else {
            continue;
        };
        let file = path.rsplit('/').next().unwrap_or(&path);
        let count = COUNT.load(Ordering::Relaxed);
        if let (Some(library), Some([start, end])) = (loaded::loaded(file), RANGES.get(count)) {
            start.store(library.text_start, Ordering::Relaxed);
            end.store(library.text_end, Ordering::Relaxed);
            COUNT.store(count + 1, Ordering::Release);
        }
    }
}

/// Who called, if a call comes from this address: PyTorch's allocator if
/// it is behind an interposer.
#[inline]
pub fn behind(caller: usize) -> usize {
    if COUNT.load(Ordering::Relaxed) == 0 { caller } else { follow(caller) }
}

#[cold]
fn follow(caller: usize) -> usize {
    if !contains(caller) {
        return caller;
    }
    let found = stack::first_outside(|pc| contains(pc as usize)).map(|pc| pc as usize);
    found.filter(|pc| allocator::is_caller(*pc)).unwrap_or(caller)
}

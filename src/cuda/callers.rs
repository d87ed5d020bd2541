//! Where calls of each caller go, for more callers than a row has lines ([`crate::cuda::routes`]):
//! the second look, where no line has the caller.
//!
//! An entry is found by the address that calls, which also serves code in no library, or by the
//! first address of its library. What it says holds as long as no library was unloaded. So the
//! loader's count is asked each time while a library is being closed, and until the count has been
//! seen after that. At all other times reading is a few loads. A name that is nowhere is
//! remembered, too, until a library has come or gone.
//!
//! It must never wait: a thread that finds another one writing writes nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

use crate::libraries::loaded;
use crate::libraries::objects;
use crate::os::locks::Turn;

const ENTRIES: usize = 2048;
const FUNCTION: u32 = 48;

/// The destination of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// To this function of CUDA's.
    Cuda(usize),
    /// To this function, which is somebody else's.
    Elsewhere(usize),
    /// There is no such function.
    Nowhere,
}

/// A number that is odd while the entry is written; first address and length of the library; and
/// the function, with the row and the kind of destination above it.
struct Entry([AtomicUsize; 4]);

static KNOWN: [Entry; ENTRIES] = [const { Entry([const { AtomicUsize::new(0) }; 4]) }; ENTRIES];
static WRITING: Turn = Turn::new(());

/// Threads that are closing a library.
static CLOSING: AtomicU32 = AtomicU32::new(0);
/// How often a library was closed, and of these the last time after which
/// nothing that we know was found to be gone.
static CLOSED: AtomicU64 = AtomicU64::new(0);
static CHECKED: AtomicU64 = AtomicU64::new(0);
/// How many libraries had been unloaded by then.
static UNLOADED: AtomicU64 = AtomicU64::new(0);

impl Entry {
    fn read(&self, row: usize, caller: usize) -> Option<(Range<usize>, usize)> {
        let [number, start, length, what] = &self.0;
        let before = number.load(Ordering::Acquire);
        let words = [start, length, what].map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let [start, length, what] = words;
        let is_whole = before & 1 == 0 && number.load(Ordering::Relaxed) == before;
        let is_it = what >> FUNCTION >> 2 == row && caller.wrapping_sub(start) < length;
        (is_whole && is_it).then_some((start..start + length, what))
    }

    fn write(&self, library: &Range<usize>, what: usize) {
        let [number, ..] = &self.0;
        // It is odd already where another thread was writing the entry
        // when this process was forked.
        let odd = number.load(Ordering::Relaxed) | 1;
        number.store(odd, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in self.0[1..].iter().zip([library.start, library.len(), what]) {
            word.store(value, Ordering::Relaxed);
        }
        number.store(odd.wrapping_add(1), Ordering::Release);
    }

    fn is_free(&self) -> bool {
        self.0[2].load(Ordering::Relaxed) == 0
    }
}

/// The two entries that may be this one's.
fn places(row: usize, address: usize) -> [&'static Entry; 2] {
    let mixed = (address ^ row << 52).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let at = mixed >> (usize::BITS - ENTRIES.trailing_zeros());
    [&KNOWN[at], &KNOWN[at ^ 1]]
}

fn coming_and_going() -> usize {
    let [loaded, unloaded] = loaded::counts();
    (loaded + unloaded) as usize & ((1 << FUNCTION) - 1)
}

/// Where calls of a row's function from this address go, and from where
/// else; `None` if that isn't known.
pub fn find(row: usize, caller: usize) -> Option<(Range<usize>, Destination)> {
    if !holds() {
        return None;
    }
    let read = |address| places(row, address).iter().find_map(|entry| entry.read(row, caller));
    let (library, what) = read(caller).or_else(|| {
        let found = read(library_of(caller).start)?;
        write(row, caller, &found.0, found.1);
        Some(found)
    })?;
    let function = what & ((1 << FUNCTION) - 1);
    let destination = match what >> FUNCTION & 3 {
        0 => Destination::Cuda(function),
        1 => Destination::Elsewhere(function),
        _ if function == coming_and_going() => Destination::Nowhere,
        _ => return None,
    };
    Some((library, destination))
}

/// The library that has this address; only the address itself if none has.
fn library_of(address: usize) -> Range<usize> {
    let found = objects::library_at(address as u64);
    found.map_or(address..address + 1, |r| r.start as usize..r.end as usize)
}

/// Remembers where calls from the library with this address go. Says which that is.
pub fn remember(row: usize, caller: usize, destination: Destination) -> Range<usize> {
    let library = library_of(caller);
    let (kind, function) = match destination {
        Destination::Cuda(function) => (0, function),
        Destination::Elsewhere(function) => (1, function),
        Destination::Nowhere => (2, coming_and_going()),
    };
    if function >> FUNCTION == 0 {
        let what = function | (row << 2 | kind) << FUNCTION;
        write(row, library.start, &library, what);
        write(row, caller, &library, what);
    }
    library
}

fn write(row: usize, address: usize, library: &Range<usize>, what: usize) {
    if let Some(_turn) = WRITING.try_lock() {
        let places = places(row, address);
        let is_it = |entry: &&&Entry| entry.is_free() || entry.read(row, library.start).is_some();
        let free = places.iter().find(is_it);
        free.unwrap_or(&places[address >> 4 & 1]).write(library, what);
    }
}

/// In a forked child, nobody else is closing a library. An entry that is
/// half written counts as free.
pub fn forget_others() {
    CLOSING.store(0, Ordering::SeqCst);
    library_may_be_gone();
}

// --- when a library goes -------------------------------------------------------------------------

/// Is a library being closed?
pub fn is_closing() -> bool {
    CLOSING.load(Ordering::SeqCst) != 0
}

/// Closes a library; `first` when all know that.
pub fn closing<T>(first: impl FnOnce(), close: impl FnOnce() -> T) -> T {
    CLOSING.fetch_add(1, Ordering::SeqCst);
    library_may_be_gone();
    first();
    let result = close();
    // In the child of a fork from within, there is none any more.
    let one_less = |n: u32| n.checked_sub(1);
    let _ = CLOSING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    result
}

/// A library may be gone.
pub fn library_may_be_gone() {
    CLOSED.fetch_add(1, Ordering::SeqCst);
}

/// Does what is known hold? What is about a caller whose code runs was
/// right when no library is gone since.
fn holds() -> bool {
    let closed = CLOSED.load(Ordering::SeqCst);
    let is_closing = is_closing();
    if !is_closing && CHECKED.load(Ordering::SeqCst) == closed {
        return true;
    }
    let [_, unloaded] = loaded::counts();
    if UNLOADED.load(Ordering::SeqCst) != unloaded {
        let Some(_turn) = WRITING.try_lock() else { return false };
        KNOWN.iter().filter(|entry| !entry.is_free()).for_each(|entry| entry.write(&(0..0), 0));
        UNLOADED.store(unloaded, Ordering::SeqCst);
    }
    if !is_closing {
        CHECKED.store(closed, Ordering::SeqCst);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_caller_has_its_own_answer_until_a_library_comes_or_goes() {
        let _alone = crate::stack::testing::alone();
        let here = find as *const () as usize;
        let nowhere = 1 << 20; // in no library: each address is for itself
        assert_eq!(find(3, here), None);
        let library = remember(3, here, Destination::Cuda(77));
        assert_eq!(remember(4, here, Destination::Elsewhere(78)), library);
        remember(3, nowhere, Destination::Nowhere);
        assert_eq!(
            find(3, here + 1),
            Some((library.clone(), Destination::Cuda(77))),
            "found by its library"
        );
        assert_eq!(find(4, here), Some((library.clone(), Destination::Elsewhere(78))));
        assert_eq!(find(3, nowhere), Some((nowhere..nowhere + 1, Destination::Nowhere)));
        assert_eq!((find(3, nowhere + 1), find(5, here)), (None, None));
        library_may_be_gone();
        assert_eq!(find(3, here), Some((library, Destination::Cuda(77))), "none is gone");
        UNLOADED.fetch_add(1, Ordering::SeqCst);
        assert!(find(3, here).is_some(), "nobody has closed any");
        library_may_be_gone();
        assert_eq!((find(3, here), find(4, here)), (None, None), "one is gone");
    }
    #[test]
    fn an_entry_that_a_fork_left_half_written_is_written_again() {
        let entry = Entry([const { AtomicUsize::new(0) }; 4]);
        entry.0[0].store(1, Ordering::Relaxed);
        let (library, what) = (100..200, 5 << 2 << FUNCTION);
        entry.write(&library, what);
        assert_eq!(entry.read(5, 150), Some((library, what)));
    }
}

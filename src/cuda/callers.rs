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

use crate::cuda::entry::Entry;
use crate::libraries::loaded;
use crate::libraries::objects;
use crate::os::locks::Turn;
use crate::os::sync::{AtomicU64, Ordering, atomics, constant, last, of_process};

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

of_process! {
    /// First address and length of the library; the function, over it the row and what sort of
    /// function.
    static KNOWN: [Entry<3>; ENTRIES] = atomics![Entry::new(); ENTRIES];
}
static WRITING: Turn = Turn::new(());

/// What an entry says of a row's calls from there.
fn said(entry: &Entry<3>, row: usize, caller: usize) -> Option<(Range<usize>, usize)> {
    let [start, length, what] = entry.read()?;
    let is_it = what >> FUNCTION >> 2 == row && caller.wrapping_sub(start) < length;
    is_it.then_some((start..start + length, what))
}

fn is_free(entry: &Entry<3>) -> bool {
    entry.word(1) == 0
}

/// The two entries that may be this one's.
fn places(row: usize, address: usize) -> [&'static Entry<3>; 2] {
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
    let read = |address| places(row, address).iter().find_map(|entry| said(entry, row, caller));
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
        let is_it =
            |entry: &&&Entry<3>| is_free(entry) || said(entry, row, library.start).is_some();
        let free = places.iter().find(is_it);
        let entry = free.unwrap_or(&places[address >> 4 & 1]);
        entry.write([library.start, library.len(), what]);
    }
}

/// In a forked child, nobody else is closing a library. An entry that is
/// half written counts as free.
pub fn forget_others() {
    DOUBT.closing.store(0, Ordering::SeqCst);
    library_may_be_gone();
}

// --- when a library goes -------------------------------------------------------------------------

/// Whether what is known holds: what is about a caller whose code runs was right when no library is
/// gone since.
struct Doubt {
    /// Threads that are closing a library.
    closing: AtomicU64,
    /// How often a library was closed, and of these the last time after which
    /// nothing that we know was found to be gone.
    closed: AtomicU64,
    checked: AtomicU64,
    /// How many libraries had been unloaded by then.
    unloaded: AtomicU64,
}

of_process! {
    static DOUBT: Doubt = Doubt::new();
}

impl Doubt {
    constant! {
        fn new() -> Doubt {
            Doubt {
                closing: AtomicU64::new(0),
                closed: AtomicU64::new(0),
                checked: AtomicU64::new(0),
                unloaded: AtomicU64::new(0),
            }
        }
    }

    /// `unloaded` asks how many libraries have been, and `forget` forgets all that is known, if it
    /// can.
    fn holds(&self, unloaded: impl FnOnce() -> u64, forget: impl FnOnce() -> bool) -> bool {
        let closed = last(&self.closed);
        let is_closing = last(&self.closing) != 0;
        if !is_closing && last(&self.checked) == closed {
            return true;
        }
        let unloaded = unloaded();
        if last(&self.unloaded) != unloaded {
            if !forget() {
                return false;
            }
            self.unloaded.store(unloaded, Ordering::SeqCst);
        }
        if !is_closing {
            self.checked.store(closed, Ordering::SeqCst);
        }
        true
    }
}

/// Is a library being closed?
pub fn is_closing() -> bool {
    last(&DOUBT.closing) != 0
}

/// Closes a library; `first` when all know that.
pub fn closing<T>(first: impl FnOnce(), close: impl FnOnce() -> T) -> T {
    DOUBT.closing.fetch_add(1, Ordering::SeqCst);
    library_may_be_gone();
    first();
    let result = close();
    // In the child of a fork from within, there is none any more.
    let one_less = |n: u64| n.checked_sub(1);
    let _ = DOUBT.closing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    result
}

/// A library may be gone.
pub fn library_may_be_gone() {
    DOUBT.closed.fetch_add(1, Ordering::SeqCst);
}

/// Does what is known hold?
fn holds() -> bool {
    DOUBT.holds(|| loaded::counts()[1], forget)
}

/// Forgets it all, unless somebody is writing.
#[cold]
fn forget() -> bool {
    let Some(_turn) = WRITING.try_lock() else { return false };
    KNOWN.iter().filter(|entry| !is_free(entry)).for_each(|entry| entry.write([0; 3]));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: where closing a library leaves no doubt, and where what is known is taken as
    /// proven while one is closed.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::thread;

        /// One is loaded in the place of one that is unloaded, while its thread closes it, and
        /// makes a call, beside a thread that looks, too.
        #[test]
        fn nothing_is_believed_of_a_library_that_has_another_ones_place() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let all = Arc::new([0, 1].map(AtomicU64::new));
                let looks = |[gone, known]: &[AtomicU64; 2]| {
                    let forget = || {
                        known.store(0, Ordering::Release);
                        true
                    };
                    DOUBT.holds(|| last(gone), forget).then(|| known.load(Ordering::Acquire))
                };
                let beside = all.clone();
                let beside = thread::spawn(move || {
                    looks(&beside);
                    let is_replaced = last(&beside[0]) == 1;
                    assert!(!is_replaced || looks(&beside) != Some(1));
                });
                closing(|| (), || all[0].fetch_add(1, Ordering::AcqRel));
                assert_ne!(looks(&all), Some(1));
                beside.join().unwrap();
            });
        }
    }

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
        DOUBT.unloaded.fetch_add(1, Ordering::SeqCst);
        assert!(find(3, here).is_some(), "nobody has closed any");
        library_may_be_gone();
        assert_eq!((find(3, here), find(4, here)), (None, None), "one is gone");
    }
}

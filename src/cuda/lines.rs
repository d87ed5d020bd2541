//! One library, and what is known of it: a line of a table that is read without a lock, by a few
//! instructions, too.
//!
//! A line is written while others read it. Its length is zero meanwhile, and a reader looks at the
//! line again after it has read what is known: a library whose code is running can't be replaced
//! by another one in the same place. That a line is written twice while one reader is at it, the
//! second time for the reader's own library again, would take hundreds of calls in these few
//! instructions.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::callers;
use crate::os::sync::Word;

/// The library's first address, its length, and what is known of it; see the module.
#[repr(C)]
pub struct Line<W = AtomicUsize>([W; 3]);

impl Line {
    /// Free.
    #[allow(clippy::new_without_default, reason = "made in statics alone")]
    pub const fn new() -> Line {
        Line([const { AtomicUsize::new(0) }; 3])
    }
}

impl<W: Word<Value = usize>> Line<W> {
    /// Does the library have this address?
    fn range(&self, address: usize) -> Option<Range<usize>> {
        let [start, length, _] = &self.0;
        let (start, length) = (start.load(Ordering::Acquire), length.load(Ordering::Acquire));
        (address.wrapping_sub(start) < length).then(|| start..start + length)
    }

    /// The library that has this address, whose code runs, and what is known of it. The
    /// instructions in `hooks.rs` read the latter alone, for which it is enough that the address is
    /// in the second range, too.
    pub fn of(&self, address: usize) -> Option<(Range<usize>, usize)> {
        let library = self.range(address)?;
        let what = self.0[2].load(Ordering::Acquire);
        (self.range(address)? == library).then_some((library, what))
    }

    /// Is it nobody's?
    pub fn is_free(&self) -> bool {
        self.0[1].load(Ordering::SeqCst) == 0
    }

    /// Writes it, unless a library is being closed: another one may come in its place at once. For
    /// one thread at a time.
    pub fn write(&self, library: Range<usize>, what: usize) {
        if callers::is_closing() {
            return;
        }
        let [start, length, place] = &self.0;
        length.store(0, Ordering::SeqCst);
        start.store(library.start, Ordering::SeqCst);
        place.store(what, Ordering::SeqCst);
        length.store(library.len(), Ordering::SeqCst);
        // Who began to close one meanwhile may have missed this line.
        if callers::is_closing() {
            length.store(0, Ordering::SeqCst);
        }
    }

    /// Forgets it.
    pub fn forget(&self) {
        if !self.is_free() {
            self.0[1].store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: without the second look at the range, where the length isn't zero meanwhile, and
    /// without the second look whether a library is being closed.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicUsize as Modelled;
        use loom::thread;

        fn check(model: impl Fn(Arc<Line<Modelled>>) + Sync + Send + 'static) {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(move || model(Arc::new(Line([0; 3].map(Modelled::new)))));
        }

        #[test]
        fn who_calls_is_told_of_its_own_library_or_nothing() {
            check(|line| {
                line.write(100..200, 1);
                let writer = line.clone();
                let writer = thread::spawn(move || writer.write(300..450, 3));
                // As the instructions in `hooks.rs` read it.
                let called = line.range(150).map(|_| line.0[2].load(Ordering::Acquire));
                let called = called.filter(|_| line.range(150).is_some());
                assert!(called.is_none_or(|what| what == 1));
                assert!(line.of(150).is_none_or(|said| said == (100..200, 1)));
                assert!(line.of(310).is_none_or(|said| said == (300..450, 3)));
                writer.join().unwrap();
                assert_eq!((line.of(150), line.of(310)), (None, Some((300..450, 3))));
            });
        }

        /// A library's destructors wait for its last thread, which has just made a call.
        #[test]
        fn nothing_is_known_of_a_library_that_is_gone() {
            check(|line| {
                let last = line.clone();
                let last = thread::spawn(move || last.write(100..200, 1));
                callers::closing(|| line.forget(), || last.join().unwrap());
                assert_eq!(line.of(150), None);
            });
        }
    }

    #[test]
    fn a_line_is_for_one_library_until_it_is_forgotten() {
        let _steady = crate::stack::testing::steady(); // nobody closes a library
        let line = Line::new();
        assert!(line.is_free() && line.of(0).is_none());
        line.write(100..150, 7);
        assert_eq!((line.of(100), line.of(149)), (Some((100..150, 7)), Some((100..150, 7))));
        assert_eq!((line.of(99), line.of(150)), (None, None));
        line.forget();
        assert!(line.is_free() && line.of(100).is_none());
    }
}

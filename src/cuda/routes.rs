//! Where a call goes that has come to one of our symbols or trampolines: to the function that the
//! loader would have found without us.
//!
//! A symbol of ours stands in front of every other one of its name, whoever calls it. It also
//! stands in front of a library's own function, which may have any signature and nothing to do with
//! CUDA. So the first question is always: what would the loader have bound this *caller* to? Each
//! row of the table remembers the answer for the libraries that call it, in lines that a few
//! instructions read (`hooks.rs`). A caller in no line is looked for among many more callers
//! ([`crate::cuda::callers`]) and then looked up ([`super::choose`]), with all registers saved. If
//! the answer is CUDA's function, the call goes to the row's handler. If it is somebody else's, the
//! call jumps there as if we had never been in between.
//!
//! If a look-up finds a function of CUDA's, the program gets a *trampoline*: a function of ours
//! for that row and that one real function. A process may have two copies or versions of a
//! library, so a row has several trampolines.
//!
//! It must never keep a library from being unloaded that would be without us, nor call into one
//! that was. So lines are forgotten before a library is closed, and none is written until that is
//! over. Another thread may open a library in its place at once.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use crate::cuda::callers::{self, Destination};
use crate::cuda::calls;
use crate::cuda::lines::Line;
use crate::cuda::table::{Api, ENTRY_POINTS, Hooks, ROWS, TRAMPOLINES};
use crate::libraries::loaded;
use crate::libraries::objects;
use crate::os::locks::Turn;
use crate::os::message;

/// How many libraries have a line for one function, where it is CUDA's.
const LINES: usize = 4;
/// Libraries whose calls go to somebody else's function.
const FOREIGN: usize = 4;
/// What is known of one row's callers, and the function for each. The first lines are read by
/// `hooks.rs`, whose offsets follow from this layout.
#[repr(C)]
pub struct Row {
    known: [Line; LINES],
    /// Those whose calls go to somebody else's function.
    pub foreign: [Line; FOREIGN],
    /// Lines written so far: the next one takes the place of the oldest.
    written: [AtomicUsize; 2],
    writing: Turn,
    /// Calls from libraries that are in none, about: a count, of which some get lost.
    others: AtomicUsize,
}

/// One in so many calls from libraries that have no line takes the place of one that has. So
/// a library that calls often gets one.
const TURN: usize = 64;

/// All rows, by number.
pub static ROUTES: [Row; ROWS] = [const { Row::new() }; ROWS];

/// The real functions behind the trampolines: one word each, which its first user sets.
pub static TARGETS: [[AtomicUsize; TRAMPOLINES]; ROWS] =
    [const { [const { AtomicUsize::new(0) }; TRAMPOLINES] }; ROWS];

impl Row {
    const fn new() -> Row {
        Row {
            known: [const { Line::new() }; LINES],
            foreign: [const { Line::new() }; FOREIGN],
            written: [const { AtomicUsize::new(0) }; 2],
            writing: Turn::new(()),
            others: AtomicUsize::new(0),
        }
    }

    fn lines(&self, destination: Destination) -> (&[Line], &AtomicUsize) {
        let [of_known, of_foreign] = &self.written;
        if let Destination::Cuda(_) = destination {
            (&self.known, of_known)
        } else {
            (&self.foreign, of_foreign)
        }
    }

    /// A call has come from a library that has no line.
    pub fn has_called(&self, range: Range<usize>, destination: Destination) {
        let (Destination::Cuda(function) | Destination::Elsewhere(function)) = destination else {
            return;
        };
        let (lines, written) = self.lines(destination);
        let others = self.others.load(Ordering::Relaxed);
        self.others.store(others.wrapping_add(1), Ordering::Relaxed);
        if others.is_multiple_of(TURN) || lines.iter().any(Line::is_free) {
            self.remember(lines, written, range, function);
        }
    }

    /// Remembers where calls from a library go; not if another thread is at it,
    /// or while a library is being closed.
    fn remember(
        &self,
        lines: &[Line],
        written: &AtomicUsize,
        range: Range<usize>,
        function: usize,
    ) {
        if !callers::is_closing()
            && let Some(_turn) = self.writing.try_lock()
        {
            let n = written.fetch_add(1, Ordering::Relaxed);
            lines[n % lines.len()].write(range, function);
        }
    }
}

/// The trampoline for a real function that was looked up; itself if there are more
/// functions of this name than trampolines.
pub fn trampoline_for(hooks: &Hooks, api: Api, function: usize) -> usize {
    static WARNED: AtomicBool = AtomicBool::new(false);
    for (target, trampoline) in TARGETS[api as usize].iter().zip(&hooks[api as usize].trampolines) {
        let claimed = target.compare_exchange(0, function, Ordering::AcqRel, Ordering::Acquire);
        if claimed.is_ok() || claimed == Err(function) {
            return trampoline.0 as usize;
        }
    }
    if !WARNED.swap(true, Ordering::Relaxed) {
        let name = ENTRY_POINTS[api as usize].name;
        message!(
            "more than {TRAMPOLINES} functions are called {name}: calls of the others are not recorded"
        );
    }
    function
}

/// Runs `close`, which closes a library: another one may come to lie in
/// its place as soon as it is gone.
pub fn closing<T>(close: impl FnOnce() -> T) -> T {
    loaded::keep();
    let result = callers::closing(forget_lines, close);
    forget_if_unloaded();
    result
}

/// Forgets what is known of libraries that were unloaded without our seeing it.
pub fn forget_if_unloaded() {
    static UNLOADED: AtomicU64 = AtomicU64::new(0);
    let [_, unloaded] = loaded::counts();
    if UNLOADED.swap(unloaded, Ordering::AcqRel) != unloaded {
        callers::library_may_be_gone();
        forget();
    }
}

fn forget_lines() {
    calls::forget();
    ROUTES.iter().flat_map(|row| row.known.iter().chain(&row.foreign)).for_each(Line::forget);
}

fn forget() {
    forget_lines();
    for target in TARGETS.as_flattened() {
        let function = target.load(Ordering::Acquire);
        if function != 0 && objects::library_at(function as u64).is_none() {
            let _ = target.compare_exchange(function, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::hooks::HOOKS;
    use crate::os::testing::held_elsewhere;

    #[test]
    fn a_line_is_for_one_library_and_the_oldest_gives_way() {
        let _steady = crate::stack::testing::steady(); // nobody closes a library
        let row = Row::new();
        let known = |caller| row.known.iter().find_map(|line| line.of(caller)).map(|(_, f)| f);
        for n in 1..=LINES + 1 {
            row.remember(&row.known, &row.written[0], n * 100..n * 100 + 50, n);
        }
        assert_eq!((known(100), known(149)), (None, None), "the first has given way");
        for n in 2..=LINES + 1 {
            assert_eq!((known(n * 100), known(n * 100 + 49)), (Some(n), Some(n)));
            assert_eq!((known(n * 100 - 1), known(n * 100 + 50)), (None, None));
        }
    }

    #[test]
    fn each_real_function_has_a_trampoline_as_long_as_there_are_any() {
        let _steady = crate::stack::testing::steady(); // nobody closes a library
        let api = Api::cuMulticastCreate;
        let trampolines: Vec<usize> =
            (1..=TRAMPOLINES).map(|n| trampoline_for(&HOOKS, api, n << 40)).collect();
        assert_eq!(trampolines, HOOKS[api as usize].trampolines.map(|d| d.0 as usize));
        assert_eq!(trampoline_for(&HOOKS, api, 2 << 40), trampolines[1], "the same again");
        assert_eq!(trampoline_for(&HOOKS, api, 9 << 40), 9 << 40, "none left: itself");
        forget();
        assert_eq!(
            trampoline_for(&HOOKS, api, 9 << 40),
            trampolines[0],
            "those lie in no library: they are gone"
        );
        forget();
    }

    #[test]
    fn a_forked_child_writes_a_line_that_another_thread_was_writing() {
        let _steady = crate::stack::testing::steady(); // nobody closes a library
        let row = &ROUTES[Api::cuMulticastCreate as usize];
        let knows = || {
            row.remember(&row.known, &row.written[0], 100..200, 7);
            row.known[0].of(100).is_some_and(|(_, function)| function == 7)
        };
        held_elsewhere(&row.writing, || {
            assert!(!knows() && crate::process::life::tests::in_child(knows));
        });
    }
}

//! The libraries that are loaded, and what they define, read without asking the loader.
//!
//! What asks the loader says so, and is not for hooks: its lock may be
//! held by whoever waits for this thread.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::elf::{Tables, headers};
pub use super::objects::counts;
use super::{list, next, objects};
use memtrace_os::checked::Process;
use memtrace_os::errno;
use memtrace_os::sync::Word;

/// Is this an address of ours?
pub fn is_own(address: usize) -> bool {
    // Whoever finds it out finds the same, and the end is shown last.
    static OWN: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
    let [start, end] = &OWN;
    if end.load(Ordering::Acquire) == 0 {
        let here = is_own as *const () as usize;
        let range = with_tables(here, Tables::range).unwrap_or(here..here + 1);
        start.store(range.start, Ordering::Relaxed);
        end.store(range.end, Ordering::Release);
    }
    (start.load(Ordering::Relaxed)..end.load(Ordering::Acquire)).contains(&address)
}

/// Asks the tables of the loaded library that has this address.
fn with_tables<R>(address: usize, ask: impl FnOnce(&Tables) -> R) -> Option<R> {
    with_library(address, |_, tables| ask(tables))
}

/// Shows `ask` the loaded library that has this address, by path.
pub fn with_library<R>(address: usize, ask: impl FnOnce(&CStr, &Tables) -> R) -> Option<R> {
    let (mut ask, mut answer) = (Some(ask), None);
    visit(|path, tables| {
        let is_it = tables.contains(address);
        if is_it && let Some(ask) = ask.take() {
            answer = Some(ask(path, tables));
        }
        is_it
    });
    answer
}

/// Shows the loaded libraries, by path, in the loader's order, until `f` has seen enough.
/// Asks the loader nothing while it does.
pub fn visit(f: impl FnMut(&CStr, &Tables) -> bool) {
    visit_from(0, f);
}

/// The same from a place in that order on. Says how many there are, if it comes to the end.
pub fn visit_from(from: usize, mut f: impl FnMut(&CStr, &Tables) -> bool) -> usize {
    let (mut place, process) = (0, Process::default());
    objects::iterate(&mut |info| {
        place += 1;
        if place <= from {
            return false;
        }
        // SAFETY: the loader's record of a library that stays while we look, and its name.
        unsafe {
            let path = if info.dlpi_name.is_null() { c"" } else { CStr::from_ptr(info.dlpi_name) };
            Tables::of(info, &process).is_some_and(|tables| f(path, &tables))
        }
    });
    place
}

/// The path of the library that has this address; that of its file for the program.
pub fn library_of(address: usize) -> Option<String> {
    let path = with_library(address, |path, _| path.to_string_lossy().into_owned())?;
    if !path.is_empty() {
        return Some(path);
    }
    let program = errno::kept(|| std::fs::read_link("/proc/self/exe"));
    Some(program.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default())
}

/// A loaded library.
pub struct Loaded {
    /// As the loader knows it.
    pub path: CString,
    /// What is added to the addresses in its file.
    pub base: usize,
    /// First address of its code.
    pub text_start: usize,
    /// Address after its code.
    pub text_end: usize,
    /// Address after everything it has mapped.
    pub end: usize,
}

/// The loaded library whose file name begins with `name`.
pub fn loaded(name: &str) -> Option<Loaded> {
    let (process, mut found) = (Process::default(), None);
    objects::iterate(&mut |info| {
        if info.dlpi_name.is_null() {
            return false;
        }
        // SAFETY: the loader's names are C strings.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) };
        let file = path.to_bytes().rsplit(|b| *b == b'/').next().unwrap_or_default();
        if !file.starts_with(name.as_bytes()) {
            return false;
        }
        let base = info.dlpi_addr as usize;
        let mut loaded =
            Loaded { path: path.to_owned(), base, text_start: usize::MAX, text_end: 0, end: 0 };
        for h in headers(info, &process).iter().filter(|h| h.p_type == libc::PT_LOAD) {
            let start = base + h.p_vaddr as usize;
            let end = start + h.p_memsz as usize;
            loaded.end = loaded.end.max(end);
            if h.p_flags & libc::PF_X != 0 {
                loaded.text_start = loaded.text_start.min(start);
                loaded.text_end = loaded.text_end.max(end);
            }
        }
        found = Some(loaded);
        true
    });
    found
}

/// Everything that the library with this address has mapped.
pub fn range_of(address: usize) -> Option<std::ops::Range<usize>> {
    with_tables(address, Tables::range)
}

/// The name of the function that this address lies in, as far as its library shows it. Slow.
pub fn name_at(address: usize) -> Option<&'static CStr> {
    with_tables(address, |tables| tables.name_at(address)).flatten()
}

/// Has the library with this address a function of this name?
pub fn defines(address: usize, name: &CStr) -> bool {
    with_tables(address, |tables| tables.symbol(name).is_some()) == Some(true)
}

/// A function of whichever loaded library defines it, but for this one.
pub fn anywhere(name: &CStr) -> Option<NonNull<c_void>> {
    in_tables(name, |_, tables| !tables.contains(anywhere as *const () as usize))
}

/// A function by the symbol tables of the loaded libraries that `is_one` accepts.
pub fn in_tables(name: &CStr, is_one: impl Fn(&CStr, &Tables) -> bool) -> Option<NonNull<c_void>> {
    let mut found = None;
    visit(|path, tables| {
        if is_one(path, tables) {
            found = tables.symbol(name);
        }
        found.is_some()
    });
    found
}

/// What is found in the own scope of the library that has this address.
/// Asks the loader: not for hooks.
pub fn in_own_scope(caller: usize, find: impl Fn(*mut c_void) -> usize) -> Option<usize> {
    // The program itself has no scope of its own, and no path.
    let path = with_library(caller, |path, _| path.to_owned()).filter(|path| !path.is_empty())?;
    in_scope_of(&path, find)
}

/// What is found in a loaded library or those that it needs, if it is not
/// ours. Asks the loader: not for hooks.
pub fn in_scope_of(library: &CStr, find: impl Fn(*mut c_void) -> usize) -> Option<usize> {
    if !list::may_load() {
        return None;
    }
    // SAFETY: a name of the loader's own, NOLOAD only looks, and the handle is given back:
    // who asked keeps open what was found.
    unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if handle.is_null() {
            return None;
        }
        let found = find(handle);
        next::close(handle);
        (found != 0 && !is_own(found)).then_some(found)
    }
}

/// Whom a look-up for the next function finds first.
pub enum Next {
    /// It is us.
    Us,
    /// It lies among what the caller's library needs.
    Needed(Vec<&'static CStr>),
    /// That is the loader's to say.
    Other,
}

/// Libraries that were there when the program began, in whose common scope
/// we are. The others come after them. Set once, by the thread that loads this library.
static AT_START: AtomicUsize = AtomicUsize::new(0);

/// How many that were.
pub fn at_start() -> usize {
    AT_START.load(Ordering::Relaxed)
}

/// When this library is loaded.
pub fn loading() {
    let mut count = 0;
    visit(|_, _| {
        count += 1;
        false
    });
    AT_START.store(count, Ordering::Relaxed);
}

/// Where a look-up that begins behind the caller's library ends.
pub fn next_after(caller: usize, symbol: &CStr) -> Next {
    let here = next_after as *const () as usize;
    let (mut place, mut asks, mut we_are, mut between) = (0, None, None, false);
    visit(|_, tables| {
        if tables.contains(caller) {
            asks = Some((place, tables.needed()));
        } else if tables.contains(here) {
            we_are = Some(place);
        } else if asks.is_some() && we_are.is_none() {
            between |= tables.symbol(symbol).is_some();
        }
        place += 1;
        asks.is_some() && we_are.is_some()
    });
    let (Some((place, needed)), Some(ours)) = (asks, we_are) else { return Next::Other };
    if place < ours && !between {
        Next::Us
    } else if place >= AT_START.load(Ordering::Relaxed) {
        Next::Needed(needed)
    } else {
        Next::Other
    }
}

/// Functions whose libraries shall stay, and don't yet.
struct ToKeep<W = AtomicUsize>([W; TO_KEEP]);

const TO_KEEP: usize = if cfg!(loom) { 2 } else { 64 };

static LATER: ToKeep = ToKeep([const { AtomicUsize::new(0) }; TO_KEEP]);

impl<W: Word<Value = usize>> ToKeep<W> {
    /// One more. Beyond the places, none.
    fn add(&self, function: usize) {
        self.0.iter().any(|place| {
            let claimed = place.compare_exchange(0, function, Ordering::AcqRel, Ordering::Acquire);
            claimed.is_ok() || claimed == Err(function)
        });
    }

    /// Has each held. None goes before it is: somebody else may close its library then.
    fn each(&self, hold: impl Fn(usize)) {
        for place in &self.0 {
            let function = place.load(Ordering::Acquire);
            if function != 0 {
                hold(function);
                let _ = place.compare_exchange(function, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// A library that another one was bound to stays loaded for its sake. The loader has bound the
/// caller to us and doesn't know. It hears of that before a library is closed ([`keep`]): here it
/// must not be asked anything.
pub fn stays(function: usize) {
    LATER.add(function);
}

/// Tells the loader which libraries stay. Not for hooks, but for those
/// that the loader is asked by anyway.
pub fn keep() {
    if list::may_load() {
        alone(|| LATER.each(hold)); // else nobody will unload anything here
    }
}

thread_local! {
    static KEEPING: Cell<bool> = const { Cell::new(false) };
}

/// Does this, unless the calling thread is at it already. The `dlopen` that is called meanwhile may
/// be another tool's, which closes libraries itself; the virtual GPU's does.
fn alone(work: impl FnOnce()) {
    if !KEEPING.replace(true) {
        work();
        KEEPING.set(false);
    }
}

/// Tells the loader that the library which has this function stays.
fn hold(function: usize) {
    /// First addresses of libraries that do: nothing else can come to lie there. Beyond
    /// these a library is only held once more.
    static KEPT: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];
    let found = with_library(function, |path, tables| (path.to_owned(), tables.start()));
    let Some((path, start)) = found.filter(|(path, _)| !path.is_empty()) else { return };
    if KEPT.iter().any(|kept| kept.load(Ordering::Acquire) == start) {
        return;
    }
    // SAFETY: a path of the loader's own; NOLOAD only looks. The handle stays open.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if !handle.is_null() {
        let claim = |place: &AtomicUsize| {
            place.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        KEPT.iter().find(|place| claim(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: where a function is taken off the list before its library is held.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicUsize as Modelled;
        use loom::thread;

        #[test]
        fn of_two_who_close_libraries_none_does_before_all_are_held_that_stay() {
            loom::model(|| {
                let (later, held) = (ToKeep([0; TO_KEEP].map(Modelled::new)), Modelled::new(0));
                let all = Arc::new((later, held));
                let closes = |(later, held): &(ToKeep<Modelled>, Modelled)| {
                    later.each(|function| _ = held.swap(function, Ordering::AcqRel));
                    assert_eq!(held.load(Ordering::Acquire), 7);
                };
                all.0.add(7);
                let other = all.clone();
                let other = thread::spawn(move || closes(&other));
                closes(&all);
                other.join().unwrap();
            });
        }
    }

    #[test]
    fn who_keeps_libraries_closes_one_meanwhile() {
        let later = ToKeep::<AtomicUsize>([const { AtomicUsize::new(0) }; TO_KEEP]);
        let times = Cell::new(0);
        let keep = |inside: &dyn Fn()| {
            let hold = |_| {
                times.set(times.get() + 1);
                inside();
            };
            alone(|| later.each(hold));
        };
        later.add(7);
        keep(&|| keep(&|| {}));
        assert_eq!(times.get(), 1);
        later.add(8);
        keep(&|| {});
        assert_eq!(times.get(), 2);
    }

    #[test]
    fn whoever_has_a_function_is_found() {
        let known = next::in_c_library(c"getpid").map(NonNull::as_ptr);
        assert!(known.is_some());
        assert_eq!(anywhere(c"getpid").map(NonNull::as_ptr), known);
        assert_eq!(anywhere(c"no such function"), None);
    }
}

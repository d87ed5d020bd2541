//! What the loader would find by name, worked out from the libraries' own tables.
//!
//! A hook must not ask the loader. `dlsym`, `dladdr` and `dlopen` take its lock, which a thread
//! holds for as long as a library's constructor runs. If the constructor waits for another thread,
//! whose first call of CUDA's waits for the lock, both wait for ever. And a signal handler that
//! leaves a look-up by a jump leaves the lock held. So the scopes are gone through here. All have
//! one in common: what the program began with, then what was opened with `RTLD_GLOBAL`. Each
//! library has its own: itself, then what it needs. Which libraries were opened how is noted when
//! they are (`deepbind.rs`).
//!
//! `dl_iterate_phdr` takes another lock, which the loader holds while it changes its list and
//! never while anybody's code runs. We hold it while we read, so that no library goes;
//! signals wait meanwhile (`objects.rs`).

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::elf::{Tables, Version};
use super::loaded;
use crate::{list, objects};
use memtrace_os::checked::Process;
use memtrace_os::sync::Word;

/// A loaded library.
pub struct Library<'l> {
    /// Its path; empty for the program.
    pub path: &'l CStr,
    /// Its tables.
    pub tables: Tables,
}

/// All of them, in the loader's order.
pub struct Libraries<'l>(Vec<Library<'l>>);

/// Asks all libraries, of which none goes meanwhile.
pub fn ask<R>(question: impl FnOnce(&Libraries<'_>) -> R) -> Option<R> {
    let (mut question, mut answer) = (Some(question), None);
    // Within the first look at the list, so that it stays as it is.
    objects::iterate(&mut |_| {
        let (mut all, process) = (Vec::with_capacity(64), Process::default());
        list::again(&mut |info| {
            // SAFETY: the loader's record of a library that stays while we look, and its name.
            unsafe {
                let path =
                    if info.dlpi_name.is_null() { c"" } else { CStr::from_ptr(info.dlpi_name) };
                all.extend(Tables::of(info, &process).map(|tables| Library { path, tables }));
            }
            false
        });
        answer = question.take().map(|question| question(&Libraries(all)));
        true
    });
    answer
}

impl Libraries<'_> {
    /// The place of the library that has this address.
    fn at(&self, address: usize) -> Option<usize> {
        self.0.iter().position(|library| library.tables.contains(address))
    }

    /// All of them.
    pub fn each(&self) -> impl Iterator<Item = &Library<'_>> {
        self.0.iter()
    }

    /// The library that has this address.
    pub fn library(&self, address: usize) -> Option<&Library<'_>> {
        self.0.iter().find(|library| library.tables.contains(address))
    }

    /// What is next behind us in the scope that all have in common.
    pub fn next(&self, name: &CStr) -> Option<usize> {
        self.first(&self.behind_us(), name, Version::Default)
    }

    /// What is needed under this name.
    fn named(&self, name: &CStr) -> Option<usize> {
        let is_it = |l: &Library<'_>| {
            l.tables.own_name() == Some(name) || l.path == name || file(l.path) == name.to_bytes()
        };
        self.0.iter().position(is_it)
    }

    /// A library's own scope: itself, then what it needs, the nearest first.
    fn own_scope(&self, library: usize) -> Vec<usize> {
        let mut scope = vec![library];
        let mut next = 0;
        while let Some(library) = scope.get(next) {
            for name in self.0[*library].tables.needed() {
                if let Some(needed) = self.named(name).filter(|n| !scope.contains(n)) {
                    scope.push(needed);
                }
            }
            next += 1;
        }
        scope
    }

    /// The scope that all have in common.
    fn common(&self) -> Vec<usize> {
        let began = loaded::at_start().min(self.0.len());
        let mut scope: Vec<usize> = (0..began).collect();
        if GLOBAL.is_used() {
            let opened: Vec<bool> = (began..self.0.len()).map(|i| GLOBAL.has(self, i)).collect();
            for (library, _) in (began..).zip(&opened).filter(|(_, is_global)| **is_global) {
                for of_it in self.own_scope(library) {
                    if !scope.contains(&of_it) {
                        scope.push(of_it);
                    }
                }
            }
        }
        scope
    }

    /// What is behind us in that scope. Nothing, if we were opened later than
    /// the C library, in a scope of our own.
    fn behind_us(&self) -> Vec<usize> {
        let here = next as *const () as usize;
        let is_c = |l: &Library<'_>| file(l.path).starts_with(b"libc.so");
        let (ours, c) = (self.at(here), self.0.iter().position(is_c));
        match ours {
            Some(ours) if c.is_none_or(|c| ours < c) => {
                let mut scope = self.common();
                scope.retain(|library| *library > ours);
                scope
            }
            _ => Vec::new(),
        }
    }

    /// Do the own functions of the library with this address come first for it, because it was
    /// opened or made so? Then that scope.
    fn deep_scope(&self, address: usize) -> Option<Vec<usize>> {
        let library = self.at(address)?;
        if self.0[library].tables.is_symbolic() {
            return Some(vec![library]);
        }
        if !DEEP.is_used() {
            return None;
        }
        let began = loaded::at_start();
        let mut opened = (began..self.0.len()).filter(|i| DEEP.has(self, *i));
        opened.find_map(|i| {
            let scope = self.own_scope(i);
            scope.contains(&library).then_some(scope)
        })
    }

    fn first(&self, scope: &[usize], name: &CStr, version: Version<'_>) -> Option<usize> {
        let tables = scope.iter().map(|library| &self.0[*library].tables);
        tables.filter(|t| !loaded::is_own(t.start())).find_map(|t| t.function(name, version))
    }

    /// What the loader would have bound a name to for the library with this address, if we were not
    /// there. That is what is next in the scope that all have in common, else what is in its own
    /// scope. The other way round where its own come first.
    ///
    /// What is found in the common scope is made to stay: the loader has bound the caller to us and
    /// doesn't know.
    pub fn bound(&self, caller: usize, name: &CStr, version: Version<'_>) -> Option<usize> {
        let deep = self.deep_scope(caller).and_then(|scope| self.first(&scope, name, version));
        let common = || {
            let found = self.first(&self.behind_us(), name, version);
            found.inspect(|found| loaded::stays(*found))
        };
        deep.or_else(common).or_else(|| {
            // The program itself has no scope of its own, and no path.
            let library = self.at(caller).filter(|i| !self.0[*i].path.is_empty())?;
            self.first(&self.own_scope(library), name, version)
        })
    }
}

/// See [`Libraries::next`].
pub fn next(name: &CStr) -> Option<usize> {
    ask(|all| all.next(name)).flatten()
}

/// What everybody finds first, us included.
pub fn default(name: &CStr) -> Option<usize> {
    in_common(|tables| tables.function(name, Version::Default))
}

/// From where to where that goes.
pub fn default_extent(name: &CStr) -> Option<std::ops::Range<usize>> {
    in_common(|tables| tables.extent(name))
}

fn in_common<R>(find: impl Fn(&Tables) -> Option<R>) -> Option<R> {
    ask(|all| all.common().iter().find_map(|library| find(&all.0[*library].tables))).flatten()
}

/// What is found first in the own scope of the library with this address, if its own come first.
pub fn deep(caller: usize, name: &CStr, version: Version<'_>) -> Option<usize> {
    ask(|all| all.first(&all.deep_scope(caller)?, name, version)).flatten()
}

/// A function of the loaded library whose file name begins with `library`, or of
/// what that needs. Says in which library.
pub fn of_file(library: &str, name: &CStr) -> Option<usize> {
    ask(|all| {
        let is_it = |l: &Library<'_>| file(l.path).starts_with(library.as_bytes());
        let library = all.0.iter().position(is_it)?;
        all.first(&all.own_scope(library), name, Version::Default)
    })
    .flatten()
}

/// The calling thread's own word of this name in the loaded library whose
/// file name begins with `library`.
pub fn of_thread(library: &str, name: &CStr) -> Option<*mut c_void> {
    unsafe extern "C" {
        fn __tls_get_addr(place: *const [usize; 2]) -> *mut c_void;
    }
    let mut place = None;
    objects::iterate(&mut |info| {
        // SAFETY: the loader's record of a library that stays while we look, and its name.
        let path = unsafe { CStr::from_ptr(info.dlpi_name) };
        if file(path).starts_with(library.as_bytes()) {
            // SAFETY: as above.
            let tables = unsafe { Tables::of(info, &Process::default()) };
            // A forked child may not get the number.
            let number = Some(info.dlpi_tls_modid).filter(|number| *number != 0);
            place = tables.and_then(|tables| Some([number?, tables.thread_local(name)?]));
        }
        place.is_some()
    });
    // SAFETY: the number of a loaded library's words for each thread, and a place among
    // them, as compiled code asks for them.
    place.map(|place| unsafe { __tls_get_addr(&raw const place) })
}

fn file(path: &CStr) -> &[u8] {
    path.to_bytes().rsplit(|b| *b == b'/').next().unwrap_or_default()
}

// --- how libraries were opened
// ---------------------------------------------------------------------------

/// Libraries that were opened in a special way, by what was asked for: the
/// whole of it and its last part.
pub struct Opened<W = AtomicU64> {
    names: [[W; 2]; NAMES],
    count: W,
}

const NAMES: usize = if cfg!(loom) { 3 } else { 256 };

/// A place that is about to be filled: the number of no name.
const TAKEN: u64 = 2;

/// So that all others find what they define.
pub static GLOBAL: Opened = Opened::new();
/// So that their own functions come first.
pub static DEEP: Opened = Opened::new();

impl Opened {
    const fn new() -> Opened {
        let names = [const { [const { AtomicU64::new(0) }; 2] }; NAMES];
        Opened { names, count: AtomicU64::new(0) }
    }
}

impl<W: Word<Value = u64>> Opened<W> {
    /// How often a new one was.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire) as usize
    }

    /// Has any been?
    pub fn is_used(&self) -> bool {
        self.count() != 0
    }

    /// One is about to be. Beyond the places, it is not known.
    pub fn note(&self, name: &CStr) {
        let numbers = [number(name.to_bytes()), number(file(name))];
        if self.numbers().any(|known| known == numbers) {
            return;
        }
        let (order, fail) = (Ordering::AcqRel, Ordering::Relaxed);
        let is_free = |[whole, _]: &&[W; 2]| whole.compare_exchange(0, TAKEN, order, fail).is_ok();
        if let Some([whole, last]) = self.names.iter().find(is_free) {
            last.store(numbers[1], Ordering::Relaxed);
            whole.store(numbers[0], Ordering::Release);
            self.count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// What is noted. Another thread may be about to note one that stands before others.
    fn numbers(&self) -> impl Iterator<Item = [u64; 2]> {
        let both =
            |[whole, last]: &[W; 2]| [whole.load(Ordering::Acquire), last.load(Ordering::Relaxed)];
        let used = self.names.iter().map(both).take_while(|[whole, _]| *whole != 0);
        used.filter(|[whole, _]| *whole != TAKEN)
    }

    /// Is it this one?
    fn has(&self, all: &Libraries<'_>, library: usize) -> bool {
        let library = &all.0[library];
        let path = number(library.path.to_bytes());
        let own = library.tables.own_name().map_or(0, |name| number(name.to_bytes()));
        let last = number(file(library.path));
        self.numbers().any(|[whole, part]| {
            // Of several files of one name the one that was asked for.
            let is_there = |l: &Library<'_>| number(l.path.to_bytes()) == whole;
            whole == path || [last, own].contains(&part) && !all.0.iter().any(is_there)
        })
    }
}

/// A number for a name; never 0.
fn number(name: &[u8]) -> u64 {
    let mix = |h: u64, b: &u8| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    name.iter().fold(0xcbf2_9ce4_8422_2325, mix) | 1
}

/// A function of an already loaded library, found by the start of its file name, or of
/// what that needs. The library stays.
pub fn loaded_symbol(library: &str, symbol: &CStr) -> Option<NonNull<c_void>> {
    let found = of_file(library, symbol)?;
    loaded::stays(found);
    NonNull::new(found as *mut c_void)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::next;

    #[test]
    fn what_is_worked_out_is_what_the_loader_says() {
        crate::as_loaded();
        for name in [c"malloc", c"dlsym", c"getpid", c"memcpy", c"pthread_create", c"qsort", c"pow"]
        {
            // SAFETY: look-ups by name.
            let said = |handle| unsafe { next::really(handle, name, None) } as usize;
            let (default, next_said) = (said(libc::RTLD_DEFAULT), said(libc::RTLD_NEXT));
            assert_eq!(super::default(name).unwrap_or(0), default, "{name:?}");
            assert_eq!(next(name).unwrap_or(0), next_said, "{name:?}");
        }
        assert_eq!(default(c"no such function"), None);
        let errno = of_thread("libc.so", c"errno").map_or(0, |at| at as usize);
        // SAFETY: this thread's own word.
        assert!(errno == 0 || errno == unsafe { libc::__errno_location() } as usize);
    }

    /// Seen red: where only as many places are looked at as have been counted, and where the last
    /// part is shown before it is there.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicU64 as Modelled;
        use loom::thread;

        #[test]
        fn who_has_noted_a_library_finds_it_noted() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let names = std::array::from_fn(|_| [0; 2].map(Modelled::new));
                let opened = Arc::new(Opened { names, count: Modelled::new(0) });
                let numbers = |name: &CStr| [number(name.to_bytes()), number(file(name))];
                let all = [c"/a/libx.so", c"/b/liby.so"];
                let notes = move |opened: &Opened<Modelled>, name: &CStr| {
                    opened.note(name);
                    let known: Vec<_> = opened.numbers().collect();
                    assert!(opened.is_used() && known.contains(&numbers(name)));
                    assert!(known.iter().all(|known| all.map(numbers).contains(known)));
                };
                let other = opened.clone();
                let other = thread::spawn(move || notes(&other, all[0]));
                notes(&opened, all[1]);
                other.join().unwrap();
                assert_eq!((opened.count(), opened.numbers().count()), (2, 2));
            });
        }
    }

    #[test]
    fn how_a_library_was_opened_is_noted_once() {
        let opened = Opened::new();
        opened.note(c"/a/libx.so");
        opened.note(c"/a/libx.so");
        opened.note(c"liby.so");
        assert_eq!(opened.count(), 2);
    }
}

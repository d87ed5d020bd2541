//! The loader's list of loaded objects: under its lock, and in a forked child past it.
//!
//! `dl_iterate_phdr` shows the list under a lock that glibc leaves in the child of a fork as it
//! was, while it makes others anew. It is held for ever if another thread of the parent was loading
//! or unloading a library, or was in the list itself. So in a child the lock is in doubt, and the
//! list is gone through as debuggers do, by `_r_debug`. It can't change meanwhile if the lock is
//! held. As soon as it is another one than at first, somebody of this process has had the lock,
//! which is no longer in doubt. What remains is the first library that a child unloads, in the
//! moment in which another one of its threads looks. The memory of libraries is read by the kernel
//! ([`memtrace_os::checked`]), which can't fault.
//!
//! The other way round, no child shall wait because *we* were in the list as its parent forked: it
//! may want to load a library. So a fork waits until nobody of ours is in it, and who wants to go
//! in waits for the fork. Neither waits for ever, since they may wait for each other in some other
//! way, too. The child of a fork by system call has no such promise: no handler runs.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::gate::Gate;
use super::links::{self, Link, links};
use super::next;
use memtrace_os::address::Address;
use memtrace_os::age::{self, age};
use memtrace_os::checked::{Memory, Process};
use memtrace_os::locks::ForkLock;

/// The process of this age knows the lock to be whole; 0: the one in which
/// this library is being loaded. One word, behind which nothing is read.
static TRUSTED: AtomicU32 = AtomicU32::new(0);
/// What the loader had counted, loads and unloads, when it was asked last. Where they don't belong
/// together, [`counts`] sees it.
static COUNTS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// When this library is loaded, which takes the lock. Once a process image.
pub fn loading() {
    TRUSTED.store(age(), Ordering::Release);
    // SAFETY: plain functions of this library, which is never unloaded (-z nodelete).
    unsafe { libc::pthread_atfork(Some(forking), Some(has_forked), Some(forked)) };
}

/// May the loader be asked for a library? Another thread of the parent may have been loading or
/// unloading one. Then the loader is in the middle of that for ever in the child, and glibc ends a
/// program that asks.
pub fn may_load() -> bool {
    is_trusted() || links::is_consistent()
}

/// And for one that isn't loaded? It looks for its file in a cache of names, which it gives
/// back each time it is done. The child of a process that was just doing so still has the
/// address of what is mapped no longer.
pub fn may_search() -> bool {
    is_trusted()
}

/// Shows the list until `visit` has seen enough.
pub fn go_through(visit: &mut dyn FnMut(&libc::dl_phdr_info) -> bool) {
    if is_trusted() {
        let _inside = GATE.enter();
        under_lock(visit);
    } else {
        past_lock(visit);
    }
}

/// The same within a `visit`: this thread has the lock already.
pub fn again(visit: &mut dyn FnMut(&libc::dl_phdr_info) -> bool) {
    if is_trusted() { under_lock(visit) } else { past_lock(visit) }
}

/// The C library's own `dl_iterate_phdr`: an interposer, who may not know what for, plays no part.
fn under_lock(mut visit: &mut dyn FnMut(&libc::dl_phdr_info) -> bool) {
    type Each = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;
    type Iterate = unsafe extern "C" fn(Each, *mut c_void) -> c_int;
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _: usize, to: *mut c_void) -> c_int {
        // SAFETY: the loader hands in a valid record of a loaded library, and our own pointer.
        unsafe {
            note(&*info);
            c_int::from((*to.cast::<&mut dyn FnMut(&libc::dl_phdr_info) -> bool>())(&*info))
        }
    }
    static OWN: Address = Address::new();
    // SAFETY: the C library's function, and a callback that goes with the
    // data, which outlives the call.
    unsafe {
        let own: Iterate = std::mem::transmute(next::of_c_library(&OWN, c"dl_iterate_phdr"));
        own(each, (&raw mut visit).cast());
    }
}

fn note(info: &libc::dl_phdr_info) {
    for (known, now) in COUNTS.iter().zip([info.dlpi_adds, info.dlpi_subs]) {
        if known.load(Ordering::Relaxed) != now {
            known.store(now, Ordering::Relaxed);
        }
    }
}

// --- past the lock
// ---------------------------------------------------------------------------------------

/// A list that was seen at some age: a number that is another one for another list.
#[derive(Default)]
struct Seen {
    age: u32,
    list: usize,
}

/// The first list that a child has seen.
static SEEN: ForkLock<Seen> = ForkLock::new(Seen { age: 0, list: 0 });

fn is_trusted() -> bool {
    match TRUSTED.load(Ordering::Acquire) {
        0 => true,
        trusted => age() == trusted || is_proven(age()),
    }
}

/// Is the list another one than this process has seen at first?
#[cold]
fn is_proven(age: u32) -> bool {
    let mix = |list: usize, link: &Link| {
        let entry = std::ptr::from_ref(link) as usize ^ link.base.rotate_left(20) ^ link.dynamic;
        (list ^ entry).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let list = links().fold(0, mix);
    let Some(mut seen) = SEEN.try_lock() else { return false };
    if TRUSTED.load(Ordering::Acquire) == age {
        return true;
    }
    if seen.age != age {
        *seen = Seen { age, list };
    }
    if seen.list == list {
        return false;
    }
    GATE.forget_others(); // what a fork by system call has left there
    TRUSTED.store(age, Ordering::Release);
    true
}

/// So many words from there; `None` if they can't be read.
fn words<const N: usize>(process: &Process, at: usize) -> Option<[u64; N]> {
    let words = [const { Cell::new(0) }; N];
    process.copy(at as u64, &words).then(|| words.map(|word| word.get()))
}

/// How a file begins, which is mapped first.
const MAGIC: u64 = u32::from_ne_bytes(*b"\x7fELF") as u64;

/// Where the program headers of an entry are, and how many.
fn headers(process: &Process, link: &Link, is_program: bool) -> Option<(usize, u16)> {
    if is_program {
        // SAFETY: asks the kernel's notes to this process.
        let of_program = |kind| unsafe { libc::getauxval(kind) };
        return Some((of_program(libc::AT_PHDR) as usize, of_program(libc::AT_PHNUM) as u16));
    }
    // As `elf.h` has the beginning.
    let [magic, _, _, _, at, _, _, count] = words(process, link.base)?;
    (magic & u64::from(u32::MAX) == MAGIC).then(|| (link.base + at as usize, count as u16))
}

/// What the loader has counted since it was asked last can be said by how many there are.
fn counts() -> [u64; 2] {
    let [loads, unloads] = COUNTS.each_ref().map(|count| count.load(Ordering::Relaxed));
    let (now, then) = (links().count() as u64, loads.saturating_sub(unloads));
    [loads + now.saturating_sub(then), unloads + then.saturating_sub(now)]
}

fn past_lock(visit: &mut dyn FnMut(&libc::dl_phdr_info) -> bool) {
    let (process, [adds, subs]) = (Process::default(), counts());
    for (place, link) in links().enumerate() {
        let Some((at, count)) = headers(&process, link, place == 0) else { continue };
        // SAFETY: numbers and pointers, of which zeros are valid.
        let mut info: libc::dl_phdr_info = unsafe { std::mem::zeroed() };
        info.dlpi_addr = link.base as u64;
        info.dlpi_name = link.name;
        info.dlpi_phdr = at as *const _;
        info.dlpi_phnum = count;
        info.dlpi_adds = adds;
        info.dlpi_subs = subs;
        if visit(&info) {
            break;
        }
    }
}

// --- around a fork
// ---------------------------------------------------------------------------------------

static GATE: Gate = Gate::new();

extern "C" fn forking() {
    GATE.close();
}

extern "C" fn has_forked() {
    GATE.open();
}

extern "C" fn forked() {
    age::forget();
    GATE.forget_others();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::as_loaded;
    use memtrace_os::testing::in_child;
    use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};

    type Go = fn(&mut dyn FnMut(&libc::dl_phdr_info) -> bool);

    fn shown(go: Go) -> Vec<(u64, usize, usize, u16)> {
        let mut all = Vec::new();
        go(&mut |info| {
            all.push((
                info.dlpi_addr,
                info.dlpi_name as usize,
                info.dlpi_phdr as usize,
                info.dlpi_phnum,
            ));
            false
        });
        all
    }

    /// A child that loads a library waits for whoever of its parent was in the
    /// list: these tests are, one at a time.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        as_loaded();
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Not for ever: the child is killed.
    fn soon() {
        // SAFETY: a plain system call.
        unsafe { libc::alarm(10) };
    }

    #[test]
    fn past_the_lock_it_is_the_same_list() {
        let _alone = alone();
        let known = shown(under_lock);
        assert!(known.len() > 3 && known == shown(past_lock));
        let [loads, unloads] = counts();
        assert_eq!((loads - unloads) as usize, known.len());
    }

    /// By the C library's function, as the program's own threads are: nobody waits for those.
    fn with_the_lock_held(f: impl FnOnce()) {
        unsafe extern "C" fn hold(
            _: *mut libc::dl_phdr_info,
            _: usize,
            barriers: *mut c_void,
        ) -> c_int {
            // SAFETY: the caller's, who waits.
            let [begun, end] = unsafe { &*barriers.cast::<[Barrier; 2]>() };
            begun.wait();
            end.wait();
            1
        }
        let barriers = [Barrier::new(2), Barrier::new(2)];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let barriers = (&raw const barriers).cast_mut().cast();
                // SAFETY: a callback that goes with its data.
                unsafe { libc::dl_iterate_phdr(Some(hold), barriers) };
            });
            barriers[0].wait();
            f();
            barriers[1].wait();
        });
    }

    #[test]
    fn a_child_does_not_wait_for_a_thread_that_was_in_the_list() {
        let _alone = alone();
        let known = shown(under_lock).len();
        with_the_lock_held(|| {
            assert!(in_child(
                || (),
                || {
                    soon();
                    let mut count = 0;
                    go_through(&mut |_| {
                        again(&mut |_| {
                            count += 1;
                            false
                        });
                        true
                    });
                    count == known
                }
            ));
        });
    }

    #[test]
    fn a_child_that_has_loaded_a_library_knows_the_lock_to_be_free() {
        let _alone = alone();
        assert!(is_trusted());
        assert!(in_child(
            || (),
            || {
                soon();
                let before = is_trusted() || is_trusted();
                // SAFETY: a library of the C library's own, which does nothing as it is loaded.
                let library = unsafe { libc::dlopen(c"libanl.so.1".as_ptr(), libc::RTLD_NOW) };
                library.is_null()
                    || !before && is_trusted() && shown(go_through) == shown(past_lock)
            }
        ));
    }

    #[test]
    fn no_child_finds_us_in_the_list() {
        let _alone = alone();
        let begun = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                go_through(&mut |_| {
                    begun.wait();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    true
                });
            });
            begun.wait();
            assert!(in_child(
                || (),
                || {
                    soon();
                    let mut all = 0;
                    under_lock(&mut |_| {
                        all += 1;
                        false
                    });
                    all > 3
                }
            ));
        });
        assert!(GATE.is_empty());
    }
}

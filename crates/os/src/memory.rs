//! Memory for this library's own needs, where the program may have none left.
//!
//! Rust ends the process when an allocation fails. That must not happen in somebody else's: a
//! program with a limit on its memory (`RLIMIT_AS`, `RLIMIT_DATA`) handles its own failures. So
//! what fails is taken from a small reserve. Whoever works on something large looks whether that
//! has happened, and stops ([`is_short`]). What needs much asks first ([`has`]). When all that was
//! taken from the reserve has come back, it is whole again.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use crate::sync::Word;
use crate::{descriptors, errno};

/// Bytes of the reserve. They cost nothing until they are needed.
const RESERVE: usize = 512 << 10;
/// Bytes for a frugal thread ([`be_frugal`]), likewise.
const FRUGAL: usize = 256 << 10;
/// What is larger it takes as others do.
const SMALL: usize = 16 << 10;

/// The C library's allocator, and the reserve behind it.
pub struct Memory;

#[global_allocator]
static MEMORY: Memory = Memory;

/// Memory that is there from the beginning, handed out piece by piece. When
/// all have come back, it is whole again.
#[repr(align(64))]
struct Reserve<const BYTES: usize, W = AtomicUsize> {
    bytes: UnsafeCell<[u8; BYTES]>,
    /// Bytes that have been handed out, and above them how many pieces have not come back.
    used: W,
}
// SAFETY: each byte is handed out to one at a time.
unsafe impl<const BYTES: usize, W: Sync> Sync for Reserve<BYTES, W> {}

const PIECE: usize = 1 << 32;

static RESERVED: Reserve<RESERVE> = Reserve::new();
static OWN: Reserve<FRUGAL> = Reserve::new();
/// A flag that stands for nothing but itself.
static SHORT: AtomicBool = AtomicBool::new(false);
/// The frugal thread, which sets and clears it itself; 0: there is none.
static THREAD: AtomicI32 = AtomicI32::new(0);

impl<const BYTES: usize> Reserve<BYTES> {
    const fn new() -> Self {
        Self { bytes: UnsafeCell::new([0; BYTES]), used: AtomicUsize::new(0) }
    }
}

impl<const BYTES: usize, W: Word<Value = usize>> Reserve<BYTES, W> {
    /// A piece of it; null where it has no room.
    fn take(&self, layout: Layout) -> *mut u8 {
        let start = self.bytes.get() as usize;
        let place = |used: usize| (start + used % PIECE).next_multiple_of(layout.align()) - start;
        let next = |used: usize| {
            let end = place(used).checked_add(layout.size()).filter(|end| *end <= BYTES)?;
            Some((used / PIECE + 1) * PIECE + end)
        };
        match self.used.fetch_update(Ordering::Acquire, Ordering::Relaxed, next) {
            Ok(used) => (start + place(used)) as *mut u8,
            Err(_) => std::ptr::null_mut(),
        }
    }

    fn has(&self, at: *mut u8) -> bool {
        (at as usize).wrapping_sub(self.bytes.get() as usize) < BYTES
    }

    /// A piece comes back. With the last one, all of the reserve does.
    #[cold]
    fn give_back(&self) {
        let less = |used: usize| Some(if used < 2 * PIECE { 0 } else { used - PIECE });
        let _ = self.used.fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// The C library has none. Its error number is no business of the program's.
#[cold]
fn take(layout: Layout, _errno: errno::Kept) -> *mut u8 {
    SHORT.store(true, Ordering::Relaxed);
    RESERVED.take(layout)
}

/// Makes the calling thread, one of ours, take what is small from memory of its own, where
/// addresses are limited. The C library may set an arena aside for a thread that takes memory from
/// it, or gives some back. That is 64 MiB of addresses, if a piece that suits it comes to lie
/// there. They are the program's. What others took the thread must not give back, and should take
/// nothing large.
pub fn be_frugal() {
    if limit(libc::RLIMIT_AS) != libc::RLIM_INFINITY {
        // SAFETY: asks for a number.
        THREAD.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    }
}

/// The thread ends: its number may become another one's.
pub fn be_as_others() {
    THREAD.store(0, Ordering::Relaxed);
}

/// From a frugal thread's own memory; null for all others, and where that has no room.
#[inline]
fn take_own(layout: Layout) -> *mut u8 {
    let thread = THREAD.load(Ordering::Relaxed);
    // SAFETY: asks for a number.
    if thread == 0 || layout.size() > SMALL || thread != unsafe { libc::gettid() } {
        return std::ptr::null_mut();
    }
    OWN.take(layout)
}

fn is_reserved(at: *mut u8) -> bool {
    RESERVED.has(at) || OWN.has(at)
}

// SAFETY: the C library's answers, or bytes of the reserve that nobody else has.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let own = take_own(layout);
        if !own.is_null() {
            return own;
        }
        // SAFETY: promised by the caller.
        let (errno, at) = (errno::Kept::now(), unsafe { System.alloc(layout) });
        if at.is_null() { take(layout, errno) } else { at }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let mut at = take_own(layout);
        if at.is_null() {
            let errno = errno::Kept::now();
            // SAFETY: promised by the caller.
            at = unsafe { System.alloc_zeroed(layout) };
            if !at.is_null() {
                return at;
            }
            at = take(layout, errno);
        }
        if !at.is_null() {
            // SAFETY: a piece of this length, which may have been another one's.
            unsafe { at.write_bytes(0, layout.size()) };
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if RESERVED.has(at) {
            RESERVED.give_back();
        } else if OWN.has(at) {
            OWN.give_back();
        } else {
            // SAFETY: promised by the caller; it came from there.
            unsafe { System.dealloc(at, layout) };
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_reserved(at) {
            let errno = errno::Kept::now();
            // SAFETY: promised by the caller; it came from there.
            let new = unsafe { System.realloc(at, layout, size) };
            drop(errno);
            if !new.is_null() {
                return new;
            }
        }
        // SAFETY: the caller's layout with a size that it promises to be sound;
        // both places are that large and apart.
        unsafe {
            let new = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !new.is_null() {
                new.copy_from_nonoverlapping(at, layout.size().min(size));
                self.dealloc(at, layout);
            }
            new
        }
    }
}

/// Has an allocation failed since somebody asked for much ([`has`])?
pub fn is_short() -> bool {
    SHORT.load(Ordering::Relaxed)
}

/// Is there so much more memory to be had? A limit of the process's may say no, or a kernel that
/// promises no more than there is (`vm.overcommit_memory` 2).
pub fn has(bytes: usize) -> bool {
    SHORT.store(false, Ordering::Relaxed);
    // SAFETY: a fresh private mapping that is taken away at once.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(std::ptr::null_mut(), bytes, protection, kind, -1, 0);
        at != libc::MAP_FAILED && libc::munmap(at, bytes) == 0
    }
}

/// The most of something that this process may have.
pub fn limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut found = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a record of the right type.
    unsafe { libc::getrlimit(resource, &raw mut found) };
    found.rlim_cur
}

/// How much more address space, or data, this process may take, whichever
/// is less, and which limit that is.
pub fn left() -> (u64, &'static str) {
    // Where the kernel says how much is taken, in pages.
    const TAKEN: &CStr = c"/proc/self/statm";
    let limits = [
        (limit(libc::RLIMIT_AS), 0, "memory (ulimit -v)"),
        (limit(libc::RLIMIT_DATA), 5, "memory (ulimit -d)"),
    ];
    if limits.iter().all(|(most, ..)| *most == libc::RLIM_INFINITY) {
        return (u64::MAX, "");
    }
    // Seven numbers. Nothing is allocated: who asks may be a thread that
    // has taken none yet, and must not.
    let mut text = [0_u8; 160];
    // SAFETY: a C string, a descriptor of our own, and a buffer of this length.
    let length = unsafe {
        let file = descriptors::open(TAKEN.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC, 0);
        let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
        if file >= 0 {
            libc::close(file);
        }
        length
    };
    let taken = &text[..usize::try_from(length).unwrap_or(0)];
    // SAFETY: asks for a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let left = limits.map(|(most, which, name)| (left_of(most, taken, which, page), name));
    left.into_iter().min().unwrap_or((u64::MAX, ""))
}

/// All of it where nobody says what is taken.
fn left_of(most: u64, taken: &[u8], which: usize, page: u64) -> u64 {
    if most == libc::RLIM_INFINITY {
        return u64::MAX;
    }
    let taken = std::str::from_utf8(taken).ok().and_then(|text| text.split(' ').nth(which));
    let pages = taken.and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0);
    most.saturating_sub(pages.saturating_mul(page))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seen red: with `Relaxed` where a piece is taken, or where one comes back.
    #[cfg(loom)]
    mod model {
        use super::*;
        use loom::cell::UnsafeCell as Modelled;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicUsize;
        use loom::thread;

        #[test]
        fn a_piece_is_ones_own_until_it_has_come_back_and_is_then_anothers() {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound = Some(3);
            builder.check(|| {
                let (bytes, used) = (UnsafeCell::new([0; 128]), AtomicUsize::new(0));
                let pieces = [0; 2].map(Modelled::new);
                let all = Arc::new((Reserve::<128, _> { bytes, used }, pieces));
                type All = (Reserve<128, AtomicUsize>, [Modelled<u32>; 2]);
                let uses = |(reserve, pieces): &All| {
                    let at = reserve.take(Layout::new::<[u64; 8]>());
                    assert!(reserve.has(at));
                    let which = (at as usize - reserve.bytes.get() as usize) / 64;
                    // SAFETY: loom looks whether another thread has this piece.
                    pieces[which].with_mut(|piece| unsafe { *piece += 1 });
                    reserve.give_back();
                };
                let other = all.clone();
                let other = thread::spawn(move || uses(&other));
                uses(&all);
                other.join().unwrap();
                uses(&all);
                assert_eq!(all.0.used.load(Ordering::Relaxed), 0);
            });
        }
    }

    #[test]
    fn what_is_taken_of_a_limit_is_not_left() {
        const NONE: u64 = libc::RLIM_INFINITY;
        let taken = b"700 3 2 1 0 50 0\n";
        for (most, taken, which, left) in [
            (1 << 22, &taken[..], 0, (1 << 22) - 700 * 4096),
            (1 << 22, taken, 5, (1 << 22) - 50 * 4096),
            (1 << 21, taken, 0, 0),
            (1 << 21, b"", 0, 1 << 21),
            (1 << 21, b"what\xff", 0, 1 << 21),
            (1 << 21, b"18446744073709551615 0", 0, 0),
            (NONE, taken, 0, NONE),
        ] {
            assert_eq!(left_of(most, taken, which, 4096), left, "{most} {taken:?} {which}");
        }
    }

    #[test]
    fn the_reserve_has_an_end_and_is_whole_again_when_all_has_come_back() {
        let layout = Layout::from_size_align(1000, 64).expect("sound");
        let mut all: Vec<usize> = Vec::new();
        loop {
            let at = take(layout, errno::Kept::now());
            if at.is_null() {
                break;
            }
            assert!(is_reserved(at) && (at as usize).is_multiple_of(64));
            all.push(at as usize);
        }
        assert!(all.len() > 400 && all.windows(2).all(|w| w[1] - w[0] >= 1000));
        assert!(is_short() && !is_reserved(std::ptr::null_mut()));
        // What came from there grows into memory of the C library's, and is not given to it.
        // SAFETY: a place of this layout that nobody else uses.
        unsafe {
            let at = all[0] as *mut u8;
            at.write_bytes(7, 1000);
            let new = MEMORY.realloc(at, layout, 5000);
            assert!(!is_reserved(new) && new.add(999).read() == 7);
            MEMORY.dealloc(new, Layout::from_size_align(5000, 64).expect("sound"));
            let all_taken = take(layout, errno::Kept::now());
            assert!(all_taken.is_null(), "what has come back is not handed out among the rest");
            for at in &all[1..] {
                MEMORY.dealloc(*at as *mut u8, layout);
            }
            let again = take(layout, errno::Kept::now());
            assert!(!again.is_null());
            MEMORY.dealloc(again, layout);
        }
        assert!(has(1 << 20) && !is_short() && !has(1 << 60));
    }
}

//! Room in the file behind the mapping, taken before it is written.
//!
//! A page of a mapping that the file system has no room for is a SIGBUS in the host program. So
//! every word is reserved before it is written, in steps that grow with what is there; a step that
//! fails leaves things as they are. What is reserved is gone for everybody else, so a step takes at
//! most a part of what the file system has left. The program (its loader processes, NCCL) wants
//! room in the same folder of shared memory, which Docker makes 64 MB small.
//!
//! The file is reached by its descriptor. A program that closes every descriptor has closed this
//! one, too. It may have got its number for a file of its own, to which nothing must be done. Then
//! the kernel is asked for the mapping's pages themselves (from 5.14 on).

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::locks::Turn;
use crate::signals;
use crate::truncated;

const PAGE: usize = 4096;

/// Reserves pages of the file behind the mapping.
#[derive(Clone, Copy)]
pub struct Space {
    /// The file; −1 for plain memory, which the kernel gives as it is touched.
    file: i32,
    /// The folder that it lies in.
    folder: Option<&'static CString>,
    base: usize,
    /// Which file that is: file system and number.
    identity: (u64, u64),
    length: usize,
    /// Its pages are memory anyway.
    in_memory: bool,
}

impl Space {
    /// For words that need no reserving.
    pub const MEMORY: Space =
        Space { file: -1, folder: None, base: 0, identity: (0, 0), length: 0, in_memory: true };

    /// The room of a file in this folder, which is mapped as these words.
    pub fn of(file: &OwnedFd, folder: &Path, words: &[AtomicU64]) -> Space {
        let file = file.as_raw_fd();
        let (identity, length) = Space::look(file).unwrap_or_default();
        let base = words.as_ptr() as usize;
        let in_memory = in_memory(folder);
        let folder = CString::new(folder.as_os_str().as_bytes()).ok();
        let folder = folder.map(|folder| &*Box::leak(Box::new(folder)));
        Space { file, folder, base, identity, length, in_memory }
    }

    /// Which file, and how long it is.
    fn look(file: i32) -> Option<((u64, u64), usize)> {
        let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the record is read only if the call filled it.
        unsafe {
            (libc::fstat(file, found.as_mut_ptr()) == 0).then(|| {
                let found = found.assume_init();
                ((found.st_dev, found.st_ino), found.st_size as usize)
            })
        }
    }

    /// Makes sure that these words can be written, if they are no more than one part in
    /// `share` of what is free. Idempotent.
    pub fn reserve<T>(&self, words: &[T], share: u64) -> bool {
        self.reserve_bytes(words.as_ptr() as usize, size_of_val(words), share)
    }

    fn reserve_bytes(&self, at: usize, bytes: usize, share: u64) -> bool {
        if self.file < 0 {
            return true;
        }
        signals::uncancelled(|| {
            let length = self.own_length();
            if !self.leaves_enough(length.is_some(), bytes, share) {
                return false;
            }
            match length {
                // Reserving would make it longer again, full of zeros.
                Some(length) if length < self.length => {
                    truncated::replace();
                    false
                }
                Some(_) => self.allocate(at, bytes),
                None => self.take_pages(at, at + bytes).unwrap_or(false),
            }
        })
    }

    /// The length of the file, as long as the descriptor is still ours.
    fn own_length(&self) -> Option<usize> {
        let (file, length) = Space::look(self.file)?;
        (file == self.identity).then_some(length)
    }

    fn leaves_enough(&self, is_own: bool, bytes: usize, share: u64) -> bool {
        let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: a descriptor or a C string, and a record of the right type; it
        // is read only if the call filled it.
        let found = unsafe {
            let code = match self.folder {
                _ if is_own => libc::fstatvfs(self.file, found.as_mut_ptr()),
                Some(folder) if self.is_reached_by(folder) => {
                    libc::statvfs(folder.as_ptr(), found.as_mut_ptr())
                }
                _ => -1,
            };
            (code == 0).then(|| found.assume_init())
        };
        // Memory without a limit has no blocks. A folder that can't be
        // found any more tells nothing.
        found.is_none_or(|found| {
            found.f_blocks == 0
                || bytes as u64 <= found.f_bavail.saturating_mul(found.f_frsize) / share
        })
    }

    /// Does the path still lead to the file system that the file is in? In
    /// another root folder it need not.
    fn is_reached_by(&self, folder: &CStr) -> bool {
        let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: a C string and a record of the right type; it is read only if the call filled it.
        unsafe {
            libc::stat(folder.as_ptr(), found.as_mut_ptr()) == 0
                && found.assume_init().st_dev == self.identity.0
        }
    }

    /// Reserves by the descriptor. Between the question whose it is and this call it may become the
    /// program's: a file that it gets then must not grow. So its length is kept; and nothing is
    /// written, as the C library does where a file system knows no such call.
    fn allocate(&self, at: usize, bytes: usize) -> bool {
        /// Times that a signal may come in between.
        const PATIENCE: usize = 16;
        let offset = (at - self.base) as libc::off_t;
        for _ in 0..PATIENCE {
            // SAFETY: a plain system call; its error number is this thread's own.
            let error = unsafe {
                match libc::fallocate(self.file, libc::FALLOC_FL_KEEP_SIZE, offset, bytes as _) {
                    0 => return true,
                    _ => *libc::__errno_location(),
                }
            };
            match error {
                libc::EINTR => {}
                libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL => {
                    let taken = self.take_pages(at, at + bytes);
                    // SAFETY: as above. Neither can be done otherwise on such a system.
                    return taken.unwrap_or_else(|| unsafe {
                        libc::posix_fallocate(self.file, offset, bytes as _) == 0
                    });
                }
                _ => return false,
            }
        }
        false
    }

    /// Reserves without a descriptor. All or nothing, but for the pages at both ends, which
    /// others share. `None`: the kernel can't.
    fn take_pages(&self, at: usize, end: usize) -> Option<bool> {
        if populate(at, end) {
            return Some(true);
        }
        // SAFETY: no memory is named: the call only says whether the kernel knows this advice.
        if unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_POPULATE_WRITE) } != 0 {
            return None;
        }
        if self.in_memory {
            let (from, to) = (at.next_multiple_of(PAGE), end / PAGE * PAGE);
            // SAFETY: whole pages of our own mapping in which nothing has been written yet.
            unsafe { libc::madvise(from as *mut _, to.saturating_sub(from), libc::MADV_REMOVE) };
        }
        Some(false)
    }

    /// Brings words that have been reserved into the page table, so that no hook meets them for the
    /// first time. That is a fault on every page of them, which costs as much as twenty events.
    /// Takes milliseconds: for the background thread. Does nothing to a file on a disk, where it
    /// would only make the kernel write zeros, nor on kernels before 5.14, which can't.
    pub fn settle<T>(&self, words: &[T]) {
        if self.in_memory {
            populate(words.as_ptr() as usize, words.as_ptr_range().end as usize);
        }
    }
}

/// Gives the pages from `at` to `end` memory. `false`: not all of them, or the kernel can't.
fn populate(at: usize, end: usize) -> bool {
    const STEP: usize = 256 << 10; // the program's own mappings wait for a step
    let mut at = at & !(PAGE - 1);
    while at < end {
        let length = STEP.min(end - at);
        // SAFETY: the range is part of a mapping of ours that is never unmapped. Nothing is changed
        // in it; a page that the file has not, or has no room for, is an error here, and no signal.
        if unsafe { libc::madvise(at as *mut _, length, libc::MADV_POPULATE_WRITE) } != 0 {
            return false;
        }
        at += length;
    }
    true
}

/// Is this folder's file system kept in memory?
pub fn in_memory(folder: &Path) -> bool {
    let Ok(path) = CString::new(folder.as_os_str().as_bytes()) else { return false };
    let mut info = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a C string and a record of the right type; it is read only if the call filled it.
    unsafe {
        libc::statfs(path.as_ptr(), info.as_mut_ptr()) == 0
            && info.assume_init().f_type == libc::TMPFS_MAGIC
    }
}

/// Words that are used from the first one on, and of which so many are reserved.
pub struct Room {
    /// Where the first one is, and how many there are.
    start: usize,
    count: usize,
    space: Space,
    /// It and the next one only grow, by whose turn it is, after the kernel has reserved. Who
    /// sees an older value asks once more.
    reserved: AtomicUsize,
    /// From here on it is time for more, so that who comes meanwhile still finds some.
    enough: AtomicUsize,
    /// Somebody is at it. What a step that fails takes back must be nobody else's.
    extending: Turn,
    /// Times that nobody looks, since there was no more.
    pause: AtomicUsize,
}

/// Times that are passed over when there was no room, since looking takes as long as ten events.
const PAUSE: usize = 1024;
/// Words that are reserved at a time, at least: 64 KiB.
pub const ROOM_STEP: usize = 8 << 10;
/// Of what the file system has left, a step takes at most one part in so many.
const SHARE: u64 = 4;

impl Room {
    /// Over these words, of which the first [`ROOM_STEP`] have been reserved.
    pub fn new<T>(words: &'static [T], space: Space) -> Room {
        let (start, count) = (words.as_ptr() as usize, words.len());
        let reserved = if space.file < 0 { count } else { ROOM_STEP.min(count) };
        let (extending, pause) = (Turn::new(()), 0.into());
        let enough = enough(0, reserved, count).into();
        Room { start, count, space, reserved: reserved.into(), enough, extending, pause }
    }

    /// Makes sure that all words before `end` can be written. Any thread
    /// may ask, also while another one does.
    #[inline]
    pub fn reaches(&self, end: usize) -> bool {
        end <= self.enough.load(Ordering::Relaxed) || self.extend(end)
    }

    #[cold]
    fn extend(&self, end: usize) -> bool {
        self.extend_by(end, |at, bytes| self.space.reserve_bytes(at, bytes, SHARE))
    }

    /// Who comes while another one is at it makes do with what there is: it may be a
    /// signal handler, which must not wait.
    fn extend_by(&self, end: usize, reserve: impl Fn(usize, usize) -> bool) -> bool {
        if end <= self.count
            && let Some(_turn) = self.extending.try_lock()
        {
            self.extend_alone(end, reserve);
        }
        end <= self.reserved.load(Ordering::Relaxed)
    }

    fn extend_alone(&self, end: usize, reserve: impl Fn(usize, usize) -> bool) {
        let from = self.reserved.load(Ordering::Relaxed);
        let is_done = end <= self.enough.load(Ordering::Relaxed); // by another one
        let less = |pause: usize| pause.checked_sub(1);
        if is_done
            || from == self.count
            || self.pause.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
        {
            return;
        }
        let least = (end.max(from + 1) - from).next_multiple_of(ROOM_STEP);
        // Whole pages: a step that fails takes back those that nobody has
        // written, also one that it shares.
        for step in [least.max((from / 2).next_multiple_of(PAGE / 8)), least] {
            let to = (from + step).min(self.count);
            if reserve(self.start + from * 8, (to - from) * 8) {
                self.reserved.store(to, Ordering::Relaxed);
                self.enough.store(enough(from, to, self.count), Ordering::Relaxed);
                return;
            }
        }
        self.pause.store(PAUSE, Ordering::Relaxed);
    }
}

/// Of a step between these two, how far one goes before the next: a
/// quarter is for those who come meanwhile.
fn enough(from: usize, to: usize, count: usize) -> usize {
    if to == count { to } else { to - (to - from) / 4 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults() -> i64 {
        let mut used = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: a record of the right type, of which zeros are valid.
        unsafe {
            libc::getrusage(libc::RUSAGE_THREAD, used.as_mut_ptr());
            used.assume_init().ru_minflt
        }
    }

    #[test]
    fn words_that_were_settled_are_written_without_a_fault() {
        const LENGTH: usize = 1 << 20;
        let touch = |settle: bool| {
            // SAFETY: a fresh private mapping of zeros, never unmapped, used as plain words.
            let words: &[AtomicU64] = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                let at = libc::mmap(std::ptr::null_mut(), LENGTH, protection, flags, -1, 0);
                assert_ne!(at, libc::MAP_FAILED);
                libc::madvise(at, LENGTH, libc::MADV_NOHUGEPAGE);
                std::slice::from_raw_parts(at.cast(), LENGTH / 8)
            };
            if settle {
                Space::MEMORY.settle(&words[100..]);
            }
            let before = faults();
            words[100..].iter().for_each(|word| word.store(1, Ordering::Relaxed));
            faults() - before
        };
        let pages = (LENGTH / PAGE) as i64;
        assert!(touch(false) >= pages - 1, "each page is met for the first time");
        // Kernels before 5.14 can't.
        // SAFETY: no memory is named: the call only says whether the kernel knows this advice.
        let known =
            unsafe { libc::madvise(std::ptr::null_mut(), 0, libc::MADV_POPULATE_WRITE) == 0 };
        if known {
            assert!(touch(true) < pages / 10);
        }
    }

    #[test]
    fn one_extends_at_a_time_so_that_what_a_failure_takes_back_is_nobody_elses() {
        static WORDS: [AtomicU64; 8 * ROOM_STEP] = [const { AtomicU64::new(0) }; 8 * ROOM_STEP];
        let room = Room::new(&WORDS, Space { file: 0, ..Space::MEMORY });
        assert!(room.extend_by(4 * ROOM_STEP, |_, _| true));
        let (last, first) = (4 * ROOM_STEP, 4 * ROOM_STEP + 1);
        let steps = std::cell::RefCell::new(Vec::new());
        // The large step finds no room. Meanwhile another thread comes for the first of its pages.
        let there = room.extend_by(first, |_, bytes| {
            let others = [last, first].map(|end| room.extend_by(end, |_, _| true));
            steps.borrow_mut().push((bytes / 8 / ROOM_STEP, others));
            bytes / 8 <= ROOM_STEP
        });
        assert!(there && room.reserved.load(Ordering::Relaxed) == 5 * ROOM_STEP);
        assert_eq!(*steps.borrow(), [(2, [true, false]), (1, [true, false])]);
        // And the next one is let in again, before there is none left.
        assert!(room.extend_by(5 * ROOM_STEP - 1, |_, _| true));
        assert_eq!(room.reserved.load(Ordering::Relaxed), 15 * ROOM_STEP / 2);
        assert!(room.extend_by(5 * ROOM_STEP, |_, _| panic!("it is there")));
    }

    #[test]
    fn a_file_that_got_the_number_does_not_grow() {
        let file = memtrace_files::scratch(&std::env::temp_dir()).expect("a file");
        file.set_len(1 << 16).expect("its length");
        let space =
            Space { file: file.as_raw_fd(), in_memory: false, folder: None, ..Space::MEMORY };
        // As if it had become the program's, and shorter, after it was looked at.
        assert!(crate::testing::stays(|| {
            signals::uncancelled(|| assert!(space.allocate(0, 1 << 20)));
        }));
        assert_eq!(file.metadata().expect("there").len(), 1 << 16);
    }
}

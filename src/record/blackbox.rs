//! The mapped file that everything is recorded into. Layout: [`memtrace_format::blackbox`].
//!
//! Memory-backed folders come first (the runtime folder, `/dev/shm`), so that the kernel never makes a hook
//! wait for a disk; then the user's output folder; then plain memory with one warning, for a machine where no
//! file can be mapped. Where the file lies elsewhere, a symbolic link in the output folder leads to it.
//!
//! A page of a mapping that the file system has no room for is a SIGBUS in the host program, so every page is
//! reserved (`fallocate`) before it is written, in steps that double as the history grows. A step that fails
//! leaves the ring as large as it is, with one line that says so.
//!
//! A file of mode 0600 with a name of its own: nobody else's data, never somebody else's file.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::blackbox::{
    DOOR_WORDS, HEADER_WORDS, LIVE_FIRST, LIVE_WORDS, Life, MAGIC, REGIONS, Region, VERSION, at,
};
use memtrace_format::event::WORDS;
use memtrace_format::labels::LABEL_WORDS;

use crate::config::Config;
use crate::hooks::table::ROWS;
use crate::message;
use crate::record::{guard, truncated};

/// Slots of the ring at the start; it doubles from there.
pub const FIRST_SLOTS: usize = 1 << 14;
/// Words of the depot of stacks: some 400,000 nodes and their index.
const DEPOT_WORDS: usize = (5 << 18) + 8;
/// Words for Python code objects: some 20,000.
const CODE_WORDS: usize = 1 << 20;
/// Words for the list of libraries: some 6,000.
const MODULE_WORDS: usize = 1 << 17;
/// Words for the description.
const ABOUT_WORDS: usize = 1 << 13;

/// Reserves pages of the file behind the mapping.
#[derive(Clone, Copy)]
pub struct Space {
    /// The file; −1 for plain memory, which the kernel gives as it is touched.
    file: i32,
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
        Space { file: -1, base: 0, identity: (0, 0), length: 0, in_memory: true };

    fn of(file: &OwnedFd, words: &[AtomicU64], in_memory: bool) -> Space {
        let file = file.as_raw_fd();
        let (identity, length) = Space::look(file).unwrap_or_default();
        let base = words.as_ptr() as usize;
        Space { file, base, identity, length, in_memory }
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

    /// Makes sure that these words can be written. Idempotent.
    pub fn reserve<T>(&self, words: &[T]) -> bool {
        if self.file < 0 {
            return true;
        }
        match Space::look(self.file) {
            Some((file, length)) if file == self.identity => {
                if length < self.length {
                    // Reserving would make it longer again, full of zeros.
                    truncated::replace();
                    return false;
                }
            }
            // A program that closes every descriptor may get ours again for a file of its own.
            _ => return false,
        }
        let offset = words.as_ptr() as usize - self.base;
        let (offset, length) = (offset as libc::off_t, size_of_val(words) as libc::off_t);
        // SAFETY: plain system call on our own descriptor.
        guard::uncancelled(|| unsafe { libc::posix_fallocate(self.file, offset, length) == 0 })
    }

    /// Brings words that have been reserved into the page table, so that no hook meets them for the first time: that is a
    /// fault, which costs as much as twenty events, on every page of them. Takes milliseconds: for the background thread.
    /// Does nothing to a file on a disk, where it would only make the kernel write zeros, nor on kernels before
    /// 5.14, which can't.
    pub fn settle<T>(&self, words: &[T]) {
        const STEP: usize = 256 << 10; // the program's own mappings wait for a step
        let (mut at, end) = (words.as_ptr() as usize, words.as_ptr_range().end as usize);
        at &= !(PAGE - 1);
        while self.in_memory && at < end {
            let length = STEP.min(end - at);
            // SAFETY: the range is part of a mapping of ours that is never unmapped. Nothing is changed in it; a page
            // that has gone from the file is an error here, and no signal.
            if unsafe { libc::madvise(at as *mut _, length, libc::MADV_POPULATE_WRITE) } != 0 {
                break;
            }
            at += length;
        }
    }
}

const PAGE: usize = 4096;

/// The mapping. It is never unmapped: a hook of another thread may be in it.
pub struct Mapped {
    words: &'static [AtomicU64],
    /// The file, and the link to it in the output folder if it lies elsewhere.
    pub path: Option<PathBuf>,
    link: Option<PathBuf>,
    space: Space,
    _file: Option<OwnedFd>,
}

fn layout(slots: usize) -> ([(usize, usize); REGIONS], usize) {
    let lengths = [
        slots * WORDS,
        LIVE_WORDS,
        DEPOT_WORDS,
        CODE_WORDS,
        MODULE_WORDS,
        ABOUT_WORDS,
        ROWS * DOOR_WORDS,
        LABEL_WORDS,
    ];
    let mut next = HEADER_WORDS;
    let regions = lengths.map(|len| {
        let start = next;
        next += len;
        (start, len)
    });
    (regions, next)
}

impl Mapped {
    /// A fresh black box for at most `slots` events.
    pub fn create(config: &Config, name: &str) -> Mapped {
        let (_, total) = layout(config.events);
        let mut trouble = None;
        for folder in folders(config) {
            let path = folder.join(name);
            match open(&path, total).and_then(|file| {
                map(&file, total).map(|words| (file, words)).inspect_err(|_| {
                    let _ = std::fs::remove_file(&path);
                })
            }) {
                Ok((file, words)) => {
                    let space = Space::of(&file, words, in_memory(&folder));
                    let mut mapped =
                        Mapped { words, path: Some(path), link: None, space, _file: Some(file) };
                    if mapped.begin(config.events) {
                        if let Some(path) = &mapped.path {
                            truncated::survive(words, path);
                        }
                        mapped.link_from(&config.out);
                        return mapped;
                    }
                    mapped.remove();
                    trouble = Some(format!("{} has no room", folder.display()));
                }
                Err(e) => trouble = trouble.or(Some(format!("{}: {e}", folder.display()))),
            }
        }
        if config.blackbox.as_deref() != Some(Path::new("off")) {
            message!(
                "no black box file could be made ({}): the record will not survive a killed process; \
                 set MEMTRACE_BLACKBOX to a folder with room",
                trouble.unwrap_or_default()
            );
        }
        Mapped::anonymous(config.events)
    }

    /// In plain memory.
    pub fn anonymous(slots: usize) -> Mapped {
        let (_, total) = layout(slots);
        let words = crate::sync::zeroed_memory(total);
        let slots = if words.len() < total { FIRST_SLOTS } else { slots };
        let mapped = Mapped { words, path: None, link: None, space: Space::MEMORY, _file: None };
        mapped.begin(slots);
        mapped
    }

    /// Reserves what every black box needs and writes the header. `false`: no room.
    fn begin(&self, slots: usize) -> bool {
        let (regions, _) = layout(slots);
        let first = FIRST_SLOTS.min(slots);
        let [ring, live, rest @ ..] = regions;
        let needed = [
            &self.words[..HEADER_WORDS],
            &self.words[ring.0..ring.0 + first * WORDS],
            &self.words[live.0..live.0 + LIVE_FIRST * WORDS],
            &self.words[rest[0].0..],
        ];
        if !needed.iter().all(|words| self.space.reserve(words)) {
            return false;
        }
        let set = |i: usize, value: u64| self.words[i].store(value, Ordering::Relaxed);
        set(at::VERSION, VERSION);
        set(at::PID, u64::from(std::process::id()));
        set(at::STARTED_NS, super::clock::now_ns());
        set(at::LIFE, Life::Recording as u64);
        for (i, (start, len)) in regions.into_iter().enumerate() {
            set(at::REGIONS + 2 * i, start as u64 * 8);
            set(at::REGIONS + 2 * i + 1, len as u64 * 8);
        }
        set(at::RING_CAPACITY, first as u64);
        self.words[at::MAGIC].store(MAGIC, Ordering::Release);
        true
    }

    /// The header's words.
    pub fn header(&self) -> &'static [AtomicU64] {
        &self.words[..HEADER_WORDS]
    }

    /// The words of a region.
    pub fn region(&self, region: Region) -> &'static [AtomicU64] {
        let word = |i: usize| self.words[i].load(Ordering::Relaxed) as usize / 8;
        let (start, len) =
            (word(at::REGIONS + 2 * region as usize), word(at::REGIONS + 2 * region as usize + 1));
        &self.words[start..start + len]
    }

    /// For reserving more of it.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Writes the description, once.
    pub fn describe(&self, about: &serde_json::Value) {
        let text = about.to_string();
        let region = self.region(Region::About);
        for (cell, bytes) in region.iter().zip(text.as_bytes().chunks(8)) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            cell.store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        let len = text.len().min(region.len() * 8);
        self.words[at::ABOUT_BYTES].store(len as u64, Ordering::Release);
    }

    /// Notes how the process is doing.
    pub fn set_life(&self, life: Life) {
        self.words[at::LIFE].store(life as u64, Ordering::Release);
    }

    fn link_from(&mut self, out: &Path) {
        let Some(path) = &self.path else { return };
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return };
        let same = |a: &Path, b: &Path| a.canonicalize().ok() == b.canonicalize().ok();
        if same(folder, out) || std::fs::create_dir_all(out).is_err() {
            return;
        }
        let link = out.join(name);
        // Fails if there is something of that name.
        if std::os::unix::fs::symlink(path, &link).is_ok() {
            self.link = Some(link);
        }
    }

    /// Removes the file: its contents have been written elsewhere, or were never needed.
    pub fn remove(&self) {
        for path in self.link.iter().chain(&self.path) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Where to try, best first.
fn folders(config: &Config) -> Vec<PathBuf> {
    match config.blackbox.as_deref() {
        Some(p) if p == Path::new("off") => return Vec::new(),
        Some(p) => return vec![p.to_owned()],
        None => {}
    }
    let runtime = config.runtime_dir.clone();
    let memory = runtime.into_iter().chain([PathBuf::from("/dev/shm")]).filter(|p| in_memory(p));
    memory.chain([config.out.clone()]).collect()
}

/// Is this folder's file system kept in memory?
fn in_memory(folder: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(path) = CString::new(folder.as_os_str().as_bytes()) else { return false };
    let mut info = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a C string and a record of the right type; it is read only if the call filled it.
    unsafe {
        libc::statfs(path.as_ptr(), info.as_mut_ptr()) == 0
            && info.assume_init().f_type == libc::TMPFS_MAGIC
    }
}

fn open(path: &Path, words: usize) -> io::Result<OwnedFd> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // A file of this name can only be the leftover of a dead process that had our number and start time.
    let file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)?;
    file.set_len(words as u64 * 8).inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })?;
    Ok(file.into())
}

fn map(file: &OwnedFd, words: usize) -> io::Result<&'static [AtomicU64]> {
    // SAFETY: maps a file of this length that is ours alone; the mapping is never removed. All-zero words, as
    // a new file has, are valid atomics.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            words * 8,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        );
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A forked child has a recorder of its own; it must not be able to write into this one.
        libc::madvise(at, words * 8, libc::MADV_DONTFORK);
        Ok(std::slice::from_raw_parts(at.cast(), words))
    }
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
}

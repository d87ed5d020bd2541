//! The mapped file that everything is recorded into. Layout: [`memtrace_format::blackbox`].
//!
//! Memory-backed folders come first (the runtime folder, `/dev/shm`), so that the kernel never
//! makes a hook wait for a disk. Then comes the user's output folder. Where no file can be
//! mapped, plain memory is used, with one warning. Where the file lies elsewhere, a symbolic
//! link in the output folder leads to it.
//!
//! It begins small and grows as it is used; every page is reserved before it is written
//! ([`super::space`]). Where the program may make only small files, or has little
//! address space, the box is made for less.
//!
//! A file of mode 0600 with a name of its own: nobody else's data, never somebody else's file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::blackbox::{
    ENTRY_POINT_WORDS, HEADER_WORDS, LIVE_FIRST, LIVE_MOST, Life, MAGIC, NOT_NOTED, REGIONS, Read,
    Region, VERSION, at,
};
use memtrace_format::event::WORDS;
use memtrace_format::key::Description;
use memtrace_format::labels::LABEL_WORDS;
use memtrace_options::NO_BLACKBOX;
use serde_json::json;

use crate::config::Config;
use crate::hot::forget_recorder;
use crate::os::clock;
use crate::os::memory::{self, limit};
use crate::os::message;
use crate::os::space::{ROOM_STEP, Room, Space, in_memory};
use crate::os::truncated;

/// Slots of the ring at the start; it doubles from there.
pub const FIRST_SLOTS: usize = 1 << 12;
/// Words for the list of libraries: some 6,000.
const MODULE_WORDS: usize = 1 << 17;
/// Words for the description, and for what is noted behind it.
const ABOUT_WORDS: usize = 1 << 13;
/// Of these, words for the settings, twice: what is there stays as it is
/// until the new ones are whole.
const SETTINGS_WORDS: usize = 1 << 10;
const SETTINGS_AT: [usize; 2] = [ABOUT_WORDS - 2 * SETTINGS_WORDS, ABOUT_WORDS - SETTINGS_WORDS];
/// Bytes of the description.
pub const ABOUT_BYTES: usize = SETTINGS_AT[0] * 8;
/// A box isn't begun where no more than this share of what is free would be left.
const BEGIN_SHARE: u64 = 2;

/// The mapping. Once it has begun it is never unmapped: a hook of another thread may be in it.
pub struct Mapped {
    words: &'static [AtomicU64],
    /// The file, and the link to it in the output folder if it lies elsewhere.
    pub path: Option<PathBuf>,
    link: Option<PathBuf>,
    /// The limit of the process that made it smaller than the user wants.
    limited: Option<&'static str>,
    space: Space,
    _file: Option<OwnedFd>,
}

/// What a black box is made for at most.
#[derive(Clone, Copy)]
struct Sizes {
    /// Events of history.
    slots: usize,
    /// Entries of the live table.
    live: usize,
    /// Words of the depot of stacks: some 400,000 nodes and their index.
    depot: usize,
    /// Words for Python code objects: some 20,000.
    codes: usize,
    /// Entry points whose use is counted.
    entry_points: usize,
}

impl Sizes {
    fn of(slots: usize, entry_points: usize) -> Sizes {
        let (depot, codes) = ((5 << 18) + 8, 1 << 20);
        Sizes { slots, live: LIVE_MOST, depot, codes, entry_points }
    }

    /// Half of everything; `None` if that is too little to be of use.
    fn half(self) -> Option<Sizes> {
        let half = Sizes {
            slots: self.slots.min((self.slots / 2).max(FIRST_SLOTS)),
            live: (self.live / 2).max(4 * LIVE_FIRST),
            depot: (self.depot / 2).max((5 << 12) + 8),
            codes: (self.codes / 2).max(1 << 14),
            ..self
        };
        (half.bytes() < self.bytes()).then_some(half)
    }

    /// What fits into a file, or into what is left of the memory, that this process may
    /// have; and the limit that makes it less.
    fn within_limits(largest: Sizes, in_file: bool) -> Option<(Sizes, Option<&'static str>)> {
        /// The program wants the rest. The smallest box is worth more to it.
        const SHARE: u64 = 8;
        const SHARE_OF_SMALLEST: u64 = 4;
        let (left, of_memory) = memory::left();
        let file = if in_file { limit(libc::RLIMIT_FSIZE) } else { libc::RLIM_INFINITY };
        let all = || std::iter::successors(Some(largest), |sizes| sizes.half());
        let fits = |share| move |sizes: &Sizes| sizes.bytes() as u64 <= file.min(left / share);
        let found =
            all().find(fits(SHARE)).or_else(|| all().last().filter(fits(SHARE_OF_SMALLEST)))?;
        let name = if file < left / SHARE { "the size of files (ulimit -f)" } else { of_memory };
        Some((found, (found.bytes() < largest.bytes()).then_some(name)))
    }

    fn bytes(self) -> usize {
        self.layout().1 * 8
    }

    /// Where each region begins and how long it is, and the length of the whole, in words.
    fn layout(self) -> ([(usize, usize); REGIONS], usize) {
        let lengths = [
            self.slots * WORDS,
            self.live * WORDS,
            self.depot,
            self.codes,
            MODULE_WORDS,
            ABOUT_WORDS,
            self.entry_points * ENTRY_POINT_WORDS,
            LABEL_WORDS,
        ];
        let mut next = HEADER_WORDS;
        let regions = lengths.map(|len| {
            let start = next;
            next = (start + len).next_multiple_of(HEADER_WORDS); // each has its pages to itself
            (start, len)
        });
        (regions, next)
    }
}

impl Mapped {
    /// A fresh black box for at most so many events as the user wants, with places for so many
    /// entry points. `None`: there is no memory, not even for the smallest one.
    pub fn create(config: &Config, name: &str, entry_points: usize) -> Option<Mapped> {
        let largest = Sizes::of(config.events, entry_points);
        Sizes::within_limits(largest, false)?;
        let sizes = Sizes::within_limits(largest, true);
        let mut trouble = None;
        for folder in folders(config) {
            let made = sizes.map_or_else(too_small, |(sizes, limited)| {
                Ok(Mapped { limited, ..Mapped::in_folder(&folder, name, sizes)? })
            });
            match made {
                Ok(mut mapped) => {
                    mapped.link_from(&config.out);
                    return Some(mapped);
                }
                Err(e) => trouble = trouble.or(Some((format!("{}: {e}", folder.display()), e))),
            }
        }
        if config.blackbox.as_deref() != Some(Path::new(NO_BLACKBOX)) {
            let (what, error) = trouble.unzip();
            message!(
                "no black box file could be made ({}): the record will not survive a killed process; {}",
                what.unwrap_or_default(),
                error.map_or(FOLDER, |e| advice(&e))
            );
        }
        Mapped::anonymous(largest)
    }

    fn in_folder(folder: &Path, name: &str, sizes: Sizes) -> io::Result<Mapped> {
        let path = folder.join(name);
        let (_, total) = sizes.layout();
        let file = open(&path, total)?;
        let made = map(&file, total).and_then(|words| {
            let space = Space::of(&file, folder, words);
            let (link, path) = (None, Some(path.clone()));
            let limited = None;
            let mapped = Mapped { words, path, link, limited, space, _file: Some(file) };
            let no_room = io::Error::other("has no room");
            if mapped.begin(sizes) {
                return Ok(mapped);
            }
            unmap(words.as_ptr() as usize, words.len()); // or what it has taken stays taken
            Err(no_room)
        });
        match &made {
            Ok(mapped) => truncated::survive(mapped.words, &path, forget_recorder),
            Err(_) => _ = std::fs::remove_file(&path),
        }
        made
    }

    /// In plain memory.
    fn anonymous(largest: Sizes) -> Option<Mapped> {
        let (sizes, limited) = Sizes::within_limits(largest, false)?;
        let (_, total) = sizes.layout();
        let words = crate::os::sync::zeroed_memory(total);
        let (path, link, space) = (None, None, Space::MEMORY);
        let mapped = Mapped { words, path, link, limited, space, _file: None };
        (words.len() >= total && mapped.begin(sizes)).then_some(mapped)
    }

    /// Reserves what every black box needs and writes the header. `false`: no room.
    fn begin(&self, sizes: Sizes) -> bool {
        let (regions, _) = sizes.layout();
        let first = FIRST_SLOTS.min(sizes.slots);
        let [ring, live, depot, codes, modules, about, doors, labels] = regions;
        let mut needed = [
            ((0, HEADER_WORDS), usize::MAX),
            (ring, first * WORDS),
            (live, LIVE_FIRST * WORDS),
            (depot, ROOM_STEP),
            (codes, ROOM_STEP),
            (modules, ROOM_STEP),
            (about, usize::MAX),
            (doors, usize::MAX),
            (labels, ROOM_STEP),
        ]
        .into_iter()
        .map(|((start, len), most)| &self.words[start..start + len.min(most)]);
        if !needed.all(|needed| self.space.reserve(needed, BEGIN_SHARE)) {
            return false;
        }
        let set = |i: usize, value: u64| self.words[i].store(value, Ordering::Relaxed);
        set(at::VERSION, VERSION);
        set(at::PID, u64::from(std::process::id()));
        set(at::STARTED_NS, clock::now_ns());
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

    /// The words of a region; none if somebody has written over where it is.
    pub fn region(&self, region: Region) -> &'static [AtomicU64] {
        let word = |i: usize| self.words[i].load(Ordering::Relaxed) as usize / 8;
        let (start, len) =
            (word(at::REGIONS + 2 * region as usize), word(at::REGIONS + 2 * region as usize + 1));
        let end = start.saturating_add(len);
        self.words.get(start..end).unwrap_or_default()
    }

    /// A region that is used from its first word on.
    pub fn room(&self, region: Region) -> Room {
        Room::new(self.region(region), self.space)
    }

    /// The limit of the process because of which a region has no room for so many entries of
    /// [`WORDS`]; `None` if it isn't because of a limit.
    pub fn limit_of(&self, region: Region, entries: u64) -> Option<&'static str> {
        let most = (self.region(region).len() / WORDS) as u64;
        self.limited.filter(|_| entries > most)
    }

    /// For reserving more of it.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Writes the description, once.
    pub fn describe(&self, about: &Description) {
        let text = about.to_text();
        put(&self.region(Region::About)[..SETTINGS_AT[0]], text.as_bytes());
        let len = text.len().min(ABOUT_BYTES);
        self.words[at::ABOUT_BYTES].store(len as u64, Ordering::Release);
    }

    /// Notes what PyTorch's allocator has read; `None`: that isn't known. For one thread at a time.
    pub fn note_settings(&self, read: Option<&Read>) {
        let place = &self.words[at::SETTINGS];
        let before = place.load(Ordering::Relaxed) as u32 as usize / 8;
        let next = if before == SETTINGS_AT[0] { SETTINGS_AT[1] } else { SETTINGS_AT[0] };
        let text = read.map(|read| json!({ "last": read.last, "all": read.all }).to_string());
        let text = text.filter(|text| text.len() <= SETTINGS_WORDS * 8);
        let noted = text.zip(self.behind_description(next)).map(|(text, words)| {
            put(words, text.as_bytes());
            ((text.len() as u64) << 32) | (next as u64 * 8)
        });
        place.store(noted.unwrap_or(NOT_NOTED), Ordering::Release);
    }

    /// Somebody may have written into the file since it began.
    fn behind_description(&self, next: usize) -> Option<&'static [AtomicU64]> {
        let start = self.words[at::REGIONS + 2 * Region::About as usize].load(Ordering::Relaxed);
        let start = (start as usize / 8).checked_add(next)?;
        self.words.get(start..start.checked_add(SETTINGS_WORDS)?)
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

/// Writes bytes into words, as far as there are any.
fn put(words: &[AtomicU64], bytes: &[u8]) {
    for (cell, bytes) in words.iter().zip(bytes.chunks(8)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        cell.store(u64::from_le_bytes(word), Ordering::Relaxed);
    }
}

/// Where to try, best first.
fn folders(config: &Config) -> Vec<PathBuf> {
    match config.blackbox.as_deref() {
        Some(p) if p == Path::new(NO_BLACKBOX) => return Vec::new(),
        Some(p) => return vec![p.to_owned()],
        None => {}
    }
    let runtime = config.runtime_dir.clone();
    let memory = runtime.into_iter().chain([PathBuf::from("/dev/shm")]).filter(|p| in_memory(p));
    memory.chain([config.out.clone()]).collect()
}

fn too_small() -> io::Result<Mapped> {
    let what = "the limit on the size of files is too low (ulimit -f)";
    Err(io::Error::new(io::ErrorKind::FileTooLarge, what))
}

const FOLDER: &str = "set MEMTRACE_BLACKBOX to a folder with room";

/// What helps against an error.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "raise the limit on open files (ulimit -n)",
        Some(libc::ENOMEM) => "raise the limit on memory (ulimit -v, ulimit -d)",
        Some(libc::EAGAIN) => "raise the limit on locked memory (ulimit -l)",
        _ if error.kind() == io::ErrorKind::FileTooLarge => "raise that limit",
        _ => FOLDER,
    }
}

fn open(path: &Path, words: usize) -> io::Result<OwnedFd> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Nothing may have this name yet: what somebody has put there is not followed, and
    // the next folder is tried. A name that is not final would add nothing: the header
    // says so of a box that is being made.
    let file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)?;
    let made = memtrace_files::aside(file).and_then(|file| {
        file.set_len(words as u64 * 8)?;
        Ok(file.into())
    });
    made.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

fn map(file: &OwnedFd, words: usize) -> io::Result<&'static [AtomicU64]> {
    // SAFETY: maps a file of this length that is ours alone; the mapping is removed only before it
    // is used. All-zero words, as a new file has, are valid atomics.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            words * 8,
            libc::PROT_NONE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        );
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Not locked in memory, all of it, if the program wants that of its mappings (`mlockall`).
        libc::munlock(at, words * 8);
        if libc::mprotect(at, words * 8, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            let error = io::Error::last_os_error();
            unmap(at as usize, words);
            return Err(error);
        }
        // A forked child has a recorder of its own; it must not be able to write into this one.
        libc::madvise(at, words * 8, libc::MADV_DONTFORK);
        Ok(std::slice::from_raw_parts(at.cast(), words))
    }
}

/// Takes a mapping away that nobody has written into, and nobody will.
fn unmap(at: usize, words: usize) {
    // SAFETY: it was mapped by `map`, with this length, and whoever has its address drops it now.
    unsafe { libc::munmap(at as *mut libc::c_void, words * 8) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_at_its_name_is_neither_followed_nor_waited_for() {
        let folder = std::env::temp_dir().join(format!("memtrace-boxes-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("made");
        let at = |name: &str| folder.join(name);
        std::fs::write(at("victim"), "precious").expect("written");
        std::os::unix::fs::symlink(at("victim"), at("link")).expect("made");
        std::os::unix::fs::symlink(at("nothing"), at("dangling")).expect("made");
        std::fs::create_dir(at("folder")).expect("made");
        let fifo = std::ffi::CString::new(at("fifo").to_str().expect("text")).expect("text");
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        for trap in ["victim", "link", "dangling", "folder", "fifo"] {
            let made = open(&at(trap), 512);
            assert_eq!(made.err().map(|e| e.kind()), Some(io::ErrorKind::AlreadyExists), "{trap}");
        }
        assert_eq!(std::fs::read_to_string(at("victim")).expect("there"), "precious");
        assert!(!at("nothing").exists());
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}

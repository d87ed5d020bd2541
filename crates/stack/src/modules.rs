//! The libraries of the process: what was loaded where, from when until when, for whoever writes
//! names.
//!
//! When a library was there is said in epochs ([`super::epoch`]). The list is brought up to date
//! when somebody is about to write names, and when a library was closed ([`super::closing`]). The
//! background thread does so now and then, and a hook never does.

use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_format::stacks::{HEADER, MODULE_FIXED, MODULE_MAGIC};

use super::arena::Arena;
use super::epoch::{epoch, leave, met};
use super::rules;
use memtrace_libraries::objects::{self, Listed};
use memtrace_os::locks::ForkLock;
use memtrace_os::space::Space;
use memtrace_os::sync::of_file;

/// A library as the loader has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Library {
    base: u64,
    start: u64,
    end: u64,
    build_id: Vec<u8>,
    path: Vec<u8>,
}

/// What the loader has counted: loads and unloads.
type Counts = [u64; 2];

#[derive(Default)]
struct Known {
    counts: Option<Counts>,
    /// Loaded libraries and where their records are (0: there was no room).
    loaded: Vec<(Library, usize)>,
}

/// The list of libraries, kept in words that others own.
pub struct ModuleTable {
    arena: Arena,
    known: ForkLock<Known>,
}

impl ModuleTable {
    /// An empty list in `words`, all of which must be 0. `None` if they are not, or are too few.
    pub fn new(words: &'static [AtomicU64], space: Space) -> Option<ModuleTable> {
        let arena = Arena::new(of_file(words), MODULE_MAGIC, HEADER, space)?;
        Some(ModuleTable { arena, known: ForkLock::new(Known::default()) })
    }

    /// The region.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Brings the list up to date. Takes a lock and allocates: not for hooks.
    pub fn refresh(&self) {
        let mut known = self.known.lock();
        if known.counts.is_some() && known.counts == Some(objects::counts()) {
            return;
        }
        let (now, counts) = loaded();
        known.counts = Some(counts);
        let mut gone = false;
        known.loaded.retain(|(library, at)| {
            let stays = now.contains(library);
            if !stays {
                gone = true;
                leave(library.start, library.end);
                self.ended(*at);
            }
            stays
        });
        if gone {
            rules::forget();
        }
        for library in now {
            if !known.loaded.iter().any(|(k, _)| *k == library) {
                met(library.start, library.end);
                let at = self.add(&library);
                known.loaded.push((library, at));
            }
        }
    }

    fn add(&self, library: &Library) -> usize {
        let bytes = library.build_id.len() + library.path.len();
        let Some(mut record) = self.arena.reserve(MODULE_FIXED, bytes) else { return 0 };
        record.set(1, library.base);
        record.set(2, library.start);
        record.set(3, library.end);
        record.set(4, u64::from(epoch()));
        record.set(5, library.build_id.len() as u64 | (library.path.len() as u64) << 32);
        record.bytes(&library.build_id);
        record.bytes(&library.path);
        record.finish(0)
    }

    /// Notes in a record that its library is gone: the epoch after the last
    /// one, so that 0 means "still there".
    fn ended(&self, at: usize) {
        if at != 0
            && let Some(epochs) = self.arena.words().get(at + 4)
        {
            epochs.fetch_or((u64::from(epoch()) + 1) << 32, Ordering::Release);
        }
    }
}

/// All loaded libraries.
fn loaded() -> (Vec<Library>, Counts) {
    let (mut libraries, mut counts) = (Vec::with_capacity(512), [0; 2]);
    let _: Option<()> = objects::each(|object| {
        counts = object.counts;
        libraries.extend(library(object));
        None
    });
    // The program itself has no name there.
    if let Some(main) = libraries.first_mut().filter(|l| l.path.is_empty())
        && let Ok(path) = std::fs::read_link("/proc/self/exe")
    {
        main.path = path.into_os_string().into_encoded_bytes();
    }
    (libraries, counts)
}

const PAGE: u64 = 4096;
/// More notes than this are no build id.
const MOST_NOTES: u64 = 1 << 16;

fn library(object: &Listed<'_>) -> Option<Library> {
    let mut build_id = Vec::new();
    let (start, end) = object.range(|h| {
        if h.p_type == libc::PT_NOTE && build_id.is_empty() {
            let notes = object.bytes(h.p_vaddr, h.p_filesz.min(MOST_NOTES) as usize);
            build_id = notes.as_deref().and_then(gnu_build_id).unwrap_or_default().to_vec();
        }
    });
    let path = if object.name.is_null() {
        &[][..]
    } else {
        // SAFETY: the loader's names are C strings, in its own memory.
        unsafe { CStr::from_ptr(object.name) }.to_bytes()
    };
    (start < end).then(|| Library {
        base: object.base,
        start: start / PAGE * PAGE,
        end,
        build_id,
        path: path.to_vec(),
    })
}

/// The GNU build id among ELF notes. Each note is three words (length of name, length of content,
/// type), the name and the content, both padded to four bytes.
fn gnu_build_id(mut notes: &[u8]) -> Option<&[u8]> {
    const NT_GNU_BUILD_ID: usize = 3;
    loop {
        let (head, rest) = notes.split_first_chunk::<12>()?;
        let word = |i: usize| {
            u32::from_ne_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]) as usize
        };
        let (name, rest) = rest.split_at_checked(word(0).next_multiple_of(4))?;
        let content = rest.get(..word(4))?;
        if word(8) == NT_GNU_BUILD_ID && name == b"GNU\0" {
            return Some(content);
        }
        notes = rest.get(word(4).next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::stacks::modules;

    fn table() -> ModuleTable {
        let words: Vec<AtomicU64> = (0..1 << 16).map(|_| AtomicU64::new(0)).collect();
        ModuleTable::new(words.leak(), Space::MEMORY).expect("large enough and empty")
    }

    #[test]
    fn the_programs_libraries_are_listed_with_path_range_and_build_id() {
        let table = table();
        table.refresh();
        let list = modules(table.arena().words());
        let has = |address: u64| list.iter().find(|m| (m.start..m.end).contains(&address));
        let test = has(gnu_build_id as *const () as u64).expect("this program");
        assert_eq!(Some(test.path.clone().into()), std::env::current_exe().ok());
        let libc = has(libc::qsort as *const () as u64).expect("the C library");
        assert!(libc.path.contains("libc"), "{}", libc.path);
        assert!(!libc.build_id.is_empty());
        assert!(list.iter().all(|m| m.until.is_none()));
        table.refresh();
        assert_eq!(modules(table.arena().words()), list, "nothing changed, nothing added");
    }

    #[test]
    fn notes_are_read_within_their_bounds() {
        let note = |kind: u32, content: &[u8]| {
            let mut n = Vec::new();
            for word in [4, content.len() as u32, kind] {
                n.extend(word.to_ne_bytes());
            }
            n.extend(b"GNU\0");
            n.extend(content);
            n.resize(n.len().next_multiple_of(4), 0);
            n
        };
        let notes = [note(1, b"abi"), note(3, b"the id")].concat();
        assert_eq!(gnu_build_id(&notes), Some(&b"the id"[..]));
        for cut in 0..notes.len() - 2 {
            assert_eq!(gnu_build_id(&notes[..cut]), None);
        }
    }
}

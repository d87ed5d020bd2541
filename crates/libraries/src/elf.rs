//! A loaded library's own tables: its symbols, and the words in which its
//! calls to others are bound.
//!
//! Read where the loader has mapped them, in the layout that the System V ABI and
//! the GNU hash section give. Nothing is looked up by the loader here, so this
//! works before, inside and around `dlsym`.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

pub use self::symbols::Version;
use memtrace_os::checked::{Memory, Process};
use memtrace_os::errno;
use memtrace_os::locks::Turn;

mod symbols;

/// See the module's documentation.
#[derive(Clone)]
pub struct Tables {
    base: usize,
    strings: usize,
    strings_size: usize,
    symbols: usize,
    /// The GNU table of hashes, and the older one, which a library may have alone.
    hashes: usize,
    older_hashes: usize,
    /// The versions of the symbols, and those that other libraries' must have.
    versions: [usize; 2],
    /// The versions that the library's own symbols have.
    own_versions: usize,
    /// What the library defines comes first for itself.
    is_symbolic: bool,
    /// The library's own name, among the strings.
    own_name: Option<usize>,
    /// The dynamic section.
    dynamic: usize,
    /// First byte and length of the tables of relocations.
    relocations: [(usize, usize); 2],
    /// What the loader makes read-only after binding.
    protected: Range<usize>,
    /// Everything that the library has mapped.
    mapped: Range<usize>,
    /// The parts of it that nobody writes to.
    constant: [Range<usize>; 4],
}

/// A word through which a library calls a function of another one.
pub struct Binding {
    /// The function's name.
    pub name: &'static CStr,
    /// Where it is.
    pub place: usize,
    is_protected: bool,
    /// The loader may be yet to bind it.
    pub is_lazy: bool,
}

/// Kinds of relocations: an address in data, and the two of words through
/// which functions are called.
const ABSOLUTE: u64 = 1;
const GLOB_DAT: u64 = 6;
const JUMP_SLOT: u64 = 7;

/// An entry of a table of relocations.
#[repr(C)]
struct Relocation {
    place: u64,
    symbol_and_kind: u64,
    addend: i64,
}

impl Tables {
    /// The tables of a loaded library; `None` if it has none, or if the
    /// program has taken their memory away.
    ///
    /// # Safety
    /// `info` describes a loaded library, which stays.
    pub unsafe fn of(info: &libc::dl_phdr_info, process: &Process) -> Option<Tables> {
        let base = info.dlpi_addr as usize;
        let (mut dynamic, mut protected, mut mapped) = (None, 0..0, 0..0);
        let mut constant = [const { 0..0 }; 4];
        let is_readable = |p: &Range<usize>| process.is_readable(p.start as u64, p.end as u64);
        for header in headers(info, process) {
            let start = base + header.p_vaddr as usize;
            let end = start + header.p_memsz as usize;
            if header.p_type == libc::PT_LOAD
                && header.p_flags & libc::PF_W == 0
                && let Some(free) = constant.iter_mut().find(|part| part.end == 0)
            {
                *free = start..end;
            }
            match header.p_type {
                libc::PT_DYNAMIC => dynamic = Some(start..end),
                // Whole pages: where it ends within one, the loader leaves that writable.
                libc::PT_GNU_RELRO => protected = page_of(start)..page_of(end),
                // In ascending order.
                libc::PT_LOAD if mapped.is_empty() => mapped = start..end,
                libc::PT_LOAD => mapped.end = end,
                _ => {}
            }
        }
        let dynamic = dynamic.filter(is_readable)?;
        // SAFETY: promised by the caller: what a program header calls the dynamic section is one.
        let tables = unsafe { Tables::at(base, dynamic.start)? };
        // The other tables lie beside the strings.
        let strings_end = tables.strings + tables.strings_size;
        let is_whole = is_readable(&(strings_end.saturating_sub(8)..strings_end));
        is_whole.then_some(Tables { protected, mapped, constant, ..tables })
    }

    /// The same by the dynamic section; what is mapped isn't known.
    ///
    /// # Safety
    /// The section is that of a loaded library, which stays.
    pub unsafe fn at(base: usize, dynamic: usize) -> Option<Tables> {
        const PLTRELSZ: i64 = 2;
        const HASH: i64 = 4;
        const STRTAB: i64 = 5;
        const SYMTAB: i64 = 6;
        const RELA: i64 = 7;
        const STRSZ: i64 = 10;
        const RELASZ: i64 = 8;
        const SYMBOLIC: i64 = 16;
        const JMPREL: i64 = 23;
        const FLAGS: i64 = 30;
        const FLAG_SYMBOLIC: usize = 2;
        const SONAME: i64 = 14;
        const GNU_HASH: i64 = 0x6fff_fef5;
        const VERSYM: i64 = 0x6fff_fff0;
        const VERDEF: i64 = 0x6fff_fffc;
        const VERNEED: i64 = 0x6fff_fffe;
        let mut tables = Tables {
            base,
            strings: 0,
            strings_size: 0,
            symbols: 0,
            hashes: 0,
            older_hashes: 0,
            versions: [0; 2],
            own_versions: 0,
            is_symbolic: false,
            own_name: None,
            dynamic,
            relocations: [(0, 0); 2],
            protected: 0..0,
            mapped: 0..0,
            constant: [const { 0..0 }; 4],
        };
        // SAFETY: promised by the caller: the section and what it names are mapped.
        unsafe {
            let mut entry = tables.dynamic as *const [i64; 2];
            while (*entry)[0] != 0 {
                let value = (*entry)[1] as usize;
                // The loader has put addresses there; where it hasn't (a
                // read-only section), it is an offset.
                let at = if value < base { base + value } else { value };
                match (*entry)[0] {
                    STRTAB => tables.strings = at,
                    STRSZ => tables.strings_size = value,
                    SYMTAB => tables.symbols = at,
                    SONAME => tables.own_name = Some(value),
                    GNU_HASH => tables.hashes = at,
                    VERSYM => tables.versions[0] = at,
                    HASH => tables.older_hashes = at,
                    SYMBOLIC => tables.is_symbolic = true,
                    FLAGS if value & FLAG_SYMBOLIC != 0 => tables.is_symbolic = true,
                    VERDEF => tables.own_versions = at,
                    VERNEED => tables.versions[1] = at,
                    RELA => tables.relocations[0].0 = at,
                    RELASZ => tables.relocations[0].1 = value,
                    JMPREL => tables.relocations[1].0 = at,
                    PLTRELSZ => tables.relocations[1].1 = value,
                    _ => {}
                }
                entry = entry.add(1);
            }
        }
        (tables.strings != 0 && tables.symbols != 0).then_some(tables)
    }

    /// Does this address lie in the library?
    pub fn contains(&self, address: usize) -> bool {
        self.mapped.contains(&address)
    }

    /// The library's first address.
    pub fn start(&self) -> usize {
        self.mapped.start
    }

    /// Everything that the library has mapped.
    pub fn range(&self) -> Range<usize> {
        self.mapped.clone()
    }

    /// The names of the libraries that this one needs.
    pub fn needed(&self) -> Vec<&'static CStr> {
        const NEEDED: i64 = 1;
        let mut names = Vec::new();
        let mut entry = self.dynamic as *const [i64; 2];
        // SAFETY: the dynamic section, which ends with an entry of zeros, and places
        // among the library's strings; see `of`.
        unsafe {
            while (*entry)[0] != 0 {
                if (*entry)[0] == NEEDED {
                    names.push(CStr::from_ptr((self.strings + (*entry)[1] as usize) as *const _));
                }
                entry = entry.add(1);
            }
        }
        names
    }

    /// What the library calls itself.
    pub fn own_name(&self) -> Option<&'static CStr> {
        // SAFETY: a place among the library's strings; see `of`.
        self.own_name.map(|at| unsafe { CStr::from_ptr((self.strings + at) as *const _) })
    }

    /// Has the library one of these texts in its constant data? The names
    /// of its symbols don't count.
    pub fn says(&self, texts: &[&[u8]]) -> bool {
        let symbols = self.strings..self.strings + self.strings_size;
        self.constant.iter().any(|part| {
            let before = part.start..part.end.min(symbols.start);
            let after = part.start.max(symbols.end)..part.end;
            contains_one(before, texts) || contains_one(after, texts)
        })
    }

    /// Does the library look among its own functions first?
    pub fn is_symbolic(&self) -> bool {
        self.is_symbolic
    }

    /// The version in which the library wants a function of another one's; none if it doesn't say.
    pub fn version_wanted(&self, name: &CStr) -> Option<&'static CStr> {
        /// Of a library that is needed: which of its versions, one after the other.
        #[repr(C)]
        struct Needed {
            _version: u16,
            count: u16,
            _file: u32,
            first: u32,
            next: u32,
        }
        #[repr(C)]
        struct Version {
            _hash: u32,
            _flags: u16,
            number: u16,
            name: u32,
            next: u32,
        }
        let [numbers, needed] = self.versions;
        if numbers == 0 || needed == 0 {
            return None;
        }
        let symbol = self.symbols_wanted().find(|i| self.entry(*i).1 == name)?;
        // SAFETY: tables of the library's own, in the layout that the GNU
        // extensions to the ABI give; see `of`.
        unsafe {
            let number = *(numbers as *const u16).add(symbol) & 0x7fff;
            let mut at = needed;
            loop {
                let of = &*(at as *const Needed);
                let mut version = at + of.first as usize;
                for _ in 0..of.count {
                    let it = &*(version as *const Version);
                    if it.number == number {
                        return Some(CStr::from_ptr((self.strings + it.name as usize) as *const _));
                    }
                    version += it.next as usize;
                }
                if of.next == 0 {
                    return None;
                }
                at += of.next as usize;
            }
        }
    }

    fn entry(&self, i: usize) -> (&'static libc::Elf64_Sym, &'static CStr) {
        // SAFETY: the index comes from one of the library's own tables,
        // and so do the places; see `of`.
        unsafe {
            let symbol = &*(self.symbols as *const libc::Elf64_Sym).add(i);
            (symbol, CStr::from_ptr((self.strings + symbol.st_name as usize) as *const _))
        }
    }

    /// The words through which the library calls functions that it does not define.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> + '_ {
        let called = self.words().filter(|r| r.is_binding());
        called.filter(|r| self.entry(r.symbol()).0.st_shndx == 0).map(|r| self.binding(r))
    }

    fn binding(&self, r: &Relocation) -> Binding {
        let place = self.base + r.place as usize;
        let is_protected = self.protected.contains(&place);
        let is_lazy = r.kind() == JUMP_SLOT;
        Binding { name: self.entry(r.symbol()).1, place, is_protected, is_lazy }
    }

    /// The words that have the address of a function, the library's own or another's:
    /// what it calls, and what its data names.
    pub fn references(&self) -> impl Iterator<Item = Binding> + '_ {
        let named =
            self.words().filter(|r| r.is_binding() || r.kind() == ABSOLUTE && r.addend == 0);
        named.map(|r| self.binding(r))
    }

    /// The symbols that the library calls and does not define.
    fn symbols_wanted(&self) -> impl Iterator<Item = usize> + '_ {
        let wanted = self.words().filter(|r| r.is_binding()).map(Relocation::symbol);
        wanted.filter(|i| self.entry(*i).0.st_shndx == 0)
    }

    fn words(&self) -> impl Iterator<Item = &Relocation> {
        self.relocations.iter().filter(|(start, _)| *start != 0).flat_map(|t| {
            // SAFETY: a table of the library's own, mapped; see `of`.
            unsafe {
                std::slice::from_raw_parts(t.0 as *const Relocation, t.1 / size_of::<Relocation>())
            }
        })
    }
}

impl Relocation {
    fn kind(&self) -> u64 {
        self.symbol_and_kind & 0xffff_ffff
    }

    fn symbol(&self) -> usize {
        (self.symbol_and_kind >> 32) as usize
    }

    /// Of a word through which functions are called.
    fn is_binding(&self) -> bool {
        matches!(self.kind(), GLOB_DAT | JUMP_SLOT)
    }
}

impl Binding {
    fn word(&self) -> &AtomicUsize {
        // SAFETY: an aligned word of a loaded library, which the loader itself writes as a whole.
        unsafe { AtomicUsize::from_ptr(self.place as *mut usize) }
    }

    /// Where calls go now: the function, or the library's own stub if the
    /// loader is yet to be asked.
    pub fn target(&self) -> usize {
        self.word().load(Ordering::Acquire)
    }

    /// Has the loader done with it, as far as can be known? What it makes read-only after binding
    /// is read-only.
    pub fn is_settled(&self) -> bool {
        !self.is_protected || !is_writable(self.word())
    }

    /// Sends calls elsewhere. Says whether that could be done. A word that the loader makes
    /// read-only after binding, and hasn't yet, is left alone. The loader is at work on this
    /// library in another thread. What it does next would fault in a page that we have made
    /// read-only before it does.
    pub fn bind(&self, target: usize) -> bool {
        static BINDING: Turn = Turn::new(());
        if !self.is_protected {
            self.word().store(target, Ordering::Release);
            return true;
        }
        let Some(_turn) = BINDING.try_lock() else { return false };
        let page = page_of(self.place) as *mut c_void;
        // SAFETY: the page of a word that the loader has made read-only is
        // made writable and read-only again.
        let protect = |to| unsafe { libc::mprotect(page, PAGE, to) } == 0;
        let is_done = !is_writable(self.word()) && protect(libc::PROT_READ | libc::PROT_WRITE);
        if is_done {
            self.word().store(target, Ordering::Release);
            protect(libc::PROT_READ);
        }
        is_done
    }
}

const PAGE: usize = 4096;

fn page_of(address: usize) -> usize {
    address & !(PAGE - 1)
}

/// Can this word be written to? The kernel is asked to change nothing in it
/// (`FUTEX_WAKE_OP` with an "or" of no bit).
fn is_writable(word: &AtomicUsize) -> bool {
    const OR_NOTHING: u32 = 2 << 28; // FUTEX_OP_OR
    static NOBODY_WAITS: AtomicU32 = AtomicU32::new(0);
    let how = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let (here, there) = (NOBODY_WAITS.as_ptr(), word.as_ptr());
    let _errno = errno::Kept::now();
    // SAFETY: wakes nobody, and changes nothing; an address that can't be written to is an error.
    unsafe { libc::syscall(libc::SYS_futex, here, how, 1, 0_usize, there, OR_NOTHING) >= 0 }
}

/// Does this memory have one of these texts in it? As far as it can be read.
fn contains_one(memory: Range<usize>, texts: &[&[u8]]) -> bool {
    const WORDS: usize = PAGE / size_of::<u64>();
    let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
    let (process, page) = (Process::default(), [const { Cell::new(0) }; WORDS]);
    let mut seen: Vec<u8> = Vec::with_capacity(2 * PAGE);
    for at in (page_of(memory.start)..memory.end).step_by(PAGE) {
        if !process.copy(at as u64, &page) {
            seen.clear();
            continue;
        }
        // What ends in this page may have begun in the last one.
        seen.drain(..seen.len().saturating_sub(longest));
        let bytes = page.iter().flat_map(|word| word.get().to_ne_bytes());
        let (first, last) = (memory.start.saturating_sub(at), (memory.end - at).min(PAGE));
        seen.extend(bytes.take(last).skip(first));
        if texts.iter().any(|text| has(&seen, text)) {
            return true;
        }
    }
    false
}

fn has(bytes: &[u8], text: &[u8]) -> bool {
    // SAFETY: reads both as long as they are.
    let found = unsafe {
        libc::memmem(bytes.as_ptr().cast(), bytes.len(), text.as_ptr().cast(), text.len())
    };
    !found.is_null()
}

/// The program headers of an object that the loader lists; none if they can't be read.
pub fn headers<'a>(info: &'a libc::dl_phdr_info, process: &Process) -> &'a [libc::Elf64_Phdr] {
    let (start, count) = (info.dlpi_phdr, usize::from(info.dlpi_phnum));
    let bytes = (count * size_of::<libc::Elf64_Phdr>()) as u64;
    if !process.is_readable(start as u64, start as u64 + bytes) {
        return &[];
    }
    // SAFETY: so many headers follow, as the loader says, and they can be read.
    unsafe { std::slice::from_raw_parts(start, count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_written_to_is_known_without_writing() {
        static CONSTANT: usize = 7;
        let word = AtomicUsize::new(usize::MAX);
        assert!(is_writable(&word) && word.into_inner() == usize::MAX);
        // SAFETY: only asked about.
        let constant = unsafe { AtomicUsize::from_ptr((&raw const CONSTANT).cast_mut()) };
        assert!(!is_writable(constant));
    }

    #[test]
    fn a_text_is_found_across_pages_and_within_the_bounds_only() {
        let mut bytes = vec![0_u8; 5 * PAGE];
        let start = page_of(bytes.as_ptr() as usize) + 2 * PAGE;
        let at = start - bytes.as_ptr() as usize;
        bytes[at - 3..at + 5].copy_from_slice(b"cuWhoAsk");
        let is_in = |from, to, text: &[u8]| contains_one(from..to, &[b"no such", text]);
        assert!(is_in(start - 9, start + 100, b"cuWhoAsk"));
        assert!(
            is_in(start - 2, start + 100, b"uWhoAsk") && !is_in(start - 2, start + 100, b"cuWho")
        );
        assert!(is_in(start, start + 5, b"hoAsk") && !is_in(start, start + 4, b"hoAsk"));
    }
}

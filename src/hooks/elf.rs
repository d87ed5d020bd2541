//! A loaded library's own tables: its symbols, and the words in which its calls to others are bound.
//!
//! Read where the loader has mapped them, in the layout that the System V ABI and the GNU hash section give. Nothing is
//! looked up by the loader here, so this works before, inside and around `dlsym`.

use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See the module's essay.
pub struct Tables {
    base: usize,
    strings: usize,
    symbols: usize,
    hashes: usize,
    /// First byte and length of the tables of relocations.
    relocations: [(usize, usize); 2],
    /// What the loader makes read-only after binding.
    protected: Range<usize>,
    /// Everything that the library has mapped.
    mapped: Range<usize>,
}

/// A word through which a library calls a function of another one.
pub struct Binding {
    /// The function's name.
    pub name: &'static CStr,
    place: usize,
    is_protected: bool,
}

/// An entry of a table of relocations.
#[repr(C)]
struct Relocation {
    place: u64,
    symbol_and_kind: u64,
    addend: i64,
}

impl Tables {
    /// The tables of a loaded library.
    ///
    /// # Safety
    /// `info` describes a loaded library, which stays.
    pub unsafe fn of(info: &libc::dl_phdr_info) -> Option<Tables> {
        const PLTRELSZ: i64 = 2;
        const STRTAB: i64 = 5;
        const SYMTAB: i64 = 6;
        const RELA: i64 = 7;
        const RELASZ: i64 = 8;
        const JMPREL: i64 = 23;
        const GNU_HASH: i64 = 0x6fff_fef5;
        let base = info.dlpi_addr as usize;
        let mut tables = Tables {
            base,
            strings: 0,
            symbols: 0,
            hashes: 0,
            relocations: [(0, 0); 2],
            protected: 0..0,
            mapped: 0..0,
        };
        // SAFETY: promised by the caller: the program headers and the dynamic section that one of them names are mapped.
        unsafe {
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
            let mut dynamic = None;
            for header in headers {
                let start = base + header.p_vaddr as usize;
                let end = start + header.p_memsz as usize;
                match header.p_type {
                    libc::PT_DYNAMIC => dynamic = Some(start),
                    libc::PT_GNU_RELRO => tables.protected = start..end,
                    // In ascending order.
                    libc::PT_LOAD if tables.mapped.is_empty() => tables.mapped = start..end,
                    libc::PT_LOAD => tables.mapped.end = end,
                    _ => {}
                }
            }
            let mut entry = dynamic? as *const [i64; 2];
            while (*entry)[0] != 0 {
                let value = (*entry)[1] as usize;
                // The loader has put addresses there; where it hasn't (a read-only section), it is an offset.
                let at = if value < base { base + value } else { value };
                match (*entry)[0] {
                    STRTAB => tables.strings = at,
                    SYMTAB => tables.symbols = at,
                    GNU_HASH => tables.hashes = at,
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

    fn entry(&self, i: usize) -> (&'static libc::Elf64_Sym, &'static CStr) {
        // SAFETY: the index comes from one of the library's own tables, and so do the places; see `of`.
        unsafe {
            let symbol = &*(self.symbols as *const libc::Elf64_Sym).add(i);
            (symbol, CStr::from_ptr((self.strings + symbol.st_name as usize) as *const _))
        }
    }

    /// A function that the library defines.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        if self.hashes == 0 {
            return None;
        }
        // SAFETY: the hash section is mapped and has this layout; see `of`.
        unsafe {
            let header = *(self.hashes as *const [u32; 4]);
            let [buckets, first, filter_words, _] = header.map(|n| n as usize);
            let bucket_table = (self.hashes + 16 + filter_words * 8) as *const u32;
            let chain = bucket_table.add(buckets);
            let hash = gnu_hash(name.to_bytes());
            let mut i = *bucket_table.add(hash as usize % buckets.max(1)) as usize;
            while i >= first {
                let link = *chain.add(i - first);
                let (symbol, own) = self.entry(i);
                if link | 1 == hash | 1 && symbol.st_shndx != 0 && own == name {
                    return NonNull::new((self.base + symbol.st_value as usize) as *mut c_void);
                }
                if link & 1 == 1 {
                    break;
                }
                i += 1;
            }
            None
        }
    }

    /// The words through which the library calls functions that it does not define.
    pub fn bindings(&self) -> impl Iterator<Item = Binding> + '_ {
        const GLOB_DAT: u64 = 6;
        const JUMP_SLOT: u64 = 7;
        let entries = self.relocations.iter().filter(|(start, _)| *start != 0).flat_map(|t| {
            // SAFETY: a table of the library's own, mapped; see `of`.
            unsafe {
                std::slice::from_raw_parts(t.0 as *const Relocation, t.1 / size_of::<Relocation>())
            }
        });
        entries
            .filter(|r| matches!(r.symbol_and_kind & 0xffff_ffff, GLOB_DAT | JUMP_SLOT))
            .filter_map(|r| {
                let (symbol, name) = self.entry((r.symbol_and_kind >> 32) as usize);
                let place = self.base + r.place as usize;
                let is_protected = self.protected.contains(&place);
                (symbol.st_shndx == 0).then_some(Binding { name, place, is_protected })
            })
    }
}

impl Binding {
    fn word(&self) -> &AtomicUsize {
        // SAFETY: an aligned word of a loaded library, which the loader itself writes as a whole.
        unsafe { AtomicUsize::from_ptr(self.place as *mut usize) }
    }

    /// Where calls go now: the function, or the library's own stub if the loader is yet to be asked.
    pub fn target(&self) -> usize {
        self.word().load(Ordering::Acquire)
    }

    /// Sends calls elsewhere. Says whether that could be done.
    pub fn bind(&self, target: usize) -> bool {
        const PAGE: usize = 4096;
        let page = (self.place & !(PAGE - 1)) as *mut c_void;
        let protect = |to| {
            // SAFETY: the page of a word that the loader has made read-only is made writable and read-only again.
            !self.is_protected || unsafe { libc::mprotect(page, PAGE, to) } == 0
        };
        if !protect(libc::PROT_READ | libc::PROT_WRITE) {
            return false;
        }
        self.word().store(target, Ordering::Release);
        protect(libc::PROT_READ);
        true
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |h: u32, b| h.wrapping_mul(33).wrapping_add(u32::from(*b)))
}

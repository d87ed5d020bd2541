//! What a loaded library defines, found as the loader finds it: by either
//! table of hashes, and by version.

use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::ptr::NonNull;

use super::Tables;

/// Which of a library's functions of one name.
#[derive(Clone, Copy)]
pub enum Version<'v> {
    /// What `dlsym` finds: one without a version, or the one that is not hidden.
    Default,
    /// What a reference to this version is bound to; a library without versions has what is wanted.
    Wanted(&'v CStr),
}

/// Kinds of symbols: a word that each thread has of its own, and a
/// function that another one chooses.
const THREAD_LOCAL: u8 = 6;
const CHOSEN_BY_CALL: u8 = 10;

impl Tables {
    /// A function that the library defines, in whichever version.
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        let (symbol, _) = self.defined(name, |_| true)?;
        NonNull::new((self.base + symbol.st_value as usize) as *mut c_void)
    }

    /// What the loader would find in this library. The library must be ready to run: it may
    /// say itself which function it means.
    pub fn function(&self, name: &CStr, version: Version<'_>) -> Option<usize> {
        let (symbol, _) = self.defined(name, |i| self.has_version(i, version))?;
        let at = self.base.wrapping_add(symbol.st_value as usize);
        match symbol.st_info & 15 {
            CHOSEN_BY_CALL => {
                // SAFETY: as the loader calls it: a function of no arguments
                // that returns the one which is meant.
                Some(unsafe { std::mem::transmute::<usize, unsafe extern "C" fn() -> usize>(at)() })
            }
            THREAD_LOCAL => None,
            _ => Some(at),
        }
    }

    /// Where a word that each thread has of its own lies in what the library has of those.
    pub fn thread_local(&self, name: &CStr) -> Option<usize> {
        let (symbol, _) = self.defined(name, |i| self.has_version(i, Version::Default))?;
        (symbol.st_info & 15 == THREAD_LOCAL).then_some(symbol.st_value as usize)
    }

    /// From where to where something goes that the library defines.
    pub fn extent(&self, name: &CStr) -> Option<Range<usize>> {
        let (symbol, _) = self.defined(name, |i| self.has_version(i, Version::Default))?;
        let at = self.base.wrapping_add(symbol.st_value as usize);
        Some(at..at + symbol.st_size as usize)
    }

    /// The name of the function that has this address.
    pub fn name_at(&self, address: usize) -> Option<&'static CStr> {
        let mut best: Option<(u64, &'static CStr)> = None;
        let offset = address.wrapping_sub(self.base) as u64;
        self.each_defined(|i| {
            let (symbol, name) = self.entry(i);
            let is_in = offset.wrapping_sub(symbol.st_value) < symbol.st_size.max(1);
            if symbol.st_shndx != 0 && is_in && best.is_none_or(|(at, _)| at < symbol.st_value) {
                best = Some((symbol.st_value, name));
            }
        });
        best.map(|(_, name)| name)
    }

    /// Shows the number of each symbol that the GNU table of hashes has.
    fn each_defined(&self, mut f: impl FnMut(usize)) {
        if self.hashes == 0 {
            return;
        }
        // SAFETY: the hash section is mapped and has this layout; see `of`.
        unsafe {
            let header = *(self.hashes as *const [u32; 4]);
            let [buckets, first, filter_words, _] = header.map(|n| n as usize);
            let bucket_table = (self.hashes + 16 + filter_words * 8) as *const u32;
            let chain = bucket_table.add(buckets);
            for bucket in 0..buckets {
                let mut i = *bucket_table.add(bucket) as usize;
                while i >= first && i != 0 {
                    f(i);
                    if *chain.add(i - first) & 1 == 1 {
                        break;
                    }
                    i += 1;
                }
            }
        }
    }

    /// A symbol that the library defines, by name and number.
    fn defined(
        &self,
        name: &CStr,
        is_right: impl Fn(usize) -> bool,
    ) -> Option<(&'static libc::Elf64_Sym, usize)> {
        let is_it = |i: usize| {
            let (symbol, own) = self.entry(i);
            (symbol.st_shndx != 0 && own == name && is_right(i)).then_some((symbol, i))
        };
        if self.hashes != 0 {
            self.by_hash(name, is_it)
        } else if self.older_hashes != 0 {
            self.by_older_hash(name, is_it)
        } else {
            None
        }
    }

    fn by_hash<R>(&self, name: &CStr, is_it: impl Fn(usize) -> Option<R>) -> Option<R> {
        // SAFETY: the hash section is mapped and has this layout; see `of`.
        unsafe {
            let header = *(self.hashes as *const [u32; 4]);
            let [buckets, first, filter_words, shift] = header.map(|n| n as usize);
            let bucket_table = (self.hashes + 16 + filter_words * 8) as *const u32;
            let chain = bucket_table.add(buckets);
            let hash = gnu_hash(name.to_bytes());
            let filter = (self.hashes + 16) as *const u64;
            let word = *filter.add((hash as usize / 64) % filter_words.max(1));
            // The filter knows of nearly every name that is not there.
            if word >> (hash % 64) & word >> ((hash >> shift) % 64) & 1 == 0 {
                return None;
            }
            let mut i = *bucket_table.add(hash as usize % buckets.max(1)) as usize;
            while i >= first {
                let link = *chain.add(i - first);
                if link | 1 == hash | 1
                    && let Some(found) = is_it(i)
                {
                    return Some(found);
                }
                if link & 1 == 1 {
                    break;
                }
                i += 1;
            }
            None
        }
    }

    fn by_older_hash<R>(&self, name: &CStr, is_it: impl Fn(usize) -> Option<R>) -> Option<R> {
        let hash = name.to_bytes().iter().fold(0_u32, |h, b| {
            let h = (h << 4).wrapping_add(u32::from(*b));
            let high = h & 0xf000_0000;
            (h ^ high >> 24) & !high
        });
        // SAFETY: the hash section is mapped and has this layout; see `of`.
        unsafe {
            let [buckets, count] = *(self.older_hashes as *const [u32; 2]);
            let bucket_table = (self.older_hashes + 8) as *const u32;
            let chain = bucket_table.add(buckets as usize);
            let mut i = *bucket_table.add((hash % buckets.max(1)) as usize);
            while i != 0 && i < count {
                if let Some(found) = is_it(i as usize) {
                    return Some(found);
                }
                i = *chain.add(i as usize);
            }
            None
        }
    }

    /// Has a symbol this version? As the loader sees it.
    fn has_version(&self, symbol: usize, wanted: Version<'_>) -> bool {
        const HIDDEN: u16 = 0x8000;
        let [numbers, _] = self.versions;
        if numbers == 0 {
            return true;
        }
        // SAFETY: a table of the library's own with a number for each symbol; see `of`.
        let number = unsafe { *(numbers as *const u16).add(symbol) };
        match wanted {
            // The first number is of no version at all.
            _ if number & !HIDDEN < 2 => number & HIDDEN == 0,
            Version::Default => number & HIDDEN == 0,
            Version::Wanted(name) => self.own_version(number & !HIDDEN) == Some(name),
        }
    }

    fn own_version(&self, number: u16) -> Option<&'static CStr> {
        #[repr(C)]
        struct Defined {
            _version: u16,
            _flags: u16,
            number: u16,
            _count: u16,
            _hash: u32,
            first: u32,
            next: u32,
        }
        let mut at = self.own_versions;
        // SAFETY: tables of the library's own, in the layout that the GNU
        // extensions to the ABI give; see `of`.
        unsafe {
            while at != 0 {
                let it = &*(at as *const Defined);
                if it.number == number {
                    let name = *((at + it.first as usize) as *const u32);
                    return Some(CStr::from_ptr((self.strings + name as usize) as *const _));
                }
                at = if it.next == 0 { 0 } else { at + it.next as usize };
            }
        }
        None
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |h: u32, b| h.wrapping_mul(33).wrapping_add(u32::from(*b)))
}

//! Names of functions in a library's file.
//!
//! First the symbols that the library exports, as the loader's own look-up (`dladdr`) has them, then those that
//! only the file has, if it wasn't stripped of them. A file whose build id is not that of the library that was
//! loaded is another file, and gives no names.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use object::elf::{STT_FILE, STT_SECTION, STT_TLS};
use object::read::elf::{ElfFile64, FileHeader, SectionHeader, Sym};
use object::{Endianness, Object};

/// One symbol: its address, its size, and where its name is in the table of names.
struct Symbol {
    address: u64,
    size: u64,
    name: u32,
}

/// A table of symbols by address.
struct Table {
    symbols: Vec<Symbol>,
    names: (usize, usize),
}

/// The symbols of a file.
pub struct Symbols {
    file: Mmap,
    /// Exported ones, then the rest.
    tables: Vec<Table>,
}

impl Symbols {
    /// The symbols of the file at `path`, if it can be read and has this build id (empty: any).
    pub fn open(path: &Path, build_id: &[u8]) -> Option<Symbols> {
        let file = File::open(path).ok()?;
        // SAFETY: the mapping is read only. Somebody may write into the file or cut it short meanwhile; that is
        // the file that the process is running, mapped in the same way by the loader, so nothing new can go wrong.
        let file = unsafe { Mmap::map(&file) }.ok()?;
        let tables = {
            let elf = ElfFile64::<Endianness>::parse(&*file).ok()?;
            if !build_id.is_empty() && elf.build_id().ok()?.is_some_and(|id| id != build_id) {
                return None;
            }
            let endian = elf.endian();
            let header = elf.elf_header();
            let sections = header.sections(endian, &*file).ok()?;
            [object::elf::SHT_DYNSYM, object::elf::SHT_SYMTAB]
                .into_iter()
                .filter_map(|kind| {
                    let table = sections.symbols(endian, &*file, kind).ok()?;
                    let strings = sections.section(table.string_section()).ok()?;
                    let (at, size) = strings.file_range(endian)?;
                    let mut symbols: Vec<Symbol> = table
                        .iter()
                        .filter(|s| {
                            !s.is_undefined(endian)
                                && !matches!(s.st_type(), STT_TLS | STT_SECTION | STT_FILE)
                                && s.st_name(endian) != 0
                        })
                        .map(|s| Symbol {
                            address: s.st_value(endian),
                            size: s.st_size(endian),
                            name: s.st_name(endian),
                        })
                        .collect();
                    // Stable: of two names for one address the first in the table stays first.
                    symbols.sort_by_key(|s| s.address);
                    Some(Table { symbols, names: (at as usize, (at + size) as usize) })
                })
                .collect()
        };
        Some(Symbols { file, tables })
    }

    /// The name, as it is in the file, of the function at an address in the file's own terms.
    pub fn name(&self, address: u64) -> Option<&[u8]> {
        self.tables.iter().find_map(|t| {
            let symbol = t.find(address)?;
            let names = self.file.get(t.names.0..t.names.1)?;
            let name = names.get(symbol.name as usize..)?;
            let end = name.iter().position(|b| *b == 0)?;
            Some(&name[..end]).filter(|n| !n.is_empty())
        })
    }
}

impl Table {
    fn find(&self, address: u64) -> Option<&Symbol> {
        let after = self.symbols.partition_point(|s| s.address <= address);
        // Functions don't overlap, but labels and aliases may lie inside one.
        let covers = |s: &&Symbol| address - s.address < s.size || s.address == address;
        let best = self.symbols[..after].iter().rev().take(64).find(covers)?;
        let first = self.symbols.partition_point(|s| s.address < best.address);
        self.symbols[first..after].iter().find(covers)
    }
}

/// A name as its source has it: C++ and Rust names are decoded, others stay.
pub fn demangle(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    if let Ok(rust) = rustc_demangle::try_demangle(&text) {
        return format!("{rust:#}");
    }
    if text.starts_with("_Z")
        && let Ok(symbol) = cpp_demangle::Symbol::new(name)
        && let Ok(decoded) = symbol.demangle()
    {
        return decoded;
    }
    text.into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded() {
        let cases: [(&str, &str); 5] = [
            ("malloc", "malloc"),
            (
                "_ZN2at6detail13empty_genericEN3c108ArrayRefIlEE",
                "at::detail::empty_generic(c10::ArrayRef<long>)",
            ),
            ("_ZN3std2rt10lang_start17h0123456789abcdefE", "std::rt::lang_start"),
            ("_RNvC6_123foo3bar", "123foo::bar"),
            ("_Znot", "_Znot"),
        ];
        for (raw, name) in cases {
            assert_eq!(demangle(raw.as_bytes()), name);
        }
    }

    #[test]
    fn this_program_knows_its_functions() {
        let path = std::env::current_exe().expect("a path");
        let symbols = Symbols::open(&path, b"").expect("an ELF file");
        let object = super::super::rules::object_at(demangle as *const () as u64).expect("loaded");
        let address = demangle as *const () as u64 - object.start;
        let name = demangle(symbols.name(address).expect("not stripped"));
        assert!(name.ends_with("symbols::demangle"), "{name}");
        assert!(Symbols::open(&path, b"another one").is_none());
        assert!(Symbols::open(Path::new("/nowhere"), b"").is_none());
    }
}

//! Names of functions in a library's file.
//!
//! First come the symbols that the library exports, as the loader's own look-up (`dladdr`) has
//! them. Then come those that only the file has, if it wasn't stripped of them. A file whose build
//! id is not that of the library that was loaded is another file, and gives no names.

use std::path::Path;

use object::elf::{SHT_DYNSYM, SHT_SYMTAB, STT_FILE, STT_SECTION, STT_TLS};
use object::read::elf::{ElfFile64, FileHeader, Sym};
use object::{Endianness, Object};

use crate::file;

/// The names of the functions at these addresses (in the file's own terms, ascending), as the file
/// has them. `None` if the file can't be read or has another build id (an empty one fits any).
///
/// One pass over each table, with a search among the addresses for each symbol. A large library has
/// some hundred thousand symbols, of which a few hundred are asked for.
pub fn names_at(path: &Path, build_id: &[u8], addresses: &[u64]) -> Option<Vec<Option<String>>> {
    let file = file::map(path).ok()?;
    let elf = ElfFile64::<Endianness>::parse(&*file).ok()?;
    if !build_id.is_empty() && elf.build_id().ok()?.is_some_and(|id| id != build_id) {
        return None;
    }
    let endian = elf.endian();
    let sections = elf.elf_header().sections(endian, &*file).ok()?;
    let mut names = vec![None; addresses.len()];
    for kind in [SHT_DYNSYM, SHT_SYMTAB] {
        let open: Vec<usize> = (0..names.len()).filter(|i| names[*i].is_none()).collect();
        if open.is_empty() {
            break;
        }
        let Ok(table) = sections.symbols(endian, &*file, kind) else { continue };
        let wanted: Vec<u64> = open.iter().map(|i| addresses[*i]).collect();
        for (i, symbol) in open.into_iter().zip(best(table.iter(), endian, &wanted)) {
            let name = symbol.and_then(|s| s.name(endian, table.strings()).ok());
            names[i] = name.filter(|n| !n.is_empty()).map(demangle);
        }
    }
    Some(names)
}

/// For each address the symbol that covers it. Of several it is the one that begins last, as the
/// inner one of nested functions. Of those it is the first in the table.
fn best<'a, S: Sym<Endian = Endianness, Word = u64> + 'a>(
    symbols: impl Iterator<Item = &'a S>,
    endian: Endianness,
    addresses: &[u64],
) -> Vec<Option<&'a S>> {
    let mut found: Vec<Option<&S>> = vec![None; addresses.len()];
    for symbol in symbols {
        let (start, size) = (symbol.st_value(endian), symbol.st_size(endian).max(1));
        let first = addresses.partition_point(|a| *a < start);
        let inside = addresses[first..].iter().take_while(|a| **a - start < size).count();
        if inside == 0
            || symbol.is_undefined(endian)
            || matches!(symbol.st_type(), STT_TLS | STT_SECTION | STT_FILE)
        {
            continue;
        }
        for place in &mut found[first..first + inside] {
            if place.is_none_or(|other| other.st_value(endian) < start) {
                *place = Some(symbol);
            }
        }
    }
    found
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
    use crate::testing::this_program;

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
        let start = |f: *const ()| f as u64 - this_program().start;
        let mut wanted = [demangle as *const (), names_at as *const ()].map(start);
        let second_is_first = wanted[0] > wanted[1];
        wanted.sort_unstable();
        let inside = [3, wanted[0], wanted[0] + 5, wanted[1] + 1, u64::MAX];
        let names = names_at(&path, b"", &inside).expect("an ELF file");
        let name = |i: usize| names[i].clone().expect("not stripped");
        let (a, b) = if second_is_first { (3, 1) } else { (1, 3) };
        assert!(name(a).ends_with("elf::demangle"), "{}", name(a));
        assert!(name(b).ends_with("elf::names_at"), "{}", name(b));
        assert_eq!(name(1), name(2));
        assert_eq!((&names[0], &names[4]), (&None, &None));
        assert_eq!(names_at(&path, b"another one", &inside), None);
        assert_eq!(names_at(Path::new("/nowhere"), b"", &inside), None);
    }
}

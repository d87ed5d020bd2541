//! The symbols of a device binary.
//!
//! Compilers hand the driver a module as a 64-bit ELF file for the device. Its symbol table says
//! which functions and variables it has, and how large those are. That is all the virtual GPU wants
//! to know of it. The caller gives an address and no length, so the length is taken from the file's
//! own header. Other forms (PTX, fat binaries) are not looked into.

use std::collections::BTreeMap;

/// What a device binary defines.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Symbols {
    /// Functions, which includes kernels.
    pub functions: Vec<String>,
    /// Variables and their sizes in bytes.
    pub variables: BTreeMap<String, u64>,
}

const HEADER: usize = 64;
const SYMBOL_TABLE: u64 = 2;
const DATA: u8 = 1;
const FUNCTION: u8 = 2;

/// A little-endian number of `size` bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(size)?)?;
    Some(field.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

fn text(bytes: &[u8], at: usize) -> Option<String> {
    let tail = bytes.get(at..)?;
    let len = tail.iter().position(|byte| *byte == 0)?;
    Some(String::from_utf8_lossy(&tail[..len]).into_owned())
}

/// The length of the file that begins with this header: its tables of
/// sections and segments are last.
fn length(header: &[u8]) -> Option<usize> {
    let is_ours = header.starts_with(b"\x7fELF\x02\x01");
    let table = |offset, entry| {
        let start = number(header, offset, 8)?;
        start.checked_add(number(header, entry, 2)? * number(header, entry + 2, 2)?)
    };
    let end = table(0x20, 0x36)?.max(table(0x28, 0x3a)?);
    (is_ours && end < 1 << 32).then_some(end as usize)
}

struct Section {
    kind: u64,
    offset: usize,
    size: usize,
    link: usize,
}

fn section(file: &[u8], index: usize) -> Option<Section> {
    let at = number(file, 0x28, 8)? as usize + index * number(file, 0x3a, 2)? as usize;
    Some(Section {
        kind: number(file, at + 4, 4)?,
        offset: number(file, at + 0x18, 8)? as usize,
        size: number(file, at + 0x20, 8)? as usize,
        link: number(file, at + 0x28, 4)? as usize,
    })
}

/// Reads the symbols of a whole file.
pub fn symbols(file: &[u8]) -> Option<Symbols> {
    length(file)?;
    let mut found = Symbols::default();
    for index in 0..number(file, 0x3c, 2)? as usize {
        let table = section(file, index)?;
        if table.kind != SYMBOL_TABLE {
            continue;
        }
        let names = section(file, table.link)?;
        let names = file.get(names.offset..names.offset.checked_add(names.size)?)?;
        let entries = file.get(table.offset..table.offset.checked_add(table.size)?)?;
        for entry in entries.chunks_exact(24) {
            let name = text(names, number(entry, 0, 4)? as usize)?;
            let defined = number(entry, 6, 2)? != 0;
            match entry[4] & 15 {
                FUNCTION if defined => found.functions.push(name),
                DATA if defined => {
                    found.variables.insert(name, number(entry, 16, 8)?);
                }
                _ => {}
            }
        }
    }
    Some(found)
}

/// Reads the symbols of a file in memory that starts here.
///
/// # Safety
/// `image` is null, or a module image as the driver API takes it: a whole
/// file, of one of its formats.
pub unsafe fn symbols_at(image: *const u8) -> Option<Symbols> {
    if image.is_null() {
        return None;
    }
    // Byte by byte, as another format may be shorter than a header.
    let magic = b"\x7fELF";
    for (i, wanted) in magic.iter().enumerate() {
        // SAFETY: every byte before this one was that of an ELF file, so the image goes on.
        if unsafe { image.add(i).read() } != *wanted {
            return None;
        }
    }
    // SAFETY: an ELF file has at least a header.
    let header = unsafe { core::slice::from_raw_parts(image, HEADER) };
    // SAFETY: the header says how long the file is, and the caller that it is whole.
    symbols(unsafe { core::slice::from_raw_parts(image, length(header)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test program itself is a 64-bit ELF file with symbols.
    #[test]
    fn finds_functions_and_variables_of_a_real_file() {
        #[unsafe(no_mangle)]
        static MEMTRACE_TEST_VARIABLE: [u8; 12] = [7; 12];
        #[unsafe(no_mangle)]
        extern "C" fn memtrace_test_function() {}
        memtrace_test_function();
        assert_eq!(std::hint::black_box(&MEMTRACE_TEST_VARIABLE)[0], 7);
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let found = symbols(&file).expect("an ELF file");
        assert!(found.functions.iter().any(|name| name == "memtrace_test_function"));
        assert_eq!(found.variables.get("MEMTRACE_TEST_VARIABLE"), Some(&12));
        // SAFETY: a whole file.
        assert_eq!(unsafe { symbols_at(file.as_ptr()) }, Some(found));
    }

    #[test]
    fn other_formats_and_damaged_files_are_left_alone() {
        assert_eq!(symbols(b"//\n// a listing in PTX\n"), None);
        assert_eq!(symbols(&[0; 8]), None);
        let mut file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        file.truncate(file.len() / 2);
        assert_eq!(symbols(&file), None);
    }
}

//! The built library, seen as the loader sees it: everything that PyTorch imports is there, and
//! nothing else is shown to the program that it is loaded into.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

use object::elf::{DT_FLAGS_1, DT_NEEDED, DT_SONAME};
use object::read::elf::{Dyn, ElfFile64, FileHeader};
use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Cargo puts the library beside the tests that depend on it.
fn library() -> Vec<u8> {
    let mut path = std::env::current_exe().expect("a test's own path");
    path.set_file_name("libmemtrace_virtual.so");
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn exported(bytes: &[u8]) -> BTreeSet<String> {
    let file = ElfFile64::<object::Endianness>::parse(bytes).expect("an ELF file");
    let defined = file.dynamic_symbols().filter(|s| s.is_definition() && s.is_global());
    defined.map(|s| s.name().expect("a name").to_owned()).collect()
}

fn table(name: &str) -> Vec<Vec<String>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("api").join(name);
    let text = std::fs::read_to_string(path).expect(name);
    text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

#[test]
fn everything_that_torch_imports_is_there() {
    let exported = exported(&library());
    let missing: Vec<String> = table("imports.tsv")
        .into_iter()
        .filter(|row| !exported.contains(&row[0]))
        .map(|row| format!("{} ({}, torch {})", row[0], row[1], row[2]))
        .collect();
    assert!(missing.is_empty(), "not exported: {missing:#?}");
}

#[test]
fn every_public_function_is_there_and_nothing_else() {
    let exported = exported(&library());
    let mut public: BTreeSet<String> =
        table("prototypes.tsv").into_iter().map(|mut row| row.swap_remove(0)).collect();
    public.extend(table("imports.tsv").into_iter().map(|mut row| row.swap_remove(0)));
    let missing: Vec<_> = public.difference(&exported).collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
    // Headers name the newest version of a function; programs built long ago ask for older ones.
    let plain = |name: &str| match name.rsplit_once("_v") {
        Some((base, number)) if number.parse::<u32>().is_ok() => base.to_owned(),
        _ => name.to_owned(),
    };
    let bases: BTreeSet<String> = public.iter().map(|name| plain(name)).collect();
    // What CUDA's compiler calls is in headers of its own. And ours: how the program opens
    // libraries, and what memtrace asks.
    let own = |name: &str| {
        name == "dlopen" || name.starts_with("memtrace_virtual_") || name.starts_with("__cuda")
    };
    let leaked: Vec<_> =
        exported.iter().filter(|name| !own(name) && !bases.contains(&plain(name))).collect();
    assert!(leaked.is_empty(), "exported, but in no public header: {leaked:?}");
}

/// It is libcuda.so.1 to everybody, stays loaded, and brings in nothing of NVIDIA's.
#[test]
fn the_loader_takes_it_for_the_driver() {
    let bytes = library();
    let file = ElfFile64::<object::Endianness>::parse(&*bytes).expect("an ELF file");
    let (endian, header) = (file.endian(), file.elf_header());
    let sections = header.sections(endian, &*bytes).expect("sections");
    let (dynamic, index) = sections.dynamic(endian, &*bytes).expect("dynamic").expect("dynamic");
    let strings = sections.strings(endian, &*bytes, index).expect("strings");
    let text = |entry: &object::elf::Dyn64<object::Endianness>| {
        let name = entry.string(endian, strings).expect("a string");
        String::from_utf8_lossy(name).into_owned()
    };
    let with = |tag| dynamic.iter().filter(move |d| d.tag(endian) == tag);
    assert_eq!(with(DT_SONAME).map(text).collect::<Vec<_>>(), ["libcuda.so.1"]);
    for needed in with(DT_NEEDED).map(text) {
        assert!(!needed.contains("cu") && !needed.contains("nv"), "needs {needed}");
    }
    let flags = with(DT_FLAGS_1).next().expect("flags").d_val.get(endian);
    assert_ne!(flags & object::elf::DF_1_NODELETE.0, 0, "may be unloaded");
}

//! Our declarations of records, compared with the records that they describe. For tests only.
//!
//! A hook reads CUDA's records by declarations of our own. They name the fields that matter, leave
//! out what comes after them, and need no header. A slip in one is a wrong size in a snapshot.
//! [`same_layout`] compares such a declaration with the one that `cudarc` made from NVIDIA's
//! headers. Where they differ, the tests do not compile. [`unchecked`] finds the declarations that
//! nobody compares, so that a test can say why of each.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Size and alignment are the same, and each field of ours is where theirs is and as large.
///
/// * `Ours = Theirs { .. }` for the whole record, `Ours => Theirs { .. }` for its beginning.
/// * `Ours = [Theirs, Others] { .. }`, or with `=>`: the same of several,
///   whose fields have the same names.
/// * Every field of ours is listed: `field: theirs`, `field: first .. last` for one
///   that stands for several, `field: _` for one that only keeps room. Theirs may
///   be a field of a field: `location.id`.
///
/// ```
/// # use memtrace_layouts::same_layout;
/// #[repr(C)]
/// struct Theirs { x: u64, y: u64, kind: i32, flags: u32, more: [u64; 8] }
/// #[repr(C)]
/// struct Ours { at: [u64; 2], kind: i32 }
///
/// same_layout!(Ours => Theirs { at: x .. y, kind: kind });
/// ```
///
/// A field elsewhere does not compile, also in one of several:
///
/// ```compile_fail,E0080
/// # use memtrace_layouts::same_layout;
/// # #[repr(C)]
/// # struct Theirs { x: u64, kind: i32 }
/// # #[repr(C)]
/// # struct Others { kind: i32, x: u64 }
/// #[repr(C)]
/// struct Ours { at: u64, kind: i32 }
///
/// same_layout!(Ours = [Theirs, Others] { at: x, kind: kind });
/// ```
///
/// ```compile_fail,E0080
/// # use memtrace_layouts::same_layout;
/// # #[repr(C)]
/// # struct Theirs { x: u64, y: u64, kind: i32, flags: u32, more: [u64; 8] }
/// #[repr(C)]
/// struct Ours { at: u64, kind: i32 }
///
/// same_layout!(Ours => Theirs { at: x, kind: kind });
/// ```
///
/// Nor does one that is not listed:
///
/// ```compile_fail
/// # use memtrace_layouts::same_layout;
/// # #[repr(C)]
/// # struct Theirs { x: u64, y: u64, kind: i32, flags: u32, more: [u64; 8] }
/// #[repr(C)]
/// struct Ours { at: [u64; 2], kind: i32 }
///
/// same_layout!(Ours => Theirs { at: x .. y });
/// ```
///
/// Nor one of another size, though what is behind it is in its place, nor the
/// beginning of a record for the whole:
///
/// ```compile_fail,E0080
/// # use memtrace_layouts::same_layout;
/// # #[repr(C)]
/// # struct Theirs { x: u64, y: u64, kind: i32, flags: u32, more: [u64; 8] }
/// #[repr(C)]
/// struct Ours { at: [u64; 2], kind: i16 }
///
/// same_layout!(Ours => Theirs { at: x .. y, kind: kind });
/// ```
///
/// ```compile_fail,E0080
/// # use memtrace_layouts::same_layout;
/// # #[repr(C)]
/// # struct Theirs { x: u64, y: u64, kind: i32, flags: u32, more: [u64; 8] }
/// #[repr(C)]
/// struct Ours { at: [u64; 2], kind: i32 }
///
/// same_layout!(Ours = Theirs { at: x .. y, kind: kind });
/// ```
#[macro_export]
macro_rules! same_layout {
    ($ours:ty = [$($theirs:ty),+ $(,)?] $fields:tt) => {
        $($crate::same_layout!($ours = $theirs $fields);)+
    };
    ($ours:ty => [$($theirs:ty),+ $(,)?] $fields:tt) => {
        $($crate::same_layout!($ours => $theirs $fields);)+
    };
    ($ours:ty = $theirs:ty { $($fields:tt)* }) => {
        const _: () = {
            use ::core::mem::{align_of, size_of};
            assert!(
                size_of::<$ours>() == size_of::<$theirs>(),
                concat!(stringify!($ours), " has another size than ", stringify!($theirs)),
            );
            assert!(
                align_of::<$ours>() == align_of::<$theirs>(),
                concat!(stringify!($ours), " has another alignment than ", stringify!($theirs)),
            );
        };
        $crate::same_layout!(@fields $ours, $theirs, $($fields)*);
    };
    ($ours:ty => $theirs:ty { $($fields:tt)* }) => {
        const _: () = {
            use ::core::mem::{align_of, size_of};
            assert!(
                size_of::<$ours>() <= size_of::<$theirs>(),
                concat!(stringify!($ours), " is longer than ", stringify!($theirs)),
            );
            assert!(
                align_of::<$ours>() <= align_of::<$theirs>(),
                concat!(stringify!($ours), " needs more alignment than ", stringify!($theirs)),
            );
        };
        $crate::same_layout!(@fields $ours, $theirs, $($fields)*);
    };
    (@fields $ours:ty, $theirs:ty,
        $($field:tt : $($first:tt).+ $(.. $($last:tt).+)?),* $(,)?) => {
        const _: () = {
            type RecordOfOurs = $ours;
            // Does not compile where one is left out.
            #[allow(dead_code)]
            fn all(RecordOfOurs { $($field: _),* }: &RecordOfOurs) {}
            $($crate::same_layout!(@field RecordOfOurs, $theirs, $field, $($first).+ $(, $($last).+)?);)*
        };
    };
    (@field $ours:ty, $theirs:ty, $field:tt, _) => {};
    (@field $ours:ty, $theirs:ty, $field:tt, $($one:ident).+) => {
        $crate::same_layout!(@field $ours, $theirs, $field, $($one).+, $($one).+);
    };
    (@field $ours:ty, $theirs:ty, $field:tt, $($first:ident).+, $($last:ident).+) => {
        const _: () = {
            use ::core::mem::offset_of;
            let begin = offset_of!($theirs, $($first).+);
            let end = offset_of!($theirs, $($last).+)
                + $crate::size_of_field(|theirs: &$theirs| &theirs.$($last).+);
            assert!(
                offset_of!($ours, $field) == begin,
                concat!(stringify!($field), " is not where ", stringify!($theirs), " has it"),
            );
            assert!(
                $crate::size_of_field(|ours: &$ours| &ours.$field) == end - begin,
                concat!(stringify!($field), " is not as large as in ", stringify!($theirs)),
            );
        };
    };
}

/// The size of what a function picks out of a record.
pub const fn size_of_field<R, F>(_: fn(&R) -> &F) -> usize {
    size_of::<F>()
}

/// Records with C's layout that no [`same_layout`] checks, as `file: Name`, by the path from
/// `sources`. The check is in the record's own file, or in `layouts.rs` in the folder of its name.
///
/// # Panics
/// The sources can't be read.
pub fn unchecked(sources: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![sources.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of sources") {
            let path = entry.expect("a folder of sources").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).expect("a source");
                let beside = if path.file_name().is_some_and(|n| n == "mod.rs" || n == "lib.rs") {
                    path.with_file_name("layouts.rs")
                } else {
                    path.with_extension("").join("layouts.rs")
                };
                let checks = text.clone() + &fs::read_to_string(beside).unwrap_or_default();
                let checked = names_behind(&checks, &["same_layout!("]);
                let file = path.strip_prefix(sources).expect("below").display().to_string();
                let records = records(&text).into_iter().filter(|name| !checked.contains(name));
                found.extend(records.map(|name| format!("{file}: {name}")));
            }
        }
    }
    found
}

/// The names of a source's records with a layout of C's.
fn records(text: &str) -> BTreeSet<String> {
    let behind = text.split("#[repr(C").skip(1);
    behind
        .flat_map(|rest| names_behind(rest, &["struct ", "union ", "enum "]).into_iter().take(1))
        .collect()
}

/// The word behind each of these, in the order of the text.
fn names_behind(text: &str, marks: &[&str]) -> Vec<String> {
    let name = |rest: &str| {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    let mut at: Vec<usize> =
        marks.iter().flat_map(|mark| text.match_indices(mark).map(|(i, m)| i + m.len())).collect();
    at.sort_unstable();
    at.into_iter().map(|at| name(&text[at..])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_and_what_is_compared_is_not() {
        let folder = std::env::temp_dir().join(format!("memtrace-layouts-{}", std::process::id()));
        let file = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        };
        file(
            "a.rs",
            "#[repr(C)]\n#[derive(Clone)]\npub struct One<T>(T);\n#[repr(C, align(8))] union Two {}\n\
             struct Not;\nsame_layout!(\n    Two = sys::Two { a: b });",
        );
        file("b.rs", "#[repr(C)]\nstruct Three { a: u8 }\n#[repr(C)]\nstruct Four;");
        file(
            "b/layouts.rs",
            "same_layout!(Four => sys::Four { a: _ });\nsame_layout!(Five<3> = x {});",
        );
        file("c/mod.rs", "#[repr(C)]\npub struct Five<const N: usize>;\n#[repr(u8)] enum Six {}");
        let found: Vec<String> = unchecked(&folder).into_iter().collect();
        fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(found, ["a.rs: One", "b.rs: Three", "c/mod.rs: Five"]);
    }
}

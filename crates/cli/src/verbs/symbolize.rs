//! `memtrace symbolize`: source lines for what a recorder left as library and offset.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memtrace_format::looks_like_json;
use memtrace_reading::contents;
use memtrace_terminal::Page;

use crate::args::{Format, Symbolize};
use crate::each::each_file;
use crate::failure::Failure;
use crate::output;
use crate::say::{Answer, eprint_line};

pub(crate) fn symbolize(args: &Symbolize) -> Result<Answer, Failure> {
    // Files of several folders may have one name.
    let written = RefCell::new(BTreeMap::new());
    each_file(&args.files, false, |path| one(path, args, &mut written.borrow_mut()))
}

fn one(
    path: &Path,
    args: &Symbolize,
    written: &mut BTreeMap<PathBuf, PathBuf>,
) -> Result<Answer, Failure> {
    let contents = contents(path, args.files.limit())?;
    let (mut snapshot, has_tables) = contents.one()?;
    let out = target(path, args, contents.packing.is_some())?;
    if let Some(other) = written.get(&out) {
        return Err(Failure::new(format!(
            "{}: {} has been written for {}: name another folder for this one with --out DIR",
            path.display(),
            out.display(),
            other.display()
        )));
    }
    let format = match looks_like_json(&contents.bytes) {
        true if has_tables => Format::Json.expanded(args.expand),
        true => Format::JsonExpanded,
        false => Format::Pickle,
    };
    let report = memtrace_symbols::source::symbolize(&mut snapshot);
    report.notes.iter().for_each(|note| eprint_line(note));
    output::replace(&out, &snapshot, format)
        .map_err(|e| Failure::new(format!("cannot write {}: {e}", out.display())))?;
    written.insert(out.clone(), path.to_owned());
    let mut page = Page::default();
    let _ = writeln!(
        page,
        "{}: {} native frames have source lines now, {} have no debug information",
        out.display(),
        report.named,
        report.left
    );
    Ok(Answer::page(page, true))
}

/// The file to write. One that is packed is not packed again, so it keeps
/// its name only in another folder.
fn target(path: &Path, args: &Symbolize, packed: bool) -> Result<PathBuf, Failure> {
    let named = |out: &str| Failure::new(format!("{}: name the {out}", path.display()));
    match &args.out {
        Some(out) if out.is_dir() => {
            let name = if packed { path.file_stem() } else { path.file_name() };
            Ok(out.join(
                name.filter(|_| path.as_os_str() != "-")
                    .ok_or_else(|| named("file to write with --out FILE"))?,
            ))
        }
        Some(out) if args.files.files.len() == 1 && !path_is_in_folder(args) => Ok(out.clone()),
        Some(_) => Err(named("folder to write into with --out DIR")),
        None if packed || !can_be_replaced(path) => Err(named("file to write with --out FILE")),
        None => Ok(path.to_owned()),
    }
}

/// Not a pipe, and not `/dev/stdin`, which is a link.
fn can_be_replaced(path: &Path) -> bool {
    let is_descriptor = path.starts_with("/proc") || path.starts_with("/dev") && path.is_symlink();
    path.as_os_str() != "-" && path.is_file() && !is_descriptor && !path.starts_with("/dev/fd")
}

fn path_is_in_folder(args: &Symbolize) -> bool {
    args.files.files.iter().any(|path| path.is_dir())
}

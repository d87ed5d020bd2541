//! `memtrace symbolize`: source lines for what a recorder left as library and offset.

use std::path::{Path, PathBuf};

use memtrace_format::looks_like_json;
use memtrace_format::screen::Page;
use memtrace_reading::contents;

use crate::args::{Format, Symbolize};
use crate::each::each_file;
use crate::failure::Failure;
use crate::output;
use crate::say::{Answer, tell};

pub(crate) fn symbolize(args: &Symbolize) -> Result<Answer, Failure> {
    each_file(&args.files, false, |path| one(path, args))
}

fn one(path: &Path, args: &Symbolize) -> Result<Answer, Failure> {
    let contents = contents(path, args.files.limit())?;
    let (mut snapshot, has_tables) = contents.one()?;
    let out = target(path, args, contents.packing.is_some())?;
    let format = match looks_like_json(&contents.bytes) {
        true if has_tables => Format::Json.expanded(args.expand),
        true => Format::JsonExpanded,
        false => Format::Pickle,
    };
    let report = memtrace_naming::source::symbolize(&mut snapshot);
    report.notes.iter().for_each(|note| tell(note));
    output::replace(&out, &snapshot, format)
        .map_err(|e| Failure::new(format!("cannot write {}: {e}", out.display())))?;
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

/// The file to write. One that is packed is not packed again, so it keeps its name only in another folder.
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
        None if packed || path.as_os_str() == "-" => Err(named("file to write with --out FILE")),
        None => Ok(path.to_owned()),
    }
}

fn path_is_in_folder(args: &Symbolize) -> bool {
    args.files.files.iter().any(|path| path.is_dir())
}

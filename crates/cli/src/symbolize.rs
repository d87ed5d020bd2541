//! `memtrace symbolize`: source lines for what a recorder left as library and offset.

use std::io::Write;

use memtrace_format::looks_like_json;
use memtrace_format::snapshot::Snapshot;

use crate::Answer;
use crate::args::{Format, Symbolize};
use crate::failure::Failure;
use crate::{files, output};

pub(crate) fn symbolize(args: &Symbolize) -> Result<Answer, Failure> {
    let bytes = files::read(&args.file)?;
    let zipped = args.file.extension().is_some_and(|e| e == "gz");
    let out = match &args.out {
        Some(out) => out,
        None if zipped || args.file.as_os_str() == "-" => {
            return Err(Failure::new("name the file to write with --out FILE"));
        }
        None => &args.file,
    };
    let mut snapshot = Snapshot::read(&bytes)
        .map_err(|e| Failure::new(format!("{}: {e}", args.file.display())))?;
    let format = if looks_like_json(&bytes) { Format::Json } else { Format::Pickle };
    let report = memtrace_naming::source::symbolize(&mut snapshot);
    for note in &report.notes {
        // Nobody may be listening.
        let _ = writeln!(std::io::stderr(), "memtrace: {note}");
    }
    output::replace(out, &snapshot, format)
        .map_err(|e| Failure::new(format!("cannot write {}: {e}", out.display())))?;
    Ok(Answer::yes(format!(
        "{}: {} native frames have source lines now, {} have no debug information\n",
        out.display(),
        report.named,
        report.left
    )))
}

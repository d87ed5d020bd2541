//! `memtrace snapshot`: a snapshot of a process that runs, without asking it.

use std::path::Path;

use memtrace_terminal::Page;

use crate::args::Snapshot;
use crate::failure::Failure;
use crate::say::Answer;
use crate::{blackbox, output, process};

pub(crate) fn snapshot(args: &Snapshot) -> Result<Answer, Failure> {
    let file = process::black_box(args.pid).map_err(Failure::new)?;
    let open = blackbox::open_alive(&file)
        .map_err(|e| Failure::new(format!("process {}: {e}", args.pid)))?;
    let folder = args.out.as_deref().unwrap_or(Path::new("."));
    let how = (args.format.expanded(args.expand), output::readers(args.permissions));
    let written = blackbox::write(&open, true, "snapshot", folder, how);
    let path = written.and_then(|written| written.place(folder))?;
    let mut page = Page::default();
    let _ = writeln!(page, "{}", path.display());
    Ok(Answer::page(page, true))
}

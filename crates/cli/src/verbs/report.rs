//! `memtrace report`: who has the rest, for a screen.

use memtrace_analysis::report::{self, DeviceReport, Labelled, Managed, Owner, Report};
use memtrace_format::key::DeferredFrees;
use memtrace_terminal::Page;

use crate::args;
use crate::each::each;
use crate::failure::Failure;
use crate::say::Answer;
use crate::units::{count, more, size, sum};
use crate::verbs::summary::{modules, rank};

pub(crate) fn report(args: &args::Report) -> Result<Answer, Failure> {
    each(&args.files, args.json, |file| {
        let report = report::report_by(file.snapshot, args.by.into());
        if args.json {
            return Answer::json(&report, true);
        }
        Ok(Answer::page(page(&report, args.top), true))
    })
}

fn page(report: &Report, top: usize) -> Page {
    let mut out = Page::default();
    if let Some(e) = &report.estimate {
        let _ = writeln!(
            out,
            "ESTIMATE on a virtual GPU: {}. Nothing was measured on a card.",
            e.profile
        );
    }
    if let Some(rank) = report.recorded_by.as_deref().and_then(rank) {
        let _ = writeln!(out, "{rank}");
    }
    for d in &report.devices {
        device(&mut out, d, top);
    }
    if report.devices.is_empty() {
        out.push_str("no GPU memory was used\n");
    }
    if !report.host.is_empty() || report.pinned.is_some() {
        out.push_str("\npage-locked host memory\n");
        owners(&mut out, &report.host);
        by_communicator(&mut out, &report.host_communicators);
        pinned(&mut out, report, top);
    }
    if let Some(waits) = &report.deferred_frees {
        deferred(&mut out, waits);
    }
    if !report.warnings.is_empty() || !report.unknown.is_empty() {
        let _ = writeln!(out);
    }
    for warning in &report.warnings {
        let _ = writeln!(out, "warning: {warning}");
    }
    for what in &report.unknown {
        let _ = writeln!(out, "note: {what}");
    }
    out
}

fn device(out: &mut Page, d: &DeviceReport, top: usize) {
    let _ = writeln!(out);
    let _ = writeln!(out, "device {}", d.device);
    let _ = writeln!(
        out,
        "  peak: {} held, {} allocated by PyTorch",
        size(d.peak_held),
        size(d.peak_allocated)
    );
    if d.owners_at_peak.is_empty() && d.peak_held > 0 {
        out.push_str("    (before the recorded history: by whom is not known)\n");
    } else if d.owners_at_peak != d.owners {
        owners(out, &d.owners_at_peak);
    }
    labels(out, "PyTorch's at its peak", &d.labels_at_peak, top);
    let outside = [&d.outside_labels_at_peak, &d.outside_labels];
    if outside.into_iter().flatten().any(|l| !l.label.is_empty()) {
        labels(out, "taken from the driver past PyTorch, at its peak", outside[0], top);
        labels(out, "of that, at the end", outside[1], top);
    }
    let _ = match d.at_process_end {
        Some(left) => writeln!(
            out,
            "  when Python began to end: {} held, {} allocated by PyTorch; at the end of the process: {} and {}",
            size(d.held),
            size(d.sites.iter().map(|s| s.bytes).sum()),
            size(left.held),
            size(left.allocated)
        ),
        None => writeln!(out, "  at the end: {} held", size(d.held)),
    };
    owners(out, &d.owners);
    by_communicator(out, &d.communicators);
    if let Some(m) = &d.managed {
        managed(out, m);
    }
    if !d.workspaces.is_empty() {
        out.push_str("  of PyTorch's, for its libraries to work in (at most, and at the end)\n");
        for w in &d.workspaces {
            let on = format!("{}, stream {:#x}", w.library, w.stream);
            let _ = writeln!(
                out,
                "    {:>18}  {on}: {} in {} now",
                count(w.peak),
                count(w.bytes),
                w.count
            );
        }
    }
    if let Some(f) = d.fragmentation {
        let _ = writeln!(
            out,
            "  unused: largest free run {}; {} between live blocks, {} in empty segments",
            size(f.largest_free),
            size(f.in_used_segments),
            size(f.in_free_segments)
        );
    }
    if !d.sites.is_empty() && top > 0 {
        out.push_str(match d.at_process_end {
            Some(_) => "  live when Python began to end, by line\n",
            None => "  live at the end, by line\n",
        });
    }
    let modules = modules(&d.sites);
    let rows = d.sites.iter().zip(&modules).map(|(s, module)| {
        let module = if module.is_empty() { String::new() } else { format!("  [{module}]") };
        (s.bytes, s.count, format!("{}{module}", s.site))
    });
    table(out, rows, (top, "line"));
    let Some(r) = &d.reconcile else { return };
    let _ = writeln!(out, "  in use, as {} says: {} of {}", r.source, count(r.used), size(r.total));
    for l in &r.lines {
        let sign = if l.bytes < 0 { "-" } else { "" };
        let bytes = format!("{sign}{}", count(l.bytes.unsigned_abs()));
        let _ = writeln!(out, "    {bytes:>18}  {} ({})", l.name, l.known);
    }
}

fn labels(out: &mut Page, what: &str, rows: &[Labelled], top: usize) {
    if !rows.is_empty() && top > 0 {
        let _ = writeln!(out, "  {what}, by label");
    }
    // Where they are too many to list, those that differ only in a number are one.
    let rolled = if rows.len() > top { report::rolled_up(rows) } else { rows.to_vec() };
    let name = |l: Labelled| if l.label.is_empty() { "(no label)".to_owned() } else { l.label };
    let rows = rolled.into_iter().map(|l| (l.bytes, l.count, name(l)));
    table(out, rows, (top, "label"));
}

/// At most `top` rows of bytes, number and name, and below them the sum of the others.
fn table(
    out: &mut Page,
    rows: impl Iterator<Item = (u64, u64, String)>,
    (top, thing): (usize, &str),
) {
    if top == 0 {
        return;
    }
    let rows: Vec<_> = rows.collect();
    let mut line = |bytes: u64, n: u64, name: &str| {
        let _ = writeln!(out, "    {:>18}  {:>6} x  {name}", count(bytes), count(n));
    };
    for (bytes, n, name) in rows.iter().take(top) {
        line(*bytes, *n, name);
    }
    if let Some(rest) = rows.get(top..).filter(|rest| !rest.is_empty()) {
        let (bytes, n) = sum(rest.iter().map(|(bytes, n, _)| (*bytes, *n)));
        line(bytes, n, &more(rest.len(), thing, rows.len()));
    }
}

/// What PyTorch's page-locked memory is made up of.
fn pinned(out: &mut Page, report: &Report, top: usize) {
    let Some(p) = &report.pinned else {
        if report.host.iter().any(|o| o.owner == "PyTorch") {
            out.push_str("  what was asked for of PyTorch's is not known\n");
        }
        return;
    };
    let most = ("at the most, in the recorded history", &p.peak);
    let moments = [Some(most).filter(|_| p.peak != p.end), Some(("at the end", &p.end))];
    for (when, at) in moments.into_iter().flatten() {
        let _ = writeln!(out, "  PyTorch's, {when}: {} held", size(at.held));
        for (bytes, what) in [
            (at.requested, "asked for and in use"),
            (at.rounding, "added to that by rounding up"),
            (at.idle, "in use by nobody, kept to be used again"),
        ] {
            let _ = writeln!(out, "    {:>18}  {what}", count(bytes));
        }
        if !at.sites.is_empty() && top > 0 {
            out.push_str("    what rounding adds, by line\n");
        }
        let rows = at.sites.iter().map(|s| (s.bytes, s.count, s.site.clone()));
        table(out, rows, (top, "line"));
    }
}

/// Frees that other streams held up: how many, and the one that held most for longest.
fn deferred(out: &mut Page, waits: &DeferredFrees) {
    let Some(first) = waits.longest.first() else { return };
    let streams: Vec<String> = first.streams.iter().map(|s| format!("{s:#x}")).collect();
    let how_long = first.completed_us.map_or_else(
        || "and still does".to_owned(),
        |end| format!("{} us long", count(end.saturating_sub(first.requested_us))),
    );
    let what_for = match &streams[..] {
        [] => "the end of a graph capture".to_owned(),
        streams => format!("stream {}", streams.join(" and ")),
    };
    let _ = writeln!(out);
    let _ = writeln!(
        out,
        "frees that waited for other streams: {}, at most {} at a time; {} waited for {what_for} {how_long}",
        count(waits.count),
        size(waits.most_bytes),
        size(first.bytes),
    );
}

fn by_communicator(out: &mut Page, all: &[Owner]) {
    if !all.is_empty() {
        out.push_str("  of NCCL's, by communicator\n");
        owners(out, all);
    }
}

/// Which is in none of the sums above it.
fn managed(out: &mut Page, m: &Managed) {
    let _ = writeln!(
        out,
        "  managed memory, beside that (with the host or on the device, wherever it was touched last): {} at most, {} at the end",
        size(m.peak_held),
        size(m.held)
    );
    owners(out, &m.owners_at_peak);
}

fn owners(out: &mut Page, owners: &[Owner]) {
    for o in owners {
        let _ = writeln!(out, "    {:>18}  {} in {}", count(o.bytes), o.owner, count(o.count));
    }
}

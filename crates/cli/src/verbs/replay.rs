//! `memtrace replay`: the recorded requests again, under other settings and on other cards.

use std::fmt::Write as _;

use memtrace_analysis::replay::exact::{Exact, exact};
use memtrace_analysis::replay::picture::picture;
use memtrace_analysis::replay::requests::{Requests, requests};
use memtrace_analysis::replay::run::{Card, Oom, Outcome, smallest_capacity};
use memtrace_analysis::replay::{self};
use memtrace_analysis::sites::Lines;
use memtrace_format::snapshot::Snapshot;
use memtrace_terminal::Page;
use serde_json::{Value, json};

use crate::args::{self, Format};
use crate::each::{Asked, each};
use crate::failure::Failure;
use crate::output;
use crate::say::Answer;
use crate::units::{count, many, percent, size};

/// A snapshot with the requests of each of its devices.
pub(crate) struct Recorded<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) devices: Vec<Requests>,
    capacity: Option<u64>,
    overhead: Option<u64>,
}

impl<'a> Recorded<'a> {
    pub(crate) fn of(
        file: &Asked<'a>,
        capacity: Option<u64>,
        overhead: Option<u64>,
    ) -> Result<Recorded<'a>, Failure> {
        let snapshot = file.snapshot;
        let used = |device: &usize| {
            let on_it =
                |s: &memtrace_format::snapshot::Segment| usize::try_from(s.device) == Ok(*device);
            !snapshot.device_traces[*device].is_empty() || snapshot.segments.iter().any(on_it)
        };
        let devices = (0..snapshot.device_traces.len()).filter(used);
        let devices: Vec<Requests> = devices.map(|device| requests(snapshot, device)).collect();
        if devices.iter().all(|d| d.during.is_empty() && d.before.is_empty()) {
            let why = "it holds no history of a GPU: record one with memtrace run, or with \
                       torch.cuda.memory._record_memory_history()";
            return Err(Failure::new(format!("{}: nothing to replay, {why}", file.name)));
        }
        Ok(Recorded { snapshot, devices, capacity, overhead })
    }

    /// What was asked for, else what memtrace wrote down of the card, else as much as it takes.
    pub(crate) fn card(&self, device: usize) -> Card {
        let known = replay::recorded_card(self.snapshot, device).unwrap_or_default();
        Card {
            capacity: self.capacity.or(known.capacity),
            overhead: self.overhead.unwrap_or(known.overhead),
        }
    }
}

/// One configuration on one device.
struct Row {
    conf: String,
    smallest: Option<u64>,
    outcome: Outcome,
}

pub(crate) fn replay(args: &args::Replay) -> Result<Answer, Failure> {
    each(&args.files, args.json, |file| one(file, args))
}

fn one(file: &Asked<'_>, args: &args::Replay) -> Result<Answer, Failure> {
    let recorded = Recorded::of(file, args.capacity, args.device_overhead)?;
    let own = replay::own_conf(recorded.snapshot);
    let confs = if args.conf.is_empty() { vec![own.clone()] } else { args.conf.clone() };
    let mut notes = Vec::new();
    let mut rows: Vec<Vec<Row>> = recorded.devices.iter().map(|_| Vec::new()).collect();
    let mut written = Vec::new();
    for conf in &confs {
        let parsed =
            replay::settings(conf).map_err(|e| Failure::new(format!("--conf '{conf}': {e}")))?;
        notes.extend(parsed.notes.iter().map(|n| format!("{}: {n}", name(conf))));
        let (snapshot, outcomes) =
            picture(recorded.snapshot, &recorded.devices, conf, &parsed.settings, |d| {
                recorded.card(d)
            });
        for ((requests, outcome), rows) in recorded.devices.iter().zip(outcomes).zip(&mut rows) {
            let overhead = recorded.card(requests.device).overhead;
            let smallest = smallest_capacity(requests, &parsed.settings, overhead);
            rows.push(Row { conf: conf.clone(), smallest, outcome });
        }
        if let Some(folder) = &args.out {
            let how = (Format::Pickle, output::readers(None));
            let path = output::write_new(folder, snapshot.memtrace.as_deref(), how, |new| {
                output::write(new, &snapshot, Format::Pickle)
            });
            written.push(path.map_err(|e| {
                Failure::new(format!("cannot write into {}: {e}", folder.display()))
            })?);
        }
    }
    let fits = rows.iter().flatten().all(|r| r.outcome.fits());
    let checks: Vec<Option<Exact>> = recorded
        .devices
        .iter()
        .map(|d| exact(recorded.snapshot, d, &replay::settings(&own).ok()?.settings))
        .collect();
    if args.json {
        let devices: Vec<Value> = recorded
            .devices
            .iter()
            .zip(&rows)
            .zip(&checks)
            .map(|((d, rows), check)| device_json(&recorded, d, rows, check.as_ref()))
            .collect();
        let written: Vec<String> = written.iter().map(|p| p.display().to_string()).collect();
        let answer = json!({"devices": devices, "notes": notes, "written": written});
        return Answer::json(&answer, fits);
    }
    let mut text = Page::default();
    file.title(&mut text);
    for ((d, rows), check) in recorded.devices.iter().zip(&rows).zip(&checks) {
        device_text(&mut text, &recorded, d, rows, check.as_ref(), &own);
    }
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    for path in written {
        let _ = writeln!(text, "wrote {}", path.display());
    }
    Ok(Answer::page(text, fits))
}

pub(crate) fn name(conf: &str) -> &str {
    if conf.is_empty() { "(no settings)" } else { conf }
}

/// The card in words.
pub(crate) fn on(card: Card) -> String {
    let mut text = match card.capacity {
        Some(bytes) => format!("on {}", size(bytes)),
        None => "on a card that is large enough".to_owned(),
    };
    if card.overhead > 0 {
        let _ = write!(text, ", {} of it taken by others", size(card.overhead));
    }
    text
}

fn device_text(
    text: &mut Page,
    recorded: &Recorded<'_>,
    d: &Requests,
    rows: &[Row],
    check: Option<&Exact>,
    own: &str,
) {
    let entries = recorded.snapshot.device_traces[d.device].len();
    let _ = writeln!(text);
    let _ = writeln!(
        text,
        "cuda:{}  {}",
        d.device,
        if entries == 1 {
            "1 entry".to_owned()
        } else {
            format!("{} entries", count(entries as u64))
        }
    );
    let recorded_with = format!("recorded with {}", name(own));
    match check {
        Some(e) => {
            let _ = writeln!(
                text,
                "  {recorded_with}: repeated, {} of {} events equal, {} of {} of segments",
                count(e.equal),
                count(e.events),
                count(e.segment_events_equal),
                count(e.segment_events),
            );
            if let Some(difference) = &e.difference {
                let _ = writeln!(text, "  first difference: {difference}");
            }
            let _ = writeln!(
                text,
                "  then: peak reserved {}, peak in use {}",
                size(e.peak_reserved),
                size(e.peak_active)
            );
        }
        None => {
            let _ = writeln!(
                text,
                "  {recorded_with}: not repeated, because its segments are of other settings: they changed under way"
            );
        }
    }
    let _ = writeln!(text, "  replayed {}:", on(recorded.card(d.device)));
    table(text, rows.iter().map(|r| (r.conf.as_str(), r.smallest, &r.outcome)));
    for row in rows {
        if let Some(oom) = &row.outcome.oom {
            let _ = writeln!(text, "  {}: {}", name(&row.conf), oom_text(oom, recorded, d.device));
        }
        if row.outcome.failed_no_more + row.outcome.failed_again > 0 {
            let _ = writeln!(
                text,
                "  {}: of {} that ran out of memory when recorded, {} do again",
                name(&row.conf),
                many(row.outcome.failed_no_more + row.outcome.failed_again, "request"),
                count(row.outcome.failed_again),
            );
        }
    }
    for note in &d.notes {
        let _ = writeln!(text, "  note: {note}");
    }
}

/// One line a configuration, under each other.
pub(crate) fn table<'a>(
    text: &mut Page,
    rows: impl Iterator<Item = (&'a str, Option<u64>, &'a Outcome)>,
) {
    let head = [
        "settings",
        "peak reserved",
        "peak in use",
        "unused",
        "mallocs",
        "retries",
        "smallest card",
        "fits",
    ];
    let mut cells: Vec<Vec<String>> = vec![head.map(str::to_owned).to_vec()];
    for (conf, smallest, o) in rows {
        cells.push(vec![
            name(conf).to_owned(),
            size(o.peak_reserved),
            size(o.peak_active),
            percent(o.overhead()),
            count(o.device_allocs),
            count(o.retries),
            smallest.map_or_else(|| "none".to_owned(), size),
            if o.fits() { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    let width =
        |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    for row in &cells {
        let first = format!("  {:<w$}", row[0], w = widths[0]);
        let rest = row.iter().zip(&widths).skip(1).map(|(cell, w)| format!("  {cell:>w$}"));
        let _ = writeln!(text, "{first}{}", rest.collect::<String>());
    }
}

fn oom_text(oom: &Oom, recorded: &Recorded<'_>, device: usize) -> String {
    let entry = recorded.snapshot.device_traces[device].get(oom.entry as usize);
    let place = match entry {
        Some(_) => format!("at entry {}", count(u64::from(oom.entry))),
        None => "before the trace begins".to_owned(),
    };
    let stack = entry.and_then(|e| e.frames);
    let site = |stack| Lines::new(recorded.snapshot).site(recorded.snapshot.tables(), Some(stack));
    let line = stack.map_or_else(String::new, |s| format!(", {}", site(s)));
    format!(
        "out of memory {place}{line}: {} wanted, {} free on the card, {} reserved, {} of it allocated",
        size(oom.segment),
        size(oom.device_free),
        size(oom.reserved),
        size(oom.allocated)
    )
}

fn device_json(
    recorded: &Recorded<'_>,
    d: &Requests,
    rows: &[Row],
    check: Option<&Exact>,
) -> Value {
    let card = recorded.card(d.device);
    let rows: Vec<Value> = rows.iter().map(|r| row_json(&r.conf, r.smallest, &r.outcome)).collect();
    json!({
        "device": d.device,
        "entries": recorded.snapshot.device_traces[d.device].len(),
        "blocks_before": d.seeds.len(),
        "capacity": card.capacity,
        "device_overhead": card.overhead,
        "repeated": check,
        "replayed": rows,
        "notes": d.notes,
    })
}

pub(crate) fn row_json(conf: &str, smallest: Option<u64>, outcome: &Outcome) -> Value {
    let mut row = json!({"conf": conf, "smallest_capacity": smallest, "fits": outcome.fits()});
    if let (Value::Object(row), Ok(Value::Object(more))) = (&mut row, serde_json::to_value(outcome))
    {
        row.extend(more);
    }
    row
}

//! What to read first when memory has run out: a text of at most 25 lines.
//!
//! What was asked, on which device, what is left, who holds the rest, and what would have freed
//! enough. The state is that of the moment of the failure. Works on a snapshot that is still in the
//! making, whose frames and stacks are elsewhere.

use std::collections::HashMap;

use memtrace_format::key::Memtrace;
use memtrace_format::snapshot::{Block, BlockState, Segment, Snapshot, StackIx, Tables};
use memtrace_terminal::Page;

use crate::conf::{self, Known, Limit};
use crate::report::warning_line;
use crate::sites::Lines;

/// The most lines.
pub const LINES: usize = 25;
/// Sites, and owners, that are named.
const TOP: usize = 5;

/// The text about the last failure of a snapshot; `None` if there was none.
pub fn text(snapshot: &Snapshot, tables: Tables<'_>) -> Option<Page> {
    let about = snapshot.memtrace.as_deref()?;
    let oom = about.out_of_memory.as_ref()?;
    let lines = Lines::from_key(Some(about), tables);
    let mut out = Page::default();
    let asked = oom.asked.unwrap_or(0);
    let call = oom.call.as_deref().unwrap_or("PyTorch's allocator");
    let by = match (&oom.call, &oom.owner) {
        (Some(_), Some(owner)) => format!(" by {owner}"),
        _ => String::new(),
    };
    let device = oom.device;
    let place = device.map_or_else(|| "the host".to_owned(), |d| format!("device {d}"));
    if about.virtual_gpu.is_some() {
        out.push_str("(on a virtual GPU)\n");
    }
    let _ = writeln!(out, "OUT OF MEMORY on {place}: {} asked of {call}{by}", size(asked));
    let _ = writeln!(out, "  at {}", lines.of_code_lines(&oom.frames));
    let known = Known::of(snapshot);
    let limit = limit(snapshot, &known);
    if let Some(free) = oom.free {
        let _ = match &limit {
            Some(limit) => writeln!(out, "  {}", limit.sentence(free, size)),
            None => writeln!(out, "  the device had {} free", size(free)),
        };
    }
    let all = if device.is_some() { &snapshot.segments } else { &snapshot.host_segments };
    let segments: Vec<&Segment> =
        all.iter().filter(|s| device.is_none_or(|d| s.device == d)).collect();
    let blocks = || segments.iter().flat_map(|s| &s.blocks);
    let free = || blocks().filter(|b| b.state == BlockState::Inactive);
    let (largest, unused) =
        (free().map(|b| b.size).max().unwrap_or(0), free().map(|b| b.size).sum::<u64>());
    let _ = writeln!(
        out,
        "  largest free run {} of {} free inside segments",
        size(largest),
        size(unused)
    );
    owners(&mut out, about, device);
    for w in about.warnings().iter().filter(|w| w.kind == "taken before out of memory") {
        let _ = writeln!(out, "  {}", warning_line(w, &lines));
    }
    let sites = sites(blocks(), tables, &lines);
    if !sites.is_empty() {
        out.push_str("  live, by line:\n");
    }
    for (site, bytes, count) in sites.iter().take(TOP) {
        let _ = writeln!(out, "    {:>10}  {count} x  {site}", size(*bytes));
    }
    more(&mut out, "lines", sites.iter().skip(TOP).map(|(_, bytes, _)| *bytes));
    out.push_str("  what would have freed enough:\n");
    let total = device.and_then(|d| conf::total(snapshot, d));
    if total.is_some_and(|total| asked > total) {
        out.push_str("    nothing: it is more than the whole device has\n");
        return Some(out.first(LINES));
    }
    let mut hints = hints(&segments, asked, &sites, (tables, &lines));
    if let Some(line) = known.expandable_line().filter(|_| unused >= asked) {
        hints.insert(0, format!("the free memory is enough but in pieces: {line}"));
    }
    if limit.is_some() {
        hints.insert(0, "a higher limit of PyTorch's own: the card has room".to_owned());
    }
    if hints.is_empty() {
        hints.push("no single line of code: see the snapshot".to_owned());
    }
    for hint in hints {
        let _ = writeln!(out, "    {hint}");
    }
    Some(out.first(LINES))
}

/// The last failure's limit, if one of PyTorch's own refused it.
pub(crate) fn limit(snapshot: &Snapshot, known: &Known) -> Option<Limit> {
    let oom = snapshot.memtrace.as_ref()?.out_of_memory.as_ref()?;
    if oom.call.is_some() {
        return None;
    }
    let time_us = oom.time_us.and_then(|time| i64::try_from(time).ok());
    known.limit(oom.device?, (oom.asked?, oom.free?, time_us))
}

/// What a list leaves out.
fn more(out: &mut Page, things: &str, rest: impl Iterator<Item = u64>) {
    let (n, bytes) = rest.fold((0, 0_u64), |(n, sum), bytes| (n + 1, sum.saturating_add(bytes)));
    if n > 0 {
        let _ = writeln!(out, "    {:>10}  in {n} more {things}", size(bytes));
    }
}

fn owners(out: &mut Page, about: &Memtrace, device: Option<i64>) {
    let by = about.owners.as_ref().and_then(|sums| match device {
        Some(d) => sums.devices.iter().find(|s| s.device == d).map(|s| &s.by),
        None => Some(&sums.host.by),
    });
    let by = by.map_or(&[][..], Vec::as_slice);
    if !by.is_empty() {
        out.push_str("  held by this process, by owner:\n");
    }
    for o in by.iter().take(TOP) {
        let _ = writeln!(out, "    {:>10}  {}", size(o.bytes), o.owner);
    }
    more(out, "owners", by.iter().skip(TOP).map(|o| o.bytes));
}

fn sites<'a>(
    blocks: impl Iterator<Item = &'a Block>,
    tables: Tables<'_>,
    lines: &Lines,
) -> Vec<(String, u64, u64)> {
    let mut by_stack: HashMap<Option<StackIx>, (u64, u64)> = HashMap::new();
    for block in blocks.filter(|b| b.state != BlockState::Inactive) {
        let (bytes, count) = by_stack.entry(block.frames).or_default();
        (*bytes, *count) = (bytes.saturating_add(block.size), *count + 1);
    }
    let mut by_site: HashMap<String, (u64, u64)> = HashMap::new();
    for (stack, (more, n)) in by_stack {
        let (bytes, count) = by_site.entry(lines.site(tables, stack).to_string()).or_default();
        (*bytes, *count) = (bytes.saturating_add(more), *count + n);
    }
    let mut all: Vec<_> =
        by_site.into_iter().map(|(site, (bytes, count))| (site, bytes, count)).collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    all
}

fn hints(
    segments: &[&Segment],
    asked: u64,
    sites: &[(String, u64, u64)],
    (tables, lines): (Tables<'_>, &Lines),
) -> Vec<String> {
    let mut all = Vec::new();
    if let Some((bytes, pins)) = cheapest(segments, asked) {
        let mut pinning: Vec<String> =
            pins.iter().map(|b| lines.site(tables, b.frames).to_string()).collect();
        pinning.sort_unstable();
        pinning.dedup();
        let more = pinning.len().saturating_sub(1);
        let more = if more > 0 { format!(" and {more} more lines") } else { String::new() };
        let first = pinning.first().map_or("", String::as_str);
        all.push(format!(
            "{} in {} blocks that pin a run of {}: {first}{more}",
            size(bytes),
            pins.len(),
            size(asked)
        ));
    }
    for (site, bytes, _) in sites.iter().filter(|(_, bytes, _)| *bytes >= asked).take(2) {
        all.push(format!("all of {site} ({})", size(*bytes)));
    }
    all
}

/// The fewest live bytes in a row of blocks of one segment that, freed, would make room.
fn cheapest<'a>(segments: &[&'a Segment], asked: u64) -> Option<(u64, Vec<&'a Block>)> {
    let mut best: Option<(u64, &[Block])> = None;
    for segment in segments {
        let blocks = segment.blocks.as_slice();
        let live = |b: &Block| if b.state == BlockState::Inactive { 0 } else { b.size };
        let (mut first, mut room, mut bytes) = (0, 0_u64, 0_u64);
        for (last, block) in blocks.iter().enumerate() {
            room = room.saturating_add(block.size);
            bytes = bytes.saturating_add(live(block));
            while room >= asked && first <= last {
                if bytes > 0 && best.is_none_or(|(least, _)| bytes < least) {
                    best = Some((bytes, &blocks[first..=last]));
                }
                room -= blocks[first].size;
                bytes -= live(&blocks[first]);
                first += 1;
            }
        }
    }
    let (bytes, run) = best?;
    Some((bytes, run.iter().filter(|b| b.state != BlockState::Inactive).collect()))
}

/// Bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", bytes as f64 / 1_073_741_824.0),
    }
}

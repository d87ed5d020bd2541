//! `memtrace summary`: the numbers of a snapshot, arranged for a screen.

use std::fmt::Write as _;

use memtrace_analysis::conf::Limit;
use memtrace_analysis::summary::{
    self, Amount, DeviceSummary, DriverMemory, Estimate, Fragmentation, Oom, Peak, SiteUse, Summary,
};
use memtrace_format::key::Memtrace;
use memtrace_origin::file_name;
use memtrace_terminal::{Page, shown};

use crate::args;
use crate::each::{Asked, each};
use crate::failure::Failure;
use crate::say::Answer;
use crate::units::{count, many, more, percent, size, span, sum};

/// Failed allocations that are listed one by one.
const OOMS: usize = 3;

pub(crate) fn summary(args: &args::Summary) -> Result<Answer, Failure> {
    each(&args.files, args.json, |file| {
        let summary = summary::summary_by(file.snapshot, args.by.into());
        if args.json {
            return Answer::json(&summary, true);
        }
        Ok(Answer::page(SummaryText::default().write(&summary, file, args.top), true))
    })
}

/// The text so far.
#[derive(Default)]
struct SummaryText(Page);

impl SummaryText {
    fn write(mut self, summary: &Summary, file: &Asked<'_>, top: usize) -> Page {
        if let Some(estimate) = &summary.estimate {
            self.estimate(estimate);
        }
        file.title(&mut self.0);
        if let Some(recorded) = &summary.recorded_by {
            self.recorded(recorded);
        }
        for device in &summary.devices {
            self.device(device, top);
        }
        if summary.devices.is_empty() {
            self.0.push_str("\nno GPU memory was used\n");
        }
        if let Some(host) = summary.host {
            self.0.push_str("\npinned host memory\n");
            let (reserved, allocated) = (host.reserved, host.allocated);
            self.line("reserved", amount(reserved, "segment"));
            self.line("allocated", amount(allocated, "block"));
        }
        if !summary.notes.is_empty() {
            let _ = writeln!(self.0);
        }
        for note in &summary.notes {
            let _ = writeln!(self.0, "note: {note}");
        }
        self.0
    }

    fn estimate(&mut self, estimate: &Estimate) {
        let name = estimate.name.as_ref().map_or_else(String::new, |n| format!(" ({n})"));
        let lazy = if estimate.lazy { ", streams finish as late as they may" } else { "" };
        let _ = writeln!(
            self.0,
            "ESTIMATE on a virtual GPU: {}{name}{lazy}. Nothing was computed or measured on a card.",
            estimate.profile
        );
    }

    /// Whose memory it was: what memtrace wrote about the process.
    fn recorded(&mut self, recorded: &Memtrace) {
        let Memtrace { command, pid, host, version, .. } = recorded;
        let mut parts = Vec::new();
        parts.extend(command.as_ref().filter(|words| !words.is_empty()).map(|w| w.join(" ")));
        parts.extend(rank(recorded));
        parts.extend(pid.map(|pid| format!("process {pid}")));
        parts.extend(host.as_ref().map(|host| format!("on {host}")));
        parts.extend(version.as_ref().map(|version| format!("recorded by memtrace {version}")));
        let _ = writeln!(self.0, "{}", parts.join(", "));
    }

    fn line(&mut self, label: &str, what: impl AsRef<str>) {
        let _ = writeln!(self.0, "  {label:<17} {}", what.as_ref());
    }

    fn device(&mut self, d: &DeviceSummary, top: usize) {
        let over = d.span_us.map_or_else(String::new, |us| format!(" over {}", span(us)));
        let entries = if d.entries == 1 { "entry" } else { "entries" };
        let _ = writeln!(self.0);
        let _ = writeln!(
            self.0,
            "device {}: {} {entries} of history{over}",
            d.device,
            count(d.entries as u64)
        );

        // Of a program without PyTorch these would be so many zeros.
        if d.has_framework() {
            self.framework(d);
        } else {
            self.capacity(d);
        }
        if let Some(driver) = &d.driver {
            self.driver(driver);
        }
        for oom in d.ooms.iter().take(OOMS) {
            self.oom(oom);
        }
        let rest = d.ooms.get(OOMS..).unwrap_or_default();
        if !rest.is_empty() {
            let asked = rest.iter().map(|o| o.asked).fold(0, u64::saturating_add);
            self.line(
                "",
                format!("and {} more, which asked for {} in all", rest.len(), size(asked)),
            );
        }
        self.sites("held at the peak", &d.at_peak, top);
        // Where the peak is the end, this would be the same list again.
        if d.now.bytes != d.allocated.bytes {
            let title = match d.at_process_end {
                Some(_) => "held when Python began to end",
                None => "held at the end",
            };
            self.sites(title, &d.at_end, top);
        }
        if let Some(driver) = &d.driver {
            self.sites("held outside PyTorch's allocator at the most", &driver.at_peak, top);
        }
    }

    /// What PyTorch's allocator did.
    fn framework(&mut self, d: &DeviceSummary) {
        let rounded = size(d.allocated_rounded);
        let rounded = if d.rounded_is_exact {
            format!("; {rounded} in rounded blocks")
        } else {
            format!("; at least {rounded} in rounded blocks")
        };
        self.line("peak allocated", format!("{}{rounded}", moment(&d.allocated)));
        if d.active.bytes > d.allocated.bytes {
            let what = format!("{}; includes frees that other streams held up", moment(&d.active));
            self.line("peak active", what);
        }
        self.line("peak reserved", moment(&d.reserved));
        self.capacity(d);
        if d.before_history.count > 0 {
            let (bytes, blocks) = (size(d.before_history.bytes), count(d.before_history.count));
            self.line(
                "before history",
                format!("{bytes} in {blocks} blocks, counted in all totals"),
            );
        }
        let mut now = amount(d.now, "block");
        if let Some(left) = d.at_process_end {
            let left = Amount { bytes: left.allocated, count: left.blocks };
            let left = amount(left, "block");
            let _ = write!(now, " when Python began to end; {left} at the end of the process");
        }
        self.line("live at the end", now);
        let s = d.segments;
        let mut segments = format!(
            "{} in {}: {} in {} large, {} in {} small",
            size(s.all.bytes),
            count(s.all.count),
            size(s.large.bytes),
            count(s.large.count),
            size(s.small.bytes),
            count(s.small.count)
        );
        if s.expandable.count > 0 {
            let _ = write!(segments, "; {} of it expandable", size(s.expandable.bytes));
        }
        self.line("segments", segments);
        self.fragmentation(&d.fragmentation);
        self.line(
            "calls",
            format!(
                "{}, {}; {} taken, {} given back",
                many(d.allocs, "alloc"),
                many(d.frees, "free"),
                many(d.segment_allocs, "segment"),
                count(d.segment_frees)
            ),
        );
    }

    /// Does it fit? Only a virtual GPU says what the card has.
    fn capacity(&mut self, d: &DeviceSummary) {
        let Some(capacity) = d.capacity.filter(|c| c.total > 0) else { return };
        let driver = d.driver.as_ref().map_or(0, |driver| driver.peak.bytes);
        let all = d.reserved.bytes.saturating_add(driver).saturating_add(capacity.context);
        self.line(
            "of the device",
            format!(
                "{} of {} ({}), {} of it for the context",
                size(all),
                size(capacity.total),
                percent(all as f64 / capacity.total as f64),
                size(capacity.context)
            ),
        );
    }

    fn fragmentation(&mut self, f: &Fragmentation) {
        self.line(
            "unused at the end",
            format!(
                "{} in empty segments; {} ({} of reserved) between live blocks",
                size(f.in_free_segments),
                size(f.in_used_segments),
                percent(f.share)
            ),
        );
        let what = format!(
            "largest free block {}; {} lost to rounding",
            size(f.largest_free),
            size(f.rounding)
        );
        self.line("", what);
    }

    fn driver(&mut self, driver: &DriverMemory) {
        let what =
            format!("{}; {} at the end", moment(&driver.peak), amount(driver.now, "allocation"));
        self.line("other, peak", what);
        for (call, made) in &driver.calls {
            self.line("", format!("{call}: {} in all", amount(*made, "call")));
        }
    }

    fn oom(&mut self, oom: &Oom) {
        let after = oom.after_us.map_or_else(String::new, |us| format!(" after {}", span(us)));
        let entry = count(oom.entry as u64);
        let what = format!(
            "at entry {entry}{after}: {} asked, {} free on the device, {} allocated, {} reserved",
            size(oom.asked),
            size(oom.device_free),
            size(oom.allocated),
            size(oom.reserved)
        );
        self.line("OUT OF MEMORY", what);
        if oom.limited {
            let limit = Limit { allowed: oom.allowed };
            self.line("", limit.sentence(oom.device_free, size));
        }
        self.line("", &oom.site);
    }

    fn sites(&mut self, title: &str, sites: &[SiteUse], top: usize) {
        if sites.is_empty() || top == 0 {
            return;
        }
        let listed = &sites[..top.min(sites.len())];
        let modules = modules(listed);
        let width = modules.iter().map(|m| m.chars().count()).max().unwrap_or(0);
        let _ = writeln!(self.0);
        let head = if width > 0 { format!("{:<width$}  ", "module line") } else { String::new() };
        let _ = writeln!(
            self.0,
            "  {:>10} {:>8} {:>8}  {head}{title}, by line",
            "size", "share", "blocks"
        );
        for (s, module) in listed.iter().zip(&modules) {
            let module = if width > 0 { format!("{module:<width$}  ") } else { String::new() };
            let _ = writeln!(
                self.0,
                "  {:>10} {:>8} {:>8}  {module}{}",
                size(s.bytes),
                percent(s.share),
                count(s.count),
                s.site
            );
        }
        let rest = &sites[listed.len()..];
        if !rest.is_empty() {
            let (bytes, blocks) = sum(rest.iter().map(|s| (s.bytes, s.count)));
            let _ = writeln!(
                self.0,
                "  {:>10} {:>8} {:>8}  {}",
                size(bytes),
                percent(rest.iter().map(|s| s.share).sum()),
                count(blocks),
                more(rest.len(), "line", sites.len())
            );
        }
    }
}

/// The second line of each row, where any was asked for: `modeling_llama.py:312 forward`.
pub(crate) fn modules(sites: &[SiteUse]) -> Vec<String> {
    let name = |s: &SiteUse| {
        let m = s.module.as_ref()?;
        let line = m.line.map_or_else(String::new, |line| format!(":{line}"));
        Some(shown(&format!("{}{line} {}", file_name(&m.file), m.function)).into_owned())
    };
    let any = sites.iter().any(|s| s.module.is_some());
    let none = if any { "-" } else { "" };
    sites.iter().map(|s| name(s).unwrap_or_else(|| none.to_owned())).collect()
}

/// Which rank a process is, of how many and on which device, as far as that is known.
pub(crate) fn rank(recorded: &Memtrace) -> Option<String> {
    let mut text = format!("rank {}", recorded.rank?);
    if let Some(ranks) = recorded.world_size {
        let _ = write!(text, " of {ranks}");
    }
    if let Some(device) = recorded.rank_device.filter(|device| *device >= 0) {
        let _ = write!(text, " on device {device}");
    }
    Some(text)
}

fn amount(amount: Amount, thing: &str) -> String {
    format!("{} in {}", size(amount.bytes), many(amount.count, thing))
}

fn moment(peak: &Peak) -> String {
    let mut text = size(peak.bytes);
    match (peak.entry, peak.after_us) {
        (None, _) if peak.bytes > 0 => text.push_str(" from the first entry on"),
        (None, _) => {}
        (Some(entry), Some(us)) => {
            let _ = write!(text, " at entry {}, after {}", count(entry as u64), span(us));
        }
        (Some(entry), None) => {
            let _ = write!(text, " at entry {}", count(entry as u64));
        }
    }
    text
}

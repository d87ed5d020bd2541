//! What a recorded process says of its own recording: the `memtrace` key of its last snapshot.

use std::io::Read;
use std::path::Path;

use memtrace_format::key::{BoundElsewhere, Counters, Memtrace};
use memtrace_format::stacks::{PYTHONS, Reason};
use memtrace_reading::{Limit, contents};
use memtrace_terminal::Page;
use serde_json::{Value, json};

use super::{Check, Level};
use crate::each::report_silent_pipe;
use crate::failure::Failure;

/// A table that is fuller than this will be full soon.
const NEARLY_FULL: f64 = 0.9;
/// As much of a run's list is read.
const LONGEST_LIST: u64 = 1 << 20;
/// Counters of things that must not happen, and what it means if they do.
fn lost(counters: &Counters) -> [(u64, &'static str); 5] {
    [
        (
            counters.unpublished,
            "events were not written to their end: the process was killed in a hook, or memtrace has a fault; report it",
        ),
        (
            counters.live_refused,
            "allocations found no room among those that are alive: set MEMTRACE_BLACKBOX to a folder with more room",
        ),
        (
            counters.live_outside,
            "live allocations were not in the black box when the process was killed: set MEMTRACE_BLACKBOX to a folder with \
             more room",
        ),
        (
            counters.interrupted,
            "calls about memory came from a signal handler that had interrupted the recorder, and are not recorded",
        ),
        (
            counters.anomalies,
            "events contradict what was alive: calls went past memtrace, or it has a fault; see what is bound elsewhere",
        ),
    ]
}

/// What a snapshot's process says of itself.
pub(super) struct Process(pub(super) Memtrace);

impl Process {
    /// The process of this snapshot.
    pub(super) fn of(path: &Path) -> Result<Process, Failure> {
        let snapshot =
            contents(path, Limit::default().on_silent_pipe(report_silent_pipe))?.one()?.0;
        Ok(Process(snapshot.memtrace.map_or_else(Memtrace::default, |about| *about)))
    }

    /// How long it was recorded.
    fn seconds(&self) -> f64 {
        let [written, started] = [self.0.written_us, self.0.started_us].map(|us| us.unwrap_or(0));
        (written as f64 - started as f64) / 1e6
    }

    fn events(&self) -> u64 {
        self.0.counters.as_ref().map_or(0, |counters| counters.events)
    }

    fn events_per_second(&self) -> Option<f64> {
        let seconds = self.seconds();
        (seconds > 0.0).then(|| self.events() as f64 / seconds)
    }

    fn ns_each(&self) -> Option<u64> {
        self.0.cost.as_ref().and_then(|cost| cost.ns_each)
    }

    /// The part of the run that recording took.
    fn share(&self) -> Option<f64> {
        let seconds = self.seconds();
        let each = self.ns_each().filter(|_| seconds > 0.0)?;
        Some(each as f64 * self.events() as f64 / 1e9 / seconds)
    }

    /// How full each table is.
    fn full(&self) -> [(&'static str, Option<f64>); 3] {
        let full = |used: Option<u64>, all: Option<u64>| {
            let (used, all) = (used? as f64, all? as f64);
            (all > 0.0).then(|| used / all)
        };
        let tables = self.0.stacks.clone().unwrap_or_default();
        [
            ("stacks", full(tables.nodes, tables.nodes_max)),
            ("code", full(tables.code_words, tables.code_words_max)),
            ("modules", full(tables.module_words, tables.module_words_max)),
        ]
    }

    fn refused(&self) -> Option<u64> {
        self.0.stacks.as_ref().and_then(|tables| tables.refused)
    }

    fn bound_elsewhere(&self) -> Option<&Vec<BoundElsewhere>> {
        self.0.bound_elsewhere.as_ref()?.0.as_ref()
    }

    fn pid(&self) -> String {
        self.0.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string())
    }

    /// As `--json` has it.
    pub(super) fn to_json(&self) -> Value {
        let about = &self.0;
        let full = self.full().map(|(table, full)| (table.to_owned(), Value::from(full)));
        json!({
            "pid": about.pid,
            "rank": about.rank,
            "command": about.command,
            "reason": about.reason,
            "python": about.stacks.as_ref().and_then(|tables| tables.python.as_ref()),
            "doors": about.doors,
            "bound_elsewhere": self.bound_elsewhere(),
            "counters": about.counters,
            "refused": self.refused(),
            "warnings": about.warnings,
            "full": Value::Object(full.into_iter().collect()),
            "cost": {
                "ns_each": self.ns_each(),
                "sampled": about.cost.as_ref().map(|cost| cost.sampled),
                "seconds": self.seconds(),
                "events_per_second": self.events_per_second(),
                "share": self.share(),
            },
        })
    }
}

/// Did anything record?
pub(super) fn found_any(processes: &[Process]) -> Check {
    if processes.is_empty() {
        let text = "no process of the program has left a snapshot: it made no call of CUDA's that could be seen. Is it a \
                    static program, or does it clear LD_PRELOAD for its children?";
        return Check::new(Level::Wrong, "record", text);
    }
    Check::new(Level::Ok, "record", format!("{} snapshots", processes.len()))
}

/// Programs that are named.
const NAMED: usize = 10;

/// What the list of a run says of programs that were started without
/// memtrace. The list has done its work then.
pub(super) fn started_without(list: &Path) -> Vec<Check> {
    let Ok(file) = memtrace_files::open(list) else { return Vec::new() };
    let mut text = Vec::new();
    let _ = (&file).take(LONGEST_LIST).read_to_end(&mut text);
    let _ = memtrace_files::remove(list, &file);
    let text = String::from_utf8_lossy(&text);
    // Process, what, words.
    let programs: Vec<String> = text
        .lines()
        .filter_map(|line| line.split_once(" x "))
        .map(|(pid, program)| match pid {
            "0" => program.to_owned(),
            pid => format!("{program} (process {pid})"),
        })
        .collect();
    let note = |text| Check::new(Level::Note, "tree", text);
    let mut found: Vec<Check> = programs.iter().take(NAMED).map(|program| {
        note(format!(
            "not recorded, because LD_PRELOAD was replaced or cleared for it (keep libmemtrace.so in it): {program}"
        ))
    }).collect();
    if programs.len() > NAMED {
        found.push(note(format!("and {} more that were not recorded", programs.len() - NAMED)));
    }
    found
}

/// How Python's objects were read.
pub(super) fn python(process: &Process) -> Check {
    let tables = process.0.stacks.as_ref();
    let said = tables.and_then(|tables| tables.python.as_deref()).unwrap_or("not looked at");
    if said.starts_with(|c: char| c.is_ascii_digit()) {
        return Check::new(Level::Ok, "Python", format!("{said}, whose frames can be read"));
    }
    if ["no Python in this process", "not looked at"].contains(&said) {
        return Check::new(Level::Note, "Python", said);
    }
    // What helps depends on what is wrong: another version, the build with
    // the GIL, or nobody's own build.
    let (oldest, newest) = (PYTHONS.start(), PYTHONS.end());
    let advice = if said == Reason::FreeThreaded.text() {
        format!("use the build with the GIL (python3.{newest}, not python3.{newest}t)")
    } else if said == Reason::LayoutCheckFailed.text() {
        "use a build without options that change its objects (--with-trace-refs, patches)"
            .to_owned()
    } else {
        format!("use CPython 3.{oldest} to 3.{newest}")
    };
    let text = format!("{said}: stacks have no Python frames; {advice}");
    Check::new(Level::Wrong, "Python", text)
}

/// Everything that is right or wrong with the record of a process.
pub(super) fn checks(process: &Process) -> Vec<Check> {
    let pid = process.pid();
    let mut found = Vec::new();
    let mut say = |level, what, text: String| {
        found.push(Check::new(level, what, format!("process {pid}: {text}")));
    };
    let python = python(process);
    say(python.level, python.about, python.text);
    if let Some(counters) = &process.0.counters {
        let lost = lost(counters);
        for (n, what) in lost.into_iter().filter(|(n, _)| *n > 0) {
            say(Level::Wrong, "drops", format!("{n} {what}"));
        }
        if lost.iter().all(|(n, _)| *n == 0) {
            say(Level::Ok, "drops", "0".to_owned());
        }
        if counters.stalls > 0 {
            let text = format!(
                "{} calls made room in the history themselves; MEMTRACE_EVENTS higher makes that rarer",
                counters.stalls
            );
            say(Level::Note, "stalls", text);
        }
    }
    if let Some(refused) = process.refused().filter(|n| *n > 0) {
        let text = format!(
            "{refused} frames or stacks found no room and are missing: --stacks python needs less"
        );
        say(Level::Wrong, "tables", text);
    }
    for (table, full) in process.full() {
        if let Some(full) = full.filter(|full| *full > NEARLY_FULL) {
            say(
                Level::Note,
                "tables",
                format!("the table of {table} is {:.0} % full", full * 100.0),
            );
        }
    }
    match process.bound_elsewhere() {
        None => {
            let text = "it was killed, so whether calls went past memtrace is not known".to_owned();
            say(Level::Note, "doors", text);
        }
        Some(all) => {
            for bound in all {
                let (level, text) = elsewhere(&process.0, bound);
                say(level, "doors", text);
            }
        }
    }
    for warning in process.0.warnings() {
        say(Level::Note, "warning", warning.text.clone());
    }
    found
}

/// A call that is bound to somebody else's function: harmless if that one calls on to us.
fn elsewhere(about: &Memtrace, bound: &BoundElsewhere) -> (Level, String) {
    let BoundElsewhere { library, function, .. } = bound;
    let to = bound.bound_to.as_deref().unwrap_or("unknown");
    // An empty name is the program itself.
    let who = if library.is_empty() { "the program" } else { library };
    let mut callers = about.doors.iter().flatten().flat_map(|used| &used.callers);
    if callers.any(|c| c.library.as_deref() == Some(to)) {
        return (
            Level::Note,
            format!("{who} calls {function} in {to}, which calls on to memtrace"),
        );
    }
    let text = format!(
        "{who} calls {function} in {to}, and no call from there was seen: what it does is not recorded; preload memtrace \
         before {to}, or let {who} use the runtime of the program"
    );
    (Level::Wrong, text)
}

/// The tables of a process, for people.
pub(super) fn print(process: &Process, text: &mut Page) {
    let about = &process.0;
    let command = about.command.as_deref().unwrap_or_default();
    let command: String = command.join(" ").replace('\n', " ").chars().take(70).collect();
    let rank = about.rank.map_or_else(String::new, |r| format!(", rank {r}"));
    let _ = writeln!(text, "process {}{rank}: {command}", process.pid());
    for used in about.doors.iter().flatten() {
        let callers = used.callers.iter().map(|caller| {
            let path = caller.library.as_deref();
            let name = path.map_or("others", |l| l.rsplit('/').next().unwrap_or(l));
            format!("{name} {}", caller.calls)
        });
        let callers: Vec<String> = callers.collect();
        let _ = writeln!(text, "  {:36} {:>9}  {}", used.door, used.calls, callers.join(", "));
    }
    let _ = writeln!(
        text,
        "  {} events in {:.1} s, {:.0} a second",
        process.events(),
        process.seconds(),
        process.events_per_second().unwrap_or(0.0)
    );
    match (process.ns_each(), process.share()) {
        (Some(each), Some(share)) => {
            let _ = writeln!(
                text,
                "  own cost: {each} ns an event ({} timed), {:.2} % of the run",
                about.cost.as_ref().map_or(0, |cost| cost.sampled),
                share * 100.0
            );
        }
        _ => {
            let _ = writeln!(text, "  own cost: too few events to tell");
        }
    }
    let full = process.full().into_iter();
    let full = full.filter_map(|(table, full)| Some(format!("{table} {:.1} %", full? * 100.0)));
    let full: Vec<String> = full.collect();
    let _ = writeln!(text, "  tables in use: {}", full.join(", "));
}

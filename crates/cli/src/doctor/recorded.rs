//! What a recorded process says of its own recording: the `memtrace` key of its last snapshot.

use std::io::Read;
use std::path::Path;

use memtrace_format::screen::Page;
use memtrace_format::stacks::Reason;
use memtrace_reading::{Limit, contents};
use serde_json::{Value, json};

use super::{Check, Level};
use crate::each::tell_of_pipe;
use crate::failure::Failure;

/// A table that is fuller than this will be full soon.
const NEARLY_FULL: f64 = 0.9;
/// As much of a run's list is read.
const LONGEST_LIST: u64 = 1 << 20;
/// Counters of things that must not happen, and what it means if they do.
const LOST: [(&str, &str); 5] = [
    (
        "unpublished",
        "events were not written to their end: the process was killed in a hook, or memtrace has a fault; report it",
    ),
    (
        "live_refused",
        "allocations found no room among those that are alive: set MEMTRACE_BLACKBOX to a folder with more room",
    ),
    (
        "live_outside",
        "live allocations were not in the black box when the process was killed: set MEMTRACE_BLACKBOX to a folder with \
         more room",
    ),
    (
        "interrupted",
        "calls about memory came from a signal handler that had interrupted the recorder, and are not recorded",
    ),
    (
        "anomalies",
        "events contradict what was alive: calls went past memtrace, or it has a fault; see what is bound elsewhere",
    ),
];

/// What a snapshot's process says of itself, as `--json` has it.
pub(super) fn process(path: &Path) -> Result<Value, Failure> {
    let about = contents(path, Limit::default().telling(tell_of_pipe))?.one()?.0.memtrace;
    let seconds = (number(&about, "written_us") - number(&about, "started_us")) / 1e6;
    let events = about["counters"]["events"].as_f64().unwrap_or(0.0);
    let each = about["cost"]["ns_each"].as_f64();
    let share = each.filter(|_| seconds > 0.0).map(|ns| ns * events / 1e9 / seconds);
    let room = |used: &str, all: &str| match (
        about["stacks"][used].as_f64(),
        about["stacks"][all].as_f64(),
    ) {
        (Some(used), Some(all)) if all > 0.0 => Value::from(used / all),
        _ => Value::Null,
    };
    Ok(json!({
        "pid": about["pid"],
        "rank": about["rank"],
        "command": about["command"],
        "reason": about["reason"],
        "python": about["stacks"]["python"],
        "doors": about["doors"],
        "bound_elsewhere": about["bound_elsewhere"],
        "counters": about["counters"],
        "refused": about["stacks"]["refused"],
        "warnings": about["warnings"],
        "full": {
            "stacks": room("nodes", "nodes_max"),
            "code": room("code_words", "code_words_max"),
            "modules": room("module_words", "module_words_max"),
        },
        "cost": {
            "ns_each": about["cost"]["ns_each"],
            "sampled": about["cost"]["sampled"],
            "seconds": seconds,
            "events_per_second": (seconds > 0.0).then(|| events / seconds),
            "share": share,
        },
    }))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(0.0)
}

/// Did anything record?
pub(super) fn found_any(processes: &[Value]) -> Check {
    if processes.is_empty() {
        let text = "no process of the program has left a snapshot: it made no call of CUDA's that could be seen. Is it a \
                    static program, or does it clear LD_PRELOAD for its children?";
        return Check::new(Level::Wrong, "record", text);
    }
    Check::new(Level::Ok, "record", format!("{} snapshots", processes.len()))
}

/// Programs that are named.
const NAMED: usize = 10;

/// What the list of a run says of programs that were started without memtrace. The list has done its work then.
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
pub(super) fn python(about: &Value) -> Check {
    let said = about["python"].as_str().unwrap_or("not looked at");
    if said.starts_with(|c: char| c.is_ascii_digit()) {
        return Check::new(Level::Ok, "Python", format!("{said}, whose frames can be read"));
    }
    if ["no Python in this process", "not looked at"].contains(&said) {
        return Check::new(Level::Note, "Python", said);
    }
    // What helps depends on what is wrong: another version, the build with the GIL, or nobody's own build.
    let advice = if said == Reason::FreeThreaded.text() {
        "use the build with the GIL (python3.13, not python3.13t)"
    } else if said == Reason::LayoutCheckFailed.text() {
        "use a build without options that change its objects (--with-trace-refs, patches)"
    } else {
        "use CPython 3.9 to 3.13"
    };
    let text = format!("{said}: stacks have no Python frames; {advice}");
    Check::new(Level::Wrong, "Python", text)
}

/// Everything that is right or wrong with the record of a process.
pub(super) fn checks(about: &Value) -> Vec<Check> {
    let pid = &about["pid"];
    let mut found = Vec::new();
    let mut say = |level, what, text: String| {
        found.push(Check::new(level, what, format!("process {pid}: {text}")));
    };
    let python = python(about);
    say(python.level, python.about, python.text);
    let counters = &about["counters"];
    for (key, what) in LOST {
        let n = counters[key].as_u64().unwrap_or(0);
        if n > 0 {
            say(Level::Wrong, "drops", format!("{n} {what}"));
        }
    }
    if counters.is_object() && LOST.iter().all(|(key, _)| counters[*key].as_u64().unwrap_or(0) == 0)
    {
        say(Level::Ok, "drops", "0".to_owned());
    }
    let stalls = counters["stalls"].as_u64().unwrap_or(0);
    if stalls > 0 {
        let text = format!(
            "{stalls} calls made room in the history themselves; MEMTRACE_EVENTS higher makes that rarer"
        );
        say(Level::Note, "stalls", text);
    }
    if about["refused"].as_u64().unwrap_or(0) > 0 {
        let text = format!(
            "{} frames or stacks found no room and are missing: --stacks python needs less",
            about["refused"]
        );
        say(Level::Wrong, "tables", text);
    }
    for (table, full) in about["full"].as_object().into_iter().flatten() {
        if let Some(full) = full.as_f64().filter(|full| *full > NEARLY_FULL) {
            say(
                Level::Note,
                "tables",
                format!("the table of {table} is {:.0} % full", full * 100.0),
            );
        }
    }
    if about["bound_elsewhere"].is_null() {
        let text = "it was killed, so whether calls went past memtrace is not known".to_owned();
        say(Level::Note, "doors", text);
    }
    for bound in about["bound_elsewhere"].as_array().into_iter().flatten() {
        let (level, text) = elsewhere(about, bound);
        say(level, "doors", text);
    }
    for warning in about["warnings"].as_array().into_iter().flatten() {
        if let Some(text) = warning["text"].as_str() {
            say(Level::Note, "warning", text.to_owned());
        }
    }
    found
}

/// A call that is bound to somebody else's function: harmless if that one calls on to us.
fn elsewhere(about: &Value, bound: &Value) -> (Level, String) {
    let text = |key: &str| bound[key].as_str().unwrap_or("unknown");
    let (library, function, to) = (text("library"), text("function"), text("bound_to"));
    // An empty name is the program itself.
    let who = if library.is_empty() { "the program" } else { library };
    let calls_on = about["doors"].as_array().into_iter().flatten().any(|door| {
        let callers = door["callers"].as_array();
        callers.into_iter().flatten().any(|c| c["library"] == to)
    });
    if calls_on {
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
pub(super) fn tell(about: &Value, text: &mut Page) {
    let command: Vec<&str> =
        about["command"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let command: String = command.join(" ").replace('\n', " ").chars().take(70).collect();
    let rank = about["rank"].as_u64().map_or_else(String::new, |r| format!(", rank {r}"));
    let _ = writeln!(text, "process {}{rank}: {command}", about["pid"]);
    for door in about["doors"].as_array().into_iter().flatten() {
        let callers = door["callers"].as_array().into_iter().flatten().map(|caller| {
            let name =
                caller["library"].as_str().map_or("others", |l| l.rsplit('/').next().unwrap_or(l));
            format!("{name} {}", caller["calls"])
        });
        let callers: Vec<String> = callers.collect();
        let name = door["door"].as_str().unwrap_or_default();
        let _ =
            writeln!(text, "  {name:36} {:>9}  {}", door["calls"].to_string(), callers.join(", "));
    }
    let cost = &about["cost"];
    let rate = cost["events_per_second"].as_f64().unwrap_or(0.0);
    let _ = writeln!(
        text,
        "  {} events in {:.1} s, {rate:.0} a second",
        about["counters"]["events"],
        number(cost, "seconds")
    );
    match (cost["ns_each"].as_u64(), cost["share"].as_f64()) {
        (Some(each), Some(share)) => {
            let _ = writeln!(
                text,
                "  own cost: {each} ns an event ({} timed), {:.2} % of the run",
                cost["sampled"],
                share * 100.0
            );
        }
        _ => {
            let _ = writeln!(text, "  own cost: too few events to tell");
        }
    }
    let full: Vec<String> = about["full"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(table, full)| Some(format!("{table} {:.1} %", full.as_f64()? * 100.0)))
        .collect();
    let _ = writeln!(text, "  tables in use: {}", full.join(", "));
}

//! `memtrace tune`: which settings would have needed the smallest card.

use memtrace_analysis::conf;
use memtrace_analysis::replay;
use memtrace_analysis::replay::tune::{Tried, candidates, tune as try_all};
use memtrace_caching::conf::NAMES;
use memtrace_terminal::Page;
use memtrace_terminal::shell::quoted;
use serde_json::{Value, json};

use crate::args;
use crate::each::{Asked, each};
use crate::failure::Failure;
use crate::say::Answer;
use crate::units::{percent, size};
use crate::verbs::replay::{Recorded, on, row_json, table};

/// How many configurations are listed on a screen.
const LISTED: usize = 8;

pub(crate) fn tune(args: &args::Tune) -> Result<Answer, Failure> {
    each(&args.files, args.json, |file| one(file, args))
}

fn one(file: &Asked<'_>, args: &args::Tune) -> Result<Answer, Failure> {
    let recorded = Recorded::of(file, args.capacity, args.device_overhead)?;
    // The device that took most decides: one line is exported for all.
    let busiest = recorded.devices.iter().max_by_key(|d| d.during.len() + d.before.len());
    let Some(requests) = busiest else {
        return Err(Failure::new("there is no device in the file"));
    };
    let own = replay::own_conf(recorded.snapshot);
    if let Err(why) = replay::settings(&own) {
        let why = format!(
            "{}: recorded with '{own}': {why}; no other settings can be held against that",
            file.name
        );
        return Err(Failure::new(why));
    }
    let release = conf::release(recorded.snapshot);
    // The recorded line comes first: it stands for all that say the same.
    let mut lines = vec![own.clone()];
    lines.extend(candidates(requests, &own, release));
    let card = recorded.card(requests.device);
    let tried = try_all(requests, &own, &lines, card);
    // Which release it is may not be known: what is advised is known to all of them.
    let is_safe = |t: &&Tried| release.is_some() || conf::since(&t.conf).is_none() || t.conf == own;
    let now = tried.iter().find(|t| t.conf == own);
    let (Some(now), Some(best)) = (now, tried.iter().find(is_safe)) else {
        return Err(Failure::new("none of the settings can be replayed; please report this"));
    };
    // Where nothing is gained, nothing is to be changed.
    let gains = gain(now, best);
    let choice = if gains { best } else { now };
    let later = tried.first().filter(|t| !is_safe(t) && gain(choice, t));
    let fits = choice.outcome.fits();
    if args.json {
        let rows: Vec<Value> =
            tried.iter().map(|t| row_json(&t.conf, t.smallest_capacity, &t.outcome)).collect();
        let answer = json!({
            "device": requests.device,
            "capacity": card.capacity,
            "device_overhead": card.overhead,
            "recorded": own,
            "best": choice.conf,
            "tried": rows,
            "notes": requests.notes,
        });
        return Answer::json(&answer, fits);
    }
    let mut text = Page::default();
    file.title(&mut text);
    let _ = writeln!(text);
    let _ = writeln!(text, "cuda:{}, replayed {}:", requests.device, on(card));
    let listed = listed(&tried, &[now, choice]);
    table(&mut text, listed.iter().map(|t| (t.conf.as_str(), t.smallest_capacity, &t.outcome)));
    if listed.len() < tried.len() {
        let more = tried.len() - listed.len();
        let _ =
            writeln!(text, "  ({more} more that are worse or change nothing, --json lists them)");
    }
    let _ = writeln!(text);
    verdict(&mut text, now, choice, gains, &own);
    if let Some(later) = later
        && let Some((major, minor)) = conf::since(&later.conf)
    {
        let _ = writeln!(
            text,
            "note: from PyTorch {major}.{minor} on, which has large_segment_size_mb, {} does better",
            later.conf
        );
    }
    for note in &requests.notes {
        let _ = writeln!(text, "note: {note}");
    }
    Ok(Answer::page(text, fits))
}

/// The rows for a screen: of those that come out alike the first line, and always these.
fn listed<'a>(tried: &'a [Tried], always: &[&'a Tried]) -> Vec<&'a Tried> {
    let numbers = |t: &Tried| {
        let o = &t.outcome;
        let calls = (o.device_allocs, o.device_frees, o.retries);
        (t.smallest_capacity, o.peak_reserved, o.peak_active, calls, o.fits())
    };
    let mut rows: Vec<&Tried> = Vec::new();
    for t in tried {
        if rows.len() < LISTED && !rows.iter().any(|row| numbers(row) == numbers(t)) {
            rows.push(t);
        }
    }
    for one in always {
        if rows.iter().all(|row| row.conf != one.conf) {
            rows.push(one);
        }
    }
    rows
}

/// Worth a change: it fits where it did not, or the card may be smaller by a hundredth. Or, on a
/// card no larger, less is reserved by a hundredth.
fn gain(now: &Tried, best: &Tried) -> bool {
    if now.outcome.fits() != best.outcome.fits() {
        return best.outcome.fits();
    }
    match (now.smallest_capacity, best.smallest_capacity) {
        (Some(now), Some(best)) if best < now - now / 100 => return true,
        (Some(now), Some(best)) if best > now + now / 100 => return false,
        (Some(_), Some(_)) => {}
        (now, best) => return now.is_none() && best.is_some(),
    }
    let (now, best) = (now.outcome.peak_reserved, best.outcome.peak_reserved);
    best < now - now / 100
}

/// What is reserved and never in use at once, as a share of it, from which on the
/// answer must not say that all is well.
const UNUSED: f64 = 0.25;
/// And as bytes: less than one segment for large requests is no matter of settings.
const SEGMENT: u64 = 20 << 20;

fn verdict(text: &mut Page, now: &Tried, choice: &Tried, gains: bool, own: &str) {
    if !gains {
        let o = &choice.outcome;
        let unused = o.peak_reserved.saturating_sub(o.peak_active);
        if o.overhead() <= UNUSED || unused < SEGMENT {
            text.push_str(
                "Nothing gains a hundredth over the settings it was recorded with: leave them.\n",
            );
            return;
        }
        text.push_str("Nothing gains a hundredth over the settings it was recorded with.\n");
        let _ = writeln!(
            text,
            "But of {} reserved at most {} were ever in use at once, {} less: settings don't change that, the \
             order in which the program asks does.",
            size(o.peak_reserved),
            size(o.peak_active),
            percent(o.overhead())
        );
        return;
    }
    let (before, after) = (now.smallest_capacity, choice.smallest_capacity);
    if let (Some(before), Some(after)) = (before, after)
        && after < before - before / 100
    {
        let _ = writeln!(
            text,
            "A card of {} would do instead of {}, {} less:",
            size(after),
            size(before),
            percent(1.0 - after as f64 / before as f64)
        );
    }
    let reserved = |t: &Tried| t.outcome.peak_reserved;
    if reserved(choice) < reserved(now) - reserved(now) / 100 {
        let _ = writeln!(
            text,
            "{} reserved at most instead of {}, for {} in use:",
            size(reserved(choice)),
            size(reserved(now)),
            size(choice.outcome.peak_active)
        );
    }
    let [name, others @ ..] = NAMES;
    if choice.conf.is_empty() {
        let _ = writeln!(text, "unset {}", NAMES.join(" "));
    } else {
        if !own.is_empty() {
            let _ = writeln!(text, "unset {}", others.join(" "));
        }
        let _ = writeln!(text, "export {name}={}", quoted(&choice.conf));
    }
}

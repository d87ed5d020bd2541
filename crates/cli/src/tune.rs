//! `memtrace tune`: which settings would have needed the smallest card.

use memtrace_analysis::replay;
use memtrace_analysis::replay::tune::{Tried, candidates, tune as try_all};
use memtrace_format::screen::Page;
use serde_json::{Value, json};

use crate::args;
use crate::each::{Asked, each};
use crate::failure::Failure;
use crate::replay::{Recorded, on, row_json, table};
use crate::say::Answer;
use crate::units::{percent, size};

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
    let own = replay::own_conf(recorded.snapshot).to_owned();
    let mut lines = candidates(requests);
    if !lines.contains(&own) {
        lines.push(own.clone());
    }
    let card = recorded.card(requests.device);
    let tried = try_all(requests, &lines, card);
    let now = tried.iter().find(|t| t.conf == own);
    let Some(best) = tried.first() else {
        return Err(Failure::new("none of the settings can be replayed; please report this"));
    };
    // Where nothing is gained, nothing is to be changed.
    let gains = now.is_none_or(|now| gain(now, best));
    let choice = if gains { best } else { now.unwrap_or(best) };
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
    let listed = tried
        .iter()
        .take(LISTED)
        .chain(now.filter(|n| !tried[..LISTED.min(tried.len())].iter().any(|t| t.conf == n.conf)));
    table(&mut text, listed.map(|t| (t.conf.as_str(), t.smallest_capacity, &t.outcome)));
    let _ = writeln!(text);
    verdict(&mut text, now, choice, gains);
    for note in &requests.notes {
        let _ = writeln!(text, "note: {note}");
    }
    Ok(Answer::page(text, fits))
}

/// Worth a change: it fits where it did not, or the card may be smaller by a hundredth.
fn gain(now: &Tried, best: &Tried) -> bool {
    if now.outcome.fits() != best.outcome.fits() {
        return best.outcome.fits();
    }
    match (now.smallest_capacity, best.smallest_capacity) {
        (Some(now), Some(best)) => best < now - now / 100,
        (now, best) => now.is_none() && best.is_some(),
    }
}

fn verdict(text: &mut Page, now: Option<&Tried>, choice: &Tried, gains: bool) {
    if !gains {
        text.push_str(
            "Nothing gains a hundredth over the settings it was recorded with: leave them.\n",
        );
        return;
    }
    let (before, after) = (now.and_then(|n| n.smallest_capacity), choice.smallest_capacity);
    if let (Some(before), Some(after)) = (before, after) {
        let _ = writeln!(
            text,
            "A card of {} would do instead of {}, {} less:",
            size(after),
            size(before),
            percent(1.0 - after as f64 / before as f64)
        );
    }
    if choice.conf.is_empty() {
        text.push_str("unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF\n");
    } else {
        let _ = writeln!(text, "export PYTORCH_ALLOC_CONF={}", quoted(&choice.conf));
    }
}

/// For a shell: brackets and `>` are quoted.
fn quoted(conf: &str) -> String {
    if conf.contains(['[', '>', ' ']) { format!("'{conf}'") } else { conf.to_owned() }
}

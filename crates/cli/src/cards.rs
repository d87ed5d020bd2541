//! The cards of this machine.
//!
//! CUDA's driver is asked in a process of its own, which is this program once more. A driver that
//! is broken may hang or end the process. And a recorder that is preloaded into this process would
//! record the question, so it is not loaded there. What else is preloaded stays, so under
//! `memtrace run --virtual` the cards are the virtual ones, and are called so.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use memtrace_cards::{Card, Cards, ask};
use memtrace_terminal::Page;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::say::Answer;
use crate::units::size;
use crate::verbs::run::{RECORDER, as_it_is};

/// How long the driver may take. Where nothing keeps it awake it wakes
/// each card, a second or two apiece.
const PATIENCE: Duration = Duration::from_mins(1);
/// How often it is looked whether it is done.
const LOOK: Duration = Duration::from_millis(5);

/// What the driver's library loads into every process, and what NVTX does:
/// tools that are not meant for this one.
const INJECTED: [&str; 2] = ["CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"];

/// What there is.
pub(crate) enum CardsHere {
    /// No driver, or none of its cards.
    Nothing,
    /// At least one card.
    Cards(Cards),
    /// A driver that can't be used: a line for the user.
    Failed(String),
}

/// Asks the driver, if there is one.
pub(crate) fn here() -> CardsHere {
    let me = match env::current_exe() {
        Ok(me) => me,
        Err(e) => {
            return CardsHere::Failed(format!("cannot tell where memtrace is installed: {e}"));
        }
    };
    let mut command = Command::new(me);
    command.args(["devices", "--ask"]);
    if let Some(preloaded) = env::var_os("LD_PRELOAD") {
        command.env("LD_PRELOAD", without_recorder(&preloaded));
    }
    for variable in INJECTED {
        command.env_remove(variable);
    }
    asked(&mut command, PATIENCE)
}

/// What is preloaded, and is not the recorder.
fn without_recorder(preloaded: &OsStr) -> OsString {
    let parts = preloaded.as_bytes().split(|b| b": ".contains(b)).map(OsStr::from_bytes);
    let is_other =
        |part: &&OsStr| as_it_is(Path::new(part)).file_name() != Some(OsStr::new(RECORDER));
    parts.filter(is_other).collect::<Vec<_>>().join(OsStr::new(":"))
}

/// What the other process says.
fn asked(command: &mut Command, patience: Duration) -> CardsHere {
    let text = match output(command, patience) {
        Ok(text) => text,
        Err(why) => return CardsHere::Failed(why),
    };
    match serde_json::from_str::<Result<Option<Cards>, String>>(&text) {
        Ok(Ok(Some(here))) if !here.cards.is_empty() => CardsHere::Cards(here),
        Ok(Ok(_)) => CardsHere::Nothing,
        Ok(Err(error)) => CardsHere::Failed(format!(
            "CUDA's driver is there and can't be used: {error}; see what nvidia-smi says"
        )),
        Err(_) => CardsHere::Failed(
            "the library that goes by the name of CUDA's driver doesn't answer as the driver does; \
             see what nvidia-smi says"
                .to_owned(),
        ),
    }
}

/// What a program prints, if it ends in time. One that hangs in the kernel
/// can't be ended, and is not waited for.
fn output(command: &mut Command, patience: Duration) -> Result<String, String> {
    let cannot = |e: std::io::Error| format!("CUDA's driver can't be asked: {e}");
    // No pipe: whoever hangs would hold it open.
    let mut printed = tempfile::tempfile().map_err(cannot)?;
    let out = printed.try_clone().map_err(cannot)?;
    command.stdin(Stdio::null()).stdout(out).stderr(Stdio::null());
    let mut child = command.spawn().map_err(cannot)?;
    let end = Instant::now() + patience;
    while child.try_wait().map_err(cannot)?.is_none() {
        if Instant::now() > end {
            let _ = child.kill();
            return Err(format!(
                "CUDA's driver has not answered for {} s; see whether nvidia-smi does",
                patience.as_secs()
            ));
        }
        sleep(LOOK);
    }
    let mut text = String::new();
    printed.rewind().and_then(|()| printed.read_to_string(&mut text)).map_err(cannot)?;
    Ok(text)
}

/// This is the other process.
pub(crate) fn answer() -> Result<Answer, Failure> {
    Answer::json(&ask(), true)
}

/// `memtrace devices --real`.
pub(crate) fn list(as_json: bool) -> Result<Answer, Failure> {
    let here = match here() {
        CardsHere::Failed(why) => return Err(Failure::new(why)),
        CardsHere::Nothing if as_json => return Answer::json(&json!([]), false),
        CardsHere::Nothing => {
            let mut text = Page::default();
            text.push_str("CUDA's driver is not here, or sees no GPU\n");
            return Ok(Answer::page(text, false));
        }
        CardsHere::Cards(here) => here,
    };
    if as_json {
        return Answer::json(&to_json(&here), true);
    }
    let mut text = Page::default();
    table(&here, &mut text);
    Ok(Answer::page(text, true))
}

/// For scripts: one object a card.
pub(crate) fn to_json(here: &Cards) -> Value {
    let one = |(number, card): (usize, &Card)| {
        json!({
            "device": number,
            "name": card.name,
            "uuid": card.uuid,
            "compute_capability": card.compute_capability,
            "memory_bytes": card.memory_bytes,
            "free_bytes": card.free_bytes,
            "cuda": here.cuda,
            "driver": here.driver,
            "virtual": here.is_virtual,
        })
    };
    here.cards.iter().enumerate().map(one).collect()
}

/// For people.
pub(crate) fn table(here: &Cards, text: &mut Page) {
    let _ = writeln!(
        text,
        "{:<10} {:<28} {:>7} {:>10} {:>10}",
        "device", "name", "compute", "memory", "free"
    );
    for (number, card) in here.cards.iter().enumerate() {
        let (major, minor) = card.compute_capability;
        let _ = writeln!(
            text,
            "{:<10} {:<28} {:>7} {:>10} {:>10}",
            format!("cuda:{number}"),
            card.name,
            format!("{major}.{minor}"),
            size(card.memory_bytes),
            card.free_bytes.map_or_else(|| "unknown".to_owned(), size),
        );
    }
    let _ = writeln!(text, "{}", versions(here));
}

/// Whose they are.
pub(crate) fn versions(here: &Cards) -> String {
    let whose = if here.is_virtual { "memtrace's virtual GPU" } else { "CUDA's driver" };
    let version = here.driver.as_ref().map_or_else(String::new, |v| format!(" {v}"));
    format!("{whose}{version}, for CUDA up to {}", here.cuda)
}

/// One card in a line.
pub(crate) fn line(number: usize, card: &Card) -> String {
    let (major, minor) = card.compute_capability;
    let memory = size(card.memory_bytes);
    let memory = match card.free_bytes {
        Some(free) => format!("{} of {memory} free", size(free)),
        None => format!("{memory}, how much of it is free is unknown without NVML"),
    };
    format!("cuda:{number}: {}, compute capability {major}.{minor}, {memory}", card.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(script: &str) -> CardsHere {
        asked(Command::new("sh").args(["-c", script]), Duration::from_millis(300))
    }

    #[test]
    fn a_driver_may_be_absent_or_broken() {
        assert!(matches!(says("echo '{\"Ok\":null}'"), CardsHere::Nothing));
        let none = r#"echo '{"Ok":{"cuda":"","driver":null,"is_virtual":false,"cards":[]}}'"#;
        assert!(matches!(says(none), CardsHere::Nothing), "no card");
        for (script, words) in [
            ("echo '{\"Err\":\"CUDA_ERROR_UNKNOWN\"}'", "CUDA_ERROR_UNKNOWN"),
            ("kill -SEGV $$", "doesn't answer as the driver does"),
            ("echo '{'; exit 101", "doesn't answer as the driver does"),
            // It holds its output open for a minute.
            ("sleep 60", "has not answered"),
        ] {
            let begun = Instant::now();
            let CardsHere::Failed(why) = says(script) else { panic!("{script}: no trouble") };
            assert!(why.contains(words), "{script}: {why}");
            assert!(begun.elapsed() < Duration::from_secs(20), "{script}");
        }
    }

    #[test]
    fn only_the_recorder_is_left_out() {
        let all =
            "/x.so:$ORIGIN/../../m/libmemtrace.so /m/libmemtrace_virtual.so:/a/libmemtrace.so";
        assert_eq!(without_recorder(OsStr::new(all)), "/x.so:/m/libmemtrace_virtual.so");
        assert_eq!(without_recorder(OsStr::new("libmemtrace.so")), "");
    }
}

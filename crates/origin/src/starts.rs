//! What only starts a program: a command's script, or the text of a new
//! process. And programs that are a text.

use std::collections::HashSet;

use super::{Origin, package, paths};
use memtrace_format::snapshot::Frame;
use paths::Path;

/// The file of code that was given as a text.
pub(super) const TEXT: &str = "<string>";

/// The most lines of a script that does nothing but call a package's function.
pub(super) const STARTER: u64 = 12;

/// PyTorch's own commands.
const OF_PYTORCH: [&str; 2] = ["torchrun", "torchfrtrace"];

/// Packages that start processes as the standard library's `multiprocessing` does.
const LIKE_MULTIPROCESSING: [&str; 2] = ["multiprocess", "billiard"];

/// Makes frames that only start a program nobody's. The stack is innermost first.
pub(super) fn mark(frames: &[&Frame], all: &mut [Origin], busy: &HashSet<String>) {
    // Innermost of those that start the program is what calls it.
    for i in (0..all.len()).filter(|i| all[*i] == Origin::User).collect::<Vec<_>>() {
        let path = Path::new(&frames[i].filename);
        let starts = match called(frames, all, i) {
            _ if path.is_of_starter(&frames[i].name) => true,
            Some(c) if all[c] == Origin::Generated => {
                let calls_starter = Path::new(&frames[c].filename).is_of_starter(&frames[c].name);
                calls_starter && path.last() == "__main__.py" && frames[i].name == "<module>"
            }
            Some(c) => is_starter(frames[i], frames[c], all[c], busy),
            None => false,
        };
        if starts {
            all[i] = Origin::Generated;
        }
    }
    if all.contains(&Origin::Generated) && is_typed(frames, all, busy) {
        for (frame, origin) in frames.iter().zip(all) {
            if super::is_method_of_text(frame) {
                *origin = Origin::User;
            }
        }
    }
}

/// The frame that this one calls: not the machinery of `import`, through which it may come.
fn called(frames: &[&Frame], all: &[Origin], i: usize) -> Option<usize> {
    (0..i).rev().find(|j| all[*j].is_python() && !is_import(frames[*j]))
}

/// The machinery of `import`.
pub(super) fn is_import(frame: &Frame) -> bool {
    frame.filename.starts_with("<frozen importlib.")
}

/// The module of a script that is where commands do.
pub(super) fn is_command(frame: &Frame) -> bool {
    frame.name == "<module>" && Path::new(&frame.filename).command_prefix().is_some()
}

/// No command that an installer makes makes an object of a class, or calls one.
fn does_more(called: &Frame) -> bool {
    called.name.starts_with("__")
}

/// Is this module only what starts a program?
fn is_starter(frame: &Frame, called: &Frame, origin: Origin, busy: &HashSet<String>) -> bool {
    let (script, target) = (Path::new(&frame.filename), Path::new(&called.filename));
    let package = package(&called.filename).unwrap_or_default();
    if frame.name != "<module>" {
        return false;
    }
    if frame.filename == TEXT {
        return match origin {
            Origin::Standard => target.is_under("multiprocessing"),
            Origin::Installed => LIKE_MULTIPROCESSING.contains(&package),
            _ => false,
        };
    }
    if frame.line > STARTER {
        return false;
    }
    match origin {
        Origin::Installed => {
            let prefix = script.command_prefix();
            prefix.is_some_and(|prefix| paths::is_in(&called.filename, &prefix))
                || (script.is_command_of(package)
                    && !does_more(called)
                    && !busy.contains(&frame.filename))
        }
        Origin::PyTorch => OF_PYTORCH.contains(&script.last()),
        _ => false,
    }
}

/// The module of a text.
pub(super) fn is_text(frame: &Frame) -> bool {
    frame.filename == TEXT && frame.name == "<module>"
}

/// Does a stack show that the program is a text? Not if the text only starts a
/// process, or if a package executes it.
pub(super) fn is_typed(frames: &[&Frame], origins: &[Origin], busy: &HashSet<String>) -> bool {
    (0..frames.len()).filter(|i| is_text(frames[*i])).any(|i| {
        let starts = called(frames, origins, i)
            .is_some_and(|c| is_starter(frames[i], frames[c], origins[c], busy));
        let caller = origins[i + 1..].iter().find(|w| w.is_python());
        !starts && !matches!(caller, Some(Origin::Installed | Origin::PyTorch))
    })
}

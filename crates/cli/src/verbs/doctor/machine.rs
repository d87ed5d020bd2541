//! What the machine has: room for a black box, and CUDA's driver.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use memtrace_files::{NewFile, Readers};
use memtrace_options::{BLACKBOX, NO_BLACKBOX};

use super::{Check, Level, this_program};
use crate::cards::{self, CardsHere};
use crate::failure::Failure;
use crate::verbs::run::VIRTUAL_GPU;

/// A black box with its whole history at the start takes less than this.
const BLACK_BOX: u64 = 24 << 20;
/// With this much it is made, with a short history.
const LEAST: u64 = 1 << 20;
/// A file that may be no longer than this has no room for one, whatever the folder has.
const SHORTEST_FILE: u64 = 3 << 20;
const DRIVER: &str = "libcuda.so.1";
/// Where containers, WSL and hosted notebooks put CUDA's driver library,
/// and where distributions do.
const DRIVER_FOLDERS: [&str; 9] = [
    "/usr/lib/wsl/lib",
    "/usr/lib64-nvidia",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/run/opengl-driver/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib",
];

/// The first folder in which a black box would find room, in the
/// recorder's order, found by writing one.
pub(super) fn black_box(out: Option<&Path>) -> Check {
    let about = "black box";
    let var = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let (folders, is_named) = match var(BLACKBOX.variable) {
        Some(off) if off == Path::new(NO_BLACKBOX) => {
            let text =
                "MEMTRACE_BLACKBOX=off: what a killed process did is lost; unset it to keep that";
            return Check::new(Level::Note, about, text);
        }
        Some(folder) => (vec![folder], true),
        None => {
            let memory = var("XDG_RUNTIME_DIR").into_iter().chain(["/dev/shm".into()]);
            let memory = memory.filter(|folder| is_in_memory(folder));
            (memory.chain(out.map(Path::to_owned)).collect(), false)
        }
    };
    let longest = longest_file();
    if longest < SHORTEST_FILE {
        let text = format!(
            "files of {} MiB at most can be made (ulimit -f), a black box needs {}: raise the limit, or what a killed \
             process did is lost",
            longest >> 20,
            SHORTEST_FILE >> 20
        );
        return Check::new(Level::Wrong, about, text);
    }
    let mut trouble = Vec::new();
    for folder in folders {
        let at = folder.display();
        match room(&folder, longest.min(BLACK_BOX)) {
            Ok(room) if room < LEAST => trouble.push(format!("{at}: {} KiB are left", room >> 10)),
            Ok(room) if room < longest.min(BLACK_BOX) => {
                let text = format!(
                    "{} MiB are left in {at}: enough for a short history; set MEMTRACE_BLACKBOX to a folder with more room",
                    room >> 20
                );
                return Check::new(Level::Note, about, text);
            }
            Ok(_) if is_named || is_in_memory(&folder) => {
                return Check::new(Level::Ok, about, format!("has room in {at}"));
            }
            Ok(_) => {
                let text = format!(
                    "has room in {at}, and none in memory ({}): if that is a disk, it may hold up the program",
                    if trouble.is_empty() { "no tmpfs".to_owned() } else { trouble.join("; ") }
                );
                return Check::new(Level::Note, about, text);
            }
            Err(e) => trouble.push(format!("{at}: {e}")),
        }
    }
    let text = format!(
        "none can be made ({}): what a killed process did is lost; set MEMTRACE_BLACKBOX to a folder with {} MiB",
        trouble.join("; "),
        BLACK_BOX >> 20
    );
    Check::new(Level::Wrong, about, text)
}

/// How many bytes of so many can be written there.
fn room(folder: &Path, most: u64) -> io::Result<u64> {
    let new = NewFile::within(folder, Readers::Owner)?;
    let piece = [0_u8; 1 << 14];
    let mut written = 0;
    while written < most {
        match new.file().write(&piece) {
            Ok(n) => written += n as u64,
            Err(_) if written > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(written)
}

/// The longest file that this process may make. One byte more and the kernel kills it.
fn longest_file() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file size"));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(u64::MAX)
}

/// Is it kept in memory? The recorder takes no other folder than such a
/// one before the output folder.
fn is_in_memory(folder: &Path) -> bool {
    let Ok(folder) = fs::canonicalize(folder) else { return false };
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        // A blank in a name is written as \040.
        let at = fields.next()?.replace("\\040", " ");
        folder.starts_with(&at).then(|| (at.len(), fields.next() == Some("tmpfs")))
    });
    // Of mounts on one another the last one counts.
    mounts.max_by_key(|(len, _)| *len).is_some_and(|(_, is_memory)| is_memory)
}

/// Where the loader finds CUDA's driver library: it is asked, and so its cache,
/// `LD_LIBRARY_PATH` and its folders count.
fn loaded_from() -> Result<Option<PathBuf>, Failure> {
    // Lists what it would load, and runs none of it.
    let mut command = this_program()?;
    let done = command.env("LD_TRACE_LOADED_OBJECTS", "1").env("LD_PRELOAD", DRIVER).output();
    let text = done.map(|d| String::from_utf8_lossy(&d.stdout).into_owned()).unwrap_or_default();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(DRIVER)?.strip_prefix(" => "));
    Ok(line.and_then(|l| l.rsplit_once(" (")).map(|(path, _)| PathBuf::from(path)))
}

pub(super) fn driver(virtual_gpu: bool) -> Result<Check, Failure> {
    let about = "CUDA";
    if let Some(path) = loaded_from()? {
        return Ok(Check::new(Level::Ok, about, format!("driver library {}", path.display())));
    }
    let elsewhere = DRIVER_FOLDERS.iter().find(|f| Path::new(f).join(DRIVER).exists());
    if let Some(folder) = elsewhere {
        let text = format!(
            "{folder}/{DRIVER} is there, but the loader doesn't look there or can't load it: add {folder} to \
             LD_LIBRARY_PATH, or run ldconfig {folder}"
        );
        return Ok(Check::new(Level::Note, about, text));
    }
    let advice = "install NVIDIA's driver; in a container, start it with the GPU (--gpus all)";
    Ok(if virtual_gpu {
        let text = format!(
            "the loader finds no {DRIVER}; the virtual GPU is there (--virtual h100). For a real one: {advice}"
        );
        Check::new(Level::Note, about, text)
    } else {
        let text = format!(
            "neither {DRIVER} nor {VIRTUAL_GPU} is there: {advice}, or install memtrace with all its libraries"
        );
        Check::new(Level::Wrong, about, text)
    })
}

/// The cards that a program would see.
pub(super) fn cards(here: &CardsHere) -> Vec<Check> {
    let about = "GPU";
    match here {
        CardsHere::Nothing => Vec::new(),
        CardsHere::Failed(why) => vec![Check::new(Level::Note, about, why.clone())],
        CardsHere::Cards(here) => {
            let one = |(number, card)| {
                let text = format!("{}; {}", cards::line(number, card), cards::versions(here));
                Check::new(Level::Ok, about, text)
            };
            here.cards.iter().enumerate().map(one).collect()
        }
    }
}

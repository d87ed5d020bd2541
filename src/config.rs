//! What the user asked for, read from the environment once, at the first CUDA call.
//!
//! `getenv` races with a program that changes its environment, so no hook ever asks again. A value that
//! makes no sense gets one line on stderr and the default: a typo must not cost somebody's training run.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use memtrace_files::Readers;
use memtrace_format::json::Stacks;
use memtrace_format::settings::NAMES;

use crate::message;
use crate::stack::Mode;

/// How a snapshot is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PyTorch's own: a pickle.
    Pickle,
    /// The same shape as JSON, with stacks in tables or spelled out.
    Json(Stacks),
}

impl Format {
    /// The file name's extension.
    pub fn extension(self) -> &'static str {
        match self {
            Format::Pickle => "pickle",
            Format::Json(_) => "json",
        }
    }
}

/// See the module's essay.
#[derive(Clone, Debug)]
pub struct Config {
    /// `MEMTRACE_OUT`: the folder for snapshots. Default: the current folder.
    pub out: PathBuf,
    /// `MEMTRACE_BLACKBOX`: the folder for the black box, or `off` for none. Default: one that lies in memory.
    pub blackbox: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// `MEMTRACE_STACKS`: `none`, `python` or `all`. Default: all.
    pub stacks: Mode,
    /// `MEMTRACE_CONTEXT=alloc`: no stacks for frees. Default (`all`): every event has its own.
    pub stacks_of_frees: bool,
    /// `MEMTRACE_SIGNAL`: a snapshot whenever this signal comes, by name (`USR2`) or number.
    pub signal: Option<i32>,
    /// `MEMTRACE_EVERY`: a snapshot every so many seconds.
    pub every_ns: Option<u64>,
    /// `MEMTRACE_PEAK_STEP`: a snapshot at each peak that is this many bytes above the last (`512MiB`, `2GiB`).
    pub peak_step: Option<u64>,
    /// `MEMTRACE_FORMAT`: `pickle` or `json`. Default: pickle.
    pub format: Format,
    /// `MEMTRACE_PERMISSIONS`: who may read snapshots, `private` (their owner: mode 0600) or `umask`. Default: private.
    pub readers: Readers,
    /// `MEMTRACE_EVENTS`: how many events of history are kept. Default: 2^20.
    pub events: usize,
    /// `MEMTRACE_QUIET=1`: say nothing but errors.
    pub quiet: bool,
    /// `MEMTRACE_RUN_PID`: the process that `memtrace run` became.
    pub run_pid: Option<i32>,
    /// `MEMTRACE_RUN_LIST`: where it finds what its processes have written.
    pub run_list: Option<PathBuf>,
    /// Settings of PyTorch's allocator.
    pub allocator_conf: String,
    /// The variable that they are from; empty if none is set. PyTorch may read another.
    pub allocator_variable: &'static str,
    /// Rank and sizes as launchers hand them down: `RANK`, `LOCAL_RANK`, `WORLD_SIZE` or what SLURM and Open MPI
    /// call them.
    pub rank: Option<u32>,
    /// Rank within the machine.
    pub local_rank: Option<u32>,
    /// Number of ranks.
    pub world_size: Option<u32>,
}

/// Events of history kept unless the user says otherwise.
pub const DEFAULT_EVENTS: usize = 1 << 20;

impl Config {
    /// Reads the environment of this process; that of its beginning, if the program has cleared it since.
    pub fn from_env() -> Config {
        let is_ours = |name: &[u8]| name.starts_with(b"MEMTRACE_");
        let is_there = std::env::vars_os().any(|(name, _)| is_ours(name.as_bytes()));
        let first = if is_there {
            Vec::new()
        } else {
            memtrace_files::read("/proc/self/environ").unwrap_or_default()
        };
        let cleared = |name: &str| {
            let value = |text: &[u8]| {
                Some(text.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?.to_owned())
            };
            is_ours(name.as_bytes()).then(|| first.split(|b| *b == 0).find_map(value)).flatten()
        };
        Config::from(|name| {
            std::env::var_os(name).or_else(|| cleared(name).map(OsString::from_vec))
        })
    }

    /// Reads from any environment.
    pub fn from(var: impl Fn(&str) -> Option<OsString>) -> Config {
        let text =
            |name: &str| var(name).and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
        let choice = |name: &str, allowed: &[&str]| {
            let value = text(name)?;
            let at = allowed.iter().position(|a| *a == value);
            if at.is_none() {
                message!("{name}={value} is not known; use one of: {}", allowed.join(", "));
            }
            at
        };
        let first = |names: &[&str]| names.iter().find_map(|n| text(n)?.parse::<u32>().ok());
        let events = match text("MEMTRACE_EVENTS") {
            None => DEFAULT_EVENTS,
            Some(v) => match v.parse::<usize>() {
                Ok(n) if (1 << 10..=1 << 30).contains(&n) => n.next_power_of_two(),
                _ => {
                    message!(
                        "MEMTRACE_EVENTS={v} is not a number from 1024 to 1073741824; keeping {DEFAULT_EVENTS}"
                    );
                    DEFAULT_EVENTS
                }
            },
        };
        // Set to nothing is set.
        let conf = NAMES.into_iter().find(|name| var(name).is_some());
        let allocator_variable = conf.unwrap_or_default();
        Config {
            out: var("MEMTRACE_OUT")
                .filter(|v| !v.is_empty())
                .map_or_else(|| ".".into(), PathBuf::from),
            blackbox: var("MEMTRACE_BLACKBOX").filter(|v| !v.is_empty()).map(PathBuf::from),
            runtime_dir: var("XDG_RUNTIME_DIR").filter(|v| !v.is_empty()).map(PathBuf::from),
            stacks: [Mode::None, Mode::Python, Mode::All]
                [choice("MEMTRACE_STACKS", &["none", "python", "all"]).unwrap_or(2)],
            format: [Format::Pickle, Format::Json(Stacks::Shared), Format::Json(Stacks::Expanded)]
                [choice("MEMTRACE_FORMAT", &["pickle", "json", "json-expanded"]).unwrap_or(0)],
            readers: [Readers::Owner, Readers::Umask]
                [choice("MEMTRACE_PERMISSIONS", &["private", "umask"]).unwrap_or(0)],
            events,
            quiet: choice("MEMTRACE_QUIET", &["0", "1"]) == Some(1),
            run_pid: text("MEMTRACE_RUN_PID").and_then(|v| v.parse().ok()),
            run_list: var("MEMTRACE_RUN_LIST").filter(|v| !v.is_empty()).map(PathBuf::from),
            stacks_of_frees: choice("MEMTRACE_CONTEXT", &["alloc", "all"]) != Some(0),
            signal: parse(
                "MEMTRACE_SIGNAL",
                text("MEMTRACE_SIGNAL"),
                "a signal such as USR2",
                parse_signal,
            ),
            every_ns: parse(
                "MEMTRACE_EVERY",
                text("MEMTRACE_EVERY"),
                "a number of seconds up to 86400",
                |v| {
                    v.parse()
                        .ok()
                        .filter(|s| (1..=86_400).contains(s))
                        .map(|s: u64| s * 1_000_000_000)
                },
            ),
            peak_step: parse(
                "MEMTRACE_PEAK_STEP",
                text("MEMTRACE_PEAK_STEP"),
                "a size such as 512MiB",
                parse_size,
            ),
            allocator_conf: text(allocator_variable).unwrap_or_default(),
            allocator_variable,
            rank: first(&["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"]),
            local_rank: first(&[
                "LOCAL_RANK",
                "SLURM_LOCALID",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "MPI_LOCALRANKID",
                "PMI_LOCAL_RANK",
            ]),
            world_size: first(&["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]),
        }
    }
}

/// The value of a variable, or one line that says what it should have been.
fn parse<T>(
    name: &str,
    value: Option<String>,
    what: &str,
    f: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let value = value?;
    let result = f(&value);
    if result.is_none() {
        message!("{name}={value} is not {what}; ignoring it");
    }
    result
}

/// `USR2`, `SIGUSR2` or `12`; only signals that a program may catch and that don't mean a fault.
fn parse_signal(value: &str) -> Option<i32> {
    const NAMES: &[(&str, i32)] = &[
        ("HUP", libc::SIGHUP),
        ("INT", libc::SIGINT),
        ("QUIT", libc::SIGQUIT),
        ("USR1", libc::SIGUSR1),
        ("USR2", libc::SIGUSR2),
        ("TERM", libc::SIGTERM),
        ("URG", libc::SIGURG),
        ("WINCH", libc::SIGWINCH),
        ("IO", libc::SIGIO),
        ("PWR", libc::SIGPWR),
    ];
    let name = value.strip_prefix("SIG").unwrap_or(value);
    let number = value.parse::<i32>().ok();
    let known = NAMES.iter().find(|(n, s)| *n == name || Some(*s) == number).map(|(_, s)| *s);
    known.or(number.filter(|n| (libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(n)))
}

/// Bytes, with KiB, MiB or GiB behind the number if need be.
fn parse_size(value: &str) -> Option<u64> {
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &value[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(unit).filter(|n| *n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(vars: &[(&str, &str)]) -> Config {
        Config::from(|n| vars.iter().find(|(k, _)| *k == n).map(|(_, v)| OsString::from(v)))
    }

    #[test]
    fn silence_means_the_defaults() {
        let c = config(&[]);
        assert_eq!((c.stacks, c.format, c.events), (Mode::All, Format::Pickle, DEFAULT_EVENTS));
        assert_eq!(c.out, PathBuf::from("."));
        assert_eq!((c.rank, c.quiet), (None, false));
    }

    #[test]
    fn nonsense_means_the_defaults_too() {
        let c = config(&[
            ("MEMTRACE_STACKS", "some"),
            ("MEMTRACE_FORMAT", "xml"),
            ("MEMTRACE_EVENTS", "-3"),
            ("RANK", "first"),
        ]);
        assert_eq!((c.stacks, c.format, c.events), (Mode::All, Format::Pickle, DEFAULT_EVENTS));
        assert_eq!(c.rank, None);
    }

    #[test]
    fn signals_and_sizes_have_names() {
        for v in ["USR2", "SIGUSR2", "12"] {
            assert_eq!(parse_signal(v), Some(libc::SIGUSR2), "{v}");
        }
        for v in ["KILL", "SEGV", "9", "0", "65", "usr2", ""] {
            assert_eq!(parse_signal(v), None, "{v}");
        }
        assert_eq!(parse_size("512MiB"), Some(512 << 20));
        assert_eq!(parse_size("7"), Some(7));
        for v in ["", "GiB", "0", "-1GiB", "1GB", "99999999999GiB"] {
            assert_eq!(parse_size(v), None, "{v}");
        }
    }

    #[test]
    fn values_are_taken() {
        let c = config(&[
            ("MEMTRACE_STACKS", "python"),
            ("MEMTRACE_FORMAT", "json"),
            ("MEMTRACE_EVENTS", "5000"),
            ("MEMTRACE_OUT", "/o"),
            ("SLURM_PROCID", "3"),
        ]);
        assert_eq!(
            (c.stacks, c.format, c.events),
            (Mode::Python, Format::Json(Stacks::Shared), 8192)
        );
        assert_eq!((c.out, c.rank), (PathBuf::from("/o"), Some(3)));
    }
}

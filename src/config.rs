//! What the user asked for, read from the environment once, at the first CUDA call.
//!
//! `getenv` races with a program that changes its environment, so no hook ever asks again. A value that
//! makes no sense gets one line on stderr and the default: a typo must not cost somebody's training run.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::message;
use crate::stack::Mode;

/// How a snapshot is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PyTorch's own: a pickle.
    Pickle,
    /// The same shape as JSON.
    Json,
}

impl Format {
    /// The file name's extension.
    pub fn extension(self) -> &'static str {
        match self {
            Format::Pickle => "pickle",
            Format::Json => "json",
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
    /// `MEMTRACE_FORMAT`: `pickle` or `json`. Default: pickle.
    pub format: Format,
    /// `MEMTRACE_EVENTS`: how many events of history are kept. Default: 2^20.
    pub events: usize,
    /// `MEMTRACE_QUIET=1`: say nothing but errors.
    pub quiet: bool,
    /// `MEMTRACE_RUN_PID`: the process that `memtrace run` became.
    pub run_pid: Option<i32>,
    /// `PYTORCH_CUDA_ALLOC_CONF`, or `PYTORCH_ALLOC_CONF` where that isn't set: settings of PyTorch's allocator.
    pub allocator_conf: String,
    /// Rank and sizes as launchers hand them down: RANK, LOCAL_RANK, WORLD_SIZE or the SLURM and Open MPI names.
    pub rank: Option<u32>,
    /// Rank within the machine.
    pub local_rank: Option<u32>,
    /// Number of ranks.
    pub world_size: Option<u32>,
}

/// Events of history kept unless the user says otherwise.
pub const DEFAULT_EVENTS: usize = 1 << 20;

impl Config {
    /// Reads the environment of this process.
    pub fn from_env() -> Config {
        Config::from(|name| std::env::var_os(name))
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
        Config {
            out: var("MEMTRACE_OUT")
                .filter(|v| !v.is_empty())
                .map_or_else(|| ".".into(), PathBuf::from),
            blackbox: var("MEMTRACE_BLACKBOX").filter(|v| !v.is_empty()).map(PathBuf::from),
            runtime_dir: var("XDG_RUNTIME_DIR").filter(|v| !v.is_empty()).map(PathBuf::from),
            stacks: [Mode::None, Mode::Python, Mode::All]
                [choice("MEMTRACE_STACKS", &["none", "python", "all"]).unwrap_or(2)],
            format: [Format::Pickle, Format::Json]
                [choice("MEMTRACE_FORMAT", &["pickle", "json"]).unwrap_or(0)],
            events,
            quiet: choice("MEMTRACE_QUIET", &["0", "1"]) == Some(1),
            run_pid: text("MEMTRACE_RUN_PID").and_then(|v| v.parse().ok()),
            allocator_conf: text("PYTORCH_CUDA_ALLOC_CONF")
                .or_else(|| text("PYTORCH_ALLOC_CONF"))
                .unwrap_or_default(),
            rank: first(&["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]),
            local_rank: first(&["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"]),
            world_size: first(&["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]),
        }
    }
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
    fn values_are_taken() {
        let c = config(&[
            ("MEMTRACE_STACKS", "python"),
            ("MEMTRACE_FORMAT", "json"),
            ("MEMTRACE_EVENTS", "5000"),
            ("MEMTRACE_OUT", "/o"),
            ("SLURM_PROCID", "3"),
        ]);
        assert_eq!((c.stacks, c.format, c.events), (Mode::Python, Format::Json, 8192));
        assert_eq!((c.out, c.rank), (PathBuf::from("/o"), Some(3)));
    }
}

//! What the user asked for, read from the environment once, at the first CUDA call.
//!
//! `getenv` races with a program that changes its environment, so no hook ever asks
//! again. A value that makes no sense gets one line on stderr and the default: a typo
//! must not cost somebody's training run.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use memtrace_caching::conf::NAMES;
use memtrace_files::Readers;
use memtrace_options::{
    self as options, Choices, Context, Format, Permissions, Quiet, Setting, Stacks, Value,
};

use crate::os::message;
use crate::stack::Mode;

/// See the module's documentation. What each variable means stands in `memtrace-options`.
#[derive(Clone, Debug)]
pub struct Config {
    /// `MEMTRACE_OUT`.
    pub out: PathBuf,
    /// `MEMTRACE_BLACKBOX`, if it is set.
    pub blackbox: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// `MEMTRACE_STACKS`.
    pub stacks: Mode,
    /// `MEMTRACE_CONTEXT`: do frees have stacks of their own?
    pub stacks_of_frees: bool,
    /// `MEMTRACE_SIGNAL`, as a number.
    pub signal: Option<i32>,
    /// `MEMTRACE_EVERY`, in nanoseconds.
    pub every_ns: Option<u64>,
    /// `MEMTRACE_PEAK_STEP`, in bytes.
    pub peak_step: Option<u64>,
    /// `MEMTRACE_FORMAT`.
    pub format: Format,
    /// `MEMTRACE_PERMISSIONS`.
    pub readers: Readers,
    /// `MEMTRACE_EVENTS`, rounded up to a power of two.
    pub events: usize,
    /// `MEMTRACE_QUIET`.
    pub quiet: bool,
    /// `MEMTRACE_RUN_PID`.
    pub run_pid: Option<i32>,
    /// `MEMTRACE_RUN_LIST`.
    pub run_list: Option<PathBuf>,
    /// Settings of PyTorch's allocator.
    pub allocator_conf: String,
    /// The variable that they are from; empty if none is set. PyTorch may read another.
    pub allocator_variable: &'static str,
    /// Rank and sizes as launchers hand them down: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`
    /// or what SLURM and Open MPI call them.
    pub rank: Option<u32>,
    /// Rank within the machine.
    pub local_rank: Option<u32>,
    /// Number of ranks.
    pub world_size: Option<u32>,
}

impl Config {
    /// Reads the environment of this process; that of its beginning, if
    /// the program has cleared it since.
    pub fn from_env() -> Config {
        let is_ours = |name: &[u8]| name.starts_with(b"MEMTRACE_");
        let now: Vec<_> =
            std::env::vars_os().filter(|(name, _)| is_ours(name.as_bytes())).collect();
        let ours = if now.is_empty() { of_the_beginning(is_ours) } else { now };
        let config = Config::from(|name| {
            std::env::var_os(name)
                .or_else(|| ours.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone()))
        });
        // `memtrace run` has reported it, once for all its processes.
        if config.run_pid.is_none() {
            let remarks =
                ours.iter().filter_map(|(name, _)| options::remark(&name.to_string_lossy()));
            remarks.for_each(|remark| message!("{remark}"));
        }
        config
    }

    /// Reads from any environment.
    pub fn from(var: impl Fn(&str) -> Option<OsString>) -> Config {
        let read = Read(&var);
        let text = |name: &str| read.plain(name);
        let first = |names: &[&str]| names.iter().find_map(|n| text(n)?.parse::<u32>().ok());
        // Set to nothing is set.
        let conf = NAMES.into_iter().find(|name| var(name).is_some());
        let allocator_variable = conf.unwrap_or_default();
        Config {
            out: read.path(&options::OUT).unwrap_or_else(|| ".".into()),
            blackbox: read.path(&options::BLACKBOX),
            runtime_dir: var("XDG_RUNTIME_DIR").filter(|v| !v.is_empty()).map(PathBuf::from),
            stacks: match read.choices::<Stacks>() {
                Stacks::None => Mode::None,
                Stacks::Python => Mode::Python,
                Stacks::All => Mode::All,
            },
            format: read.choices::<Format>(),
            readers: match read.choices::<Permissions>() {
                Permissions::Private => Readers::Owner,
                Permissions::Umask => Readers::Umask,
            },
            events: read
                .number(&options::EVENTS)
                .map_or(options::DEFAULT_EVENTS as usize, |n| (n as usize).next_power_of_two()),
            quiet: read.choices::<Quiet>() == Quiet::Yes,
            run_pid: read.text(&options::RUN_PID).and_then(|v| v.parse().ok()),
            run_list: read.path(&options::RUN_LIST),
            stacks_of_frees: read.choices::<Context>() == Context::All,
            signal: read.parsed(&options::SIGNAL, parse_signal),
            every_ns: read.number(&options::EVERY).map(|s| s * 1_000_000_000),
            peak_step: read.number(&options::PEAK_STEP),
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

/// Variables as they were when the program began, which it can't clear.
fn of_the_beginning(is_meant: impl Fn(&[u8]) -> bool) -> Vec<(OsString, OsString)> {
    let first = memtrace_files::read("/proc/self/environ").unwrap_or_default();
    let owned = |bytes: &[u8]| OsString::from_vec(bytes.to_owned());
    let one = |line: &[u8]| {
        let at = line.iter().position(|b| *b == b'=')?;
        is_meant(&line[..at]).then(|| (owned(&line[..at]), owned(&line[at + 1..])))
    };
    first.split(|b| *b == 0).filter_map(one).collect()
}

/// An environment. A value that its setting can't have gets one line.
struct Read<'a, F>(&'a F);

impl<F: Fn(&str) -> Option<OsString>> Read<'_, F> {
    fn plain(&self, name: &str) -> Option<String> {
        self.0(name).and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty())
    }

    fn text(&self, setting: &Setting) -> Option<String> {
        self.plain(setting.variable)
    }

    fn path(&self, setting: &Setting) -> Option<PathBuf> {
        self.0(setting.variable).filter(|v| !v.is_empty()).map(PathBuf::from)
    }

    fn choices<T: Choices>(&self) -> T {
        self.parsed(T::SETTING, T::named).unwrap_or_default()
    }

    fn number(&self, setting: &Setting) -> Option<u64> {
        self.parsed(setting, |text| setting.value.number(text))
    }

    fn parsed<T>(&self, setting: &Setting, f: impl Fn(&str) -> Option<T>) -> Option<T> {
        let value = self.text(setting)?;
        let result = f(&value);
        if result.is_none() {
            message!("{}={value} {}", setting.variable, wrong(setting));
        }
        result
    }
}

/// What to say of a value that a setting can't have.
fn wrong(setting: &Setting) -> String {
    match setting.value {
        Value::Choices(_) => {
            format!("is not known; use {}", setting.value.wanted().replacen("of", "of:", 1))
        }
        _ if setting.default.is_empty() => {
            format!("is not {}; ignoring it", setting.value.wanted())
        }
        _ => format!("is not {}; keeping {}", setting.value.wanted(), setting.default),
    }
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;

    const DEFAULT_EVENTS: usize = options::DEFAULT_EVENTS as usize;

    fn config(vars: &[(&str, &str)]) -> Config {
        Config::from(|n| vars.iter().find(|(k, _)| *k == n).map(|(_, v)| OsString::from(v)))
    }

    #[test]
    fn all_settings_of_the_recorder_are_read_and_no_other() {
        let asked = RefCell::new(BTreeSet::new());
        Config::from(|name| {
            asked.borrow_mut().insert(name.to_owned());
            None
        });
        let ours = asked.into_inner().into_iter().filter(|name| name.starts_with("MEMTRACE_"));
        let read_here = |s: &&&Setting| {
            s.reader == options::Reader::Recorder
                || **s == &options::RUN_PID
                || **s == &options::RUN_LIST
        };
        let settings: BTreeSet<_> =
            options::ALL.iter().filter(read_here).map(|s| s.variable.to_owned()).collect();
        assert_eq!(ours.collect::<BTreeSet<_>>(), settings);
    }

    #[test]
    fn what_is_said_of_values_that_make_no_sense() {
        for (setting, said) in [
            (&options::STACKS, "is not known; use one of: none, python, all"),
            (&options::EVENTS, "is not a number from 1024 to 1073741824; keeping 1048576"),
            (&options::EVERY, "is not a number of seconds up to 86400; ignoring it"),
            (&options::SIGNAL, "is not a signal such as USR2; ignoring it"),
            (&options::PEAK_STEP, "is not a size such as 512MiB; ignoring it"),
        ] {
            assert_eq!(wrong(setting), said);
        }
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
    fn signals_have_names() {
        for v in ["USR2", "SIGUSR2", "12"] {
            assert_eq!(parse_signal(v), Some(libc::SIGUSR2), "{v}");
        }
        for v in ["KILL", "SEGV", "9", "0", "65", "usr2", ""] {
            assert_eq!(parse_signal(v), None, "{v}");
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
        assert_eq!((c.stacks, c.format, c.events), (Mode::Python, Format::Json, 8192));
        assert_eq!((c.out, c.rank), (PathBuf::from("/o"), Some(3)));
    }
}

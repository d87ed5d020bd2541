//! What a user may ask of memtrace: every `MEMTRACE_*` variable, in one table.
//!
//! The recorder, the virtual GPU and the command read by it. Help, completions, the manual page and
//! the table in `docs/running.md` are written from it. So a new variable is a row of [`ALL`] and a
//! line where it is read. A test fails where one of the two is missing.
//!
//! This crate is data. It reads no environment and prints nothing.

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod choices;
mod near;

pub use choices::{
    Choice, Choices, Context, Format, LogLevel, Permissions, Quiet, Stacks, VirtualLog,
};
pub use near::remark;

/// One thing that can be set.
#[derive(Debug, PartialEq, Eq)]
pub struct Setting {
    /// The variable, `MEMTRACE_…`.
    pub variable: &'static str,
    /// The option of `memtrace run` that sets it, without its dashes.
    pub option: Option<&'static str>,
    /// What stands for a value in help: `DIR`.
    pub placeholder: &'static str,
    /// What it may be set to.
    pub value: Value,
    /// What holds where nobody sets it; empty if that is nothing.
    pub default: &'static str,
    /// What it is for: one line, without a full stop.
    pub help: &'static str,
    /// What else there is to know, in sentences; empty if nothing.
    pub more: &'static str,
    /// Who reads it.
    pub reader: Reader,
}

/// Who reads a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The library in the program.
    Recorder,
    /// The virtual GPU in the program.
    VirtualGpu,
    /// The Python package.
    Package,
    /// Nobody sets it by hand: processes of a run hand it down.
    Run,
}

/// What a setting may be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// One of these.
    Choices(&'static [Choice]),
    /// A folder.
    Folder,
    /// A file.
    File,
    /// A whole number from one to another.
    Number(u64, u64),
    /// Whole seconds up to a number.
    Seconds(u64),
    /// Bytes, with KiB, MiB or GiB behind the number if need be.
    Size,
    /// A signal by name or number.
    Signal,
    /// Something else, which its reader knows.
    Text,
}

impl Setting {
    /// What a value looks like: its words, or what stands for it.
    pub fn shape(&self) -> String {
        match self.value {
            Value::Choices(words) => {
                words.iter().map(|word| word.name).collect::<Vec<_>>().join("|")
            }
            _ => self.placeholder.to_owned(),
        }
    }
}

impl Value {
    /// What a value has to be, as a sentence says it behind "is not".
    pub fn wanted(&self) -> String {
        match self {
            Value::Choices(words) => {
                let names: Vec<&str> = words.iter().map(|word| word.name).collect();
                format!("one of {}", names.join(", "))
            }
            Value::Folder => "a folder".to_owned(),
            Value::File => "a file".to_owned(),
            Value::Number(least, most) => format!("a number from {least} to {most}"),
            Value::Seconds(most) => format!("a number of seconds up to {most}"),
            Value::Size => "a size such as 512MiB".to_owned(),
            Value::Signal => "a signal such as USR2".to_owned(),
            Value::Text => "a text".to_owned(),
        }
    }

    /// The number that a text stands for, if this is set to numbers and it is one that may be.
    pub fn number(&self, text: &str) -> Option<u64> {
        match *self {
            Value::Number(least, most) => text.parse().ok().filter(|n| (least..=most).contains(n)),
            Value::Seconds(most) => text.parse().ok().filter(|n| (1..=most).contains(n)),
            Value::Size => bytes(text),
            _ => None,
        }
    }
}

fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(unit).filter(|n| *n > 0)
}

/// Events of history that are kept unless the user says otherwise.
pub const DEFAULT_EVENTS: u64 = 1 << 20;

/// In the place of a folder: no black box.
pub const NO_BLACKBOX: &str = "off";

/// A row's name is that of its variable, so that neither can be mistaken for another.
macro_rules! table {
    ($($name:ident { $($field:tt)* })+) => {
        $(
            #[doc = concat!("`MEMTRACE_", stringify!($name), "`.")]
            pub const $name: Setting =
                Setting { variable: concat!("MEMTRACE_", stringify!($name)), $($field)* };
        )+

        /// All that can be set, in the order of the documentation.
        pub const ALL: &[&Setting] = &[$(&$name),+];
    };
}

table! {
    OUT {
        option: Some("out"), placeholder: "DIR", value: Value::Folder,
        default: "the current folder", reader: Reader::Recorder,
        help: "Folder for snapshots, made if it is not there",
        more: "",
    }
    STACKS {
        option: Some("stacks"), placeholder: "WHICH", value: Value::Choices(Stacks::CHOICES),
        default: "all", reader: Reader::Recorder,
        help: "Which frames to record",
        more: "",
    }
    FORMAT {
        option: Some("format"), placeholder: "FORMAT", value: Value::Choices(Format::CHOICES),
        default: "pickle", reader: Reader::Recorder,
        help: "How to write snapshots",
        more: "",
    }
    PERMISSIONS {
        option: Some("permissions"), placeholder: "WHO", value: Value::Choices(Permissions::CHOICES),
        default: "private", reader: Reader::Recorder,
        help: "Who may read snapshots, which hold paths and command lines",
        more: "",
    }
    SIGNAL {
        option: None, placeholder: "SIGNAL", value: Value::Signal,
        default: "", reader: Reader::Recorder,
        help: "Also a snapshot whenever this signal comes, such as USR2",
        more: "By name or number: HUP, INT, QUIT, USR1, USR2, TERM, URG, WINCH, IO, PWR or a real-time signal.",
    }
    EVERY {
        option: None, placeholder: "SECONDS", value: Value::Seconds(86_400),
        default: "", reader: Reader::Recorder,
        help: "Also a snapshot every so many seconds",
        more: "",
    }
    PEAK_STEP {
        option: None, placeholder: "SIZE", value: Value::Size,
        default: "", reader: Reader::Recorder,
        help: "Also a snapshot at each peak this much above the last, such as 512MiB",
        more: "",
    }
    CONTEXT {
        option: None, placeholder: "WHICH", value: Value::Choices(Context::CHOICES),
        default: "all", reader: Reader::Recorder,
        help: "Which events have a stack",
        more: "",
    }
    EVENTS {
        option: None, placeholder: "N", value: Value::Number(1 << 10, 1 << 30),
        default: "1048576", reader: Reader::Recorder,
        help: "Events of history that are kept",
        more: "Blocks that still live are always exact.",
    }
    BLACKBOX {
        option: None, placeholder: "DIR|off", value: Value::Folder,
        default: "one that is kept in memory", reader: Reader::Recorder,
        help: "Folder for the black box, or off",
        more: "With off, nothing is left of a process that is killed.",
    }
    QUIET {
        option: None, placeholder: "0|1", value: Value::Choices(Quiet::CHOICES),
        default: "0", reader: Reader::Recorder,
        help: "With 1, say nothing but errors",
        more: "",
    }
    VIRTUAL {
        option: Some("virtual"), placeholder: "SPEC", value: Value::Text,
        default: "", reader: Reader::VirtualGpu,
        help: "Run on a virtual GPU: a name from `memtrace devices`, or your own as sm_90,80GiB,132SM",
        more: "Behind it `*2` for two of them, `,lazy` for streams that finish as late as they may, `,placement=ascending` \
               for addresses as on Windows and under WSL (without it as on Linux).",
    }
    VIRTUAL_LOG {
        option: None, placeholder: "0|1|2", value: Value::Choices(VirtualLog::CHOICES),
        default: "0", reader: Reader::VirtualGpu,
        help: "What the virtual GPU says of its calls",
        more: "",
    }
    VIRTUAL_WORKSPACES {
        option: None, placeholder: "FILE", value: Value::File,
        default: "", reader: Reader::VirtualGpu,
        help: "Workspaces of convolutions as measured on a card, by scripts/gpu_check --learn",
        more: "",
    }
    VIRTUAL_CUDNN_VERSION {
        option: None, placeholder: "VERSION", value: Value::Text,
        default: "that of the installed package", reader: Reader::VirtualGpu,
        help: "cuDNN's version on the virtual GPU, such as 9.10.2",
        more: "",
    }
    LIBRARY {
        option: None, placeholder: "FILE", value: Value::File,
        default: "the one of the wheel or checkout", reader: Reader::Package,
        help: "The libmemtrace.so that the Python package loads where none is loaded",
        more: "",
    }
    LOG_LEVEL {
        option: None, placeholder: "LEVEL", value: Value::Choices(LogLevel::CHOICES),
        default: "warning", reader: Reader::Package,
        help: "What the Python package logs",
        more: "",
    }
    LOG_FILE {
        option: None, placeholder: "FILE", value: Value::File,
        default: "", reader: Reader::Package,
        help: "Where the Python package logs as JSON lines, too",
        more: "",
    }
    RUN_PID {
        option: None, placeholder: "PID", value: Value::Text,
        default: "", reader: Reader::Run,
        help: "The process that memtrace run became",
        more: "",
    }
    RUN_LIST {
        option: None, placeholder: "FILE", value: Value::File,
        default: "", reader: Reader::Run,
        help: "Where it finds what its processes have written",
        more: "",
    }
    VIRTUAL_CARDS {
        option: None, placeholder: "FILE", value: Value::File,
        default: "", reader: Reader::Run,
        help: "The file by which the processes of a run share its virtual cards",
        more: "",
    }
    DEVICE_ENSURED {
        option: None, placeholder: "DEVICE", value: Value::Text,
        default: "", reader: Reader::Run,
        help: "The device for which memtrace.ensure_device has started this program again",
        more: "",
    }
}

/// Variables of those who build and test memtrace, which scripts and tests read.
/// With `_` at the end: all that begin so.
pub const DEVELOPMENT: &[&str] =
    &["MEMTRACE_BUILD", "MEMTRACE_TORCH", "MEMTRACE_PYTHON", "MEMTRACE_PYTHON3_", "MEMTRACE_TEST_"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_differs_from_the_others() {
        for (i, one) in ALL.iter().enumerate() {
            for other in &ALL[..i] {
                assert_ne!(one.variable, other.variable);
                assert!(one.option.is_none() || one.option != other.option, "{}", one.variable);
            }
        }
    }

    #[test]
    fn texts_can_be_put_behind_each_other() {
        for setting in ALL {
            let help = setting.help;
            assert!(help.len() <= 90 && !help.ends_with('.') && !help.contains('\n'), "{help}");
            assert!(setting.more.is_empty() || setting.more.ends_with('.'), "{}", setting.more);
            if let Value::Choices(words) = setting.value {
                let is_one = words.iter().any(|word| word.name == setting.default);
                assert!(is_one, "{}: {}", setting.variable, setting.default);
            }
        }
        assert_eq!(EVENTS.default, DEFAULT_EVENTS.to_string());
    }

    #[test]
    fn numbers() {
        assert_eq!(PEAK_STEP.value.number("512MiB"), Some(512 << 20));
        assert_eq!(PEAK_STEP.value.number("7"), Some(7));
        for text in ["", "GiB", "0", "-1GiB", "1GB", "99999999999GiB"] {
            assert_eq!(PEAK_STEP.value.number(text), None, "{text}");
        }
        assert_eq!(["1", "86400"].map(|t| EVERY.value.number(t)), [Some(1), Some(86_400)]);
        assert_eq!(["0", "86401", "x"].map(|t| EVERY.value.number(t)), [None; 3]);
        assert_eq!(
            ["1023", "1024", "-3"].map(|t| EVENTS.value.number(t)),
            [None, Some(1024), None]
        );
        assert_eq!(OUT.value.number("1"), None);
    }
}

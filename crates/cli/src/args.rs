//! The arguments of the command. The texts here are the reference of the
//! command line, and are tested as such.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum, ValueHint};
use memtrace_analysis::summary;
use memtrace_options::{FORMAT, PERMISSIONS, STACKS, VIRTUAL};

pub(crate) use memtrace_options::{Format, Permissions, Stacks};

use crate::settings::{Settings, and_variables, behind, behind_all, choices, help, long_help};
use crate::units;

/// The flight recorder for GPU memory: every allocation of a program, with
/// the line of code behind it.
#[derive(Debug, Parser)]
#[command(
    name = "memtrace",
    version,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 yes or done, 1 the answer is no, 2 an error; `run` exits as the command does.\n\
                  The next step after a run: memtrace summary FILE, or open FILE at https://pytorch.org/memory_viz"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Summary(Summary),
    Report(Report),
    Check(Check),
    Recover(Recover),
    Snapshot(Snapshot),
    Symbolize(Symbolize),
    Replay(Replay),
    Tune(Tune),
    Doctor(Doctor),
    Devices(Devices),
    Completions(Completions),
    Man(Man),
}

const RUN: &str = "Examples:\n  \
    memtrace run -- python train.py\n  \
    memtrace run --out traces -- torchrun --nproc-per-node 8 train.py\n  \
    memtrace run --virtual h100 -- python train.py          will it fit? (no GPU needed)\n  \
    memtrace run --virtual 'sm_90,80GiB,132SM*2' -- python train.py\n\n\
Without `memtrace run`:\n  \
    LD_PRELOAD=/path/to/libmemtrace.so MEMTRACE_OUT=traces python train.py";

/// Run a program and record its GPU memory.
///
/// memtrace becomes the program: process id, signals and exit code are the program's
/// own. When it ends, or runs out of GPU memory, each process that used the GPU
/// leaves a snapshot in the output folder.
#[derive(Debug, ClapArgs)]
#[command(after_help = RUN, after_long_help = and_variables(RUN))]
pub(crate) struct Run {
    #[arg(long = VIRTUAL.option, value_name = VIRTUAL.placeholder, help = help(&VIRTUAL), long_help = long_help(&VIRTUAL), display_order = 0)]
    pub(crate) virtual_gpu: Option<String>,

    #[command(flatten)]
    pub(crate) settings: Settings,

    /// With --format json: spell out every stack, as PyTorch's viewer wants it;
    /// the file may be eighty times as large
    #[arg(long, requires = "format", display_order = behind(&FORMAT))]
    pub(crate) expand: bool,

    /// Record at all; `off` leaves just the virtual GPU, to compare with
    #[arg(long, value_name = "ON|OFF", default_value = "on", hide_possible_values = true, display_order = behind_all())]
    pub(crate) record: Switch,

    /// The list in which the processes of this run say what they do, for whoever has
    /// started `memtrace run` and will read it
    #[arg(long, hide = true)]
    pub(crate) list: Option<PathBuf>,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum By {
    /// the user's own lines
    Line,
    /// these, and the innermost lines outside PyTorch, which may be a library's
    ModuleLine,
}

impl From<By> for summary::By {
    fn from(by: By) -> summary::By {
        match by {
            By::Line => summary::By::Line,
            By::ModuleLine => summary::By::ModuleLine,
        }
    }
}

/// Which files are read, and how much memory that may take.
#[derive(Debug, ClapArgs)]
pub(crate) struct Files {
    /// Snapshots, or folders with snapshots; - is standard input
    #[arg(required = true, value_name = "FILE|DIR")]
    pub(crate) files: Vec<PathBuf>,

    /// The most memory that reading one file may take [default: 1GiB, or
    /// 16 times the file if that is more]
    #[arg(long, value_name = "SIZE", value_parser = units::parse, display_order = 900)]
    pub(crate) max_memory: Option<u64>,
}

/// Say what the peak was, who held it, and what is left.
///
/// Reads snapshots of memtrace and of every PyTorch since 2.1: pickle or JSON,
/// also packed with gzip or zstd. Several files (ranks, dumps) each get a heading,
/// by rank; with --json they are a list.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace summary memtrace-host-4711-0.pickle\n  \
    memtrace summary memtrace-*.pickle                      one after the other\n  \
    memtrace summary --top 30 snapshot.pickle\n  \
    memtrace summary --by module-line snapshot.pickle       and where in the libraries\n  \
    memtrace summary --json snapshot.pickle | jq '.devices[0].allocated.bytes'")]
pub(crate) struct Summary {
    #[command(flatten)]
    pub(crate) files: Files,

    /// Print one JSON object (a list for several files), sizes in bytes, all lines of code
    #[arg(long)]
    pub(crate) json: bool,

    /// How many lines of code to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(crate) top: usize,

    /// By which lines of code to add up
    #[arg(long, value_name = "WHICH", default_value = "line")]
    pub(crate) by: By,
}

/// Say who has the rest: memory by owner, adding up to what the device itself says is in use.
///
/// Owners are libraries: PyTorch, NCCL, cuBLAS, your own. What has no size in any API
/// (contexts, modules, graphs) is measured by what the device said before and after;
/// what is left is printed as unexplained.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace report memtrace-host-4711-0.pickle\n  \
    memtrace report --json snapshot.pickle | jq '.devices[0].reconcile.lines'")]
pub(crate) struct Report {
    #[command(flatten)]
    pub(crate) files: Files,

    /// Print one JSON object (a list for several files), sizes in bytes
    #[arg(long)]
    pub(crate) json: bool,

    /// How many lines of code, and labels, to list
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) top: usize,

    /// By which lines of code to add up
    #[arg(long, value_name = "WHICH", default_value = "line")]
    pub(crate) by: By,
}

/// Say whether PyTorch's viewers can show a file, and why not.
///
/// Checks how the file is written, whether its sums are sums, and whether its history agrees with
/// its segments. Exits with 0 if all files are sound, 1 if one is not, 2 if one can't be read.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace check snapshot.pickle\n  \
    memtrace check --json traces")]
pub(crate) struct Check {
    #[command(flatten)]
    pub(crate) files: Files,

    /// Print a JSON list, one object a file
    #[arg(long)]
    pub(crate) json: bool,
}

/// Write the snapshots that processes could not write because they were killed.
///
/// A recorded process leaves a black box (*.blackbox) if it dies by a signal, or of a full machine:
/// it holds everything up to the last call. Prints the path of each snapshot and removes the black
/// box. Without FILE or DIR, lists the black boxes that there are: whose, how large, alive or dead.
/// Exits with 0 if each black box of a dead process is a snapshot now (or one is listed), 1 if
/// there was none or some could not be read, 2 if all failed.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace recover                                        what is there?\n  \
    memtrace recover traces\n  \
    memtrace recover --keep traces/memtrace-host-4711-1730000000000.blackbox\n  \
    memtrace recover traces && memtrace summary traces")]
pub(crate) struct Recover {
    /// Black boxes, or folders with black boxes (or links to them, as in a program's output folder)
    #[arg(value_name = "FILE|DIR")]
    pub(crate) paths: Vec<PathBuf>,

    /// Print the list as JSON, sizes in bytes
    #[arg(long, conflicts_with_all = ["paths", "out", "format", "keep", "permissions"])]
    pub(crate) json: bool,

    /// Folder for the snapshots [default: where the black box, or the link to it, is]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,

    #[arg(long, value_name = FORMAT.placeholder, help = FORMAT.help, default_value = FORMAT.default, value_parser = choices::<Format>())]
    pub(crate) format: Format,

    /// With --format json: spell out every stack, as PyTorch's viewer wants it;
    /// the file may be eighty times as large
    #[arg(long, requires = "format")]
    pub(crate) expand: bool,

    #[arg(long, value_name = PERMISSIONS.placeholder, help = help(&PERMISSIONS), value_parser = choices::<Permissions>())]
    pub(crate) permissions: Option<Permissions>,

    /// Leave the black boxes where they are
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Write a snapshot of a running process, which notices nothing.
///
/// Reads the black box of the process from outside; the process is neither
/// stopped nor attached to. Prints the path.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace snapshot 4711\n  \
    memtrace summary $(memtrace snapshot --out /tmp 4711)")]
pub(crate) struct Snapshot {
    /// Id of the process
    #[arg(value_name = "PID")]
    pub(crate) pid: u64,

    /// Folder for the snapshot [default: the current folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,

    #[arg(long, value_name = FORMAT.placeholder, help = FORMAT.help, default_value = FORMAT.default, value_parser = choices::<Format>())]
    pub(crate) format: Format,

    /// With --format json: spell out every stack, as PyTorch's viewer wants it;
    /// the file may be eighty times as large
    #[arg(long, requires = "format")]
    pub(crate) expand: bool,

    #[arg(long, value_name = PERMISSIONS.placeholder, help = help(&PERMISSIONS), value_parser = choices::<Permissions>())]
    pub(crate) permissions: Option<Permissions>,
}

/// Look up source lines for C++ frames, which a recorder leaves as library and offset.
///
/// Needs the libraries, as they were, with debug information; frames of others stay as they are.
/// Adds the functions that the compiler has inlined.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace symbolize memtrace-host-4711-0.pickle\n  \
    memtrace symbolize --out with-lines.pickle memtrace-host-4711-0.pickle")]
pub(crate) struct Symbolize {
    #[command(flatten)]
    pub(crate) files: Files,

    /// Write to this file, or under the same names into this folder [default: FILE itself]
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) out: Option<PathBuf>,

    /// Of JSON: spell out every stack, as PyTorch's viewer wants it; the
    /// file may be eighty times as large
    #[arg(long)]
    pub(crate) expand: bool,
}

/// Say whether a program would have fitted: with other settings, on a smaller card.
///
/// Takes the requests out of a snapshot (memtrace's, or PyTorch's since 2.1) and asks them of
/// PyTorch's own allocator again, on a card that only counts. First it repeats the recorded
/// run and says how much of it comes out equal. Exits with 0 if the program fits under all
/// settings given, 1 if it runs out of memory.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace replay --capacity 40GiB memtrace-host-4711-0.pickle\n  \
    memtrace replay --conf '' --conf expandable_segments:True snapshot.pickle\n  \
    memtrace replay --conf max_split_size_mb:128 --capacity 24GiB --device-overhead 500MiB --out what-if snapshot.pickle\n  \
    memtrace replay --json snapshot.pickle | jq '.devices[0].replayed[0].smallest_capacity'")]
pub(crate) struct Replay {
    #[command(flatten)]
    pub(crate) files: Files,

    /// Settings as PYTORCH_CUDA_ALLOC_CONF has them, '' for none; may be given more than
    /// once [default: those of the recording]
    #[arg(long, value_name = "SETTINGS")]
    pub(crate) conf: Vec<String>,

    /// Memory of the card, such as 40GiB [default: the recorded card, if memtrace
    /// wrote it down, or as much as it takes]
    #[arg(long, value_name = "SIZE", value_parser = units::parse)]
    pub(crate) capacity: Option<u64>,

    /// Memory that others take: the context, libraries, other processes
    /// [default: as recorded, or none]
    #[arg(long, value_name = "SIZE", value_parser = units::parse)]
    pub(crate) device_overhead: Option<u64>,

    /// Print one JSON object (a list for several files), sizes in bytes, with the course over time
    #[arg(long)]
    pub(crate) json: bool,

    /// Folder for a new snapshot of each replay, made if it is not there
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// Search the settings under which a program would have needed the smallest
/// card, and print the line to export.
///
/// Replays a snapshot under some dozens of settings and combines the best of them. Exits with 0
/// if it fits under the best, 1 if not.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace tune memtrace-host-4711-0.pickle\n  \
    memtrace tune --capacity 40GiB --device-overhead 500MiB snapshot.pickle\n  \
    export PYTORCH_CUDA_ALLOC_CONF=$(memtrace tune --json snapshot.pickle | jq -r .best)")]
pub(crate) struct Tune {
    #[command(flatten)]
    pub(crate) files: Files,

    /// Memory of the card, such as 40GiB [default: the recorded card, if memtrace
    /// wrote it down, or as much as it takes]
    #[arg(long, value_name = "SIZE", value_parser = units::parse)]
    pub(crate) capacity: Option<u64>,

    /// Memory that others take: the context, libraries, other processes
    /// [default: as recorded, or none]
    #[arg(long, value_name = "SIZE", value_parser = units::parse)]
    pub(crate) device_overhead: Option<u64>,

    /// Print one JSON object (a list for several files) with all that was tried, sizes in bytes
    #[arg(long)]
    pub(crate) json: bool,
}

/// Say whether memtrace works here, and what it sees of a program.
///
/// Without CMD, checks the installation. With CMD, runs it under recording, too, and reports which
/// entry points of CUDA which library called, what went past memtrace, how much room is left, and
/// what recording cost. Exits with 0 if all is well, 1 if something is wrong (each finding says
/// what to do), 2 if the program can't be run.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace doctor\n  \
    memtrace doctor -- python train.py --steps 3\n  \
    memtrace doctor --virtual h100 --json -- python train.py | jq '.processes[0].doors'")]
pub(crate) struct Doctor {
    /// Print one JSON object; what CMD prints goes to standard error then
    #[arg(long)]
    pub(crate) json: bool,

    /// Run CMD on a virtual GPU, as `memtrace run` does
    #[arg(long = "virtual", value_name = "SPEC")]
    pub(crate) virtual_gpu: Option<String>,

    /// Keep the snapshots in this folder [default: they are removed]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,

    #[arg(long, value_name = STACKS.placeholder, help = help(&STACKS), value_parser = choices::<Stacks>())]
    pub(crate) stacks: Option<Stacks>,

    /// The program and its arguments
    #[arg(trailing_var_arg = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// List this machine's GPUs, and those that `run --virtual` can be.
///
/// A real GPU is listed under the number by which a program would see it, with what is free of its
/// memory. No context is made. With --real exits with 0 if there is one, 1 if there is none, 2 if
/// CUDA's driver is there and can't be used.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace devices\n  \
    memtrace devices --real --json | jq '.[].free_bytes'\n  \
    memtrace devices --json                                 virtual ones alone\n  \
    memtrace run --virtual a100-40*4 -- python train.py")]
pub(crate) struct Devices {
    /// Print a JSON list of the virtual ones, with the source of each
    /// number; with --real, of the real ones
    #[arg(long)]
    pub(crate) json: bool,

    /// This machine's GPUs alone
    #[arg(long)]
    pub(crate) real: bool,

    /// Ask CUDA's driver in this process, and print its answer for the process that waits for it
    #[arg(long, hide = true, conflicts_with_all = ["json", "real"])]
    pub(crate) ask: bool,
}

/// Print the script by which a shell completes commands and options.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    source <(memtrace completions bash)                     in this shell\n  \
    memtrace completions bash > ~/.local/share/bash-completion/completions/memtrace\n  \
    memtrace completions zsh > ~/.zfunc/_memtrace           with fpath+=~/.zfunc in ~/.zshrc\n  \
    memtrace completions fish > ~/.config/fish/completions/memtrace.fish")]
pub(crate) struct Completions {
    /// For which shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Print the manual: the page of this command, or of one of its commands.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
    memtrace man | man -l -\n  \
    memtrace man run | man -l -\n  \
    memtrace man --out ~/.local/share/man/man1              all pages: man memtrace-run")]
pub(crate) struct Man {
    /// The command, such as run
    #[arg(value_name = "COMMAND", value_hint = ValueHint::Other)]
    pub(crate) command: Option<String>,

    /// Write all pages into this folder, made if it is not there, and print their paths
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "command")]
    pub(crate) out: Option<PathBuf>,
}

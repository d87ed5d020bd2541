//! A snapshot file of this process.
//!
//! It reads the ring without stopping anybody, names the stacks, and writes a new file. That file
//! then takes the first name that is free ([`memtrace_files`]). So a reader never sees half a file,
//! and no file of an earlier run is ever overwritten. It runs in the background thread, at exit and
//! for `memtrace_dump`; never in a hook.
//!
//! It takes memory for what is alive and for the names of stacks. The history takes none: it
//! goes from the ring into the file event by event ([`memtrace_snapshot::write`]). The
//! program's threads wait for it at most while the live table is copied, and only if an
//! eighth of the ring fills meanwhile.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use memtrace_analysis::report::warning_line;
use memtrace_analysis::sites::Lines;
use memtrace_files::NewFile;
use memtrace_format::blackbox::{MAGIC, at, count_from_header};
use memtrace_format::event::Event;
use memtrace_format::json::Stacks;
use memtrace_format::key::{Description, Memtrace, OrNull, StackTables};
use memtrace_format::snapshot::Value;
use memtrace_options::Format;
use memtrace_snapshot::{Counts, Encoding, Moment};
use memtrace_state::State;
use memtrace_state::recording::Recording;
use memtrace_terminal::Page;
use memtrace_terminal::shell::quoted;

use crate::config::Config;
use crate::cuda::{deepbind, table};
use crate::labels::{self, store::Store};
use crate::os::descriptors;
use crate::os::memory;
use crate::os::message;
use crate::os::{clock, truncated};
use crate::process::Process;
use crate::process::measure;
use crate::process::tree;
use crate::process::tree::TreeNode;
use crate::process::virtual_gpu;
use crate::pytorch::settings;
use crate::record::Recorder;
use crate::record::live::Live;

/// Why a snapshot is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The process ends.
    Exit,
    /// An allocation failed.
    Oom,
    /// More memory is in use than ever before.
    Peak,
    /// The user's signal came.
    Signal,
    /// The time that the user named has passed.
    Clock,
    /// Somebody asked.
    Request,
}

impl Reason {
    fn name(self) -> &'static str {
        match self {
            Reason::Exit => "exit",
            Reason::Oom => "oom",
            Reason::Peak => "peak",
            Reason::Signal => "signal",
            Reason::Clock => "clock",
            Reason::Request => "request",
        }
    }
}

/// What a snapshot has found that the user should know.
#[derive(Default)]
struct Findings {
    /// The text about a failure.
    oom: Option<Page>,
    /// A line each.
    warnings: Vec<String>,
}

/// What is asked for where nobody says which moment.
pub const NOW: Moment = Moment::Ticket(u64::MAX);

/// The program has another root folder now, in which the user's folder is
/// not. What is recorded is kept outside.
fn warn_of_new_root(recorder: &Recorder) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if let Some(path) =
        recorder.blackbox.path.as_ref().filter(|_| !WARNED.swap(true, Ordering::Relaxed))
    {
        message!(
            "the program has changed its root folder, where {} is another folder: when it has ended, memtrace recover {}",
            recorder.config.out.display(),
            quoted(path)
        );
    }
}

/// Writes the state of a moment under the next free name in the user's folder, and says where.
/// Trouble is one line on stderr: the program must not notice.
pub fn to_folder(process: &Process, moment: Moment, reason: Reason) -> Option<PathBuf> {
    let recorder = &process.recorder;
    let _turn = process.dumping.lock();
    if tree::is_elsewhere() {
        warn_of_new_root(recorder);
        return None;
    }
    if matches!(moment, NOW | Moment::End) {
        measure::sample(process);
    }
    let mut findings = Findings::default();
    match write_new(process, moment, reason, &mut findings) {
        Ok((path, counts)) => {
            if let Some(text) = findings.oom {
                report_oom(recorder, &path, &text);
            }
            if reason == Reason::Exit && !recorder.config.quiet {
                for warning in &findings.warnings {
                    let on =
                        if virtual_gpu::stats().is_some() { " (on a virtual GPU)" } else { "" };
                    message!("warning{on}: {warning}");
                }
            }
            tree::wrote(&recorder.config, &path);
            if !recorder.config.quiet {
                let why = match reason {
                    Reason::Oom => " at out of memory",
                    Reason::Peak => " at a new peak",
                    _ => "",
                };
                message!("wrote {}{why}: {} entries", path.display(), counts.entries);
            }
            if counts.overwritten > 0 && !recorder.config.quiet {
                message!(
                    "the program overwrote the {} oldest events of {} while it was written: MEMTRACE_EVENTS higher \
                     than {} keeps more",
                    counts.overwritten,
                    path.display(),
                    recorder.config.events
                );
            }
            Some(path)
        }
        Err(_) if truncated::happened() => None, // which has been findings
        Err(e) => {
            message!(
                "cannot write a snapshot into {}: {e}; {}",
                recorder.config.out.display(),
                advice(recorder, &e)
            );
            None
        }
    }
}

/// What helps against an error.
fn advice(recorder: &Recorder, error: &io::Error) -> String {
    let recover = recorder.blackbox.path.as_ref().map_or_else(String::new, |path| {
        format!("; once the process has ended, `memtrace recover {}` writes it", quoted(path))
    });
    match error.kind() {
        io::ErrorKind::OutOfMemory => {
            format!("the limit on memory is too low for that (ulimit -v, ulimit -d){recover}")
        }
        io::ErrorKind::FileTooLarge => {
            format!("the limit on the size of files is too low (ulimit -f){recover}")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("set MEMTRACE_OUT to a folder with more room{recover}")
        }
        io::ErrorKind::InvalidData => "the record is lost".to_owned(),
        // An error that names its path has no number.
        _ if error.raw_os_error() == Some(libc::EMFILE) || !descriptors::is_one_left() => {
            format!("raise the limit on open files (ulimit -n){recover}")
        }
        _ => "set MEMTRACE_OUT to a folder that can be written".to_owned(),
    }
}

/// Puts the text about a failure beside its snapshot, and the first one of a process on stderr.
fn report_oom(recorder: &Recorder, snapshot: &Path, text: &Page) {
    static WARNED_IN: AtomicI32 = AtomicI32::new(0);
    let stem = snapshot.file_stem().unwrap_or_default().to_string_lossy();
    let name =
        |n: u32| if n == 0 { format!("{stem}-oom.txt") } else { format!("{stem}-oom-{n}.txt") };
    let folder = memtrace_files::folder_of(snapshot);
    let written = NewFile::within(folder, recorder.config.readers).and_then(|new| {
        new.file().write_all(text.as_bytes())?;
        new.place((0..u32::MAX).map(|n| folder.join(name(n))))
    });
    if let Err(e) = written {
        message!("cannot write {}: {e}", folder.join(name(0)).display());
    }
    let first = WARNED_IN.swap(recorder.pid, Ordering::Relaxed) != recorder.pid;
    if first && !recorder.config.quiet {
        // Every line says who speaks, and all come in one piece, also
        // where several ranks fail at once.
        message::page(text);
    }
}

/// Writes the state of now to `path`, replacing what was there.
///
/// # Errors
/// The file can't be written; what was there is as it was.
pub fn to_path(process: &Process, path: &Path) -> io::Result<()> {
    let recorder = &process.recorder;
    let _turn = process.dumping.lock();
    measure::sample(process);
    let new = NewFile::within(memtrace_files::folder_of(path), recorder.config.readers)?;
    let format = format_of(path, recorder.config.format);
    write(process, NOW, Reason::Request, &new, format, &mut Findings::default())?;
    new.replace(path)
}

fn format_of(path: &Path, default: Format) -> Format {
    match path.extension().and_then(|e| e.to_str()) {
        Some("json") if default == Format::Pickle => Format::Json,
        Some("pickle" | "pkl") => Format::Pickle,
        _ => default,
    }
}

/// `memtrace-<host>-<pid>[-rank<r>]-<n>.<extension>`
fn file_name(recorder: &Recorder, n: u32) -> String {
    let rank = recorder.world().filter(|world| !world.several).map(|world| world.rank);
    let rank = recorder.config.rank.or(rank).map_or_else(String::new, |r| format!("-rank{r}"));
    let extension = recorder.config.format.extension();
    format!("memtrace-{}-{}{rank}-{n}.{extension}", host(), recorder.pid)
}

/// In which namespace this process has its number, as `pid:[4026531836]`: who is not in it must not
/// take the number for that of another process.
fn pid_namespace() -> Option<String> {
    Some(std::fs::read_link("/proc/self/ns/pid").ok()?.to_string_lossy().into_owned())
}

/// The machine's name, fit for a file name.
pub fn host() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the buffer is valid for its length less the terminating zero.
    unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|b| *b == 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&name[..end]).replace(['/', ' '], "_");
    if text.is_empty() { "localhost".to_owned() } else { text }
}

/// Writes a file and gives it the first number that is free when it is complete.
fn write_new(
    process: &Process,
    moment: Moment,
    reason: Reason,
    findings: &mut Findings,
) -> io::Result<(PathBuf, Counts)> {
    let Config { out, readers, format, .. } = &process.recorder.config;
    std::fs::create_dir_all(out)?;
    let new = NewFile::within(out, *readers)?;
    let counts = write(process, moment, reason, &new, *format, findings)?;
    let names = (0..u32::MAX).map(|n| out.join(file_name(&process.recorder, n)));
    new.place(names).map(|(path, _)| (path, counts))
}

/// Bytes that writing a snapshot takes, about: for names, and for each thing that is alive.
const NEEDED: usize = 24 << 20;
const NEEDED_EACH: usize = 1 << 10;

/// Writes the state of a moment into this file. An error if the black box was cut short meanwhile:
/// part of what was written is zeros then.
fn write(
    process: &Process,
    moment: Moment,
    reason: Reason,
    new: &NewFile,
    format: Format,
    findings: &mut Findings,
) -> io::Result<Counts> {
    let recorder = &process.recorder;
    let encoding = match format {
        Format::Pickle => Encoding::Pickle,
        Format::Json => Encoding::Json(Stacks::Shared),
        Format::JsonExpanded => Encoding::Json(Stacks::Expanded),
    };
    if recorder.blackbox.header()[at::MAGIC].load(Ordering::Relaxed) != MAGIC {
        let what = "somebody has written into the black box";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    if !memory::has(
        NEEDED
            + recorder.blackbox.header()[at::LIVE_USED].load(Ordering::Relaxed) as usize
                * NEEDED_EACH,
    ) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut namer = recorder.stacks.namer();
    if let Some(labels) = labels::store::existing() {
        namer = namer.with_labels(labels.words());
    }
    memtrace_snapshot::write(
        &mut Own(recorder),
        moment,
        &mut namer,
        &table::name,
        (new, encoding),
        &mut |snapshot, known, namer| {
            let (settings, conf) = settings::in_force(&recorder.config);
            snapshot.allocator_settings = settings;
            let used = recorder.usage.read();
            let about = Memtrace {
                allocator_conf: Some(conf),
                libraries: Some(namer.build_ids()),
                python: Some(namer.places_and_links().to_key()),
                pytorch: namer.pytorch(),
                doors: Some(memtrace_snapshot::entry_point_calls(&used, &table::name, namer)),
                bound_elsewhere: Some(OrNull(Some(deepbind::bound_elsewhere()))),
                ..about(process, reason, known)
            };
            let about = &*snapshot.memtrace.insert(Box::new(about));
            let lines = Lines::from_key(Some(about), namer.tables());
            findings.warnings = about.warnings().iter().map(|w| warning_line(w, &lines)).collect();
            if reason == Reason::Oom {
                findings.oom = memtrace_analysis::oom::text(snapshot, namer.tables());
            }
        },
    )
    .and_then(|counts| {
        if truncated::happened() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(counts) }
    })
}

fn enough_memory() -> io::Result<()> {
    if memory::is_short() { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
}

/// What this process records, read while it does.
struct Own<'a>(&'a Recorder);

impl Recording for Own<'_> {
    fn written(&mut self) -> io::Result<u64> {
        Ok(self.0.ring.written())
    }

    fn live(&mut self) -> io::Result<(State, u64)> {
        self.0.retire_ahead();
        let (copied, from) = self.0.ring.live(Live::copy);
        let copied = copied.map_err(|_| io::ErrorKind::OutOfMemory)?;
        enough_memory()?;
        Ok((copied.state(), from))
    }

    fn read(&mut self, from: u64, to: u64, events: &mut Vec<Event>) -> io::Result<Option<u64>> {
        // This may be the thread that keeps room in the ring, and what is
        // retired can still be read.
        self.0.retire_ahead();
        enough_memory()?;
        let read = self.0.ring.read_range(from..to, events);
        // The rest reads as zeros, for whose publication there is no need to wait.
        if truncated::happened() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
    }
}

/// What is known of the process when recording begins, beside what is `known` already.
fn identity(config: &Config, started_ns: u64, place: &TreeNode, known: Memtrace) -> Memtrace {
    let mut about = Memtrace {
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        pid: Some(std::process::id().into()),
        parent: Some(std::os::unix::process::parent_id().into()),
        host: Some(host()),
        pid_namespace: pid_namespace(),
        command: Some(command_line()),
        rank: config.rank.map(u64::from),
        local_rank: config.local_rank.map(u64::from),
        world_size: config.world_size.map(u64::from),
        started_us: Some(started_ns / 1000),
        allocator_conf: Some(config.allocator_conf.clone()),
        allocator_variable: Some(config.allocator_variable.to_owned()),
        not_recorded: Some(NOT_RECORDED.iter().map(|&what| what.to_owned()).collect()),
        virtual_gpu: virtual_gpu::stats(),
        ..known
    };
    place.describe(config, &mut about);
    about
}

/// What the black box says of the process, so that the snapshot that somebody else makes of it says
/// the same. At most `room` bytes of text.
pub fn description(
    config: &Config,
    started_ns: u64,
    place: &TreeNode,
    stacks: StackTables,
    room: usize,
) -> Description {
    let known = Memtrace { stacks: Some(stacks), ..Memtrace::default() };
    let out = std::path::absolute(&config.out).ok();
    let mut about = Description {
        memtrace: identity(config, started_ns, place, known),
        entry_points: table::ENTRY_POINTS.iter().map(|e| e.name.to_owned()).collect(),
        out: out.and_then(|path| Some(path.to_str()?.to_owned())),
    };
    // A command line may be as long as two megabytes.
    let cuts: [fn(&mut Description); 3] = [
        |about| about.memtrace.command = None,
        |about| about.memtrace.allocator_conf = None,
        |about| about.out = None,
    ];
    for cut in cuts {
        if about.to_text().len() > room {
            cut(&mut about);
        }
    }
    about
}

/// The extra top-level key: what is known of the process now, beside what was worked out.
fn about(process: &Process, reason: Reason, known: Memtrace) -> Memtrace {
    let recorder = &process.recorder;
    let header = |i: usize| recorder.blackbox.header()[i].load(Ordering::Relaxed);
    let mut about = identity(&recorder.config, recorder.started_ns, &process.place, known);
    about.reason = Some(reason.name().to_owned());
    about.written_us = Some(clock::now_ns() / 1000);
    about.stacks = Some(recorder.stacks.about());
    count_from_header(&header, false, about.counters.get_or_insert_default());
    about.cost = Some(memtrace_snapshot::cost(header(at::SAMPLED), header(at::SAMPLED_NS)));
    if let Some(world) = recorder.world() {
        world.tell(&mut about);
    }
    about
}

/// How recording goes, for `memtrace_stats`.
pub fn statistics(recorder: Option<&Recorder>) -> Value {
    let Some(recorder) = recorder else { return serde_json::json!({ "recording": false }) };
    let counter = |i: usize| recorder.blackbox.header()[i].load(Ordering::Relaxed);
    serde_json::json!({
        "recording": true,
        "events": recorder.ring.written(),
        "history": recorder.ring.written() - recorder.ring.retired(),
        "stalls": counter(at::STALLS),
        "live_refused": counter(at::LIVE_REFUSED),
        "live_outside": counter(at::LIVE_OUTSIDE),
        "interrupted": counter(at::INTERRUPTED),
        "cost": memtrace_snapshot::cost(counter(at::SAMPLED), counter(at::SAMPLED_NS)),
        "stacks": recorder.stacks.about(),
        "labels_refused": labels::store::existing().map_or(0, Store::refused),
        "blackbox": recorder.blackbox.path.as_ref().map(|path| path.display().to_string()),
        "out": recorder.config.out.display().to_string(),
        "virtual": virtual_gpu::stats().is_some(),
    })
}

/// What PyTorch's own snapshot would also know.
const NOT_RECORDED: &[&str] = &["the names of compiled regions"];

fn command_line() -> Vec<String> {
    let raw = memtrace_files::read("/proc/self/cmdline").unwrap_or_default();
    raw.split(|b| *b == 0)
        .filter(|a| !a.is_empty())
        .map(|a| String::from_utf8_lossy(a).into_owned())
        .collect()
}

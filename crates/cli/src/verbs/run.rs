//! `memtrace run`: prepares the environment and becomes the program.
//!
//! There is no parent that waits. The environment is prepared, then this process is
//! replaced. So the program's id, signals, terminal and exit code are what they would be
//! without memtrace. Everything that could go wrong is looked at before, because
//! afterwards there is nobody left to explain.

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, parent_id};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use memtrace_devices::Spec;
use memtrace_files::{NewFile, Readers};
use memtrace_options::{
    FORMAT, Format, OUT, QUIET, Quiet, RUN_LIST, RUN_PID, VIRTUAL, VIRTUAL_CARDS, remark,
};

use crate::args::{Run, Switch};
use crate::failure::Failure;
use crate::preloadable::{find, preloadable};
use crate::say::eprint_line;
use crate::stand_ins::Folder;
use crate::{Inherit, boxes, leftovers};

/// What PyTorch and Triton compile and time on one GPU they keep for the next run. What
/// they find out on a virtual card must not be used by a run on a real one. So it is kept
/// apart, unless the user has said where.
const CACHES: [(&str, &str); 3] = [
    ("PYTORCH_KERNEL_CACHE_PATH", "torch-kernels"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    ("TRITON_CACHE_DIR", "triton"),
];

pub(crate) const RECORDER: &str = "libmemtrace.so";
pub(crate) const VIRTUAL_GPU: &str = "libmemtrace_virtual.so";

/// Becomes the program; returns only to say why not.
pub(crate) fn run(args: &Run, inherit: Inherit) -> Result<Infallible, Failure> {
    let (name, rest) =
        args.command.split_first().ok_or_else(|| Failure::new("no program is named"))?;
    let spec = match &args.virtual_gpu {
        Some(text) => Some(Spec::parse(text).map_err(|e| Failure::new(format!("--virtual: {e}")))?),
        None => None,
    };
    let record = args.record == Switch::On;
    let path = find(name).map_err(|r| Failure::new(r.to_string()))?;
    if record || spec.is_some() {
        preloadable(&path).map_err(|r| Failure::new(r.to_string()))?;
    }
    misspelt().for_each(|remark| eprint_line(&remark));
    let mut command = Command::new(&path);
    command.arg0(name).args(rest);
    let mut preload = Vec::new();
    if record {
        let library = find_library(RECORDER, "--record off runs without it")?;
        // A profiler that wants NVTX for itself has said so.
        if env::var_os(NVTX).is_none_or(|v| v.is_empty()) {
            command.env(NVTX, &library);
        }
        preload.push(library);
        let out = out_folder(args.settings.of(&OUT).map(Path::new))?;
        // The recorder distinguishes this process, which the user started, from those that it
        // starts; these say in the list what they have written.
        let root = if args.list.is_some() { parent_id() } else { std::process::id() };
        command.env(RUN_PID.variable, root.to_string());
        let list = RUN_LIST.variable;
        match &args.list {
            Some(named) => command.env(list, named),
            None if quiet() => command.env_remove(list), // nobody would read it
            None => command.env(list, leftovers::list_of_run(&out)),
        };
        leftovers::clear(&out);
        command.envs(args.settings.given().map(|(setting, value)| (setting.variable, value)));
        if args.expand && args.settings.of(&FORMAT).is_some_and(|f| f == Format::Json.name()) {
            command.env(FORMAT.variable, Format::JsonExpanded.name());
        }
        command.env(OUT.variable, out);
        if !quiet() {
            boxes::mention();
        }
    }
    if let Some(spec) = spec {
        let library = find_library(VIRTUAL_GPU, "without --virtual a real GPU is used")?;
        let folder = Folder::ready(&library).map_err(Failure::new)?;
        preload.extend(folder.libraries());
        let spec = OsString::from(spec.to_string());
        // A run within a run of the same cards has those cards.
        let cards = VIRTUAL_CARDS.variable;
        if env::var_os(VIRTUAL.variable).as_ref() != Some(&spec)
            || env::var_os(cards).is_none_or(|path| path.is_empty())
        {
            command.env(cards, cards_of_run());
        }
        command.env(VIRTUAL.variable, spec);
        let search = list([folder.path().to_owned()], env::var_os("LD_LIBRARY_PATH"), b":");
        command.env("LD_LIBRARY_PATH", search);
        for (variable, name) in CACHES {
            if env::var_os(variable).is_none_or(|v| v.is_empty()) {
                command.env(variable, folder.path().join("cache").join(name));
            }
        }
    }
    if !preload.is_empty() {
        for library in &preload {
            loadable(library)?;
        }
        command.env("LD_PRELOAD", preloaded(&preload, env::var_os("LD_PRELOAD")));
        command.env(SANITIZER.0, with_setting(env::var_os(SANITIZER.0), SANITIZER.1));
    }
    inherit(&mut command);
    let error = command.exec();
    Err(Failure::new(format!("cannot run '{}': {error}", path.display())))
}

/// Does the user want nothing printed but errors?
fn quiet() -> bool {
    env::var_os(QUIET.variable).is_some_and(|v| v == Quiet::Yes.name())
}

/// What to say of variables that look like ours and are read by nobody.
pub(crate) fn misspelt() -> impl Iterator<Item = String> {
    env::vars_os().filter_map(|(name, _)| remark(&name.to_string_lossy()))
}

/// Where NVTX looks for the library that wants to know of ranges.
const NVTX: &str = "NVTX_INJECTION64_PATH";

/// New paths before those that were there, each once.
fn list(
    new: impl IntoIterator<Item = PathBuf>,
    old: Option<OsString>,
    separators: &[u8],
) -> OsString {
    let mut all: Vec<OsString> = new.into_iter().map(PathBuf::into_os_string).collect();
    let old = old.unwrap_or_default();
    for part in old.as_bytes().split(|b| separators.contains(b)) {
        let part = OsStr::from_bytes(part);
        if !part.is_empty() && !all.iter().any(|a| a == part) {
            all.push(part.to_owned());
        }
    }
    all.join(OsStr::new(":"))
}

/// The runtime of `AddressSanitizer` ends a program in which it isn't the first library, unless it
/// must not look. A program that needs the runtime has it loaded behind what is preloaded.
const SANITIZER: (&str, &str) = ("ASAN_OPTIONS", "verify_asan_link_order=0");

/// A setting in front of those that were there, which win.
fn with_setting(old: Option<OsString>, setting: &str) -> OsString {
    let mut all = OsString::from(setting);
    if let Some(old) = old.filter(|old| !old.is_empty()) {
        all.push(":");
        all.push(old);
    }
    all
}

/// The runtimes of compilers' sanitizers, which replace functions of the C library
/// and must come before everybody else.
pub(crate) fn is_sanitizer(path: &[u8]) -> bool {
    let file = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
    ["asan", "tsan", "lsan", "msan", "hwasan", "ubsan"].iter().any(|name| {
        [format!("lib{name}."), format!("libclang_rt.{name}")]
            .iter()
            .any(|start| file.starts_with(start.as_bytes()))
    })
}

/// The value of `LD_PRELOAD`: sanitizers that the user preloads, then ours, then what else was
/// there. The loader takes blanks for separators too.
fn preloaded(ours: &[PathBuf], old: Option<OsString>) -> OsString {
    let old = old.unwrap_or_default();
    let parts = old.as_bytes().split(|b| b": ".contains(b));
    let (first, others): (Vec<_>, Vec<_>) = parts.partition(|part| is_sanitizer(part));
    let path = |part: &&[u8]| PathBuf::from(OsStr::from_bytes(part));
    let new = first.iter().map(path).chain(ours.iter().map(|library| only_for_glibc(library)));
    list(new, Some(OsStr::from_bytes(&others.join(&b':')).to_owned()), b":")
}

/// The same file by a path that glibc's loader alone can read. A program that this one starts
/// may have another C library: musl's loader would load ours, miss glibc under it and give up. A
/// file that it can't find it passes over. glibc puts the program's folder in the place of
/// `$ORIGIN`; from there it goes up to the root.
fn only_for_glibc(library: &Path) -> PathBuf {
    /// Folders are not deeper; there is nothing above the root.
    const UP: usize = 24;
    let mut path = PathBuf::from("$ORIGIN");
    path.extend([".."; UP]);
    path.push(library.strip_prefix("/").unwrap_or(library));
    path
}

/// The path of the file that such a one leads to; any other path as it is.
pub(crate) fn as_it_is(preloaded: &Path) -> PathBuf {
    let Ok(rest) = preloaded.strip_prefix("$ORIGIN/..") else { return preloaded.to_owned() };
    let below = rest.components().skip_while(|part| *part == Component::ParentDir);
    Path::new("/").join(below.collect::<PathBuf>())
}

/// `LD_PRELOAD` has no way to write a path with its separators in it.
fn loadable(library: &Path) -> Result<(), Failure> {
    if library.as_os_str().as_bytes().iter().any(|b| b": \t".contains(b)) {
        return Err(Failure::new(format!(
            "'{}' cannot be preloaded, its path has a blank or a colon: move it (or set TMPDIR) to a path without",
            library.display()
        )));
    }
    Ok(())
}

/// A library of ours is beside this program, or where an installation puts libraries.
pub(crate) fn find_library(name: &str, otherwise: &str) -> Result<PathBuf, Failure> {
    let me = env::current_exe()
        .and_then(fs::canonicalize)
        .map_err(|e| Failure::new(format!("cannot tell where memtrace is installed: {e}")))?;
    let here = me.parent().unwrap_or(Path::new("/"));
    let mut places = vec![here.to_owned(), here.join("../lib"), here.join("../lib/memtrace")];
    places.extend(packages(here));
    let found = places.iter().filter_map(|place| fs::canonicalize(place.join(name)).ok());
    found.into_iter().find(|p| p.is_file()).ok_or_else(|| {
        Failure::new(format!(
            "{name} is neither in {} nor in ../lib or ../lib/memtrace from there: install memtrace with its \
             libraries, or build them (cargo build --release --workspace); {otherwise}",
            here.display()
        ))
    })
}

/// Where pip puts the libraries of the wheel whose command this is: an environment, and `--target`.
fn packages(here: &Path) -> impl Iterator<Item = PathBuf> {
    let lib = fs::read_dir(here.join("../lib")).into_iter().flatten().flatten();
    let pythons = lib.filter(|e| e.file_name().as_bytes().starts_with(b"python3"));
    let sites = pythons.map(|e| e.path().join("site-packages"));
    sites.chain([here.join("..")]).map(|site| site.join("memtrace/lib"))
}

/// The folder for snapshots: absolute, there, and writable.
pub(crate) fn out_folder(asked: Option<&Path>) -> Result<PathBuf, Failure> {
    let from_env = || env::var_os(OUT.variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    let out = asked.map(Path::to_owned).or_else(from_env).unwrap_or_else(|| PathBuf::from("."));
    let fail = |e: std::io::Error| {
        Failure::new(format!(
            "cannot write snapshots into {}: {e}; name another folder with --out DIR",
            out.display()
        ))
    };
    fs::create_dir_all(&out).map_err(fail)?;
    let out = fs::canonicalize(&out).map_err(fail)?;
    // Permissions, a full disk and a read-only file system all show only when somebody writes.
    NewFile::within(&out, Readers::Owner)
        .and_then(|new| new.file().write_all(b"memtrace"))
        .map_err(fail)?;
    Ok(out)
}

/// Where the processes of a run say what they hold of its virtual cards. The name can't be guessed,
/// and the file is in memory if there is a folder for that. The first process that needs it makes
/// the file, and the last one takes it away.
fn cards_of_run() -> PathBuf {
    let random = || RandomState::new().hash_one(std::process::id());
    let name = format!("memtrace-cards1-{}-{:016x}{:016x}", std::process::id(), random(), random());
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.join(name) } else { env::temp_dir().join(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_preloaded_stays_and_nothing_comes_twice() {
        let new = || ["/m/a.so", "/m/b.so"].map(PathBuf::from);
        assert_eq!(list(new(), None, b": "), "/m/a.so:/m/b.so");
        assert_eq!(list(new(), Some("".into()), b": "), "/m/a.so:/m/b.so");
        let old = "/x.so /m/a.so:/y.so:".into();
        assert_eq!(list(new(), Some(old), b": "), "/m/a.so:/m/b.so:/x.so:/y.so");
        assert_eq!(
            list(new(), Some("/with blank:/c".into()), b":"),
            "/m/a.so:/m/b.so:/with blank:/c"
        );
    }

    #[test]
    fn sanitizers_stay_first_and_ours_are_for_glibc_alone() {
        let ours = || vec![PathBuf::from("/m/a.so")];
        let up = format!("$ORIGIN{}/m/a.so", "/..".repeat(24));
        assert_eq!(as_it_is(Path::new(&up)), Path::new("/m/a.so"));
        for other in ["/m/a.so", "$ORIGIN/a.so", "../a.so"] {
            assert_eq!(as_it_is(Path::new(other)), Path::new(other));
        }
        assert_eq!(preloaded(&ours(), None), up.as_str());
        let old = "/x.so /usr/lib/libasan.so.8:/y/libclang_rt.tsan-x86_64.so".into();
        let expected = format!("/usr/lib/libasan.so.8:/y/libclang_rt.tsan-x86_64.so:{up}:/x.so");
        assert_eq!(preloaded(&ours(), Some(old)), expected.as_str());
        assert_eq!(with_setting(None, "a=0"), "a=0");
        assert_eq!(with_setting(Some("a=1".into()), "a=0"), "a=0:a=1");
    }

    #[test]
    fn paths_that_the_loader_would_split_are_refused() {
        assert_eq!(loadable(Path::new("/usr/lib/libmemtrace.so")), Ok(()));
        for bad in ["/my files/libmemtrace.so", "/a:b/libmemtrace.so"] {
            assert!(loadable(Path::new(bad)).expect_err("refused").to_string().contains("move it"));
        }
    }
}

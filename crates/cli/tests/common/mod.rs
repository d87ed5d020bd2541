//! An installation of memtrace in a folder of its own, with libraries that do nothing.

// Each test binary takes what it needs.
#![allow(dead_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// The program under test, where cargo built it.
pub fn memtrace() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
    command.current_dir(data()).env_remove("COLUMNS");
    command
}

/// The snapshots of the repository.
pub fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
}

/// `bin/memtrace`, its libraries beside it or in `lib`, `tmp` for
/// temporary files, `work` to run in.
pub struct Installation {
    root: TempDir,
}

impl Installation {
    pub fn new(libraries: &str) -> Installation {
        let root = TempDir::with_prefix("memtrace-test-").expect("a temporary folder");
        let here = Installation { root };
        for folder in ["bin", "tmp", "work", libraries] {
            fs::create_dir_all(here.path(folder)).expect("made");
        }
        fs::copy(env!("CARGO_BIN_EXE_memtrace"), here.path("bin/memtrace")).expect("copied");
        // What a linker of Rust's needs anyway.
        for (name, soname, function) in [
            ("libmemtrace.so", "libmemtrace.so", "memtrace_dump"),
            ("libmemtrace_virtual.so", "libcuda.so.1", "cudaMalloc"),
        ] {
            let source = here.path("work/library.c");
            fs::write(&source, format!("int {function}(void) {{ return 42; }}")).expect("written");
            let built = Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(here.path(libraries).join(name))
                .arg(format!("-Wl,-soname,{soname}"))
                .arg(&source)
                .status();
            assert!(built.expect("these tests need cc in PATH").success());
            fs::remove_file(source).expect("removed");
        }
        here
    }

    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.path().canonicalize().expect("there").join(relative)
    }

    /// `memtrace` with an environment of its own.
    pub fn memtrace(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/memtrace"));
        command
            .args(args)
            .current_dir(self.path("work"))
            .env_remove("LD_PRELOAD")
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("MEMTRACE_OUT")
            .env_remove("XDG_RUNTIME_DIR")
            .env("TMPDIR", self.path("tmp"));
        command
    }

    /// Runs `memtrace` and expects it to succeed; returns what it printed.
    #[track_caller]
    pub fn prints(&self, args: &[&str]) -> String {
        ok(&self.memtrace(args).output().expect("started"))
    }

    /// Runs `memtrace` and expects exit code 2 and one line on standard error; returns the line.
    #[track_caller]
    pub fn refuses(&self, args: &[&str]) -> String {
        refused(&self.memtrace(args).output().expect("started"))
    }

    /// An executable file in the folder it runs in.
    pub fn program(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path("work").join(name);
        fs::write(&path, bytes).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("set");
        path
    }
}

/// Standard error, but for what killed processes of others have left on
/// this machine, which any run mentions.
fn stderr_of(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let is_mine =
        |line: &&str| !(line.contains(" black box") && line.trim_end().ends_with("lists them"));
    text.split_inclusive('\n').filter(is_mine).collect()
}

#[track_caller]
pub fn ok(output: &Output) -> String {
    let stderr = stderr_of(output);
    assert!(output.status.success(), "{:?}: {stderr}", output.status);
    assert_eq!(stderr, "", "trouble where none is expected");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
pub fn refused(output: &Output) -> String {
    let stderr = stderr_of(output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr.trim_end().strip_prefix("memtrace: ").expect("says who speaks").to_owned()
}

/// The files that an `LD_PRELOAD` means: memtrace's own are named from
/// `$ORIGIN` up to the root and down again.
pub fn preloaded(env: &str) -> Vec<PathBuf> {
    let entries = var(env, "LD_PRELOAD").expect("set").split(':');
    let meant = |entry: &str| match entry.strip_prefix("$ORIGIN") {
        Some(up) => PathBuf::from(up.trim_start_matches("/..")),
        None => PathBuf::from(entry),
    };
    entries.map(meant).collect()
}

/// The value of a variable in the output of `env`.
pub fn var<'a>(env: &'a str, name: &str) -> Option<&'a str> {
    env.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('='))
}

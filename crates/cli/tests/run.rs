//! `memtrace run`: what the program finds, that it is the program that
//! runs, and each thing that can't be.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;

use common::{Installation, ok, preloaded, refused, var};

#[test]
fn the_program_finds_the_recorder_and_its_settings() {
    let here = Installation::new("bin");
    let env = here.prints(&["run", "--", "env"]);
    assert_eq!(preloaded(&env), [here.path("bin/libmemtrace.so")]);
    assert_eq!(var(&env, "MEMTRACE_OUT"), here.path("work").to_str());
    assert!(var(&env, "MEMTRACE_RUN_PID").is_some());
    for unset in ["MEMTRACE_STACKS", "MEMTRACE_FORMAT", "MEMTRACE_VIRTUAL", "LD_LIBRARY_PATH"] {
        assert_eq!(var(&env, unset), None, "{unset}");
    }

    let env = here
        .prints(&["run", "--out", "a/b", "--stacks", "python", "--format", "json", "--", "env"]);
    assert_eq!(var(&env, "MEMTRACE_OUT"), here.path("work/a/b").to_str());
    assert_eq!(var(&env, "MEMTRACE_STACKS"), Some("python"));
    assert_eq!(var(&env, "MEMTRACE_FORMAT"), Some("json"));
    assert_eq!(fs::read_dir(here.path("work/a/b")).expect("made").count(), 0, "nothing is left");

    let env = ok(&here.memtrace(&["run", "env"]).env("MEMTRACE_OUT", "c").output().expect("run"));
    assert_eq!(var(&env, "MEMTRACE_OUT"), here.path("work/c").to_str());
}

#[test]
fn an_option_sets_its_variable() {
    let here = Installation::new("bin");
    let env = here.prints(&[
        "run",
        "--permissions",
        "umask",
        "--format",
        "json",
        "--expand",
        "--stacks",
        "none",
        "--",
        "env",
    ]);
    assert_eq!(var(&env, "MEMTRACE_PERMISSIONS"), Some("umask"));
    assert_eq!(var(&env, "MEMTRACE_FORMAT"), Some("json-expanded"));
    assert_eq!(var(&env, "MEMTRACE_STACKS"), Some("none"));
    // The option counts where both are set.
    let mut both = here.memtrace(&["run", "--format", "json-expanded", "--", "env"]);
    let env = ok(&both.env("MEMTRACE_FORMAT", "pickle").output().expect("run"));
    assert_eq!(var(&env, "MEMTRACE_FORMAT"), Some("json-expanded"));
    let other = here.memtrace(&["run", "--stacks", "some", "--", "env"]).output().expect("run");
    assert_eq!(other.status.code(), Some(2));
}

#[test]
fn a_variable_that_nobody_reads_is_said_once() {
    let here = Installation::new("bin");
    let mut command = here.memtrace(&["run", "--", "sh", "-c", "env; env >/dev/null"]);
    command.env("MEMTRACE_STACK", "none").env("MEMTRACE_TEST_WALKS", "1");
    let output = command.output().expect("started");
    assert!(output.status.success());
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "memtrace: MEMTRACE_STACK is not known and changes nothing; did you mean MEMTRACE_STACKS?\n"
    );
}

#[test]
fn libraries_are_found_where_an_installation_has_them() {
    for place in ["lib", "lib/memtrace"] {
        let here = Installation::new(place);
        let env = here.prints(&["run", "--", "env"]);
        assert_eq!(preloaded(&env), [here.path(place).join("libmemtrace.so")]);
    }
}

#[test]
fn what_was_preloaded_stays() {
    let here = Installation::new("bin");
    let other = here.path("bin/libmemtrace_virtual.so").display().to_string();
    let mut command = here.memtrace(&["run", "--", "env"]);
    let env = ok(&command.env("LD_PRELOAD", &other).output().expect("started"));
    let first = here.path("bin/libmemtrace.so");
    assert_eq!(preloaded(&env), [first.clone(), PathBuf::from(other)]);

    // A run inside a run changes nothing.
    let twice = here.prints(&[
        "run",
        "--",
        here.path("bin/memtrace").to_str().expect("UTF-8"),
        "run",
        "env",
    ]);
    assert_eq!(preloaded(&twice), [first]);
}

#[test]
fn record_off_leaves_the_program_alone() {
    let here = Installation::new("bin");
    let env = here.prints(&["run", "--record", "off", "--out", "no", "--", "env"]);
    assert!(!env.contains("MEMTRACE_"), "{env}");
    assert_eq!(var(&env, "LD_PRELOAD"), None);
    assert!(!here.path("work/no").exists());
    let env = here.prints(&["run", "--record", "off", "--virtual", "t4", "--", "env"]);
    assert!(!var(&env, "LD_PRELOAD").expect("the virtual GPU").contains("libmemtrace.so"));
    assert_eq!(var(&env, "MEMTRACE_VIRTUAL"), Some("t4"));
}

#[test]
fn the_process_is_the_programs_own() {
    let here = Installation::new("bin");
    let code =
        |script: &str| here.memtrace(&["run", "--", "sh", "-c", script]).status().expect("started");
    assert_eq!(code("exit 0").code(), Some(0));
    assert_eq!(code("exit 1").code(), Some(1));
    assert_eq!(code("exit 127").code(), Some(127));
    assert_eq!(code("kill -9 $$").signal(), Some(9));
    assert_eq!(code("kill -SEGV $$").signal(), Some(11));

    let mut child = here
        .memtrace(&[
            "run",
            "--",
            "sh",
            "-c",
            "echo $$ $MEMTRACE_RUN_PID; grep SigIgn /proc/self/status",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let pid = child.id();
    let mut out = String::new();
    std::io::Read::read_to_string(child.stdout.as_mut().expect("piped"), &mut out).expect("text");
    assert!(child.wait().expect("ended").success());
    assert!(out.starts_with(&format!("{pid} {pid}\n")), "{out} from {pid}");
    let ignored = out.split_whitespace().last().and_then(|mask| u64::from_str_radix(mask, 16).ok());
    let sigpipe = 1 << (13 - 1);
    assert_eq!(
        ignored.map(|mask| mask & sigpipe),
        Some(0),
        "a closed pipe must end the program: {out}"
    );
}

#[test]
fn arguments_pass_through() {
    let here = Installation::new("bin");
    let print = |args: &[&str]| here.prints(&[&["run"], args].concat());
    assert_eq!(print(&["--", "printf", "%s|", "--out", "x y", "-h", "--"]), "--out|x y|-h|--|");
    assert_eq!(print(&["printf", "%s|", "--out", "a"]), "--out|a|");
    // Under its own name, as a shell would start it.
    assert_eq!(print(&["sh", "-c", "echo $0"]), "sh\n");
}

#[test]
fn scripts_run() {
    let here = Installation::new("bin");
    here.program("direct.sh", b"#!/bin/sh\necho direct $LD_PRELOAD\n");
    here.program("by_env", b"#!/usr/bin/env -S VAR=1 python3 -I\nprint('by env')\n");
    here.program("no_first_line", b"echo shell\n");
    assert!(here.prints(&["run", "./direct.sh"]).contains("libmemtrace.so"));
    assert_eq!(here.prints(&["run", "./by_env"]), "by env\n");
    assert_eq!(here.prints(&["run", "./no_first_line"]), "shell\n");
}

#[test]
fn a_command_that_is_not_there() {
    let here = Installation::new("bin");
    assert_eq!(
        here.refuses(&["run", "--", "no-such-program"]),
        "cannot find 'no-such-program' in PATH"
    );
    assert_eq!(here.refuses(&["run", "--", "./no/such"]), "cannot find './no/such'");
    assert_eq!(here.refuses(&["run", "--", ""]), "cannot find '' in PATH");
    let mut none = here.memtrace(&["run", "--"]);
    assert_eq!(none.output().expect("started").status.code(), Some(2));
}

/// What looks like an option of ours before the program is one that there is not; behind it,
/// or behind `--`, it is the program's.
#[test]
fn options_that_there_are_not() {
    let here = Installation::new("bin");
    for command in ["run", "doctor"] {
        let refused = here.memtrace(&[command, "--colour", "echo"]).output().expect("started");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.starts_with("error: unexpected argument '--colour' found"), "{said}");
        assert_eq!(refused.status.code(), Some(2));
    }
    let line = here.refuses(&["run", "--", "--colour"]);
    assert_eq!(line, "cannot find '--colour' in PATH");
}

#[test]
fn files_that_are_no_programs() {
    let here = Installation::new("bin");
    fs::write(here.path("work/train.py"), "print()").expect("written");
    let line = here.refuses(&["run", "--", "./train.py"]);
    assert!(line.starts_with("'./train.py' is not executable: chmod +x it"), "{line}");
    fs::write(here.path("work/$(id) x.py"), "print()").expect("written");
    let line = here.refuses(&["run", "--", "./$(id) x.py"]);
    assert!(line.ends_with("memtrace run -- python './$(id) x.py'"), "{line}");
    let line = here.refuses(&["run", "--", "./"]);
    assert_eq!(line, "'./' is a folder: name the program to run");
    here.program("lost", b"#!/no/such/python\n");
    let line = here.refuses(&["run", "--", "./lost"]);
    assert!(line.starts_with("'./lost' asks for the interpreter '/no/such/python'"), "{line}");
    here.program("env_lost", b"#!/usr/bin/env no-such-python\n");
    let line = here.refuses(&["run", "--", "./env_lost"]);
    assert!(line.starts_with("'./env_lost' asks for the interpreter 'no-such-python'"), "{line}");
    here.program("damaged", b"\x7fELF\x02\x01");
    assert!(here.refuses(&["run", "--", "./damaged"]).contains("damaged"));
}

/// The header of a program, with a loader or without.
fn elf(class: u8, machine: u16, loader: Option<&str>) -> Vec<u8> {
    let loader = loader.map(|l| [l.as_bytes(), b"\0"].concat());
    let mut bytes = [b"\x7fELF", &[class, 1, 1, 0][..], &[0; 8]].concat();
    bytes.extend([2_u16.to_le_bytes(), machine.to_le_bytes()].concat());
    bytes.extend(1_u32.to_le_bytes());
    for word in [0_u64, 64, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(0_u32.to_le_bytes());
    for half in [64, 56, u16::from(loader.is_some()), 64, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    assert_eq!(bytes.len(), 64);
    if let Some(loader) = loader {
        let size = loader.len() as u64;
        bytes.extend([3_u32.to_le_bytes(), 4_u32.to_le_bytes()].concat());
        for word in [120, 0, 0, size, size, 1] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(loader);
    }
    bytes
}

const OURS: u16 = if cfg!(target_arch = "x86_64") { 62 } else { 183 };
const RISC_V: u16 = 243;

#[test]
fn programs_that_nothing_can_be_preloaded_into() {
    let here = Installation::new("bin");
    here.program("static", &elf(2, OURS, None));
    let line = here.refuses(&["run", "--", "./static"]);
    assert!(line.starts_with("'./static' is statically linked"), "{line}");
    here.program("script", format!("#!{}\n", here.path("work/static").display()).as_bytes());
    let line = here.refuses(&["run", "--", "./script"]);
    assert!(line.contains("work/static' is statically linked"), "{line}");
    here.program("bits32", &elf(1, 3, None));
    let line = here.refuses(&["run", "--", "./bits32"]);
    assert!(line.starts_with("'./bits32' is a 32-bit program"), "{line}");
    here.program("other", &elf(2, RISC_V, Some("/lib/ld-linux-riscv64-lp64d.so.1")));
    let line = here.refuses(&["run", "--", "./other"]);
    assert!(line.starts_with("'./other' is built for RISC-V"), "{line}");
    here.program("musl", &elf(2, OURS, Some("/lib/ld-musl-x86_64.so.1")));
    let line = here.refuses(&["run", "--", "./musl"]);
    assert!(line.starts_with("'./musl' uses musl's C library"), "{line}");
    // With nothing to preload there is nothing to refuse.
    here.program("static_shell", format!("#!{}\n", here.path("work/static").display()).as_bytes());
    let output = here.memtrace(&["run", "--record", "off", "--", "./static_shell"]).output();
    let stderr = String::from_utf8_lossy(&output.expect("started").stderr).into_owned();
    assert!(!stderr.contains("statically linked"), "{stderr}");
}

#[test]
fn a_setuid_program_of_somebody_else() {
    let here = Installation::new("bin");
    // Only root can make one; everybody else has the system's.
    let mine = fs::metadata(here.path("work")).expect("there").uid();
    let program = if mine == 0 {
        let path = here.program("raised", &elf(2, OURS, Some("/lib64/ld-linux-x86-64.so.2")));
        std::os::unix::fs::chown(&path, Some(12345), None).expect("root may");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).expect("set");
        path
    } else {
        ["/usr/bin/su", "/bin/su", "/usr/bin/passwd"]
            .into_iter()
            .map(Into::into)
            .find(|p: &PathBuf| p.exists())
            .expect("a system has a setuid program")
    };
    let line = here.refuses(&["run", "--", program.to_str().expect("UTF-8")]);
    assert!(line.contains("is setuid or setgid"), "{line}");
}

#[test]
fn an_output_folder_that_can_not_be_written() {
    let here = Installation::new("bin");
    fs::write(here.path("work/file"), "").expect("written");
    for out in ["file", "file/below", "/proc/nowhere"] {
        let line = here.refuses(&["run", "--out", out, "--", "true"]);
        assert!(line.starts_with(&format!("cannot write snapshots into {out}: ")), "{line}");
        assert!(line.ends_with("name another folder with --out DIR"), "{line}");
    }
}

#[test]
fn gpus_that_there_are_not() {
    let here = Installation::new("bin");
    let line = here.refuses(&["run", "--virtual", "h1000", "--", "true"]);
    assert!(line.starts_with("--virtual: no GPU is called `h1000`"), "{line}");
    for name in ["h100", "a100-40", "t4", "rtx4090", "b200", "v100-16", "l40s", "h200"] {
        assert!(line.contains(name), "{name} in {line}");
    }
    for spec in
        ["", "h100*0", "h100*99", "sm_90,0GiB,132SM", "sm_90,80000TiB,132SM", "sm_9,8GiB,1SM"]
    {
        let line = here.refuses(&["run", "--virtual", spec, "--", "true"]);
        assert!(line.starts_with("--virtual: "), "{line}");
    }
}

#[test]
fn libraries_that_are_missing() {
    let here = Installation::new("bin");
    fs::remove_file(here.path("bin/libmemtrace_virtual.so")).expect("removed");
    let line = here.refuses(&["run", "--virtual", "h100", "--", "true"]);
    assert!(line.starts_with("libmemtrace_virtual.so is neither in "), "{line}");
    fs::remove_file(here.path("bin/libmemtrace.so")).expect("removed");
    let line = here.refuses(&["run", "--", "true"]);
    assert!(
        line.starts_with("libmemtrace.so is neither in ") && line.contains("cargo build"),
        "{line}"
    );
    assert_eq!(here.prints(&["run", "--record", "off", "--", "echo", "yes"]), "yes\n");
}

#[test]
fn values_that_are_not_choices() {
    let here = Installation::new("bin");
    for args in [["--stacks", "some"], ["--format", "xml"], ["--record", "maybe"]] {
        let output = here.memtrace(&[&["run"], &args[..], &["--", "true"]].concat()).output();
        let output = output.expect("started");
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(args[1]));
    }
    assert!(
        refused(&here.memtrace(&["summary", "nothing.pickle"]).output().expect("run"))
            .contains("nothing.pickle")
    );
}

//! What is done on all processors comes out as on one: order, names, words.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use common::memtrace;
use memtrace_format::made::{Made, black_box};
use memtrace_format::snapshot::Snapshot;
use tempfile::TempDir;

/// Has a program see a single processor.
fn on_one_processor(command: &mut Command) -> &mut Command {
    let pin = || {
        // SAFETY: plain system calls on a record of ours.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::sched_getaffinity(0, size_of_val(&set), &raw mut set);
            let first = (0..libc::CPU_SETSIZE as usize).find(|n| libc::CPU_ISSET(*n, &set));
            libc::CPU_ZERO(&mut set);
            libc::CPU_SET(first.unwrap_or(0), &mut set);
            libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
        }
        Ok(())
    };
    // SAFETY: `pin` makes system calls only.
    unsafe { command.pre_exec(pin) }
}

/// Exit code, standard output and standard error, without where it was.
fn said(output: &Output, folder: &Path) -> (Option<i32>, String, String) {
    let text =
        |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(&*folder.to_string_lossy(), "HERE");
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

const BOXES: usize = 40;

/// A folder of black boxes that all want the same name for their snapshots,
/// some of them damaged, and one a link.
fn boxes() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let of_nobody = tempfile::tempdir_in(folder.path()).expect("a folder").keep();
    for n in 0..BOXES {
        let about = format!(r#"{{"pid": 7, "command": ["job", "{n}"]}}"#);
        // The first ones take longest.
        let stacks = Made::of_words(if n < 3 { 1 << 15 } else { 1 << 8 });
        let words = black_box(&[], &[], &stacks, &about);
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if n % 7 == 4 {
            bytes.truncate(100);
        }
        let name = format!("memtrace-h-7-{n:02}.blackbox");
        let path = folder.path().join(&name);
        if n == 9 {
            fs::write(of_nobody.join(&name), bytes).expect("written");
            std::os::unix::fs::symlink(of_nobody.join(&name), path).expect("linked");
        } else {
            fs::write(path, bytes).expect("written");
        }
    }
    folder
}

/// What each snapshot in a folder is of, by its number.
fn commands(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let name = entry.file_name().into_string().expect("UTF-8");
        if name.ends_with(".pickle") {
            let bytes = fs::read(entry.path()).expect("there");
            let snapshot = Snapshot::read(&bytes).expect("sound");
            let command = snapshot.memtrace.and_then(|about| about.command).expect("the key");
            found.push((name, command[1].clone()));
        }
    }
    found.sort();
    found
}

#[test]
fn recovered_snapshots_have_the_same_names_in_the_same_order() {
    let recovered = |one_processor: bool, named: bool| {
        let folder = boxes();
        let mut command = memtrace();
        command.current_dir(folder.path()).arg("recover");
        if named {
            let names = fs::read_dir(folder.path()).expect("a folder").flatten();
            let mut names: Vec<_> = names.map(|e| e.path()).filter(|p| !p.is_dir()).collect();
            names.sort();
            // One comes twice, one not at all.
            names.extend([names[1].clone(), folder.path().join("none.blackbox")]);
            command.args(names);
        } else {
            command.arg(folder.path());
        }
        if one_processor {
            on_one_processor(&mut command);
        }
        let said = said(&command.output().expect("started"), folder.path());
        (said, commands(folder.path()))
    };
    for named in [false, true] {
        let one = recovered(true, named);
        let ((code, out, err), commands) = &one;
        assert_eq!(*code, Some(1), "{err}");
        let numbers: Vec<usize> = commands.iter().map(|(_, n)| n.parse().expect("n")).collect();
        assert_eq!(numbers.len(), BOXES - 6, "{numbers:?}");
        assert_eq!(out.lines().count(), numbers.len());
        assert_eq!(err.lines().count(), 6 + 2 * usize::from(named), "{err}");
        for (n, line) in out.lines().enumerate() {
            assert!(line.ends_with(&format!("memtrace-unknown-7-{n}.pickle")), "{line}");
        }
        for _ in 0..3 {
            assert_eq!(recovered(false, named), one);
        }
    }
}

#[test]
fn what_tune_tries_comes_in_the_same_order() {
    let tune = |one_processor: bool| {
        let mut command = memtrace();
        command.args(["tune", "--json", "snapshots/finetune_torch21.pickle.gz"]);
        if one_processor {
            on_one_processor(&mut command);
        }
        let output = command.output().expect("started");
        assert!(!output.stdout.is_empty(), "{output:?}");
        said(&output, Path::new("/none"))
    };
    assert_eq!(tune(false), tune(true));
}

/// What is recovered makes room for what comes behind it, also where several are written at a time.
#[test]
fn a_full_disk_takes_as_many_as_on_one_processor() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut bytes, mut pages) = (Vec::new(), 0);
    for n in 0..24 {
        // A snapshot takes nearly what its black box does, and there is room for one and a half.
        let about = format!(r#"{{"pid": 7, "command": ["job", "{}"]}}"#, "x".repeat(300_000));
        let words = black_box(&[], &[], &Made::of_words(1 << 8), &about);
        bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        fs::write(folder.path().join(format!("memtrace-h-7-{n:02}.blackbox")), &bytes)
            .expect("written");
        pages += bytes.len().div_ceil(4096);
    }
    fs::create_dir(folder.path().join("small")).expect("made");
    let size = pages * 4096 + bytes.len() * 3 / 2;
    let script = format!(
        "mount -t tmpfs -o size={size} tmpfs small && cp *.blackbox small || exit 77\n\
         \"$0\" recover small && ls small"
    );
    let output = Command::new("unshare")
        .args(["-m", "bash", "-c", &script])
        .arg(memtrace().get_program())
        .current_dir(folder.path())
        .output();
    let (code, out, err) = match output {
        Ok(output)
            if !matches!(output.status.code(), Some(1 | 77))
                || output.stderr.starts_with(b"memtrace") =>
        {
            said(&output, folder.path())
        }
        _ => return, // no mount namespaces without root
    };
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(!out.contains(".blackbox"), "{out}");
    assert_eq!(out.matches(".pickle").count(), 48, "{out}");
}

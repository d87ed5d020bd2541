//! The stand-ins for NVIDIA's libraries: the loader takes them, and a look-up in one of them ends
//! in the virtual GPU. The virtual GPU here is a library with one function.

// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use common::{Installation, ok, var};
use memtrace_cli::stand_ins::names;

fn folder(here: &Installation) -> PathBuf {
    let env = here.prints(&["run", "--virtual", "h100*2,lazy", "--", "env"]);
    assert_eq!(var(&env, "MEMTRACE_VIRTUAL"), Some("h100*2,lazy"));
    PathBuf::from(var(&env, "LD_LIBRARY_PATH").expect("set"))
}

#[test]
fn what_a_virtual_card_teaches_is_kept_from_real_ones() {
    let here = Installation::new("bin");
    let caches = ["PYTORCH_KERNEL_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"];
    let mut command = here.memtrace(&["run", "--virtual", "h100", "--", "env"]);
    let env = ok(&command.env(caches[1], "/mine").output().expect("started"));
    let folder = PathBuf::from(var(&env, "LD_LIBRARY_PATH").expect("set"));
    for cache in [caches[0], caches[2]] {
        assert!(PathBuf::from(var(&env, cache).expect("set")).starts_with(&folder), "{cache}");
    }
    assert_eq!(var(&env, caches[1]), Some("/mine"));
    let env = here.prints(&["run", "--", "env"]);
    assert!(caches.iter().all(|c| var(&env, c).is_none()), "a real card keeps its own");
}

#[test]
fn every_library_is_preloaded_and_searched() {
    let here = Installation::new("bin");
    let mut command = here.memtrace(&["run", "--virtual", "h100", "--", "env"]);
    let env = ok(&command.env("LD_LIBRARY_PATH", "/opt/x").output().expect("started"));
    let (folder, rest) =
        var(&env, "LD_LIBRARY_PATH").and_then(|v| v.split_once(':')).expect("two folders");
    assert_eq!(rest, "/opt/x");
    let mut expected =
        vec![here.path("bin/libmemtrace.so"), PathBuf::from(folder).join("libcuda.so.1")];
    expected.extend(names().map(|name| PathBuf::from(folder).join(name)));
    assert_eq!(common::preloaded(&env), expected);
    let target = fs::canonicalize(PathBuf::from(folder).join("libcuda.so")).expect("a link");
    assert_eq!(target, here.path("bin/libmemtrace_virtual.so"));
    let mode = fs::metadata(folder).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_look_up_in_a_stand_in_finds_the_virtual_gpu() {
    let here = Installation::new("bin");
    let program = format!(
        "import ctypes\n\
         for name in {:?} + ['libcuda.so', 'libcuda.so.1']:\n\
         \x20   assert ctypes.CDLL(name).cudaMalloc() == 42, name\n\
         assert ctypes.CDLL(None).cudaMalloc() == 42\n\
         copies = {{line.split()[-1] for line in open('/proc/self/maps') if 'libmemtrace_virtual' in line}}\n\
         print(len(copies))\n",
        names().collect::<Vec<_>>()
    );
    assert_eq!(here.prints(&["run", "--virtual", "h100", "--", "python3", "-c", &program]), "1\n");
}

#[test]
fn a_folder_is_used_again_and_repaired() {
    let here = Installation::new("bin");
    let first = folder(&here);
    let stamp =
        |name: &str| fs::metadata(first.join(name)).expect("there").modified().expect("a time");
    let before = stamp("libnccl.so.2");
    fs::remove_file(first.join("libcudart.so.13")).expect("removed");
    fs::remove_file(first.join("libcuda.so.1")).expect("removed");
    assert_eq!(folder(&here), first);
    assert_eq!(stamp("libnccl.so.2"), before);
    assert!(first.join("libcudart.so.13").is_file());
    assert!(first.join("libcuda.so.1").is_file());

    // Another build of the virtual GPU is another folder.
    let library = here.path("bin/libmemtrace_virtual.so");
    let bytes = fs::read(&library).expect("read");
    fs::remove_file(&library).expect("removed");
    fs::write(&library, [bytes, vec![0]].concat()).expect("written");
    assert_ne!(folder(&here), first);
}

#[test]
fn many_runs_at_once() {
    let here = Installation::new("bin");
    let runs: Vec<Child> = (0..8)
        .map(|_| {
            here.memtrace(&["run", "--virtual", "t4", "--", "true"])
                .stderr(Stdio::piped())
                .spawn()
                .expect("started")
        })
        .collect();
    for run in runs {
        let output = run.wait_with_output().expect("ended");
        assert_eq!(ok(&output), "");
    }
    let folder = folder(&here);
    let left = fs::read_dir(&folder).expect("there").count();
    assert_eq!(left, names().count() + 2, "nothing unfinished is left");
    assert_eq!(fs::read_dir(here.path("tmp")).expect("there").count(), 1);
}

#[test]
fn a_folder_that_others_can_change_is_not_trusted() {
    let here = Installation::new("bin");
    let folder = folder(&here);
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("set");
    let line = here.refuses(&["run", "--virtual", "h100", "--", "true"]);
    assert!(line.contains("is not a folder that only you can change: remove it"), "{line}");

    fs::remove_dir_all(&folder).expect("removed");
    let elsewhere = here.path("work/elsewhere");
    fs::create_dir(&elsewhere).expect("made");
    std::os::unix::fs::symlink(&elsewhere, &folder).expect("linked");
    let line = here.refuses(&["run", "--virtual", "h100", "--", "true"]);
    assert!(line.contains("is not a folder that only you can change"), "{line}");
    assert_eq!(fs::read_dir(&elsewhere).expect("there").count(), 0);
}

#[test]
fn what_stands_at_a_name_is_replaced_and_not_followed() {
    let here = Installation::new("bin");
    let folder = folder(&here);
    let mut paths = names().map(|name| folder.join(name));
    let mut next = || paths.next().expect("three names");
    let (link, dangling, fifo) = (next(), next(), next());
    for path in [&link, &dangling, &fifo] {
        fs::remove_file(path).expect("there");
    }
    let victim = here.path("work/victim");
    fs::write(&victim, "precious").expect("written");
    std::os::unix::fs::symlink(&victim, &link).expect("linked");
    std::os::unix::fs::symlink(here.path("work/nothing"), &dangling).expect("linked");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("run").success());
    ok(&here.memtrace(&["run", "--virtual", "h100", "--", "true"]).output().expect("run"));
    for path in [&link, &dangling, &fifo] {
        let found = fs::symlink_metadata(path).expect("there");
        assert!(
            found.is_file() && found.permissions().mode() & 0o777 == 0o600,
            "{}",
            path.display()
        );
    }
    assert_eq!(fs::read_to_string(&victim).expect("there"), "precious");
    assert!(!here.path("work/nothing").exists());

    fs::remove_file(&link).expect("there");
    fs::create_dir(&link).expect("made");
    let said = here.refuses(&["run", "--virtual", "h100", "--", "true"]);
    assert!(said.contains("not a plain file"), "{said}");
}

#[test]
fn a_place_that_can_not_be_written_or_preloaded_from() {
    let here = Installation::new("bin");
    let run = |tmp: &str| {
        let mut command = here.memtrace(&["run", "--virtual", "h100", "--", "true"]);
        common::refused(&command.env("TMPDIR", tmp).output().expect("started"))
    };
    assert!(run("/proc/nowhere").contains("set TMPDIR"), "{}", run("/proc/nowhere"));
    let blank = here.path("my files");
    fs::create_dir(&blank).expect("made");
    let line = run(blank.to_str().expect("UTF-8"));
    assert!(line.contains("its path has a blank or a colon"), "{line}");
}

#[test]
fn the_sessions_own_folder_is_preferred() {
    let here = Installation::new("bin");
    let session = here.path("session");
    fs::create_dir(&session).expect("made");
    let mut command = here.memtrace(&["run", "--virtual", "h100", "--", "env"]);
    let env = ok(&command.env("XDG_RUNTIME_DIR", &session).output().expect("started"));
    assert!(
        var(&env, "LD_LIBRARY_PATH").expect("set").starts_with(session.to_str().expect("UTF-8"))
    );
}

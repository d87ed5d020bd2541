use std::io::Write;
use std::os::unix::fs::symlink;
use std::process::Command;

use super::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("readable").flatten();
    let mut names: Vec<String> =
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn new(folder: &Path, text: &str) -> NewFile {
    let new = NewFile::within(folder, Readers::Owner).expect("made");
    new.file().write_all(text.as_bytes()).expect("written");
    new
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("there").permissions().mode() & 0o777
}

#[test]
fn a_file_takes_the_first_free_name_and_writes_through_nothing() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("0"), "old").expect("written");
    symlink(at("victim"), at("1")).expect("linked");
    fs::create_dir(at("2")).expect("made");
    let (name, _) =
        new(folder.path(), "new").place((0..9).map(|n| at(&n.to_string()))).expect("placed");
    assert_eq!(name, at("3"));
    assert_eq!(fs::read_to_string(at("0")).expect("there"), "old");
    assert_eq!(fs::read_to_string(at("3")).expect("there"), "new");
    assert_eq!(names(folder.path()), ["0", "1", "2", "3"], "nothing is left, no link was followed");
    assert_eq!(mode(&at("3")), 0o600);
    let taken = new(folder.path(), "").place([at("0"), at("1")]).expect_err("taken");
    assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(names(folder.path()), ["0", "1", "2", "3"]);
}

#[test]
fn a_named_file_is_replaced_whole_and_keeps_its_permissions() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "old").expect("written");
    fs::set_permissions(at("file"), Permissions::from_mode(0o640)).expect("set");
    new(folder.path(), "new").replace(&at("file")).expect("replaced");
    assert_eq!(
        (fs::read_to_string(at("file")).expect("there").as_str(), mode(&at("file"))),
        ("new", 0o640)
    );
    symlink(at("file"), at("link")).expect("linked");
    new(folder.path(), "newer").replace(&at("link")).expect("replaced");
    assert_eq!(fs::read_to_string(at("file")).expect("there"), "new", "a link is not followed");
    assert_eq!(fs::read_to_string(at("link")).expect("there"), "newer");
}

#[test]
fn what_is_no_file_is_not_replaced() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).expect("made");
    symlink("/dev/null", at("device")).expect("linked");
    symlink("/proc/self/fd/1", at("descriptor")).expect("linked");
    assert!(Command::new("mkfifo").arg(at("fifo")).status().expect("run").success());
    for name in ["folder", "device", "descriptor", "fifo"] {
        let why = new(folder.path(), "").replace(&at(name)).expect_err(name).to_string();
        assert!(why.contains("not a plain file"), "{name}: {why}");
    }
    assert_eq!(names(folder.path()), ["descriptor", "device", "fifo", "folder"]);
}

#[test]
fn traps_are_recognised_and_nobody_waits() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "text").expect("written");
    symlink(at("file"), at("link")).expect("linked");
    fs::create_dir(at("folder")).expect("made");
    assert!(Command::new("mkfifo").arg(at("fifo")).status().expect("run").success());
    assert!(open(&at("file")).is_ok());
    for (name, what) in [("link", "a link"), ("folder", "a folder"), ("fifo", "a FIFO")] {
        let why = open(&at(name)).expect_err(name).to_string();
        assert!(why.contains(what), "{name}: {why}");
    }
    let why = open(Path::new("/dev/null")).expect_err("a device").to_string();
    assert!(why.contains("a device"), "{why}");
    for name in ["link", "folder", "fifo"] {
        append(&at(name)).expect_err(name);
    }
    for line in ["a\n", "b\n"] {
        append(&at("list")).expect("opened").write_all(line.as_bytes()).expect("written");
    }
    assert_eq!(fs::read_to_string(at("list")).expect("there"), "a\nb\n");
    assert_eq!(mode(&at("list")), 0o600);
}

#[test]
fn only_what_nobody_finishes_is_cleared() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let mine = new(folder.path(), "half");
    for name in [".memtrace-abandoned.part", "other.part", ".memtrace-x.run"] {
        fs::write(at(name), "half").expect("written");
    }
    symlink(at("other.part"), at(".memtrace-link.part")).expect("linked");
    assert!(Command::new("mkfifo").arg(at(".memtrace-fifo.part")).status().expect("run").success());
    clear_abandoned(folder.path());
    assert!(mine.path().exists(), "its writer lives");
    drop(mine);
    let left = [".memtrace-fifo.part", ".memtrace-link.part", ".memtrace-x.run", "other.part"];
    assert_eq!(names(folder.path()), left);
}

#[test]
fn readers_are_the_owner_or_those_of_the_umask() {
    let folder = folder();
    let made = NewFile::within(folder.path(), Readers::Umask).expect("made");
    let plain = folder.path().join("plain");
    fs::write(&plain, "").expect("written");
    assert_eq!(mode(made.path()), mode(&plain));
}

#[test]
fn another_file_of_the_same_name_is_not_removed() {
    let folder = folder();
    let (path, other) = (folder.path().join("a"), folder.path().join("b"));
    fs::write(&path, "").expect("written");
    let opened = open(&path).expect("opened");
    fs::write(&other, "").expect("written");
    fs::rename(&other, &path).expect("renamed");
    remove(&path, &opened).expect_err("another file");
    assert!(path.exists());
}

/// A program that has closed its standard input, output or error must not
/// find a file of ours there.
#[test]
fn files_have_numbers_that_no_program_uses() {
    use std::os::fd::AsRawFd;
    let folder = folder();
    let path = folder.path().join("file");
    let new = NewFile::within(folder.path(), Readers::Owner).expect("made");
    fs::write(&path, "text").expect("written");
    let files = [
        scratch(folder.path()).expect("made"),
        open(&path).expect("opened"),
        append(&path).expect("opened"),
        aside(File::open(&path).expect("opened")).expect("moved"),
    ];
    for file in files.iter().chain([new.file()]) {
        assert!(file.as_raw_fd() >= NUMBERS[0], "{file:?}");
        let flags = rustix::io::fcntl_getfd(file).expect("open");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{file:?}");
    }
    assert_eq!(read(&path).expect("read"), b"text");
}

//! What processes leave behind when they are killed: the list of a run, and files that nobody
//! finishes. Both are cleared by the next `memtrace run` or `memtrace recover`. Black boxes,
//! which are worth something, never are.
//!
//! The name of a list says which process it belongs to. It has the machine, the namespace
//! of process numbers, the number, and the time since the machine started. So the list of a
//! run that goes on somewhere else stays.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};

/// How the name of a list of this machine's begins.
fn list_prefix() -> String {
    format!(".memtrace-{}-", here())
}

/// The machine's name as the recorder writes it.
pub(crate) fn here() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim_end().replace(['/', ' '], "_")
}

/// The namespace of this process's number as the recorder writes it.
pub(crate) fn namespace() -> String {
    fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned()
}

/// Its number alone: `pid:[4026531836]`.
fn namespace_number() -> String {
    namespace().chars().filter(char::is_ascii_digit).collect()
}

/// When a process began, in the kernel's ticks since the machine did: a number
/// that is given again has another one.
fn began(pid: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may have brackets and blanks in it.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Where the processes of a run say what they have written: a name that nobody can guess.
pub(crate) fn list_of_run(out: &Path) -> PathBuf {
    let pid = std::process::id().to_string();
    let began = began(&pid).unwrap_or(0);
    let random = RandomState::new().build_hasher().finish();
    let name = format!("{}{}-{pid}-{began}-{random:016x}.run", list_prefix(), namespace_number());
    out.join(name)
}

/// Clears a folder of what killed processes have left unfinished.
pub(crate) fn clear(folder: &Path) {
    memtrace_files::clear_abandoned(folder);
    let prefix = list_prefix();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|n| n.strip_prefix(&prefix)?.strip_suffix(".run"));
        if rest.is_some_and(is_left)
            && let Ok(file) = memtrace_files::open(&entry.path())
            && memtrace_files::is_ours(&file).unwrap_or(false)
        {
            let _ = memtrace_files::remove(&entry.path(), &file);
        }
    }
}

/// Is this the list of a run whose first process is dead, and would be seen here if it weren't?
fn is_left(rest: &str) -> bool {
    let fields: Vec<&str> = rest.split('-').collect();
    let [namespace, pid, start, _] = fields[..] else { return false };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    namespace == namespace_number()
        && is_number(pid)
        && is_number(start)
        && began(pid) != start.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_killed_runs_go_and_others_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let (ns, own) = (namespace_number(), std::process::id());
        let mine = began(&own.to_string()).expect("a start");
        let at = |name: String| folder.path().join(name);
        let name = |ns: &str, pid: u32, start: u64| {
            at(format!("{}{ns}-{pid}-{start}-0011223344556677.run", list_prefix()))
        };
        let gone = [name(&ns, 4_194_305, 7), name(&ns, own, mine + 1)];
        let stay = [
            name(&ns, own, mine),
            name("1", 4_194_305, 7),
            at(".memtrace-elsewhere-1-4194305-7-00.run".to_owned()),
            at(format!("{}notes.run", list_prefix())),
        ];
        for path in gone.iter().chain(&stay) {
            fs::write(path, "").expect("written");
        }
        clear(folder.path());
        assert_eq!(
            gone.map(|p| p.exists()),
            [false; 2],
            "a number that no process has, and one given again"
        );
        assert_eq!(stay.map(|p| p.exists()), [true; 4], "alive, elsewhere, none of ours");
        let list = list_of_run(folder.path());
        assert_ne!(list, list_of_run(folder.path()), "nobody can guess it");
        fs::write(&list, "").expect("written");
        clear(folder.path());
        assert!(list.exists(), "this process lives");
    }
}

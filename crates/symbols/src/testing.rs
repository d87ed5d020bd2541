//! Helpers of the tests: interpreters, and this program.

use std::ops::Range;
use std::path::PathBuf;

/// CPython 3.`minor`: from `MEMTRACE_PYTHON3_<minor>`, the search path, or pyenv.
pub fn python(minor: u8) -> Option<PathBuf> {
    let is_it = |path: &PathBuf| {
        let out = std::process::Command::new(path)
            .args(["-I", "-c", "import sys; print(sys.version_info[:2], sys.implementation.name)"])
            .output();
        out.is_ok_and(|o| {
            String::from_utf8_lossy(&o.stdout).trim() == format!("(3, {minor}) cpython")
        })
    };
    if let Some(named) = std::env::var_os(format!("MEMTRACE_PYTHON3_{minor}")) {
        return Some(PathBuf::from(named)).filter(is_it);
    }
    let name = format!("python3.{minor}");
    let on_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|p| std::env::split_paths(&p).map(|d| d.join(&name)).collect::<Vec<_>>());
    let pyenv = std::env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let versions = pyenv
        .and_then(|root| std::fs::read_dir(root.join("versions")).ok())
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path().join("bin").join(&name));
    versions.chain(on_path).filter(|p| p.is_file()).find(is_it)
}

/// Where this program is mapped.
pub fn this_program() -> Range<u64> {
    let path = std::env::current_exe().expect("a path");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux");
    let ours = maps.lines().filter(|l| l.ends_with(path.to_str().expect("UTF-8")));
    let mut ranges = ours.map(|line| {
        let (start, rest) = line.split_once('-').expect("a range");
        let end = rest.split_once(' ').expect("more").0;
        let number = |hex| u64::from_str_radix(hex, 16).expect("hex");
        number(start)..number(end)
    });
    let first = ranges.next().expect("mapped");
    first.start..ranges.next_back().map_or(first.end, |r| r.end)
}

//! Helpers of the tests: interpreters, this program, and regions as a recorder leaves them.

use std::ops::Range;
use std::path::PathBuf;

use memtrace_format::stacks::{
    CODE_FIXED, CODE_MAGIC, DEPOT_FULL, DEPOT_MAGIC, DepotShape, HEAD_CAPACITY, HEAD_NEXT, HEADER,
    MODULE_FIXED, MODULE_MAGIC, RECORD_READY, RawFrame, StackId,
};

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

/// Three regions, filled by hand.
pub struct Made {
    pub depot: Vec<u64>,
    pub codes: Vec<u64>,
    pub modules: Vec<u64>,
}

impl Made {
    pub fn new() -> Made {
        let region = |magic, next| {
            let mut words = vec![0; 5000];
            words[0] = magic;
            words[HEAD_CAPACITY] = HEADER as u64;
            words[HEAD_NEXT] = next;
            words
        };
        Made {
            depot: region(DEPOT_MAGIC, u64::from(DEPOT_FULL) + 1),
            codes: region(CODE_MAGIC, HEADER as u64),
            modules: region(MODULE_MAGIC, HEADER as u64),
        }
    }

    /// A Python function whose second unit is on the line after its first.
    pub fn function(&mut self, name: &str, file: &str, line: u64) -> u32 {
        let sizes = [name.len() as u64, file.len() as u64 | 4 << 32];
        let fixed = [0, 0, line, sizes[0], sizes[1]];
        record(
            &mut self.codes,
            10 << 32,
            fixed,
            CODE_FIXED,
            &[name.as_bytes(), file.as_bytes(), &[2, 0, 2, 1]],
        )
    }

    /// A library of one page, or of `size` bytes.
    pub fn library(&mut self, path: &str, range: Range<u64>, from: u64, until: Option<u64>) {
        let epochs = from | until.map_or(0, |u| u + 1) << 32;
        let fixed = [range.start, range.start, range.end, epochs, (path.len() as u64) << 32, 0];
        record(&mut self.modules, 0, fixed, MODULE_FIXED, &[path.as_bytes()]);
    }

    /// A stack of these frames; every one gets nodes of its own.
    pub fn stack(&mut self, innermost_first: &[RawFrame]) -> StackId {
        let shape = DepotShape::of(self.depot.len()).expect("large enough");
        let mut id = 0;
        for (depth, frame) in (1_u64..).zip(innermost_first.iter().rev()) {
            let new = self.depot[HEAD_NEXT] as u32;
            let at = shape.node(new).expect("room");
            self.depot[at] = frame.pack();
            self.depot[at + 1] = u64::from(id) | depth << 32;
            self.depot[HEAD_NEXT] += 1;
            id = new;
        }
        id
    }
}

fn record<const N: usize>(
    region: &mut [u64],
    head: u64,
    fixed: [u64; N],
    words: usize,
    strings: &[&[u8]],
) -> u32 {
    assert_eq!(N + 1, words);
    let at = region[HEAD_NEXT] as usize;
    region[at + 1..at + words].copy_from_slice(&fixed);
    let bytes = strings.concat();
    for (cell, bytes) in region[at + words..].iter_mut().zip(bytes.chunks(8)) {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        *cell = u64::from_le_bytes(word);
    }
    let length = words + bytes.len().div_ceil(8);
    region[at] = RECORD_READY | head | length as u64;
    region[HEAD_NEXT] += length as u64;
    at as u32
}

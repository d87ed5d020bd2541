//! The snapshots in `tests/data`, and Python to ask about them.

// Each test binary takes what it needs.
#![allow(dead_code)]

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use flate2::read::GzDecoder;

/// Every real snapshot in the repository: name and bytes, unpacked.
pub fn files() -> Vec<(String, Vec<u8>)> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let mut paths: Vec<PathBuf> = ["golden", "snapshots"]
        .iter()
        .flat_map(|folder| {
            fs::read_dir(data.join(folder)).expect("tests/data is in the repository")
        })
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|e| e == "gz"))
        .collect();
    paths.sort();
    assert!(paths.len() >= 13, "tests/data lost files: {paths:?}");
    paths.iter().map(|path| (path.display().to_string(), unpack(path))).collect()
}

/// One of them, by a part of its name.
pub fn file(part: &str) -> Vec<u8> {
    files().into_iter().find(|(name, _)| name.contains(part)).expect("a file of that name").1
}

fn unpack(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    GzDecoder::new(fs::File::open(path).expect("readable"))
        .read_to_end(&mut bytes)
        .expect("intact");
    bytes
}

/// Runs a Python program with `blobs` on its standard input, each after its length, and returns
/// what it prints. The program finds them as the list `blobs`.
pub fn python(program: &str, blobs: &[&[u8]]) -> Vec<u8> {
    let prelude = "import sys, pickle, pickletools, json\n\
         data = sys.stdin.buffer.read()\n\
         blobs = []\n\
         while data:\n    n = int.from_bytes(data[:8], 'little'); blobs.append(data[8:8 + n]); data = data[8 + n:]\n";
    let mut child = Command::new("python3")
        .args(["-c", &format!("{prelude}{program}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("these tests need python3 in PATH");
    let mut stdin = child.stdin.take().expect("piped");
    for blob in blobs {
        stdin.write_all(&(blob.len() as u64).to_le_bytes()).expect("python reads");
        stdin.write_all(blob).expect("python reads");
    }
    drop(stdin);
    let out = child.wait_with_output().expect("python ends");
    assert!(out.status.success(), "python says no, see above");
    out.stdout
}

//! Workspaces that were measured on a card: `MEMTRACE_VIRTUAL_WORKSPACES` names a file
//! that `scripts/gpu_check --learn` wrote.
//!
//! Lines of text, one of each kind:
//!
//! ```text
//! # a comment
//! device Tesla T4, cudnn 9.10.2
//! 134217728 backward_filter float32 nchw 32x512x7x7 2048x512x1x1 pad 0x0 stride 1x1 dilation 1x1 groups 1
//! ```
//!
//! A line of bytes belongs to the device above it. It is taken where the device's name
//! and cuDNN's version are the same and the words behind the bytes are the convolution's
//! own (`Problem`'s `Display`). A table of another card is no measurement of this one, so
//! it is left alone, which is reported.

use super::problem::Problem;
use crate::gpu::{self, log};
use crate::libs::versions;
use std::collections::BTreeMap;
use std::sync::OnceLock;

const VARIABLE: &str = memtrace_options::VIRTUAL_WORKSPACES.variable;

/// What was measured on one kind of device: bytes by convolution, in words.
type Measured = BTreeMap<String, i64>;

/// The tables, by device and version as the file writes them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tables(BTreeMap<String, Measured>);

impl Tables {
    /// Reads a file's text.
    fn parse(text: &str) -> Result<Self, String> {
        let mut tables = Self::default();
        let mut device = None;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            let wrong = |what: &str| format!("line {}: {what}: {line}", number + 1);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix("device ") {
                device = Some(name.trim().to_owned());
                tables.0.entry(name.trim().to_owned()).or_default();
                continue;
            }
            let device = device.as_ref().ok_or_else(|| wrong("no device stands above it"))?;
            let (bytes, problem) =
                line.split_once(' ').ok_or_else(|| wrong("not bytes and a convolution"))?;
            let bytes = bytes.parse().ok().filter(|bytes| *bytes >= 0);
            let bytes = bytes.ok_or_else(|| wrong("its first word is no number of bytes"))?;
            let measured = tables.0.get_mut(device).ok_or_else(|| wrong("no such device"))?;
            measured.insert(problem.trim().to_owned(), bytes);
        }
        Ok(tables)
    }

    /// The file that the environment names, if it does. What can't be read
    /// is reported, and is no table.
    fn read() -> Self {
        let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
            return Self::default();
        };
        let text = std::fs::read_to_string(&path).map_err(|error| error.to_string());
        text.and_then(|text| Self::parse(&text)).unwrap_or_else(|error| {
            let path = path.display();
            log::warn_once(&format!("{VARIABLE}: {path}: {error}; the model is taken instead"));
            Self::default()
        })
    }
}

/// How a table names a device of this process.
fn device(name: &str, [major, minor, patch]: versions::Version) -> String {
    format!("{name}, cudnn {major}.{minor}.{patch}")
}

/// Bytes that were measured for a convolution on such a card.
pub(super) fn find(problem: &Problem) -> Option<i64> {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    let tables = TABLES.get_or_init(Tables::read);
    if tables.0.is_empty() {
        return None;
    }
    let current = gpu::device(gpu::current_device()).ok()?;
    let device = device(&current.profile.name, versions::cudnn());
    let Some(measured) = tables.0.get(&device) else {
        let known: Vec<&str> = tables.0.keys().map(String::as_str).collect();
        log::warn_once(&format!(
            "{VARIABLE}: nothing was measured on {device}, only on {}; the model is taken instead",
            known.join("; ")
        ));
        return None;
    };
    measured.get(&problem.to_string()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read() {
        let text = "# measured\n\ndevice Tesla T4, cudnn 9.10.2\n 5 forward a\n0 forward b\ndevice X, cudnn 9.1.0\n7 forward a\n";
        let tables = Tables::parse(text).expect("sound");
        assert_eq!(tables.0["Tesla T4, cudnn 9.10.2"]["forward a"], 5);
        assert_eq!(tables.0["Tesla T4, cudnn 9.10.2"]["forward b"], 0);
        assert_eq!(tables.0["X, cudnn 9.1.0"]["forward a"], 7);
        assert!(tables.0.contains_key(&device("X", [9, 1, 0])));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        for (text, said) in [
            ("5 forward a", "line 1: no device"),
            ("device d\n\n-5 forward a", "line 3: its first word is no number of bytes"),
            ("device d\n5", "line 2: not bytes and a convolution"),
            ("device d\nmany forward a", "line 2: its first word is no number"),
        ] {
            let error = Tables::parse(text).expect_err(text);
            assert!(error.starts_with(said), "{error}");
        }
    }
}

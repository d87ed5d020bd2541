//! Names in commands that a user may copy from a screen into a shell.
//!
//! Anybody may have named files and folders: `$(rm -rf ~).pickle` is a name. So every command that
//! memtrace suggests has its names from here, as one word that the shell hands on unchanged.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::is_seen;

/// A word for a shell. What needs no quotes gets none.
pub fn quoted(name: impl AsRef<OsStr>) -> String {
    let mut word = Vec::new();
    quote(name.as_ref().as_bytes(), |part| word.extend_from_slice(part));
    String::from_utf8_lossy(&word).into_owned()
}

/// Hands out a word for a shell, part by part. Allocates nothing.
pub fn quote(name: &[u8], mut to: impl FnMut(&[u8])) {
    // It would be an option; alone it stands for standard input.
    if name.first() == Some(&b'-') && name.len() > 1 {
        to(b"./");
    }
    let is_plain = |b: &u8| b.is_ascii_alphanumeric() || b"_./,:+-".contains(b);
    if !name.is_empty() && name.iter().all(is_plain) {
        return to(name);
    }
    if std::str::from_utf8(name).is_ok_and(|name| name.chars().all(is_seen)) {
        to(b"'");
        for (i, part) in name.split(|b| *b == b'\'').enumerate() {
            if i > 0 {
                to(b"'\\''");
            }
            to(part);
        }
        return to(b"'");
    }
    // What is not seen is written as the number of each of its bytes,
    // which takes a quote of its own kind.
    to(b"$'");
    for b in name {
        match b {
            b'\'' | b'\\' => to(&[b'\\', *b]),
            b' '..=b'~' => to(&[*b]),
            _ => to(&[b'\\', b'0' + (b >> 6), b'0' + (b >> 3 & 7), b'0' + (b & 7)]),
        }
    }
    to(b"'");
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_harmless_stays_as_it_is() {
        for name in ["a.pickle", "/tmp/x_1/memtrace-h-2-rank0-3.pickle.gz", "a,b:c+d", "-"] {
            assert_eq!(quoted(name), name);
        }
    }

    #[test]
    fn a_shell_hands_on_the_name() {
        let all: Vec<u8> = (1..=255).collect();
        let names: [&[u8]; 16] = [
            b"",
            b"a b",
            b"$(touch PWNED)",
            b"`id`",
            b"it's",
            b"'",
            b"a;b&c|d",
            b"~root",
            b"a\\b",
            b"!x",
            b"*",
            b"a\nb",
            b"\x1b[2J'\\0",
            b"\xff\xfe7",
            "Gr\u{fc}\u{df}e".as_bytes(),
            &all,
        ];
        for name in names {
            let word = quoted(OsStr::from_bytes(name));
            assert!(word.chars().all(is_seen), "{word:?} is shown as it is");
            let script = format!("printf %s {word}");
            let said = Command::new("bash").args(["-c", &script]).env("LC_ALL", "C").output();
            assert_eq!(said.expect("bash is there").stdout, name, "{word}");
        }
    }

    #[test]
    fn a_name_is_no_option() {
        assert_eq!(quoted("-rf"), "./-rf");
        assert_eq!(quoted("--out=x y"), "./'--out=x y'");
    }
}

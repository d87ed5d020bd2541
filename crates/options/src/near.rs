//! A variable that nobody reads is a typo, and the user thinks that it counts.

use crate::{ALL, DEVELOPMENT};

/// What to say of a variable of this name: nothing if it is known, or none of memtrace's.
pub fn remark(name: &str) -> Option<String> {
    let rest = name.strip_prefix(PREFIX)?;
    let is_known = ALL.iter().any(|setting| setting.variable == name)
        || DEVELOPMENT
            .iter()
            .any(|known| name == *known || known.ends_with('_') && name.starts_with(known));
    if is_known {
        return None;
    }
    let near = nearest(rest).map_or_else(
        || "`memtrace run --help` lists those that are".to_owned(),
        |near| format!("did you mean {near}?"),
    );
    Some(format!("{name} is not known and changes nothing; {near}"))
}

const PREFIX: &str = "MEMTRACE_";

/// Longer names are no slips of the pen, and would take long to compare.
const LONGEST: usize = 64;

/// The variable that is meant, if one looks much like this.
fn nearest(rest: &str) -> Option<&'static str> {
    let rest = rest.to_ascii_uppercase();
    if rest.len() > LONGEST {
        return None;
    }
    let names = ALL.iter().map(|setting| setting.variable);
    let by_distance = names.map(|name| {
        let known = &name[PREFIX.len()..];
        // A longer or shorter word for the same.
        let begins = known.starts_with(&rest) || rest.starts_with(known);
        let distance = distance(known.as_bytes(), rest.as_bytes());
        (if begins { distance.min(2) } else { distance }, name)
    });
    let (distance, name) = by_distance.min()?;
    (!rest.is_empty() && distance <= 2.max(rest.len() / 3)).then_some(name)
}

/// How many characters have to be put in, left out, replaced or exchanged with the next.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, n) in [("", "", 0), ("", "ab", 2), ("stack", "stacks", 1), ("ab", "ba", 1)] {
            assert_eq!(distance(a.as_bytes(), b.as_bytes()), n, "{a} {b}");
            assert_eq!(distance(b.as_bytes(), a.as_bytes()), n, "{b} {a}");
        }
        assert_eq!(distance(b"kitten", b"sitting"), 3);
    }

    #[test]
    fn what_is_known_or_not_ours_gets_no_remark() {
        for setting in ALL {
            assert_eq!(remark(setting.variable), None);
        }
        for name in
            ["PATH", "MEMTRACE", "MEMTRACE_BUILD", "MEMTRACE_TEST_WALKS", "MEMTRACE_PYTHON3_9"]
        {
            assert_eq!(remark(name), None, "{name}");
        }
    }

    #[test]
    fn slips_of_the_pen() {
        for (name, meant) in [
            ("MEMTRACE_STACK", "MEMTRACE_STACKS"),
            ("MEMTRACE_OUTPUT", "MEMTRACE_OUT"),
            ("MEMTRACE_FROMAT", "MEMTRACE_FORMAT"),
            ("MEMTRACE_out", "MEMTRACE_OUT"),
            ("MEMTRACE_BLACK_BOX", "MEMTRACE_BLACKBOX"),
            ("MEMTRACE_PERMISSION", "MEMTRACE_PERMISSIONS"),
            ("MEMTRACE_PEAKSTEP", "MEMTRACE_PEAK_STEP"),
            ("MEMTRACE_LOGLEVEL", "MEMTRACE_LOG_LEVEL"),
            ("MEMTRACE_VIRTUAL_WORKSPACE", "MEMTRACE_VIRTUAL_WORKSPACES"),
        ] {
            let said = remark(name).expect(name);
            assert_eq!(
                said,
                format!("{name} is not known and changes nothing; did you mean {meant}?")
            );
        }
    }

    #[test]
    fn nothing_is_guessed_of_what_looks_like_none() {
        for name in ["MEMTRACE_", "MEMTRACE_FOLDER", "MEMTRACE_BANANA", "MEMTRACE_X"] {
            let said = remark(name).expect(name);
            assert!(said.ends_with("lists those that are"), "{said}");
        }
        assert!(remark(&format!("MEMTRACE_{}", "X".repeat(1 << 20))).is_some());
    }
}

//! From a position in a code object to a source line.
//!
//! CPython has had three formats. They are all a run of ranges of instructions, each with a step
//! from the line before. The table ends where its bytes end, and no entry is trusted to be
//! whole. A range may have no line (code that the compiler made up, or that somebody generated):
//! that is `None`, as in `co_lines()`.

/// The line of the code unit (two bytes) at index `unit`, or the first line if the
/// function has not begun. `minor` is the version of the interpreter that made the table,
/// `first` the code object's first line.
pub fn line(minor: u8, first: i32, table: &[u8], unit: Option<u32>) -> Option<u32> {
    let first = i64::from(first);
    let line = match (unit, minor) {
        (None, _) => Some(first),
        (Some(unit), ..=9) => Some(lnotab(first, table, u64::from(unit) * 2)),
        (Some(unit), 10) => linetable(first, table, u64::from(unit) * 2),
        (Some(unit), _) => locations(first, table, u64::from(unit)),
    };
    u32::try_from(line?).ok()
}

/// Up to 3.9: pairs of a step in bytes of code and a signed step in lines.
fn lnotab(first: i64, table: &[u8], at: u64) -> i64 {
    let (mut line, mut addr) = (first, 0);
    for pair in table.chunks_exact(2) {
        addr += u64::from(pair[0]);
        if addr > at {
            break;
        }
        line += i64::from(pair[1] as i8);
    }
    line
}

/// 3.10: pairs of a length in bytes of code and a signed step in lines, −128 for no line at all.
fn linetable(first: i64, table: &[u8], at: u64) -> Option<i64> {
    let (mut line, mut end) = (first, 0);
    for pair in table.chunks_exact(2) {
        end += u64::from(pair[0]);
        let step = pair[1] as i8;
        if step != i8::MIN {
            line += i64::from(step);
        }
        if at < end {
            return (step != i8::MIN).then_some(line);
        }
    }
    None
}

/// From 3.11: entries of one to many bytes, of which only the first has its top bit set. It
/// has the form of the entry and the number of code units that it covers. The step in
/// lines, if the form has one, comes next.
fn locations(first: i64, table: &[u8], at: u64) -> Option<i64> {
    const ONE_LINE: std::ops::RangeInclusive<u8> = 10..=12;
    const NO_COLUMNS: u8 = 13;
    const LONG: u8 = 14;
    const NO_LOCATION: u8 = 15;
    let (mut line, mut end) = (first, 0);
    let mut rest = table;
    while let Some((head, tail)) = rest.split_first() {
        let next = tail.iter().position(|b| b & 0x80 != 0).unwrap_or(tail.len());
        let (fields, after) = tail.split_at(next);
        rest = after;
        let form = head >> 3 & 15;
        line = line.saturating_add(match form {
            NO_COLUMNS | LONG => signed(fields),
            f if ONE_LINE.contains(&f) => i64::from(f - ONE_LINE.start()),
            _ => 0,
        });
        end += u64::from(head & 7) + 1;
        if at < end {
            return (form != NO_LOCATION).then_some(line);
        }
    }
    None
}

/// A number of six bits a byte, lowest first, whose lowest bit is its sign.
fn signed(bytes: &[u8]) -> i64 {
    let mut value = 0_u64;
    for (i, b) in bytes.iter().enumerate() {
        value |= u64::from(b & 63).checked_shl(6 * i as u32).unwrap_or(0);
        if b & 64 == 0 {
            break;
        }
    }
    let size = (value >> 1) as i64;
    if value & 1 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::stacks::PYTHONS;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_give_some_answer(minor in 0_u8..20, first in any::<i32>(), table in prop::collection::vec(any::<u8>(), 0..300), unit in prop::option::of(any::<u32>())) {
            let _ = line(minor, first, &table, unit);
        }

        /// A cut table agrees with the whole one on everything that it still covers.
        #[test]
        fn a_cut_table_loses_only_its_end(table in prop::collection::vec(any::<u8>(), 0..60), cut in 0_usize..60) {
            for unit in 0..40 {
                if let Some(known) = linetable(1, &table[..cut.min(table.len()) / 2 * 2], unit) {
                    prop_assert_eq!(linetable(1, &table, unit), Some(known));
                }
            }
        }
    }

    #[test]
    fn before_the_first_instruction_it_is_the_first_line() {
        for minor in PYTHONS {
            assert_eq!(line(minor, 7, &[1, 1], None), Some(7));
        }
    }

    #[test]
    fn ranges_without_a_line_have_none() {
        // Three ranges of two units; the middle one has no line.
        let t310 = [4, 1, 4, 0x80, 4, 2];
        let t311 = [0x80 | 13 << 3 | 1, 2, 0x80 | 15 << 3 | 1, 0x80 | 13 << 3 | 1, 4];
        for (minor, table) in [(10, &t310[..]), (11, &t311[..])] {
            let lines: Vec<_> = (0..7).map(|u| line(minor, 10, table, Some(u))).collect();
            let expect = [Some(11), Some(11), None, None, Some(13), Some(13), None];
            assert_eq!(lines, expect, "3.{minor}");
        }
        let back = [2, 5, 2, 0xfc];
        assert_eq!(line(9, 10, &back, Some(1)), Some(15));
        assert_eq!(line(9, 10, &back, Some(2)), Some(11));
    }

    /// The interpreters themselves are the oracle: every instruction of
    /// every function of many modules.
    #[test]
    fn every_instruction_has_the_line_that_python_gives() {
        let mut tried = 0;
        for minor in PYTHONS {
            let Some(python) = crate::testing::python(minor) else {
                eprintln!(
                    "skipped 3.{minor}: not found (set MEMTRACE_PYTHON3_{minor} to its path)"
                );
                continue;
            };
            let out = std::process::Command::new(&python)
                .args(["-I", "-W", "ignore", "-c", JUDGE])
                .env_clear()
                .output()
                .expect("the interpreter starts");
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            let text = String::from_utf8(out.stdout).expect("ASCII");
            let (mut codes, mut units) = (0, 0);
            for row in text.lines() {
                let mut fields = row.split(' ');
                let mut field = || fields.next().expect("four fields");
                let (first, table, name) = (field().parse().expect("a number"), field(), field());
                let table: Vec<u8> = (0..table.len() / 2)
                    .map(|i| u8::from_str_radix(&table[2 * i..2 * i + 2], 16).expect("hex"))
                    .collect();
                let expect = field().split(',').filter(|l| !l.is_empty());
                for (unit, expect) in expect.enumerate() {
                    let got = line(minor, first, &table, Some(unit as u32));
                    let expect = expect.parse().ok();
                    assert_eq!(got, expect, "3.{minor}: unit {unit} of {name}");
                    units += 1;
                }
                codes += 1;
            }
            println!("3.{minor}: {units} code units of {codes} code objects");
            assert!(
                codes > 3000 && units > 100_000,
                "3.{minor}: {codes} code objects, {units} units"
            );
            tried += 1;
        }
        println!("lines agree with {tried} versions of CPython");
    }

    /// Prints, for each code object: first line, table, name, and the line
    /// of each code unit ("-": none).
    const JUDGE: &str = r#"
import sys, types, importlib.util, dis
MODULES = """argparse ast asyncio.base_events asyncio.tasks bdb calendar cgitb codecs collections configparser
contextlib copy csv ctypes dataclasses datetime decimal difflib dis doctest email.message enum fractions ftplib
functools gettext glob gzip heapq html.parser http.client http.cookiejar imaplib inspect ipaddress json.decoder
json.encoder locale logging mailbox mimetypes multiprocessing.pool multiprocessing.managers ntpath opcode
optparse os pathlib pdb pickle pickletools platform plistlib posixpath pprint pydoc queue random re shelve shlex
shutil smtplib socket socketserver ssl statistics string subprocess sysconfig tarfile tempfile textwrap threading
timeit token tokenize traceback types typing unittest.case unittest.mock urllib.parse urllib.request uuid warnings
weakref xml.dom.minidom xml.etree.ElementTree zipfile _pydecimal _pydatetime _strptime""".split()
NEW = sys.version_info >= (3, 10)
def lines(code):
    size = len(code.co_code) // 2
    out = ["-"] * size
    if NEW:
        for start, end, line in code.co_lines():
            for i in range(start // 2, min(end // 2, size)):
                out[i] = "-" if line is None else str(line)
    else:
        starts = dict(dis.findlinestarts(code))
        line = code.co_firstlineno
        for i in range(size):
            line = starts.get(2 * i, line)
            out[i] = str(line)
    return out
def visit(code):
    table = code.co_linetable if NEW else code.co_lnotab
    print(code.co_firstlineno, table.hex(), ascii(code.co_name).replace(" ", "_"), ",".join(lines(code)))
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            visit(c)
for name in MODULES:
    try:
        code = importlib.util.find_spec(name).loader.get_code(name)
    except Exception:
        continue
    if code is not None:
        visit(code)
"#;
}

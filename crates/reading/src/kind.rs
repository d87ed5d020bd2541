//! What a file is that is no snapshot, and what to do with it.

use std::ffi::OsStr;
use std::path::Path;

use memtrace_terminal::shell::quoted;

/// How a black box begins; see [`memtrace_format::blackbox`].
const BLACK_BOX: [u8; 8] = memtrace_format::blackbox::MAGIC.to_le_bytes();
/// The number with which torch.save's files began before PyTorch 1.6, as a pickle of its own.
const OLD_TORCH_SAVE: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
/// How much of a text is looked at.
const HEAD: usize = 4096;

/// Says what a file is, by how it begins and by its name. `None`: a
/// snapshot perhaps, or nothing that is known.
pub fn kind(bytes: &[u8], path: &Path) -> Option<String> {
    let file = quoted(path);
    if bytes.is_empty() {
        return Some("an empty file: nothing was written to it, or the disk was full".to_owned());
    }
    let head = &bytes[..bytes.len().min(HEAD)];
    if head.starts_with(&BLACK_BOX) || path.extension() == Some(OsStr::new("blackbox")) {
        return Some(format!(
            "a black box, of a process that is alive or was killed: `memtrace recover {file}` makes a snapshot of it \
             (`memtrace snapshot PID` while it lives)"
        ));
    }
    if is_run_list(head, path) {
        return Some(
            "the list of a run that has not ended, or was killed: name the snapshots in it, or their folder".to_owned(),
        );
    }
    if is_oom_text(head) {
        return Some(format!("the text about an out of memory; {}", beside(path)));
    }
    if head.starts_with(OLD_TORCH_SAVE) || is_torch_zip(head) {
        return Some(format!(
            "a file that torch.save wrote; PyTorch's viewers can't read it either: \
             python -c \"import pickle, sys, torch; pickle.dump(torch.load(sys.argv[1], weights_only=True), \
             open('snapshot.pickle', 'wb'))\" {file}"
        ));
    }
    if head[0] == 0x80 || memtrace_format::looks_like_json(head) {
        return None;
    }
    packed(head, path).or_else(|| other(head))
}

/// A file in which others are, or that is to be unpacked.
fn packed(head: &[u8], path: &Path) -> Option<String> {
    let (what, command) = match head {
        [b'P', b'K', 3 | 5 | 7, 4 | 6 | 8, ..] => ("a zip archive", "unzip"),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => ("compressed with xz", "xz -d"),
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => ("compressed with bzip2", "bzip2 -d"),
        [4, 0x22, 0x4d, 0x18, ..] => ("compressed with lz4", "lz4 -d"),
        [0x1f, 0x8b, ..] => ("compressed with gzip, twice", "gzip -d"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("compressed with zstd, twice", "zstd -d"),
        [0x1f, 0x9d, ..] => ("compressed with compress", "uncompress"),
        [0x78, 0x01 | 0x5e | 0x9c | 0xda, ..] => ("compressed with zlib", "pigz -d"),
        [0x5d, 0, 0, ..] => ("compressed with lzma", "xz -d --format=lzma"),
        [0xff, 6, 0, 0, b's', b'N', b'a', b'P', b'p', b'Y', ..] => {
            ("compressed with snappy", "snzip -d")
        }
        _ => {
            let found = infer::get(head)?;
            let what = found.extension();
            return match found.matcher_type() {
                infer::MatcherType::Archive => {
                    Some(format!("an archive ({what}): unpack it first"))
                }
                infer::MatcherType::Text => None,
                _ => Some(format!("a file of another kind ({})", found.mime_type())),
            };
        }
    };
    Some(format!("{what}: unpack it first ({command} {})", quoted(path)))
}

/// What begins neither as a pickle nor as JSON.
fn other(head: &[u8]) -> Option<String> {
    let text = head.trim_ascii_start();
    let starts =
        |with: &[u8]| text.len() >= with.len() && text[..with.len()].eq_ignore_ascii_case(with);
    if let [0xff, 0xfe, ..] | [0xfe, 0xff, ..] = head {
        return Some("text in UTF-16: store it as UTF-8".to_owned());
    }
    if starts(b"<!doctype html") || starts(b"<html") {
        return Some(
            "a web page; the viewer's pages are made of a snapshot and don't replace it".to_owned(),
        );
    }
    if starts(b"\x93NUMPY") {
        return Some("an array of NumPy's".to_owned());
    }
    if [&b"(dp"[..], b"(lp", b"}q", b"]q"].iter().any(|begin| head.starts_with(begin)) {
        return Some(
            "a pickle of protocol 0 or 1: write it with pickle.dump(…, protocol=4)".to_owned(),
        );
    }
    if head.iter().all(|b| *b == 0) {
        return Some("a file of zeros: it was never written, or the disk lost it".to_owned());
    }
    let is_text = std::str::from_utf8(head).map_or_else(|e| e.error_len().is_none(), |_| true);
    let control = |b: &u8| b.is_ascii_control() && !b.is_ascii_whitespace() && *b != 0x1b;
    if is_text && !head.iter().any(control) {
        return Some(
            "a text file; a snapshot begins as a pickle (protocol 2 to 5) or as JSON".to_owned(),
        );
    }
    None
}

fn is_torch_zip(head: &[u8]) -> bool {
    let name = |part: &[u8]| head.windows(part.len()).any(|w| w == part);
    head.starts_with(b"PK\x03\x04") && name(b"/data.pkl")
}

/// Lines of a process number, a word and a path; see `src/process/tree.rs` of the recorder.
fn is_run_list(head: &[u8], path: &Path) -> bool {
    let line = head.split(|b| *b == b'\n').next().unwrap_or_default();
    let mut words = line.split(|b| *b == b' ');
    let number = words.next().is_some_and(|w| !w.is_empty() && w.iter().all(u8::is_ascii_digit));
    let path_follows = words.nth(1).is_some_and(|w| w.starts_with(b"/"));
    number && path_follows || path.extension() == Some(OsStr::new("run"))
}

fn is_oom_text(head: &[u8]) -> bool {
    let head = head.strip_prefix(b"(on a virtual GPU)\n").unwrap_or(head);
    head.starts_with(b"OUT OF MEMORY on ")
}

/// Where the snapshot is that a text was written with.
fn beside(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let snapshot =
        stem.strip_suffix("-oom").map(|stem| path.with_file_name(format!("{stem}.pickle")));
    match snapshot.filter(|p| p.is_file()) {
        Some(snapshot) => format!("its snapshot is {}", snapshot.display()),
        None => "the snapshot is another file, written beside it".to_owned(),
    }
}

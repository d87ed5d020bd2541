//! The processes of one run: who was started by whom, and which files they left.
//!
//! `memtrace run` becomes the program, so there is no parent that waits and could add up. It leaves
//! two things in the environment: the number of the process that it became, the *root*, and the
//! name of a list, which nobody can guess. A process that records adds a line to the list when it
//! begins and one for each snapshot. A process that starts a program without memtrace adds one for
//! that. Each line is one write, and only while the root lives.
//!
//! When the root ends it reads the list, reports what is in it, and removes it. The list of a
//! root that was killed goes at the next run. A process that never calls CUDA adds nothing, and
//! where nobody does there is no list.
//!
//! Each snapshot names the nearest process above its own that records, too. It names it by number
//! and by the name of its black box, because numbers are given again and these names are not. A
//! forked child has its parent's recorder in its memory still; of other parents `/proc/PID/maps`
//! says whether they have a black box mapped.
//!
//! The root may end by `_exit`, in a signal handler: what is done there
//! takes no lock and allocates nothing.

use std::ffi::{CStr, CString, c_int};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_format::key::{Kept, Memtrace, RecordedParent};
use memtrace_terminal::shell::quote;
use memtrace_terminal::show;

use crate::config::Config;
use crate::os::descriptors;
use crate::os::locks::SetOnce;
use crate::os::signals;
use crate::process;
use crate::record::Recorder;
use crate::stack::on_a_large_one;

/// Ancestors that are looked at.
const GENERATIONS: usize = 32;

/// A process above this one that records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its number.
    pub pid: i32,
    /// The file name of its black box.
    pub blackbox: String,
}

/// Where a process stands in the tree.
#[derive(Clone, Debug, Default)]
pub struct TreeNode {
    /// The name of its own black box (also if there was no room for one).
    pub blackbox: String,
    /// The nearest process above it that records.
    pub above: Option<Recorded>,
}

impl TreeNode {
    /// Of this process, which begins to record.
    pub fn find(config: &Config, blackbox: &str) -> TreeNode {
        let above = forked_from().or_else(|| nearest(config.run_pid));
        TreeNode { blackbox: blackbox.to_owned(), above }
    }

    /// For a snapshot's `memtrace` key.
    pub fn describe(&self, config: &Config, about: &mut Memtrace) {
        about.blackbox = Some(self.blackbox.clone());
        about.root = config.run_pid.map(i64::from);
        about.recorded_parent = self.above.as_ref().map(|a| RecordedParent {
            pid: a.pid.into(),
            blackbox: a.blackbox.clone(),
            kept: Kept::NOTHING,
        });
    }
}

/// Remembers the root folder, and adds the recorder to the list of the run.
pub fn began(recorder: &Recorder) {
    if let Some(root) = root_folder() {
        ROOT_FOLDER.set(root);
    }
    if let Some(path) = &recorder.blackbox.path {
        add(&recorder.config, 'r', path);
    }
}

/// The root folder when recording began, by device and number.
static ROOT_FOLDER: SetOnce<(u64, u64)> = SetOnce::new();

fn root_folder() -> Option<(u64, u64)> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a C string and a record of the right type; it is read only if the call filled it.
    unsafe {
        (libc::stat(c"/".as_ptr(), found.as_mut_ptr()) == 0).then(|| {
            let found = found.assume_init();
            (found.st_dev, found.st_ino)
        })
    }
}

/// Has the process locked itself into another root folder since
/// (`chroot`)? Paths mean something else there.
pub fn is_elsewhere() -> bool {
    ROOT_FOLDER.get().copied().is_some_and(|then| root_folder() != Some(then))
}

/// Adds a snapshot to the run's list.
pub fn wrote(config: &Config, path: &Path) {
    add(config, 'w', path);
}

fn forked_from() -> Option<Recorded> {
    // Only plain memory is read, not the black box, which a fork doesn't inherit.
    let last = process::last()?;
    let mine = last.recorder.pid == std::process::id() as i32;
    (!mine).then(|| Recorded { pid: last.recorder.pid, blackbox: last.place.blackbox.clone() })
}

/// The nearest process above that has a black box mapped, up to the root.
fn nearest(root: Option<i32>) -> Option<Recorded> {
    let own = std::process::id() as i32;
    if root == Some(own) {
        return None;
    }
    let mut pid = std::os::unix::process::parent_id() as i32;
    for _ in 0..GENERATIONS {
        if pid <= 1 {
            break;
        }
        let maps = memtrace_files::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        if let Some(blackbox) = black_box_in(&maps) {
            return Some(Recorded { pid, blackbox });
        }
        if root == Some(pid) {
            break;
        }
        pid = parent_of(&memtrace_files::read(format!("/proc/{pid}/stat")).ok()?)?;
    }
    None
}

/// The name of the first black box among mappings.
fn black_box_in(maps: &[u8]) -> Option<String> {
    let lines = maps.split(|b| *b == b'\n').map(|l| l.strip_suffix(b" (deleted)").unwrap_or(l));
    let line = lines.into_iter().find(|l| l.ends_with(b".blackbox"))?;
    let name = line.rsplit(|b| *b == b'/').next()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

/// The parent in the text of `/proc/PID/stat`. The name in brackets may
/// have brackets and blanks in it.
fn parent_of(stat: &[u8]) -> Option<i32> {
    let end = stat.iter().rposition(|b| *b == b')')?;
    std::str::from_utf8(&stat[end + 1..]).ok()?.split_whitespace().nth(1)?.parse().ok()
}

/// Adds `PID WHAT PATH` to the list of the run, if there is somebody who will read it.
fn add(config: &Config, what: char, path: &Path) {
    let (Some(list), Some(root)) = (&config.run_list, config.run_pid) else { return };
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let path = path.as_os_str().as_bytes();
    if !is_alive(root) || path.contains(&b'\n') || RUN.get().is_some_and(Run::is_elsewhere) {
        return;
    }
    let mut line = format!("{} {what} ", std::process::id()).into_bytes();
    line.extend(path);
    line.push(b'\n');
    // The list is for a few lines at the end of the run; the snapshots are there without it.
    let _ = memtrace_files::append(list).and_then(|mut file| file.write_all(&line));
}

fn is_alive(pid: i32) -> bool {
    // SAFETY: signal 0 only asks whether there is such a process.
    unsafe { libc::kill(pid, 0) == 0 || *libc::__errno_location() != libc::ESRCH }
}

// --- the root ------------------------------------------------------------------------------------

/// The run that this process belongs to.
struct Run {
    root: i32,
    list: CString,
    /// The root folder at that time.
    folder: Option<(u64, u64)>,
}

impl Run {
    /// Is the root folder another one now? Then the name of the list must not be made there.
    fn is_elsewhere(&self) -> bool {
        root_folder() != self.folder
    }
}

/// Set when the library is loaded, so that a program may do with its environment what it likes.
static RUN: SetOnce<Run> = SetOnce::new();

/// When the library is loaded: does this process belong to a run?
pub fn loading() {
    let var = |name: &CStr| {
        // SAFETY: nothing of the program's has run yet that could change the environment.
        let at = unsafe { libc::getenv(name.as_ptr()) };
        // SAFETY: a variable's value is a C string.
        (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) })
    };
    let root = var(c"MEMTRACE_RUN_PID").and_then(|p| p.to_str().ok()?.parse().ok());
    if let (Some(root), Some(list)) = (root, var(c"MEMTRACE_RUN_LIST"))
        && !list.is_empty()
    {
        RUN.set(Run { root, list: list.to_owned(), folder: root_folder() });
    }
}

/// Does this process belong to a run?
pub fn is_of_a_run() -> bool {
    RUN.get().is_some()
}

/// Adds a word to a line.
pub type AddWord<'a> = &'a mut dyn FnMut(&[u8]);

/// Adds to the list that a program is started without memtrace in it. The line has this number,
/// if that is known, and the words that `say` adds. Nothing is added if `say` returns `None`.
/// Takes no lock and allocates nothing.
pub fn started_without(pid: i32, say: &mut dyn FnMut(AddWord<'_>) -> Option<()>) {
    let is_read = |run: &&Run| is_alive(run.root) && !run.is_elsewhere();
    let Some(run) = RUN.get().filter(is_read) else { return };
    let mut line = Text::<SHORT>::new();
    line.number(pid as usize).add(b" x");
    let added = say(&mut |word| {
        line.add(b" ");
        word.split_inclusive(|b| *b == b'\n').for_each(|part| match part {
            [line_of_it @ .., b'\n'] => _ = line.add(line_of_it).add(b"?"),
            whole => _ = line.add(whole),
        });
    });
    if added.is_none() {
        return;
    }
    line.end();
    let file = descriptors::open_own(&run.list, libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT);
    if file >= 0 {
        line.write_to(file);
        // SAFETY: our own descriptor.
        unsafe { libc::close(file) };
    }
}

/// Snapshots that are named.
const NAMED: usize = 10;
/// The longest line of the list that is read.
const LONGEST: usize = 4096 + 32;

/// At the end of the root: reports which files its processes have written. `false`:
/// none has recorded. Allocates nothing.
pub fn ending() -> bool {
    static DONE: AtomicBool = AtomicBool::new(false);
    // SAFETY: getpid has no preconditions.
    let own = unsafe { libc::getpid() };
    let Some(run) = RUN.get().filter(|run| run.root == own) else { return false };
    if DONE.swap(true, Ordering::AcqRel) {
        return false;
    }
    // Lines of a path's length have no room on the stack of a signal handler.
    on_a_large_one(|| signals::uncancelled(|| report_run(run, own)))
}

/// Reports which files the processes of this run have written, and removes the list.
fn report_run(run: &Run, own: i32) -> bool {
    // What somebody else has put there is not read, nor removed.
    let file = descriptors::open_own(&run.list, libc::O_RDONLY);
    if file < 0 {
        return false;
    }
    let (mut written, mut of_others, mut recorded) = (0, false, false);
    lines(file, |pid, what, _| {
        written += usize::from(what == b'w');
        recorded |= what != b'x';
        of_others |= what == b'w' && pid != own;
    });
    // A process that wrote its own snapshot has reported it.
    if of_others {
        let mut text = Text::<LONGEST>::new();
        let what: &[u8] = if written == 1 { b" snapshot:\n" } else { b" snapshots:\n" };
        text.add(b"memtrace: this run wrote ").number(written).add(what).flush();
        let mut named = 0;
        lines(file, |_, what, path| {
            if what == b'w' {
                named += 1;
                if named <= NAMED {
                    text.add(b"memtrace:   ").name(path).add(b"\n").flush();
                }
            }
        });
        if written > NAMED {
            text.add(b"memtrace:   and ").number(written - NAMED).add(b" more\n").flush();
        }
    }
    lines(file, |pid, what, path| {
        if what == b'r' && pid != own && !is_alive(pid) && exists(path) {
            let mut text = Text::<LONGEST>::new();
            text.add(b"memtrace: process ").number(pid as usize);
            text.add(b" was killed; what it did: memtrace recover ").word(path).add(b"\n").flush();
        }
    });
    report_unrecorded(file);
    // SAFETY: our own descriptor and a C string.
    unsafe {
        libc::close(file);
        libc::unlink(run.list.as_ptr());
    }
    recorded
}

/// Reports which programs were started without memtrace.
fn report_unrecorded(file: c_int) {
    let mut without = 0;
    lines(file, |_, what, _| without += usize::from(what == b'x'));
    if without == 0 {
        return;
    }
    let mut text = Text::<LONGEST>::new();
    text.add(b"memtrace: not recorded, because LD_PRELOAD was replaced or cleared for it (keep libmemtrace.so in it):\n");
    text.flush();
    let mut named = 0;
    lines(file, |pid, what, program| {
        if what == b'x' && named < NAMED {
            named += 1;
            text.add(b"memtrace:   ").name(program);
            if pid != 0 {
                text.add(b" (process ").number(pid as usize).add(b")");
            }
            text.add(b"\n").flush();
        }
    });
    if without > NAMED {
        text.add(b"memtrace:   and ").number(without - NAMED).add(b" more\n").flush();
    }
}

/// Hands out the lines of a list, from its beginning: process, what, path.
fn lines(file: c_int, mut f: impl FnMut(i32, u8, &[u8])) {
    let mut buffer = [0_u8; LONGEST];
    let (mut have, mut at) = (0, 0);
    loop {
        let room = &mut buffer[have..];
        // SAFETY: our own descriptor; the buffer is valid for its length.
        let got = unsafe { libc::pread(file, room.as_mut_ptr().cast(), room.len(), at) };
        let Ok(got) = usize::try_from(got) else { return };
        at += got as libc::off_t;
        have += got;
        let mut rest = &buffer[..have];
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            let mut fields = rest[..end].splitn(3, |b| *b == b' ');
            if let (Some(pid), Some([what]), Some(path)) =
                (fields.next(), fields.next(), fields.next())
                && let Some(pid) = std::str::from_utf8(pid).ok().and_then(|p| p.parse().ok())
            {
                f(pid, *what, path);
            }
            rest = &rest[end + 1..];
        }
        let (left, start) = (rest.len(), have - rest.len());
        if got == 0 || left == LONGEST {
            return;
        }
        buffer.copy_within(start..have, 0);
        have = left;
    }
}

fn exists(path: &[u8]) -> bool {
    let mut name = [0_u8; LONGEST];
    let Some(place) = name.get_mut(..path.len()) else { return false };
    place.copy_from_slice(path);
    // SAFETY: a C string, since the buffer is longer than a path and was zero.
    path.len() < LONGEST && unsafe { libc::access(name.as_ptr().cast(), libc::F_OK) == 0 }
}

/// The longest line about a program that is started: its stack may be small.
pub const SHORT: usize = 400;

/// A line of at most `N` bytes that is put together without allocating.
struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    fn new() -> Self {
        Text { bytes: [0; N], len: 0 }
    }

    fn add(&mut self, part: &[u8]) -> &mut Self {
        let part = &part[..part.len().min(N - self.len)];
        self.bytes[self.len..self.len + part.len()].copy_from_slice(part);
        self.len += part.len();
        self
    }

    /// A name, of which every character is seen.
    fn name(&mut self, name: &[u8]) -> &mut Self {
        for chunk in name.utf8_chunks() {
            for c in chunk.valid().chars() {
                show(c, |c| {
                    self.add(c.encode_utf8(&mut [0; 4]).as_bytes());
                });
            }
            if !chunk.invalid().is_empty() {
                self.add("\u{fffd}".as_bytes());
            }
        }
        self
    }

    /// A name in a command that the user may copy.
    fn word(&mut self, name: &[u8]) -> &mut Self {
        quote(name, |part| {
            self.add(part);
        });
        self
    }

    fn number(&mut self, n: usize) -> &mut Self {
        let mut digits = [0_u8; 20];
        let (mut n, mut at) = (n, digits.len());
        loop {
            at -= 1;
            digits[at] = b'0' + (n % 10) as u8;
            n /= 10;
            if n == 0 {
                break self.add(&digits[at..]);
            }
        }
    }

    /// Ends the line, also where it had no room.
    fn end(&mut self) {
        self.len = self.len.min(N - 1);
        self.add(b"\n");
    }

    /// One write, so that lines of several processes don't mix.
    fn write_to(&self, file: c_int) {
        // SAFETY: the buffer is valid for its length; a failed write is of no consequence.
        unsafe { libc::write(file, self.bytes.as_ptr().cast(), self.len) };
    }

    /// The same, to standard error, and begins again.
    fn flush(&mut self) {
        descriptors::say(&self.bytes[..self.len]);
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_parent_is_read_past_any_name() {
        assert_eq!(parent_of(b"17 (a) b (c) ) S 4711 17 17 0"), Some(4711));
        assert_eq!(parent_of(b"17 (sh) S"), None);
        assert_eq!(parent_of(b""), None);
    }

    #[test]
    fn a_name_is_shown() {
        let mut text = Text::<LONGEST>::new();
        text.name(b"/out/a\x1b[2Jb\xff \xe2\x80\xae");
        assert_eq!(
            std::str::from_utf8(&text.bytes[..text.len]),
            Ok("/out/a\\u{1b}[2Jb\u{fffd} \\u{202e}")
        );
    }

    #[test]
    fn a_name_in_a_command_is_one_word() {
        let mut text = Text::<LONGEST>::new();
        text.word(b"/out/$(id) a.blackbox").word(b"/plain.blackbox");
        let text = std::str::from_utf8(&text.bytes[..text.len]);
        assert_eq!(text, Ok("'/out/$(id) a.blackbox'/plain.blackbox"));
    }

    #[test]
    fn a_black_box_is_found_among_mappings() {
        let maps = b"7f00-7f10 r-xp 0 fe:00 9 /lib/libc.so.6\n\
            7f10-7f20 rw-s 0 00:1a 77 /dev/shm/a b/memtrace-h-4-5.blackbox (deleted)\n";
        assert_eq!(black_box_in(maps).as_deref(), Some("memtrace-h-4-5.blackbox"));
        assert_eq!(black_box_in(b"7f00-7f10 r-xp 0 fe:00 9 /x.blackbox.old\n"), None);
    }

    #[test]
    fn a_list_is_read_in_pieces() {
        let path = std::env::temp_dir().join(format!("memtrace-list-{}", std::process::id()));
        let long = "x".repeat(3000);
        let text: Vec<_> = (1..=50).map(|i| format!("{i} w /{long} {i}\n")).collect();
        fs::write(&path, text.concat() + "7 r /b\nnonsense\n9 w /half").expect("written");
        let file = fs::File::open(&path).expect("there");
        let mut found = Vec::new();
        lines(file.as_raw_fd(), |pid, what, path| found.push((pid, what, path.len())));
        let _ = fs::remove_file(&path);
        assert_eq!(found.len(), 51);
        assert_eq!(
            (found[0], found[49], found[50]),
            ((1, b'w', 3003), (50, b'w', 3004), (7, b'r', 2))
        );
    }

    #[test]
    fn text_is_put_together() {
        let mut text = Text::<LONGEST>::new();
        text.add(b"a ").number(0).add(b" ").number(1_234_567_890);
        assert_eq!(&text.bytes[..text.len], b"a 0 1234567890");
        text.add(&[b'x'; 2 * LONGEST]);
        assert_eq!(text.len, LONGEST);
    }
}

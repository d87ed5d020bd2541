//! Where ranks that really exist find each other.
//!
//! Most of a communicator's ranks are usually pretended, and nothing has to be asked of the others.
//! Splitting is the exception: who gets which colour is only known to all ranks together. Where
//! torchrun has started them all on this machine, they can say so.
//!
//! A rendezvous is one file in the temporary folder, named by the communicator's unique id. Each
//! rank appends a line to it when it comes, when it splits, and when it leaves; the last one
//! removes the file. A process that ends leaves every rendezvous. If not all ranks have come within
//! a second, some are taken to be pretended, and nobody is waited for again.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::gpu::log;

/// How long ranks may take to come, and then to split.
const COMING: Duration = Duration::from_secs(1);
const SPLITTING: Duration = Duration::from_mins(1);
const PAUSE: Duration = Duration::from_millis(2);

/// What a rank gives to a split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Its rank in the old communicator.
    pub rank: i32,
    /// Ranks of one colour stay together; a negative one leaves.
    pub colour: i32,
    /// Their order.
    pub key: i32,
}

/// One rank's part in its communicator's rendezvous.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    id: String,
    rank: i32,
    ranks: i32,
    splits: u32,
    alone: bool,
}

impl Rendezvous {
    /// Joins the rendezvous of that id, which must be good for a file name.
    pub fn join(id: &str, rank: i32, ranks: i32) -> Self {
        let mut rendezvous = Self { id: id.to_owned(), rank, ranks, splits: 0, alone: true };
        if ranks > 1 && rendezvous.say("here").is_some() {
            rendezvous.alone = false;
            AT_EXIT.call_once(|| {
                // SAFETY: a function without arguments that may run at any time.
                unsafe { libc::atexit(leave_all) };
            });
            open().push((std::process::id(), rendezvous.clone()));
        }
        rendezvous
    }

    /// The rendezvous of a communicator with no other process in it.
    pub fn alone() -> Self {
        Self { id: String::new(), rank: 0, ranks: 1, splits: 0, alone: true }
    }

    /// The name of the rendezvous of a communicator that is split off this one.
    pub fn child(&self, colour: i32) -> String {
        format!("{}-{}-{colour}", self.id, self.splits)
    }

    /// What all ranks chose, in the order of ranks; `None` if some are pretended.
    pub fn split(&mut self, colour: i32, key: i32) -> Option<Vec<Choice>> {
        self.splits += 1;
        let word = format!("split {}", self.splits);
        if !self.alone {
            self.alone = self.say(&format!("{word} {colour} {key}")).is_none()
                || self.wait_for("here", COMING).is_none();
        }
        if self.alone {
            return None;
        }
        let lines = self.wait_for(&word, SPLITTING)?;
        let mut choices: Vec<Choice> = lines.into_iter().filter_map(|line| line.choice()).collect();
        choices.sort_by_key(|choice| choice.rank);
        Some(choices)
    }

    /// Leaves; the last one clears up.
    pub fn leave(self) {
        let mut open = open();
        let Some(at) = open.iter().position(|(_, m)| m.id == self.id && m.rank == self.rank) else {
            return;
        };
        open.remove(at);
        drop(open);
        // A file that can't be written or read any more needs no goodbye.
        let _ = self.say("gone");
        if self.lines("gone").len() >= self.lines("here").len() {
            let _ = std::fs::remove_file(self.path());
        }
    }

    fn path(&self) -> PathBuf {
        std::env::temp_dir().join(format!("memtrace-nccl-{}", self.id))
    }

    /// Appends one line, which is short enough to be written whole.
    fn say(&self, word: &str) -> Option<File> {
        let mut file = open_plain(&self.path(), OpenOptions::new().create(true).append(true))?;
        file.write_all(format!("{} {word}\n", self.rank).as_bytes()).ok()?;
        Some(file)
    }

    fn lines(&self, word: &str) -> Vec<Line> {
        let mut text = String::new();
        if let Some(mut file) = open_plain(&self.path(), OpenOptions::new().read(true)) {
            let _ = file.read_to_string(&mut text); // what can't be read says nothing
        }
        // The last line may still be on its way.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().filter_map(|line| Line::parse(line, word)).collect()
    }

    /// The ranks' lines with this word, once there is one of each.
    fn wait_for(&self, word: &str, limit: Duration) -> Option<Vec<Line>> {
        let start = Instant::now();
        loop {
            let lines = self.lines(word);
            if lines.len() >= self.ranks as usize {
                return Some(lines);
            }
            if start.elapsed() > limit {
                return None;
            }
            sleep(PAUSE);
        }
    }
}

/// Opens a rendezvous's file, which is this user's own. The folder is everybody's. Where somebody
/// has put a link, a FIFO or anything else, nothing is followed and nobody is waited for. The ranks
/// are then pretended, which is reported once.
fn open_plain(path: &Path, how: &mut OpenOptions) -> Option<File> {
    static WARNED: Once = Once::new();
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = how.mode(0o600).custom_flags(flags).open(path).and_then(|file| {
        let found = file.metadata()?;
        // SAFETY: has no arguments and can't fail.
        let ours = found.uid() == unsafe { libc::geteuid() };
        let plain = found.is_file() && ours;
        if plain { Ok(file) } else { Err(io::Error::other("it is not a file of this user's")) }
    });
    if let Err(e) = &opened
        && e.kind() != io::ErrorKind::NotFound
    {
        WARNED.call_once(|| {
            log::warn_once(&format!(
                "ranks of NCCL can't meet in {}: {e}; the others are pretended",
                path.display()
            ));
        });
    }
    opened.ok()
}

static AT_EXIT: Once = Once::new();

/// The rendezvous that this process has joined, with its id: a child that it forks has joined none.
fn open() -> MutexGuard<'static, Vec<(u32, Rendezvous)>> {
    static OPEN: Mutex<Vec<(u32, Rendezvous)>> = Mutex::new(Vec::new());
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn leave_all() {
    let mine: Vec<_> =
        open().iter().filter(|(pid, _)| *pid == std::process::id()).cloned().collect();
    for (_, rendezvous) in mine {
        rendezvous.leave();
    }
}

/// A rank, and the numbers that follow the word.
struct Line {
    rank: i32,
    numbers: Vec<i32>,
}

impl Line {
    fn parse(line: &str, word: &str) -> Option<Self> {
        let (rank, rest) = line.split_once(' ')?;
        let rest = rest.strip_prefix(word)?;
        if !rest.is_empty() && !rest.starts_with(' ') {
            return None;
        }
        let numbers: Result<_, _> = rest.split_whitespace().map(str::parse).collect();
        Some(Self { rank: rank.parse().ok()?, numbers: numbers.ok()? })
    }

    fn choice(&self) -> Option<Choice> {
        match self.numbers[..] {
            [colour, key] => Some(Choice { rank: self.rank, colour, key }),
            _ => None,
        }
    }
}

/// This rank's place among those of its colour: how many there are, and which it is.
pub fn place(choices: &[Choice], rank: i32) -> Option<(i32, i32)> {
    let own = choices.iter().find(|choice| choice.rank == rank)?;
    let mut members: Vec<_> = choices.iter().filter(|c| c.colour == own.colour).collect();
    members.sort_by_key(|choice| (choice.key, choice.rank));
    let at = members.iter().position(|choice| choice.rank == rank)?;
    Some((members.len() as i32, at as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> String {
        format!("test-{name}-{}", std::process::id())
    }

    #[test]
    fn ranks_that_exist_learn_each_others_colours() {
        let id = id("split");
        let threads: Vec<_> = (0..4)
            .map(|rank| {
                let id = id.clone();
                std::thread::spawn(move || {
                    let mut rendezvous = Rendezvous::join(&id, rank, 4);
                    // Even and odd ranks part; the keys turn their order round.
                    let first = rendezvous.split(rank % 2, -rank).expect("all came");
                    let second = rendezvous.split(0, rank).expect("all came");
                    let path = rendezvous.path();
                    rendezvous.leave();
                    (place(&first, rank), place(&second, rank), path)
                })
            })
            .collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            let (first, second, path) = thread.join().expect("no panic");
            let rank = rank as i32;
            assert_eq!(first, Some((2, 1 - rank / 2)));
            assert_eq!(second, Some((4, rank)));
            if rank == 3 {
                assert!(!path.exists(), "the last one clears up");
            }
        }
    }

    #[test]
    fn pretended_ranks_are_waited_for_once() {
        let mut rendezvous = Rendezvous::join(&id("alone"), 3, 8);
        assert_eq!(rendezvous.split(0, 0), None);
        let start = Instant::now();
        assert_eq!(rendezvous.split(1, 0), None);
        assert!(start.elapsed() < COMING);
        let path = rendezvous.path();
        rendezvous.leave();
        assert!(!path.exists());
    }

    #[test]
    fn what_somebody_has_put_there_is_not_followed_and_nobody_waits() {
        let folder = std::env::temp_dir();
        let victim = folder.join(format!("memtrace-nccl-victim-{}", std::process::id()));
        std::fs::write(&victim, "precious").expect("written");
        for trap in ["link", "dangling", "fifo", "folder"] {
            let mut rendezvous =
                Rendezvous { id: id(trap), rank: 0, ranks: 2, splits: 0, alone: true };
            let path = rendezvous.path();
            match trap {
                "link" => std::os::unix::fs::symlink(&victim, &path).expect("made"),
                "dangling" => std::os::unix::fs::symlink(victim.join("x"), &path).expect("made"),
                "folder" => std::fs::create_dir(&path).expect("made"),
                _ => {
                    let path = std::ffi::CString::new(path.to_str().expect("text")).expect("text");
                    // SAFETY: a C string.
                    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
                }
            }
            let start = Instant::now();
            rendezvous = Rendezvous::join(&rendezvous.id, 0, 2);
            assert!(rendezvous.alone && rendezvous.lines("here").is_empty(), "{trap}");
            assert_eq!(rendezvous.split(0, 0), None);
            assert!(start.elapsed() < COMING, "{trap}");
            assert!(path.symlink_metadata().is_ok());
            if std::fs::remove_file(&path).is_err() {
                std::fs::remove_dir(&path).expect("empty");
            }
        }
        assert_eq!(std::fs::read_to_string(&victim).expect("there"), "precious");
        std::fs::remove_file(&victim).expect("there");
    }

    #[test]
    fn one_word_is_not_the_beginning_of_another() {
        assert!(Line::parse("3 split 1 0 5", "split 1").is_some());
        assert!(Line::parse("3 split 12 0 5", "split 1").is_none());
        assert!(Line::parse("here", "here").is_none());
    }
}

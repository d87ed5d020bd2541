//! Where ranks that really exist find each other.
//!
//! Most of a communicator's ranks are usually pretended, and nothing has to be asked of the others. Splitting
//! is the exception: who gets which colour is only known to all ranks together. Where torchrun has
//! started them all on this machine, they can say so.
//!
//! The place is one file in the temporary folder, named by the communicator's unique id, to which each rank
//! appends a line when it comes, when it splits, and when it leaves; the last one takes the file away. A
//! process that ends leaves all its meetings. If not all ranks have come within a second, some are taken to be
//! pretended, and nobody is waited for again.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

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

/// One rank's seat in its communicator's meeting.
#[derive(Clone, Debug)]
pub struct Meeting {
    id: String,
    rank: i32,
    ranks: i32,
    splits: u32,
    alone: bool,
}

impl Meeting {
    /// Comes to the meeting of that id, which must be good for a file name.
    pub fn join(id: &str, rank: i32, ranks: i32) -> Self {
        let mut meeting = Self { id: id.to_owned(), rank, ranks, splits: 0, alone: true };
        if ranks > 1 && meeting.say("here").is_some() {
            meeting.alone = false;
            FAREWELL.call_once(|| {
                // SAFETY: a function without arguments that may run at any time.
                unsafe { libc::atexit(leave_all) };
            });
            open().push((std::process::id(), meeting.clone()));
        }
        meeting
    }

    /// A communicator with no other process in it.
    pub fn alone() -> Self {
        Self { id: String::new(), rank: 0, ranks: 1, splits: 0, alone: true }
    }

    /// The name of a meeting that grows out of this one.
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
        let mut file = OpenOptions::new().create(true).append(true).open(self.path()).ok()?;
        file.write_all(format!("{} {word}\n", self.rank).as_bytes()).ok()?;
        Some(file)
    }

    fn lines(&self, word: &str) -> Vec<Line> {
        let text = std::fs::read_to_string(self.path()).unwrap_or_default();
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

static FAREWELL: Once = Once::new();

/// Meetings that this process sits in, with its id: a child that it forks sits in none.
fn open() -> MutexGuard<'static, Vec<(u32, Meeting)>> {
    static OPEN: Mutex<Vec<(u32, Meeting)>> = Mutex::new(Vec::new());
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn leave_all() {
    let mine: Vec<_> =
        open().iter().filter(|(pid, _)| *pid == std::process::id()).cloned().collect();
    for (_, meeting) in mine {
        meeting.leave();
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
                    let mut meeting = Meeting::join(&id, rank, 4);
                    // Even and odd ranks part; the keys turn their order round.
                    let first = meeting.split(rank % 2, -rank).expect("all came");
                    let second = meeting.split(0, rank).expect("all came");
                    let path = meeting.path();
                    meeting.leave();
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
        let mut meeting = Meeting::join(&id("alone"), 3, 8);
        assert_eq!(meeting.split(0, 0), None);
        let start = Instant::now();
        assert_eq!(meeting.split(1, 0), None);
        assert!(start.elapsed() < COMING);
        let path = meeting.path();
        meeting.leave();
        assert!(!path.exists());
    }

    #[test]
    fn one_word_is_not_the_beginning_of_another() {
        assert!(Line::parse("3 split 1 0 5", "split 1").is_some());
        assert!(Line::parse("3 split 12 0 5", "split 1").is_none());
        assert!(Line::parse("here", "here").is_none());
    }
}

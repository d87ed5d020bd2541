//! A file is opened so that nobody waits for ever: a pipe with a name (a FIFO) may have nobody who
//! writes to it. Where somebody has it open and writes nothing, the user learns what is waited for.

use std::fs::{File, OpenOptions};
use std::io::{self, Cursor, Read, Seek};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, SeekFrom, fcntl_getfl, fcntl_setfl, fstatfs, seek};

/// How long the one file that was named is waited for …
const ALONE: Duration = Duration::from_secs(5);
/// … and one of several.
const AMONG_SEVERAL: Duration = Duration::from_secs(2);
/// How long the writer of a pipe may be silent before that is said.
const SILENCE: Duration = AMONG_SEVERAL;
/// The file system of pipes without a name, `<(zcat …)`. Their writer was there from the beginning.
const PIPES: u64 = 0x5049_5045;

/// A file, ready to be read.
pub(crate) struct Opened {
    /// What has been read already, and the rest.
    pub(crate) bytes: io::Chain<Cursor<Vec<u8>>, Waiting>,
    /// What it takes on the disk. A sparse file is longer; what is no file has
    /// no length, it may have no end either.
    pub(crate) on_disk: u64,
    /// How long a file is; anything else is as long as it turns out to be.
    pub(crate) length: u64,
}

/// What is read, and what to do once if that is a pipe whose writer is silent.
pub(crate) struct Waiting {
    file: File,
    tell: Option<Box<dyn FnOnce()>>,
}

impl Waiting {
    fn tell(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell();
        }
    }
}

impl Read for Waiting {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.tell.is_some() && is_silent(&self.file, SILENCE)? {
            self.tell();
        }
        self.file.read(into)
    }
}

/// Opens what a user has named, alone or among several. `tell`: a writer
/// of that pipe is waited for.
pub(crate) fn open(path: &Path, several: bool, tell: fn(&Path)) -> Result<Opened, String> {
    let unread = |e: io::Error| format!("cannot be read: {e}");
    // Without waiting, for now; and a terminal does not become this process's own.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path);
    let mut file = opened.map_err(|e| {
        let is_socket = path.metadata().is_ok_and(|m| m.file_type().is_socket());
        if is_socket { "a socket, where a file is wanted".to_owned() } else { unread(e) }
    })?;
    let about = file.metadata().map_err(unread)?;
    if about.is_dir() {
        return Err("a folder, where a file is wanted".to_owned());
    }
    let mut begin = Vec::new();
    let mut silent: Option<Box<dyn FnOnce()>> = None;
    if about.file_type().is_fifo() && !is_nameless(&file) {
        let path = path.to_owned();
        let mut waiting = Waiting { file, tell: Some(Box::new(move || tell(&path))) };
        begin = wait(&mut waiting, several)?;
        Waiting { file, tell: silent } = waiting;
    }
    let flags = fcntl_getfl(&file).map_err(|e| unread(e.into()))?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|e| unread(e.into()))?;
    let length = if about.is_file() { about.len() } else { 0 };
    let on_disk = if has_holes(&file, length).map_err(unread)? {
        length.min(about.blocks().saturating_mul(512))
    } else {
        length
    };
    let bytes = Cursor::new(begin).chain(Waiting { file, tell: silent });
    Ok(Opened { bytes, on_disk, length })
}

/// How many blocks a file has is asked for only then: of one that was just written,
/// not every file system knows it yet.
fn has_holes(mut file: &File, length: u64) -> io::Result<bool> {
    if length == 0 {
        return Ok(false);
    }
    // A file system that knows of no holes may say so with an error.
    let hole = seek(file, SeekFrom::Hole(0)).unwrap_or(length);
    file.rewind()?;
    Ok(hole < length)
}

fn is_nameless(pipe: &File) -> bool {
    fstatfs(pipe).is_ok_and(|about| about.f_type as u64 == PIPES)
}

/// Has nobody written for so long? What has ended isn't silent.
fn is_silent(pipe: &File, patience: Duration) -> io::Result<bool> {
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready == 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Until somebody writes, or has written. One that was named alone is read however slow its writer
/// is; of several the others wait for their answers.
fn wait(pipe: &mut Waiting, several: bool) -> Result<Vec<u8>, String> {
    let unread = |e: io::Error| format!("cannot be read: {e}");
    let all = if several { AMONG_SEVERAL } else { ALONE };
    for patience in [SILENCE, all.saturating_sub(SILENCE)] {
        if !is_silent(&pipe.file, patience).map_err(unread)? {
            return Ok(Vec::new()); // there is something to be read, if only the end
        }
        let mut first = vec![0];
        match pipe.file.read(&mut first) {
            // Nobody has it open to write, so far.
            Ok(0) => {}
            Ok(_) => return Ok(first),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && !several => {
                pipe.tell();
                return Ok(Vec::new());
            }
            Err(_) => {}
        }
    }
    Err(format!(
        "a pipe (FIFO) to which nobody has written for {} s: start what writes to it, or name a file",
        all.as_secs()
    ))
}

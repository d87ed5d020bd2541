//! Files that memtrace makes and opens in folders that others may write to, too. Links,
//! FIFOs and devices there must do no harm.
//!
//! A file is made under a name that nobody can guess and that nothing has yet (`O_EXCL`). It gets
//! its own name when it is complete ([`NewFile`]). So a link, a device or a FIFO at that name is
//! never written through, and a reader never sees half a file. No file is overwritten but the one
//! that the user named, by [`NewFile::replace`]. Files hold paths and command lines, so they are
//! their owner's alone unless the user wants otherwise ([`Readers`]).
//!
//! The writer holds a lock on its file until then. The kernel releases it when the process dies,
//! however it dies. So whoever gets the lock knows that nobody will finish the file
//! ([`clear_abandoned`]). Where a file system has no locks, nothing is cleared.
//!
//! A file is opened without following a link and without waiting
//! ([`open`]), and must be a plain one.
//!
//! The kernel gives a new descriptor the lowest number that is free. In somebody else's
//! process that may be 0, 1 or 2. Then the program reads our file as its input or writes its
//! output into it. Or it is a number that the program would have got next. So every file is
//! moved to a higher number at once ([`aside`]).

#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile, PersistError};

/// How a name begins that is not final.
const PREFIX: &str = ".memtrace-";
/// How it ends.
const SUFFIX: &str = ".part";
/// Letters and digits between.
const RANDOM: usize = 16;
/// The lowest numbers for descriptors of ours, best first: the limit on them may be low
/// (`ulimit -n`). The last one is beyond standard input, output and error.
const NUMBERS: [i32; 4] = [200, 60, 15, FIRST_OWN];
/// No program has its standard input, output or error here.
const FIRST_OWN: i32 = 3;
/// How often a new file is taken away by somebody who clears up before it is locked.
const TRIES: usize = 16;

/// Who may read a new file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Readers {
    /// Its owner alone: mode 0600.
    #[default]
    Owner,
    /// Whoever the process's umask lets: mode 0666 less the umask.
    Umask,
}

/// A file that has no name of its own yet. If it never gets one, it goes.
#[derive(Debug)]
pub struct NewFile {
    file: NamedTempFile,
    folder: PathBuf,
}

impl NewFile {
    /// An empty file in a folder that is there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn within(folder: &Path, readers: Readers) -> io::Result<NewFile> {
        let mode = match readers {
            Readers::Owner => 0o600,
            Readers::Umask => 0o666,
        };
        let folder = if folder == Path::new("") { Path::new(".") } else { folder };
        for _ in 0..TRIES {
            let mut builder = Builder::new();
            builder.prefix(PREFIX).suffix(SUFFIX).rand_bytes(RANDOM);
            let file = builder.permissions(Permissions::from_mode(mode)).tempfile_in(folder)?;
            let (file, path) = file.into_parts();
            let file = NamedTempFile::from_parts(aside(file)?, path);
            // Without locks nobody clears up either.
            let locked = !matches!(file.as_file().try_lock(), Err(TryLockError::WouldBlock));
            if locked && file.as_file().metadata()?.nlink() > 0 {
                return Ok(NewFile { file, folder: folder.to_owned() });
            }
        }
        Err(io::Error::other("somebody removes every new file"))
    }

    /// To write to and to read from.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Where it is until it has a name of its own.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The folder that it is in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Gives it the first of these names that nothing has.
    ///
    /// # Errors
    /// Those of the file system; `AlreadyExists` if all names are taken.
    pub fn place(self, names: impl IntoIterator<Item = PathBuf>) -> io::Result<(PathBuf, File)> {
        let mut file = self.file;
        for name in names {
            match take_name(file, &name) {
                Ok(file) => {
                    let _ = file.unlock(); // it is no longer one that can be abandoned
                    return Ok((name, file));
                }
                Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => file = e.file,
                Err(e) => return Err(e.error),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Gives it a name that the user has chosen, instead of the plain file or the link to one that
    /// may be there. A file keeps its permissions; what a link leads to stays as it is.
    ///
    /// # Errors
    /// Those of the file system; also if something else is there.
    pub fn replace(self, path: &Path) -> io::Result<()> {
        match fs::symlink_metadata(path) {
            Ok(old) if old.is_file() => {
                let mode = old.permissions().mode() & 0o777;
                self.file().set_permissions(Permissions::from_mode(mode))?;
            }
            Ok(old) if old.is_symlink() && may_go(path) => {}
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "what is there is not a plain file; name another one",
                ));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        self.file.persist(path).map(drop).map_err(|e| e.error)
    }
}

/// May this link be replaced by a file? `/dev/stdout` and its like may not,
/// whatever they lead to at the moment.
fn may_go(link: &Path) -> bool {
    let to_descriptor = fs::read_link(link).is_ok_and(|to| to.starts_with("/proc"));
    !to_descriptor && fs::metadata(link).map_or(true, |to| to.is_file())
}

/// Renames, but never over something. Where a file system can do neither that nor hard
/// links, a look and a rename must do.
fn take_name(file: NamedTempFile, name: &Path) -> Result<File, PersistError> {
    match file.persist_noclobber(name) {
        Err(e)
            if e.error.kind() != io::ErrorKind::AlreadyExists
                && fs::symlink_metadata(name)
                    .is_err_and(|e| e.kind() == io::ErrorKind::NotFound) =>
        {
            e.file.persist(name)
        }
        Err(e) if fs::symlink_metadata(name).is_ok() => {
            Err(PersistError { error: io::ErrorKind::AlreadyExists.into(), file: e.file })
        }
        other => other,
    }
}

/// An empty file for reading and writing, which has no name and goes with its last user.
///
/// # Errors
/// Those of the file system.
pub fn scratch(folder: &Path) -> io::Result<File> {
    tempfile::tempfile_in(folder).and_then(aside)
}

/// The same file by a descriptor that is not in the program's way.
///
/// # Errors
/// It has the number of standard input, output or error, and there is no other one.
pub fn aside<F: Into<OwnedFd> + From<OwnedFd>>(file: F) -> io::Result<F> {
    let file: OwnedFd = file.into();
    let higher = |least| rustix::io::fcntl_dupfd_cloexec(&file, least);
    match NUMBERS.into_iter().map(higher).find_map(Result::ok) {
        Some(other) => Ok(other.into()),
        None if file.as_raw_fd() >= FIRST_OWN => Ok(file.into()),
        None => Err(rustix::io::Errno::MFILE.into()),
    }
}

/// The bytes of any file, such as those under `/proc`.
///
/// # Errors
/// Those of the file system.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    aside(File::open(path)?)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The folder that a path's file is in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| *p != Path::new("")).unwrap_or(Path::new("."))
}

/// Opens a plain file for reading, without following a link and without waiting for anybody.
///
/// # Errors
/// Those of the file system; `InvalidInput`, with what it is, for anything but a plain file.
pub fn open(path: &Path) -> io::Result<File> {
    plain(path, OpenOptions::new().read(true))
}

/// Opens a file to which several processes of one user add lines; it is made, for
/// its owner alone, if it is not there.
///
/// # Errors
/// Those of the file system; `InvalidInput` for anything but a plain file of one's own.
pub fn append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).mode(0o600);
    let file = match plain(path, options.create_new(true)) {
        // Then it is opened, if it is one that this user made.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            plain(path, options.create_new(false))?
        }
        other => other?,
    };
    if is_ours(&file)? {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it belongs to somebody else"))
    }
}

fn plain(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = options.custom_flags(flags).open(path).map_err(|e| {
        let is_link = e.raw_os_error() == Some(libc::ELOOP);
        if is_link { not_plain("a link") } else { e }
    })?;
    let file = aside(file)?;
    let kind = file.metadata()?.mode() & libc::S_IFMT;
    match kind {
        libc::S_IFREG => Ok(file),
        libc::S_IFDIR => Err(not_plain("a folder")),
        libc::S_IFIFO => Err(not_plain("a FIFO")),
        _ => Err(not_plain("a device")),
    }
}

fn not_plain(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("it is {what}, not a file"))
}

/// Does it belong to the user of this process?
///
/// # Errors
/// Those of the file system.
pub fn is_ours(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.uid() == user()?)
}

/// The user of this process: its own entry belongs to its effective user.
///
/// # Errors
/// There is no `/proc`.
pub fn user() -> io::Result<u32> {
    fs::metadata("/proc/self").map(|m| m.uid())
}

/// Removes a file, if what has its name is still the one that was opened.
///
/// # Errors
/// Those of the file system; `NotFound` if the name is another file's.
pub fn remove(path: &Path, file: &File) -> io::Result<()> {
    let (named, opened) = (fs::symlink_metadata(path)?, file.metadata()?);
    if (named.dev(), named.ino()) != (opened.dev(), opened.ino()) {
        return Err(io::ErrorKind::NotFound.into());
    }
    fs::remove_file(path)
}

/// Removes this user's unfinished files whose writers are dead.
pub fn clear_abandoned(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let unfinished =
            name.to_str().is_some_and(|n| n.starts_with(PREFIX) && n.ends_with(SUFFIX));
        if unfinished
            && let Ok(file) = open(&entry.path())
            && is_ours(&file).unwrap_or(false)
            && file.try_lock().is_ok()
        {
            // Whoever makes it right now sees that it is gone, and makes another one.
            let _ = remove(&entry.path(), &file);
        }
    }
}

#[cfg(test)]
mod tests;

//! Can something be preloaded into this program? It is asked before the start, because the system
//! says nothing. A static or setuid program simply runs unrecorded. One of another architecture
//! fills the terminal with the loader's complaints.
//!
//! A script is what its first line says, so the interpreter is looked at, and through `env` the
//! program that it will find. What a program starts later can't be known here.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memtrace_terminal::shell::quoted;
use object::Endianness;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};

/// Scripts whose interpreter is a script … the kernel follows as many.
const MAX_SCRIPTS: usize = 5;

/// How much of a file holds its headers and the name of its loader.
const HEAD: u64 = 64 << 10;

/// Where programs are looked for without a PATH.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

#[cfg(target_arch = "x86_64")]
const OURS: (elf::Machine, &str) = (elf::EM_X86_64, "x86-64");
#[cfg(target_arch = "aarch64")]
const OURS: (elf::Machine, &str) = (elf::EM_AARCH64, "AArch64");

/// Why a command can't be run, or would run unseen. One line, with what to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NotFound(OsString),
    NotExecutable(PathBuf),
    Folder(PathBuf),
    Damaged(PathBuf),
    NoInterpreter(PathBuf, OsString),
    Static(PathBuf),
    Privileged(PathBuf),
    Bits32(PathBuf),
    Machine(PathBuf, String),
    Musl(PathBuf),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arch = OURS.1;
        match self {
            Self::NotFound(name) if name.as_bytes().contains(&b'/') => {
                write!(f, "cannot find '{}'", name.display())
            }
            Self::NotFound(name) => write!(f, "cannot find '{}' in PATH", name.display()),
            Self::NotExecutable(path) => {
                let word = quoted(path);
                let path = path.display();
                write!(
                    f,
                    "'{path}' is not executable: chmod +x it, or name its interpreter: memtrace run -- python {word}"
                )
            }
            Self::Folder(path) => {
                write!(f, "'{}' is a folder: name the program to run", path.display())
            }
            Self::Damaged(path) => {
                write!(f, "'{}' is a damaged program: build or install it again", path.display())
            }
            Self::NoInterpreter(path, interpreter) => write!(
                f,
                "'{}' asks for the interpreter '{}', which cannot be found: correct its first line",
                path.display(),
                interpreter.display()
            ),
            Self::Static(path) => write!(
                f,
                "'{}' is statically linked, so nothing can be recorded in it: link it to a shared C library",
                path.display()
            ),
            Self::Privileged(path) => {
                let path = path.display();
                write!(
                    f,
                    "'{path}' is setuid or setgid, so the system keeps memtrace out of it: run memtrace inside it"
                )
            }
            Self::Bits32(path) => write!(
                f,
                "'{}' is a 32-bit program and memtrace is for {arch}: use a 64-bit build of it",
                path.display()
            ),
            Self::Machine(path, machine) => write!(
                f,
                "'{}' is built for {machine} and memtrace for {arch}: use the build for this machine",
                path.display()
            ),
            Self::Musl(path) => write!(
                f,
                "'{}' uses musl's C library and memtrace glibc's: use a program built for glibc",
                path.display()
            ),
        }
    }
}

/// Finds a command as a shell does.
pub(crate) fn find(command: &OsStr) -> Result<PathBuf, Refusal> {
    if command.as_bytes().contains(&b'/') {
        let path = PathBuf::from(command);
        return match fs::metadata(&path) {
            Ok(_) => Ok(path),
            Err(_) => Err(Refusal::NotFound(command.to_owned())),
        };
    }
    let path = env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
    let files = || {
        let found = env::split_paths(&path).map(|folder| folder.join(command));
        found.filter(|p| !command.is_empty() && fs::metadata(p).is_ok_and(|m| m.is_file()))
    };
    // Without an executable one, name the file that is nearly it.
    let executable = files().find(|p| fs::metadata(p).is_ok_and(|m| m.mode() & 0o111 != 0));
    executable.or_else(|| files().next()).ok_or_else(|| Refusal::NotFound(command.to_owned()))
}

/// Says whether a library can be preloaded into a program.
pub(crate) fn preloadable(program: &Path) -> Result<(), Refusal> {
    let mut path = program.to_owned();
    for _ in 0..MAX_SCRIPTS {
        let Some(head) = look(&path)? else { return Ok(()) };
        let Some(line) = head.strip_prefix(b"#!") else {
            if head.starts_with(&elf::ELFMAG) {
                return inspect_elf(&path, &head);
            }
            // Neither a program nor a script with a first line: the shell will be asked.
            path = PathBuf::from("/bin/sh");
            continue;
        };
        let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
        path = interpreter(&path, line)?;
    }
    Ok(())
}

/// The beginning of a file that can be executed; `None` if we may not see
/// it, which the system may not mind.
fn look(path: &Path) -> Result<Option<Vec<u8>>, Refusal> {
    let (Ok(found), Ok(me)) = (fs::metadata(path), fs::metadata("/proc/self")) else {
        return Ok(None);
    };
    if found.is_dir() {
        return Err(Refusal::Folder(path.to_owned()));
    }
    if found.mode() & 0o111 == 0 {
        return Err(Refusal::NotExecutable(path.to_owned()));
    }
    let setuid = found.mode() & 0o4000 != 0 && found.uid() != me.uid();
    let setgid = found.mode() & 0o2010 == 0o2010 && found.gid() != me.gid();
    if setuid || setgid {
        return Err(Refusal::Privileged(path.to_owned()));
    }
    let mut head = Vec::new();
    let read = File::open(path).and_then(|f| f.take(HEAD).read_to_end(&mut head));
    Ok(read.is_ok().then_some(head))
}

/// The program that a script's first line (without `#!`) leads to.
fn interpreter(script: &Path, line: &[u8]) -> Result<PathBuf, Refusal> {
    let missing = |name: &OsStr| Refusal::NoInterpreter(script.to_owned(), name.to_owned());
    let mut words = line.split(u8::is_ascii_whitespace).filter(|w| !w.is_empty());
    let first = OsStr::from_bytes(words.next().unwrap_or_default());
    let mut name = first;
    if Path::new(first).file_name() == Some(OsStr::new("env")) {
        // Options and variables are before the program; -u and -C take a word with them.
        let mut options = words.skip_while({
            let mut value_follows = false;
            move |word| {
                let skip = value_follows || word.starts_with(b"-") || word.contains(&b'=');
                value_follows = !value_follows && matches!(*word, b"-u" | b"-C");
                skip
            }
        });
        name = OsStr::from_bytes(options.next().unwrap_or_default());
    }
    find(name).map_err(|_| missing(name))
}

fn inspect_elf(path: &Path, head: &[u8]) -> Result<(), Refusal> {
    let damaged = || Refusal::Damaged(path.to_owned());
    if head.get(4) == Some(&elf::ELFCLASS32.0) {
        return Err(Refusal::Bits32(path.to_owned()));
    }
    let program = elf::FileHeader64::<Endianness>::parse(head).map_err(|_| damaged())?;
    let endian = program.endian().map_err(|_| damaged())?;
    let machine = program.e_machine(endian);
    if machine != OURS.0 || endian != Endianness::Little {
        return Err(Refusal::Machine(path.to_owned(), machine_name(machine)));
    }
    let parts = program.program_headers(endian, head).map_err(|_| damaged())?;
    let loader = parts.iter().find_map(|p| p.interpreter(endian, head).ok().flatten());
    match loader {
        None => Err(Refusal::Static(path.to_owned())),
        Some(loader) if loader.windows(4).any(|w| w == b"musl") => {
            Err(Refusal::Musl(path.to_owned()))
        }
        Some(_) => Ok(()),
    }
}

fn machine_name(machine: elf::Machine) -> String {
    match machine {
        elf::EM_X86_64 => "x86-64".to_owned(),
        elf::EM_AARCH64 => "AArch64".to_owned(),
        elf::EM_RISCV => "RISC-V".to_owned(),
        elf::EM_PPC64 => "PowerPC".to_owned(),
        elf::EM_S390 => "s390".to_owned(),
        other => format!("another machine (ELF machine {})", other.0),
    }
}

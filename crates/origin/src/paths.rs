//! What a path says by its parts: packages, the standard library,
//! PyTorch's folder, what a compiler wrote.
//!
//! Parts are compared whole, and from a place that is known: a folder of packages is one only where
//! an interpreter would look for it. Paths may come from another machine, so none is looked up on
//! this one. Those of Windows have a drive or two backslashes in front, and both kinds of slash.

/// Files in which native code is.
const LIBRARIES: [&str; 5] = ["so", "dll", "pyd", "dylib", "exe"];

/// Files in which native code was written, or waits to be linked.
const SOURCES: [&str; 20] = [
    "o", "a", "c", "cc", "cpp", "cxx", "cu", "cuh", "h", "hh", "hpp", "hxx", "inc", "inl", "ipp",
    "tcc", "rs", "s", "S", "asm",
];

/// Where transformers, datasets and evaluate keep code that they have fetched.
const OF_MODELS: [&str; 3] = ["transformers_modules", "datasets_modules", "evaluate_modules"];

/// Folders with what only starts a program, each in another: debuggers, and what packed
/// applications bring. And what of memtrace's own is between a program and the functions that
/// it calls, where it isn't installed.
const STARTERS: [[&str; 2]; 9] = [
    ["memtrace", "recording.py"],
    ["memtrace", "integrations"],
    ["memtrace", "tracer"],
    ["libs", "debugpy"],
    ["python", "debugpy"],
    ["helpers", "pydev"],
    ["helpers", "pycharm"],
    [".bootstrap", "pex"],
    [".pex", "venvs"],
];

/// Modules and packages of the standard library, of CPython 3.8 to 3.15, that have a source file.
const STANDARD: &str = "\
__future__ __hello__ __phello__ _aix_support _collections_abc _colorize _compat_pickle _compression _markupbase \
_opcode_metadata _osx_support _py_abc _pydatetime _pydecimal _pyio _pylong _pyrepl _py_warnings _sitebuiltins \
_strptime _threading_local _weakrefset abc annotationlib argparse ast asynchat asyncio asyncore base64 bdb bisect bz2 \
cProfile calendar cgi cgitb chunk cmd code codecs codeop collections colorsys compileall compression concurrent \
configparser contextlib contextvars copy copyreg crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis \
distutils doctest email encodings ensurepip enum filecmp fileinput fnmatch formatter fractions ftplib functools \
genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http idlelib imaplib imghdr imp \
importlib inspect io ipaddress json keyword lib2to3 linecache locale logging lzma mailbox mailcap mimetypes \
modulefinder msilib multiprocessing netrc nntplib ntpath nturl2path numbers opcode operator optparse os pathlib pdb \
pickle pickletools pipes pkgutil platform plistlib poplib posixpath pprint profile profiling pstats pty py_compile \
pyclbr pydoc pydoc_data queue quopri random re reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil \
signal site smtpd smtplib sndhdr socket socketserver sqlite3 sre_compile sre_constants sre_parse ssl stat statistics \
string stringprep struct subprocess sunau symbol symtable sysconfig tabnanny tarfile telnetlib tempfile textwrap this \
threading timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo types typing \
unittest urllib uu uuid venv warnings wave weakref webbrowser wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport \
zoneinfo";

/// Does the path come from Windows?
pub(super) fn is_windows(file: &str) -> bool {
    let drive = matches!(file.as_bytes(), [d, b':', b'/' | b'\\', ..] if d.is_ascii_alphabetic());
    drive || file.starts_with("\\\\")
}

/// Is the file in this folder? Windows ignores the case of letters.
pub(super) fn is_in(file: &str, folder: &str) -> bool {
    let (file, folder) = (Path::new(file), Path::new(folder));
    file.parts.len() > folder.parts.len()
        && file.windows == folder.windows
        && file.parts.iter().zip(&folder.parts).all(|(a, b)| file.same(a, b))
}

/// The first part of a frozen module's name: `<frozen importlib._bootstrap>`.
pub(super) fn frozen(file: &str) -> Option<&str> {
    file.strip_prefix("<frozen ")?.strip_suffix('>')?.split('.').next()
}

/// A module of the standard library, by its name or its file's. One of them is there only frozen.
pub(super) fn is_standard_module(part: &str) -> bool {
    let name = part.split('.').next().unwrap_or_default();
    name == "getpath" || STANDARD.split(' ').any(|module| module == name)
}

/// A file of Python's by its name.
pub(super) fn is_python_file(file: &str) -> bool {
    let extension = extension(Path::new(file).last());
    matches!(extension, "py" | "pyw" | "pyc" | "pyx" | "ipynb")
}

/// A library or a program by its name.
pub(super) fn is_library(file: &str) -> bool {
    let name = Path::new(file).last();
    let numbered = |rest: &str| rest.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let versioned = name.split_once(".so.").is_some_and(|(_, rest)| numbered(rest));
    versioned || LIBRARIES.contains(&extension(name))
}

/// A source file of native code by its name. A script may have such a name, too.
pub(super) fn is_native_source(file: &str) -> bool {
    SOURCES.contains(&extension(Path::new(file).last()))
}

fn extension(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(_, extension)| extension)
}

/// The installed package that a file belongs to: the folder, or the
/// module, right in a folder of packages.
pub fn package(file: &str) -> Option<&str> {
    let path = Path::new(file);
    let at = (0..path.parts.len()).rev().find(|i| path.is_folder_of_packages(*i))?;
    let name = *path.parts.get(at + 1)?;
    Some(name.strip_suffix(".py").unwrap_or(name))
}

/// A path in its parts.
pub(super) struct Path<'a> {
    file: &'a str,
    parts: Vec<&'a str>,
    windows: bool,
}

impl<'a> Path<'a> {
    pub(super) fn new(file: &'a str) -> Path<'a> {
        let windows = is_windows(file);
        let parts = file.split(|c| c == '/' || (windows && c == '\\')).collect();
        Path { file, parts, windows }
    }

    /// The file's name.
    pub(super) fn last(&self) -> &'a str {
        self.parts.last().copied().unwrap_or_default()
    }

    fn same(&self, a: &str, b: &str) -> bool {
        a == b || (self.windows && a.eq_ignore_ascii_case(b))
    }

    fn part(&self, i: Option<usize>) -> &'a str {
        i.and_then(|i| self.parts.get(i)).copied().unwrap_or_default()
    }

    /// The path up to the part with this number, which is in it.
    fn up_to(&self, i: usize) -> String {
        let end = self.parts[..=i].iter().map(|p| p.len() + 1).sum::<usize>() - 1;
        self.file[..end].to_owned()
    }

    /// Does the path begin at the root?
    pub(super) fn is_absolute(&self) -> bool {
        self.windows || self.file.starts_with('/')
    }

    /// The first part.
    pub(super) fn first(&self) -> &'a str {
        self.part(Some(0))
    }

    /// The number of the file's own part, or of the archive's that is a command
    /// of Windows: `acme.exe/__main__.py`.
    fn command(&self) -> Option<usize> {
        let last = self.parts.len().checked_sub(1)?;
        let archive = last.checked_sub(1).filter(|_| self.last() == "__main__.py");
        let is_program = |i: &usize| extension(self.parts[*i]).eq_ignore_ascii_case("exe");
        Some(archive.filter(is_program).unwrap_or(last))
    }

    /// Somebody's own folders begin with such a part.
    fn is_in_a_home(&self) -> bool {
        self.part(Some(1)) == "root" || self.parts.iter().any(|part| has_homes(part))
    }

    /// The folder that this one is in, if it may be one of packages: not
    /// the root, and nobody's home.
    pub(super) fn parent_of_packages(&self) -> Option<String> {
        let parent = self.parts.len().checked_sub(2).filter(|_| self.is_absolute())?;
        let is_home = self.is_in_a_home()
            && (self.part(Some(parent)) == "root" || has_homes(self.part(parent.checked_sub(1))));
        let is_root = parent == 0 || (self.file.starts_with("\\\\") && parent <= 3);
        (!is_root && !is_home).then(|| self.up_to(parent))
    }

    /// Is the file in this folder, and is it no command of one of its packages?
    pub(super) fn is_package_in(&self, folder: &str) -> bool {
        is_in(self.file, folder) && self.command_prefix().is_none_or(|prefix| prefix != folder)
    }

    /// A folder that an interpreter looks for packages in, or one in which a packed one is.
    fn is_folder_of_packages(&self, i: usize) -> bool {
        let before = |n: usize| self.part(i.checked_sub(n));
        if i + 1 == self.parts.len() {
            return false;
        }
        let is_called = |name: &str| self.same(self.parts[i], name);
        if is_called("site-packages") || is_called("dist-packages") {
            // The folder of a user's own packages on Windows is `Python311`.
            let is_version = is_version(before(1))
                || (self.windows && is_version(&before(1).to_ascii_lowercase()));
            return is_version
                || (self.windows && before(1).eq_ignore_ascii_case("lib"))
                // Programs that bring their packages: unpacked by shiv, and
                // a folder for each package by Bazel.
                || before(2) == ".shiv"
                || self.parts[..i].iter().any(|p| *p == "external" || p.ends_with(".runfiles"));
        }
        let name = self.parts[i];
        let is_pdm = name == "lib" && before(2) == "__pypackages__";
        // Code that comes with a model.
        let is_cache = (name == "modules" && OF_MODELS.contains(&self.parts[i + 1]))
            || [before(2), before(1), name] == [".cache", "torch", "hub"];
        is_pdm
            || is_cache
            || (!self.windows && matches!(extension(name), "egg" | "whl") && name.contains('-'))
    }

    /// A module of the standard library, where one would be.
    pub(super) fn is_standard(&self) -> bool {
        (1..self.parts.len()).any(|i| {
            let (folder, before) = (self.parts[i - 1], self.part(i.checked_sub(2)));
            let is_lib = before == "lib" || before == "lib64";
            let is_folder = (is_lib && is_version(folder) && folder.contains('.'))
                || (self.windows && folder.eq_ignore_ascii_case("lib"))
                || is_zipped(folder);
            is_folder && is_standard_module(self.parts[i])
        })
    }

    /// The folder of PyTorch that this library of its own is in.
    pub(super) fn pytorch_of_library(&self) -> Option<String> {
        let name = self.last().strip_prefix("lib").unwrap_or(self.last());
        let is_library = name.contains(".so") || name.contains(".dll") || name.contains(".dylib");
        let is_its = name.starts_with("torch") || name.starts_with("c10");
        let folder = self.parts.len().checked_sub(3)?;
        let is_there = self.parts[folder] == "torch" && self.parts[folder + 1] == "lib";
        (is_library && is_its && is_there).then(|| self.up_to(folder))
    }

    /// The folder of the standard library that this library is in, or
    /// that belongs to this interpreter.
    pub(super) fn standard_of_library(&self) -> Option<String> {
        let folder = self.parts.len().checked_sub(2)?;
        if self.parts[folder] == "lib-dynload" {
            return Some(self.up_to(folder.checked_sub(1)?));
        }
        let name = self.last();
        let prefix = || Some(self.up_to(folder.checked_sub(1)?));
        match self.parts[folder] {
            "bin" if is_version(name) && name.contains('.') => {
                Some(format!("{}/lib/{name}", prefix()?))
            }
            "lib" if name.starts_with("libpython3.") => {
                let version = name.strip_prefix("lib")?.split(".so").next()?;
                Some(format!("{}/lib/{version}", prefix()?))
            }
            _ => None,
        }
    }

    /// The path up to a folder of this name whose rest is known.
    pub(super) fn folder_before(
        &self,
        name: &str,
        is_known: impl Fn(&str) -> bool,
    ) -> Option<String> {
        let found = (0..self.parts.len().saturating_sub(1))
            .rev()
            .find(|i| self.parts[*i] == name && is_known(&self.parts[i + 1..].join("/")))?;
        Some(self.up_to(found))
    }

    /// Is one of its folders called so?
    pub(super) fn is_under(&self, folder: &str) -> bool {
        self.parts.split_last().is_some_and(|(_, folders)| folders.contains(&folder))
    }

    /// Written by `torch.compile`: by the folder's name, or, where the user has
    /// chosen another, by how it names files.
    pub(super) fn is_of_inductor(&self) -> bool {
        let Some((name, folders)) = self.parts.split_last() else { return false };
        if folders.iter().any(|f| f.starts_with("torchinductor_")) {
            return true;
        }
        let stem = name.strip_suffix(".py").unwrap_or_default();
        let is_hash = |s: &str| s.bytes().all(|b| matches!(b, b'a'..=b'z' | b'2'..=b'7'));
        stem.len() == 52
            && is_hash(stem)
            && folders.last().is_some_and(|f| f.len() == 2 && stem.get(1..3) == Some(*f))
    }

    /// Does the function of this file belong to what only starts programs?
    pub(super) fn is_of_starter(&self, function: &str) -> bool {
        let of_shiv = self.parts.ends_with(&["_bootstrap", "__init__.py"]);
        if of_shiv && matches!(function, "bootstrap" | "run") {
            return true;
        }
        self.parts.windows(2).any(|pair| STARTERS.iter().any(|known| pair == known))
    }

    /// Of a command's script, in `bin` or in `Scripts`: where its packages are.
    pub(super) fn command_prefix(&self) -> Option<String> {
        let folder = self.command()?.checked_sub(1)?;
        let prefix = folder.checked_sub(1)?;
        self.is_folder_of_commands(folder).then(|| self.up_to(prefix))
    }

    fn is_folder_of_commands(&self, i: usize) -> bool {
        self.parts[i] == "bin" || self.parts[i].eq_ignore_ascii_case("scripts")
    }

    /// Is this the script of a command whose packages are elsewhere? Nobody but an installer makes
    /// one that is a program with an archive in it, or writes where all look for commands. In a
    /// home it is called as its package is.
    pub(super) fn is_command_of(&self, package: &str) -> bool {
        let Some(at) = self.command() else { return false };
        let name = self.parts[at];
        if at + 1 < self.parts.len() {
            return true;
        }
        let is_there = at > 0 && self.is_folder_of_commands(at - 1) && !is_python_file(name);
        is_there && (!self.is_in_a_home() || name.replace('-', "_") == package)
    }
}

/// A folder with people's homes.
fn has_homes(name: &str) -> bool {
    matches!(name, "home" | "homes" | "Users" | "users")
}

/// `python`, `python3`, `python3.11`, `python3.13t`, `pypy3.10`.
fn is_version(name: &str) -> bool {
    let rest = name.strip_prefix("python").or_else(|| name.strip_prefix("pypy"));
    let rest = rest.map(|r| r.strip_suffix('t').unwrap_or(r));
    rest.is_some_and(|r| r.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
}

/// The interpreter's program, which may be one with checks: `python3.11d`, `python3.11-dbg`.
pub(super) fn is_interpreter(name: &str) -> bool {
    let name = name.strip_suffix("-dbg").or_else(|| name.strip_suffix('d')).unwrap_or(name);
    is_version(name)
}

/// `python311.zip`
fn is_zipped(name: &str) -> bool {
    let digits = name.strip_prefix("python").and_then(|r| r.strip_suffix(".zip"));
    digits.is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))
}

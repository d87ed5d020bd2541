//! Whose code a frame is: native, PyTorch's, the standard library's, an
//! installed package's, or the user's.
//!
//! This is the one place that decides it. A line of code, an owner and a report all ask here.
//! A frame has a name, a file and a number, and nothing in it says of what kind it is. So what
//! is known for certain comes first. A snapshot of memtrace's lists the libraries that its
//! native frames are in. It also lists the folders of PyTorch and of the standard library,
//! which follow from the libraries that the process had loaded. Without that, they follow from
//! the other frames: a file and function that only PyTorch has say where its folder is. Only
//! then does the shape of a path count.
//!
//! - A frame is Python's unless it is a native one, whatever its file is
//!   called: a script needs no `.py`.
//! - A folder is known from its beginning, never by a part in the middle:
//!   `/home/me/torch/optim` is the user's.
//! - A folder counts only if Python runs from it. The path of a library is the real
//!   one; that of a Python file need not be.
//! - What a compiler wrote (`torch.compile`, FX, `dataclasses`) is nobody's line. Neither
//!   is what only starts a program, such as the script that pip makes for a command or
//!   the text that `multiprocessing` gives a new process. Nor is memtrace's own Python,
//!   which wraps functions that it watches.

mod paths;
mod starts;

use std::collections::{BTreeMap, BTreeSet, HashSet};

use memtrace_format::key::{Kept, Memtrace, PythonPlaces};
use memtrace_format::snapshot::{Frame, FrameIx, NO_LINE, Snapshot, Tables};

pub use paths::package;
use paths::{Path, is_interpreter, is_library, is_native_source, is_windows};

/// Whose a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// Machine code of a library or a program.
    Native,
    /// No code at all: why a stack is empty or cut.
    Gap,
    /// Python that a compiler wrote.
    Generated,
    /// Python's standard library.
    Standard,
    /// PyTorch's own Python.
    PyTorch,
    /// A package that was installed.
    Installed,
    /// The user's.
    User,
}

impl Origin {
    /// Has the frame a line of Python?
    pub fn is_python(self) -> bool {
        !matches!(self, Origin::Native | Origin::Gap)
    }
}

/// The file of frames that are no code: gaps and reasons.
pub const NO_FILE: &str = "memtrace";

/// Functions that only PyTorch has, by their file in its folder. They say
/// where it is when nothing else does.
const ONLY_PYTORCH: [(&str, &[&str]); 9] = [
    ("nn/modules/module.py", &["_call_impl", "_wrapped_call_impl", "_apply"]),
    ("utils/_contextlib.py", &["decorate_context"]),
    ("autograd/graph.py", &["_engine_run_backward"]),
    ("autograd/__init__.py", &["_make_grads", "backward"]),
    ("_tensor.py", &["backward"]),
    ("optim/optimizer.py", &["profile_hook_step", "_use_grad"]),
    ("serialization.py", &["restore_location", "_legacy_load", "_load"]),
    ("_dynamo/eval_frame.py", &["_fn", "compile_wrapper"]),
    ("cuda/memory.py", &["_record_memory_history", "_snapshot"]),
];

/// What frames are outside the libraries that are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Outside {
    /// Any: little is known.
    #[default]
    Any,
    /// Python's.
    Python,
    /// Python's, and native ones that were given their source files.
    Sources,
}

/// Where a process has its Python, by which its frames are classified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The libraries and programs that native frames are in.
    native: HashSet<String>,
    /// What is outside of `native`.
    outside: Outside,
    /// Files with a function that only Python's have, whatever they are called.
    scripts: HashSet<String>,
    /// PyTorch's folders.
    pytorch: Vec<String>,
    /// Folders of the standard library.
    standard: Vec<String>,
    /// Folders of packages that are known only by PyTorch's place.
    packages: Vec<String>,
    /// An application that keeps no folders: all files begin with their package.
    packed: bool,
    /// The program is a text, such as that of `python -c`.
    typed: bool,
    /// Scripts that do more than to call one function, though they are where commands do.
    busy: HashSet<String>,
}

impl Places {
    /// Those of the process of a snapshot.
    pub fn of(snapshot: &Snapshot) -> Places {
        Places::from_key(snapshot.memtrace.as_deref(), snapshot.tables())
    }

    /// From a snapshot's `memtrace` key, its frames and its stacks, where these are apart.
    pub fn from_key(about: Option<&Memtrace>, tables: Tables<'_>) -> Places {
        let libraries = about.and_then(|about| about.libraries.as_ref()).into_iter().flatten();
        let native = libraries.map(|(path, _)| path.clone()).collect();
        let recorded = about.and_then(|about| about.python.as_ref());
        let [pytorch, standard] =
            [recorded.and_then(|t| t.pytorch.as_ref()), recorded.and_then(|t| t.standard.as_ref())];
        let mut places = Places { native, ..Places::default() };
        // What has no Python at all has no script either.
        let is_empty = |folders: Option<&Vec<String>>| folders.is_some_and(Vec::is_empty);
        let mut sources = about.is_some_and(|about| about.symbolized == Some(true))
            || (is_empty(pytorch) && is_empty(standard));
        for frame in tables.frames {
            if is_pythons_function(&frame.name) && !places.native.contains(&frame.filename) {
                places.scripts.insert(frame.filename.clone());
            } else if is_native_name(&frame.name) && ![NO_FILE, "??"].contains(&&*frame.filename) {
                sources |= !places.native.contains(&frame.filename);
            }
        }
        if recorded.is_some() {
            places.outside = if sources { Outside::Sources } else { Outside::Python };
        }
        let python: Vec<&Frame> = tables
            .frames
            .iter()
            .filter(|f| f.filename != NO_FILE && !places.is_native(f))
            .collect();
        let folders = |recorded: Option<&Vec<String>>| recorded.cloned().unwrap_or_default();
        places.find_folders(tables.frames, &python, folders(pytorch), folders(standard));
        places.look_at_programs(tables);
        places
    }

    /// PyTorch's folders and the standard library's, of those that the
    /// snapshot lists, and of what frames say.
    fn find_folders(
        &mut self,
        all: &[Frame],
        python: &[&Frame],
        pytorch: Vec<String>,
        standard: Vec<String>,
    ) {
        // A folder that no Python frame is in may be another name of the right one.
        let is_used = |folder: &String| python.iter().any(|f| paths::is_in(&f.filename, folder));
        let loaded = folders_of_libraries(all.iter().map(|f| &*f.filename)).0;
        let is_loaded = !pytorch.is_empty() || !loaded.is_empty();
        self.pytorch = pytorch.into_iter().filter(is_used).collect();
        // Packages are in the standard library's folder, too, and say nothing of it.
        let is_used_itself = |folder: &String| {
            let mut own = python.iter().filter(|f| package(&f.filename).is_none());
            own.any(|f| paths::is_in(&f.filename, folder))
        };
        self.standard = standard.into_iter().filter(is_used_itself).collect();
        if self.pytorch.is_empty() {
            self.pytorch = loaded.into_iter().filter(is_used).collect();
        }
        if self.pytorch.is_empty() {
            self.pytorch = unique(python.iter().filter_map(|f| folder_of_pytorch(f)));
        }
        let has_folder = |f: &&Frame| !is_generated(f) && Path::new(&f.filename).is_absolute();
        self.packed = !python.iter().any(has_folder)
            && (is_loaded || !self.pytorch.is_empty())
            && is_used(&"torch".to_owned());
        if self.packed {
            self.pytorch = vec!["torch".to_owned()];
        }
    }

    /// What whole stacks say: where the program is, and whether it is a text.
    fn look_at_programs(&mut self, tables: Tables<'_>) {
        let beside = self.pytorch.iter().filter_map(|f| Path::new(f).parent_of_packages());
        let mut packages = unique(beside);
        if !packages.is_empty() {
            let is_module: Vec<bool> = tables.frames.iter().map(|f| f.name == "<module>").collect();
            let is_outer: Vec<bool> = tables.frames.iter().map(|f| self.is_outer(f)).collect();
            // Only a machinery of Python's is outside of the program's own module.
            let program = |stack: &Vec<FrameIx>| {
                let mut frames = stack.iter().rev().map(|f| *f as usize);
                let inner = frames.find(|f| is_outer.get(*f) != Some(&true))?;
                (is_module.get(inner) == Some(&true)).then_some(inner)
            };
            let programs: HashSet<usize> = tables.stacks.iter().filter_map(program).collect();
            packages.retain(|folder| {
                let lies_there =
                    |f: &usize| Path::new(&tables.frames[*f].filename).is_package_in(folder);
                !programs.iter().any(lies_there)
            });
        }
        self.packages = packages;
        self.busy = self.busy_scripts(tables);
        let is_text: Vec<bool> = tables.frames.iter().map(starts::is_text).collect();
        if is_text.contains(&true) {
            let origins: Vec<Origin> = tables.frames.iter().map(|f| self.origin(f)).collect();
            self.typed = tables.stacks.iter().any(|stack| {
                let known = || stack.iter().map(|f| *f as usize).filter(|f| *f < origins.len());
                let frames = || known().map(|f| &tables.frames[f]).collect::<Vec<_>>();
                let origins = || known().map(|f| origins[f]).collect::<Vec<_>>();
                known().any(|f| is_text[f]) && starts::is_typed(&frames(), &origins(), &self.busy)
            });
        }
    }

    /// Scripts among commands that call from several lines. What an installer makes calls from one.
    fn busy_scripts(&self, tables: Tables<'_>) -> HashSet<String> {
        let is_command: Vec<bool> = tables.frames.iter().map(starts::is_command).collect();
        if !is_command.contains(&true) {
            return HashSet::new();
        }
        let is_python: Vec<bool> =
            tables.frames.iter().map(|f| self.origin(f).is_python()).collect();
        let mut lines: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
        for stack in tables.stacks {
            let known =
                stack.iter().map(|f| *f as usize).filter(|f| is_python.get(*f) == Some(&true));
            let mut called: Option<&Frame> = None;
            for f in known {
                let frame = &tables.frames[f];
                if is_command[f] && called.is_some_and(|c| !starts::is_import(c)) {
                    lines.entry(&frame.filename).or_default().insert(frame.line);
                }
                called = Some(frame);
            }
        }
        let busy = lines.into_iter().filter(|(_, lines)| {
            lines.len() > 1 || lines.iter().any(|line| *line > starts::STARTER)
        });
        busy.map(|(file, _)| file.to_owned()).collect()
    }

    /// Does the frame run programs, whosever they are?
    fn is_outer(&self, frame: &Frame) -> bool {
        let origin = self.origin(frame);
        !origin.is_python() || origin == Origin::Standard
    }

    /// Those of a process that has loaded these libraries.
    pub fn of_libraries<'a>(files: impl Iterator<Item = &'a str>) -> Places {
        let (pytorch, standard) = folders_of_libraries(files);
        Places { pytorch, standard, ..Places::default() }
    }

    /// Adds the paths by which Python knows PyTorch's folders where these have
    /// others, by what `real` says of a path.
    pub fn add_links(&mut self, frames: &[Frame], real: impl Fn(&str) -> Option<String>) {
        if self.pytorch.is_empty() {
            return;
        }
        let sources = frames.iter().filter(|f| paths::is_python_file(&f.filename));
        let named = sources.filter_map(|f| Path::new(&f.filename).folder_before("torch", |_| true));
        let known: Vec<String> = self.pytorch.iter().filter_map(|folder| real(folder)).collect();
        let is_link = |folder: &String| {
            !self.pytorch.contains(folder) && real(folder).is_some_and(|path| known.contains(&path))
        };
        let links: Vec<String> = unique(named).into_iter().filter(is_link).collect();
        self.pytorch.extend(links);
    }

    /// For the `memtrace` key of a snapshot.
    pub fn to_key(&self) -> PythonPlaces {
        PythonPlaces {
            pytorch: Some(self.pytorch.clone()),
            standard: Some(self.standard.clone()),
            kept: Kept::NOTHING,
        }
    }

    /// Whose a frame is, taken by itself.
    pub fn origin(&self, frame: &Frame) -> Origin {
        if frame.filename == NO_FILE {
            Origin::Gap
        } else if self.is_native(frame) {
            Origin::Native
        } else if is_generated(frame)
            || package(&frame.filename) == Some("memtrace")
            || (is_method_of_text(frame) && !self.typed)
        {
            Origin::Generated
        } else {
            self.source(&frame.filename)
        }
    }

    /// Whose a Python source file is.
    pub fn source(&self, file: &str) -> Origin {
        let path = Path::new(file);
        let is_in = |folders: &[String]| folders.iter().any(|folder| paths::is_in(file, folder));
        let module = paths::frozen(file);
        let package = package(file);
        if is_in(&self.pytorch) || package == Some("torch") || module == Some("torch") {
            return Origin::PyTorch;
        }
        if package.is_some() {
            return Origin::Installed;
        }
        let looks = self.standard.is_empty() && path.is_standard();
        let is_module = module.is_some_and(paths::is_standard_module)
            || (self.packed && paths::is_standard_module(path.first()));
        if is_in(&self.standard) || looks || is_module {
            return Origin::Standard;
        }
        let is_beside = self.packages.iter().any(|folder| path.is_package_in(folder));
        if is_beside { Origin::Installed } else { Origin::User }
    }

    /// Whose the frames of a stack are, innermost first. Here the ones
    /// count that only start a program.
    pub fn stack(&self, frames: &[&Frame]) -> Vec<Origin> {
        let mut all: Vec<Origin> = frames.iter().map(|f| self.origin(f)).collect();
        starts::mark(frames, &mut all, &self.busy);
        all
    }

    fn is_native(&self, frame: &Frame) -> bool {
        let (file, name) = (&*frame.filename, &*frame.name);
        if self.native.contains(file) || file == "??" {
            return true;
        }
        if file.starts_with('<') || paths::is_python_file(file) || self.scripts.contains(file) {
            return false;
        }
        // A header of C++ may have no extension.
        if is_native_name(name) {
            return true;
        }
        if is_library(file) || (self.outside != Outside::Python && is_native_source(file)) {
            return true;
        }
        if self.outside != Outside::Any {
            return false;
        }
        // PyTorch's own recorder gives a program's frames the offset in it,
        // and leaves away what it doesn't know.
        let file_name = Path::new(file).last();
        let is_offset = frame.line == 0 || (frame.line >= 4096 && frame.line != NO_LINE);
        file.is_empty() || is_interpreter(file_name) || (!file_name.contains('.') && is_offset)
    }
}

/// PyTorch's folders, and those of the standard library, by the libraries
/// that are in them or beside them.
fn folders_of_libraries<'a>(files: impl Iterator<Item = &'a str>) -> (Vec<String>, Vec<String>) {
    let (mut pytorch, mut standard) = (Vec::new(), Vec::new());
    for file in files {
        let path = Path::new(file);
        pytorch.extend(path.pytorch_of_library());
        standard.extend(path.standard_of_library());
    }
    (unique(pytorch.into_iter()), unique(standard.into_iter()))
}

/// Where PyTorch is, by a function that only it has.
fn folder_of_pytorch(frame: &Frame) -> Option<String> {
    let is_known = |part: &str| {
        let known = ONLY_PYTORCH.iter().find(|(file, _)| *file == part);
        known.is_some_and(|(_, functions)| functions.contains(&&*frame.name))
    };
    Path::new(&frame.filename).folder_before("torch", is_known)
}

fn unique(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = all.collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// A name that only C++ and Rust have, or none at all.
fn is_native_name(name: &str) -> bool {
    name.contains("::") || name.contains('(') || name == "??"
}

/// What Python calls code that has no name of its own.
fn is_pythons_function(name: &str) -> bool {
    matches!(
        name,
        "<module>" | "<lambda>" | "<listcomp>" | "<setcomp>" | "<dictcomp>" | "<genexpr>"
    )
}

/// Python that no person wrote.
fn is_generated(frame: &Frame) -> bool {
    const TEXTS: [&str; 10] = [
        "<eval_with_key>",
        "<attrs generated",
        "<cattrs generated",
        "<decorator-gen",
        "<makefun-gen",
        "<boltons.funcutils.FunctionBuilder",
        "<lambdifygenerated",
        "<__array_function__ internals>",
        "<@beartype(",
        "<fx-generated",
    ];
    let file = &*frame.filename;
    TEXTS.iter().any(|t| file.starts_with(t)) || Path::new(file).is_of_inductor()
}

/// Such as a data class's `__init__`: written by nobody, unless the program itself is a text.
fn is_method_of_text(frame: &Frame) -> bool {
    let name = &*frame.name;
    frame.filename == starts::TEXT && name.starts_with("__") && name.ends_with("__")
}

/// The file without its folders, as a person would name it.
pub fn file_name(file: &str) -> &str {
    let end = if is_windows(file) { file.rfind(['/', '\\']) } else { file.rfind('/') };
    end.map_or(file, |at| &file[at + 1..])
}

#[cfg(test)]
mod tests;

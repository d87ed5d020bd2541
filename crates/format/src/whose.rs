//! Whose code a frame is: native, PyTorch's, the standard library's, an installed package's, or the user's.
//!
//! This is the one place that decides it; a line of code, an owner and a report all ask here. A frame has a name, a file
//! and a number, and nothing in it says of what kind it is. So what is known for certain comes first: a snapshot of
//! memtrace's names the libraries that its native frames lie in, and the folders of PyTorch and of the standard library,
//! which follow from the libraries that the process had loaded. Without that, they follow from the other frames: a file
//! and function that only PyTorch has say where its folder is. Only then does the shape of a path count.
//!
//! - A frame is Python's unless it is a native one, whatever its file is called: a script needs no `.py`.
//! - A folder is known from its beginning, never by a part in the middle: `/home/me/torch/optim` is the user's.
//! - What a compiler wrote (`torch.compile`, FX, `dataclasses`) is nobody's line, and neither is what only starts a
//!   program: the script that pip makes for a command, the text that `multiprocessing` gives a new process.

mod paths;

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::snapshot::{Frame, Snapshot};

pub use paths::package;
use paths::{Path, is_native_file, is_windows};

/// Whose a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Whose {
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

impl Whose {
    /// Has the frame a line of Python?
    pub fn is_python(self) -> bool {
        !matches!(self, Whose::Native | Whose::Gap)
    }
}

/// The file of frames that are no code: gaps and reasons.
pub const NO_FILE: &str = "memtrace";

/// The most lines of a script that does nothing but call a package's function.
const STARTER: u64 = 12;

/// Functions that only PyTorch has, by their file in its folder. They say where it lies when nothing else does.
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

/// Where a process has its Python: what tells its frames apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The libraries and programs that native frames lie in.
    native: HashSet<String>,
    /// `native` is all of them.
    complete: bool,
    /// PyTorch's folders.
    pytorch: Vec<String>,
    /// Folders of the standard library.
    standard: Vec<String>,
}

impl Places {
    /// Those of the process of a snapshot.
    pub fn of(snapshot: &Snapshot) -> Places {
        Places::told(&snapshot.memtrace, &snapshot.frames)
    }

    /// From a snapshot's `memtrace` key and its frames, where these lie apart.
    pub fn told(about: &Value, frames: &[Frame]) -> Places {
        let keys = about["libraries"].as_object().into_iter().flat_map(|m| m.keys());
        let folders = |key: &str| -> Vec<String> {
            let list = about["python"][key].as_array().into_iter().flatten();
            list.filter_map(|f| Some(f.as_str()?.to_owned())).collect()
        };
        let mut places = Places {
            native: keys.cloned().collect(),
            complete: about["python"].is_object(),
            pytorch: folders("pytorch"),
            standard: folders("standard"),
        };
        // A folder that no frame lies in may be another name of the right one.
        let is_used = |folder: &String| frames.iter().any(|f| paths::is_in(&f.filename, folder));
        places.pytorch.retain(is_used);
        places.standard.retain(is_used);
        if places.pytorch.is_empty() {
            let files = frames.iter().map(|f| &*f.filename);
            places.pytorch = folders_of_libraries(files).0;
        }
        if places.pytorch.is_empty() {
            places.pytorch = unique(frames.iter().filter_map(folder_of_pytorch));
        }
        places
    }

    /// Those of a process that has loaded these libraries.
    pub fn of_libraries<'a>(files: impl Iterator<Item = &'a str>) -> Places {
        let (pytorch, standard) = folders_of_libraries(files);
        Places { pytorch, standard, ..Places::default() }
    }

    /// For the `memtrace` key of a snapshot.
    pub fn to_json(&self) -> Value {
        json!({ "pytorch": self.pytorch, "standard": self.standard })
    }

    /// Whose a frame is, taken by itself.
    pub fn whose(&self, frame: &Frame) -> Whose {
        if frame.filename == NO_FILE {
            Whose::Gap
        } else if self.is_native(frame) {
            Whose::Native
        } else if is_generated(frame) {
            Whose::Generated
        } else {
            self.source(&frame.filename)
        }
    }

    /// Whose a Python source file is.
    pub fn source(&self, file: &str) -> Whose {
        let path = Path::new(file);
        let in_pytorch = self.pytorch.iter().any(|folder| paths::is_in(file, folder));
        let package = package(file);
        if in_pytorch || package == Some("torch") {
            return Whose::PyTorch;
        }
        if package.is_some() {
            return Whose::Installed;
        }
        let told = self.standard.iter().any(|folder| paths::is_in(file, folder));
        let looks = self.standard.is_empty() && path.is_standard();
        if told || looks || file.starts_with("<frozen ") { Whose::Standard } else { Whose::User }
    }

    /// Whose the frames of a stack are, innermost first. Here the ones count that only start a program.
    pub fn stack(&self, frames: &[&Frame]) -> Vec<Whose> {
        let mut all: Vec<Whose> = frames.iter().map(|f| self.whose(f)).collect();
        let mut called = None;
        for i in 0..all.len() {
            if let Some(called) = called.filter(|_| all[i] == Whose::User)
                && is_starter(frames[i], frames[called], all[called])
            {
                all[i] = Whose::Generated;
            }
            if all[i].is_python() {
                called = Some(i);
            }
        }
        all
    }

    fn is_native(&self, frame: &Frame) -> bool {
        let (file, name) = (&*frame.filename, &*frame.name);
        if self.native.contains(file) || file == "??" {
            return true;
        }
        if file.starts_with('<') || paths::is_python_file(file) {
            return false;
        }
        // Names that only C++ and Rust have; a header of theirs may have no extension.
        if is_native_file(file) || name.contains("::") || name.contains('(') || name == "??" {
            return true;
        }
        if self.complete {
            return false;
        }
        // PyTorch's own recorder gives a program's frames the offset in it, and leaves away what it doesn't know.
        let file_name = Path::new(file).last();
        let is_python_itself = file_name.starts_with("python") || file_name.starts_with("pypy");
        let is_offset = frame.line == 0 || frame.line >= 4096;
        file.is_empty() || is_python_itself || (!file_name.contains('.') && is_offset)
    }
}

/// PyTorch's folders, and those of the standard library, by the libraries that lie in them or beside them.
fn folders_of_libraries<'a>(files: impl Iterator<Item = &'a str>) -> (Vec<String>, Vec<String>) {
    let (mut pytorch, mut standard) = (Vec::new(), Vec::new());
    for file in files {
        let path = Path::new(file);
        pytorch.extend(path.pytorch_of_library());
        standard.extend(path.standard_of_library());
    }
    (unique(pytorch.into_iter()), unique(standard.into_iter()))
}

/// Where PyTorch lies, by a function that only it has.
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

/// Python that no person wrote.
fn is_generated(frame: &Frame) -> bool {
    const TEXTS: [&str; 8] = [
        "<eval_with_key>",
        "<attrs generated",
        "<decorator-gen",
        "<makefun-gen",
        "<lambdifygenerated",
        "<__array_function__ internals>",
        "<@beartype(",
        "<fx-generated",
    ];
    let (file, name) = (&*frame.filename, &*frame.name);
    // Such as a data class's `__init__`.
    let is_method = file == "<string>" && name.starts_with("__") && name.ends_with("__");
    is_method || TEXTS.iter().any(|t| file.starts_with(t)) || Path::new(file).is_of_inductor()
}

/// Is this only what starts a program: a command's script, or the text of a new process?
fn is_starter(frame: &Frame, called: &Frame, whose: Whose) -> bool {
    if frame.name != "<module>" {
        return false;
    }
    if frame.filename == "<string>" {
        return whose == Whose::Standard && Path::new(&called.filename).is_under("multiprocessing");
    }
    frame.line <= STARTER
        && whose == Whose::Installed
        && Path::new(&frame.filename)
            .command_prefix()
            .is_some_and(|prefix| paths::is_in(&called.filename, &prefix))
}

/// The file without its folders, as a person would name it.
pub fn file_name(file: &str) -> &str {
    let end = if is_windows(file) { file.rfind(['/', '\\']) } else { file.rfind('/') };
    end.map_or(file, |at| &file[at + 1..])
}

#[cfg(test)]
mod tests;

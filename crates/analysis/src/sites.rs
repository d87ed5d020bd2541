//! Which line of the program a stack is about.
//!
//! An allocation's innermost frame is always the allocator; what a user wants is the innermost frame of
//! *their* code. Frames of installed packages, of the interpreter's own library and of generated code are
//! passed over. If nothing is left, the innermost Python frame is the best there is. Without any Python (a
//! backward thread) it is the autograd node that runs, then the operator, then the innermost native frame
//! that is not part of the recorder or the allocator.

use std::fmt;
use std::path::Path;

use memtrace_format::snapshot::{Frame, Snapshot, StackIx, Tables};

/// A line of code that memory is charged to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Site {
    /// A line.
    Line {
        /// Source file, or library.
        filename: String,
        /// Line number, or offset in the library.
        line: u64,
        /// Function.
        name: String,
    },
    /// The entry has no stack.
    NoStack,
    /// The block is older than the history, and nobody kept its stack.
    BeforeHistory,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Site::Line { filename, name, .. } if !is_python(filename) => {
                let library = filename.rsplit('/').next().unwrap_or(filename);
                f.write_str(&short(name))?;
                if library.contains(".so") { write!(f, " ({library})") } else { Ok(()) }
            }
            Site::Line { filename, line, name } => write!(f, "{filename}:{line} {name}"),
            Site::NoStack => f.write_str("(no stack was recorded)"),
            Site::BeforeHistory => f.write_str("(allocated before the history begins)"),
        }
    }
}

/// The line of a stack; `None` is a block or entry without one.
pub fn site(snapshot: &Snapshot, stack: Option<StackIx>) -> Site {
    site_in(snapshot.tables(), stack)
}

/// The same where frames and stacks are kept apart from the snapshot.
pub fn site_in(tables: Tables<'_>, stack: Option<StackIx>) -> Site {
    let stack = stack.and_then(|s| tables.stacks.get(s as usize));
    let indices = stack.map_or(&[][..], Vec::as_slice);
    let frames: Vec<&Frame> =
        indices.iter().filter_map(|f| tables.frames.get(*f as usize)).collect();
    site_of(&frames)
}

/// The line of these frames, innermost first.
pub fn site_of(frames: &[&Frame]) -> Site {
    let frames = || frames.iter().copied();
    let users = || frames().find(|f| is_python(&f.filename) && !is_library(&f.filename));
    let python = || frames().find(|f| is_python(&f.filename));
    let node = || frames().find(|f| is_autograd_node(&f.name));
    let operator = || frames().find(|f| f.name.starts_with("at::_ops::"));
    let native = || frames().find(|f| !is_machinery(f));
    let anything = || frames().next();
    match users().or_else(python).or_else(node).or_else(operator).or_else(native).or_else(anything)
    {
        None => Site::NoStack,
        Some(frame) => Site::Line {
            filename: frame.filename.clone(),
            line: frame.line,
            name: frame.name.clone(),
        },
    }
}

/// Python's frames name a source file, or what stands in for one: `<stdin>`, `<string>`, a notebook's cell.
fn is_python(filename: &str) -> bool {
    let extension = Path::new(filename).extension();
    filename.starts_with('<') || extension.is_some_and(|e| e == "py" || e == "ipynb")
}

/// Code that came with something the user installed, or that a compiler of theirs wrote.
fn is_library(filename: &str) -> bool {
    const FOLDERS: [&str; 4] =
        ["/site-packages/", "/dist-packages/", "/torchinductor_", "/lib/python3."];
    // `torch` itself where it is not installed but built: a source tree.
    const TREES: [&str; 3] = ["/torch/nn/", "/torch/autograd/", "/torch/optim/"];
    filename.starts_with("<frozen")
        || filename.starts_with("<eval_with_key>")
        || FOLDERS.iter().chain(&TREES).any(|part| filename.contains(part))
}

/// The function of a backward thread that names the operation it differentiates.
fn is_autograd_node(name: &str) -> bool {
    name.starts_with("torch::autograd::") && name.contains("::apply(")
}

/// Native frames that every allocation has: who recorded it, the allocator, and what has no name.
fn is_machinery(frame: &Frame) -> bool {
    const NAMES: [&str; 6] = [
        "unwind::unwind",
        "CapturedTraceback::gather",
        "gather_with_cpp",
        "CachingAllocator",
        "at::detail::",
        "c10::StorageImpl",
    ];
    frame.name.is_empty()
        || frame.name == "??"
        || frame.filename.contains("libmemtrace")
        || NAMES.iter().any(|part| frame.name.contains(part))
}

/// A C++ name without its parameters and the namespaces that all of them share.
fn short(name: &str) -> String {
    let name = name.replace("(anonymous namespace)::", "");
    let name = name.split('(').next().unwrap_or_default();
    let name = name.strip_prefix("torch::autograd::").unwrap_or(name);
    name.strip_prefix("generated::").unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(frames: &[(&str, &str, u64)]) -> String {
        let snapshot = Snapshot {
            frames: frames
                .iter()
                .map(|(name, filename, line)| Frame {
                    name: (*name).to_owned(),
                    filename: (*filename).to_owned(),
                    line: *line,
                })
                .collect(),
            stacks: vec![(0..frames.len() as u32).collect()],
            ..Snapshot::default()
        };
        site(&snapshot, Some(0)).to_string()
    }

    const ALLOCATOR: [(&str, &str, u64); 2] = [
        ("torch::unwind::unwind()", "??", 0),
        (
            "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)",
            "",
            0,
        ),
    ];

    #[test]
    fn the_users_own_line_wins() {
        let package =
            ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125);
        let standard = ("decorate", "/usr/lib/python3.11/contextlib.py", 81);
        let frozen = ("_call", "<frozen importlib._bootstrap>", 241);
        let compiled = ("call", "/tmp/torchinductor_me/ab/cabc.py", 77);
        let user = ("train", "/home/user/train.py", 12);
        let main = ("<module>", "/home/user/train.py", 40);
        let mut stack = ALLOCATOR.to_vec();
        stack.extend([compiled, package, standard, frozen, user, main]);
        assert_eq!(told(&stack), "/home/user/train.py:12 train");
        assert_eq!(told(&[package, ("<module>", "<stdin>", 1)]), "<stdin>:1 <module>");
        assert_eq!(told(&[ALLOCATOR[0], package, standard]), format!("{}:125 forward", package.1));
    }

    #[test]
    fn a_backward_thread_names_what_it_differentiates() {
        let apply = "torch::autograd::generated::BmmBackward0::apply(std::vector<at::Tensor>&&)";
        let frames = [
            ALLOCATOR[0],
            ALLOCATOR[1],
            ("at::_ops::bmm::call(at::Tensor const&, at::Tensor const&)", "??", 0),
            (apply, "/env/torch/lib/libtorch_cpu.so", 77),
        ];
        assert_eq!(told(&frames), "BmmBackward0::apply (libtorch_cpu.so)");
        assert_eq!(told(&frames[..3]), "at::_ops::bmm::call");
        // Of those inside each other it is the one that was called last.
        let outer = ("at::_ops::matmul::call(at::Tensor const&, at::Tensor const&)", "??", 0);
        assert_eq!(told(&[frames[0], frames[1], frames[2], outer]), "at::_ops::bmm::call");
        let node = "torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)";
        let reentrant = [frames[0], frames[1], frames[2], frames[3], (node, "??", 0)];
        assert_eq!(told(&reentrant), "BmmBackward0::apply (libtorch_cpu.so)");
    }

    #[test]
    fn native_programs_have_sites_too() {
        let load = ("(anonymous namespace)::load(char const*)", "/opt/app/engine.so", 4096);
        assert_eq!(
            told(&[("cudaMalloc", "/opt/libmemtrace.so", 9), ("??", "/lib/x.so", 1), load]),
            "load (engine.so)"
        );
        assert_eq!(told(&[ALLOCATOR[0]]), "torch::unwind::unwind");
        assert_eq!(told(&[]), "(no stack was recorded)");
    }
}

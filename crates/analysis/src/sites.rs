//! Which line of the program a stack is about.
//!
//! An allocation's innermost frame is always the allocator; what a user wants is the innermost
//! frame of *their* code ([`memtrace_origin`] says whose a frame is). If the whole program is an
//! installed package, it is the innermost frame of a package. Only without such a frame is it one
//! of PyTorch or of the standard library. Without any Python, as on a backward thread, it is the
//! autograd node that runs. Else it is the operator, else the innermost native frame that is not
//! part of the recorder or the allocator.
//!
//! A trainer's whole memory may be one line of the user's. So there is a second line,
//! [`Lines::module_line`]: that of the innermost code outside PyTorch, be it a library's.

use std::fmt;

use memtrace_format::key::{CodeLine, Memtrace};
use memtrace_format::snapshot::{Frame, NO_LINE, Snapshot, StackIx, Tables};
use memtrace_origin::{Origin, Places, file_name};

/// A line of code that memory is charged to.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Site {
    /// A line of Python.
    Line {
        /// Source file.
        filename: String,
        /// Line number.
        line: u64,
        /// Function.
        name: String,
    },
    /// Native code.
    Native {
        /// Library, or source file.
        filename: String,
        /// Offset in the library, or line number.
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
            Site::Native { filename, name, .. } => {
                let library = file_name(filename);
                f.write_str(&short(name))?;
                if library.contains(".so") { write!(f, " ({library})") } else { Ok(()) }
            }
            Site::Line { filename, line, name } => {
                f.write_str(if filename.is_empty() { "(no file)" } else { filename })?;
                known(*line).map_or(Ok(()), |line| write!(f, ":{line}"))?;
                write!(f, " {name}")
            }
            Site::NoStack => f.write_str("(no stack was recorded)"),
            Site::BeforeHistory => f.write_str("(allocated before the history begins)"),
        }
    }
}

/// The number of a line of Python; the first is 1.
pub(crate) fn known(line: u64) -> Option<u64> {
    Some(line).filter(|line| ![0, NO_LINE].contains(line))
}

/// Which lines a snapshot's stacks are about.
#[derive(Clone, Debug, Default)]
pub struct Lines(Places);

impl Lines {
    /// For the stacks of a snapshot.
    pub fn new(snapshot: &Snapshot) -> Lines {
        Lines(Places::of(snapshot))
    }

    /// The same where frames and stacks are kept apart from the snapshot.
    pub fn from_key(about: Option<&Memtrace>, tables: Tables<'_>) -> Lines {
        Lines(Places::from_key(about, tables))
    }

    /// The line of a stack; `None` is a block or entry without one.
    pub fn site(&self, tables: Tables<'_>, stack: Option<StackIx>) -> Site {
        self.of_frames(&frames_of(tables, stack))
    }

    /// The innermost line of a stack that is neither PyTorch's nor the standard library's.
    pub fn module_line(&self, tables: Tables<'_>, stack: Option<StackIx>) -> Option<Site> {
        let frames = frames_of(tables, stack);
        let origins = self.0.stack(&frames);
        let is_module = |w: &Origin| matches!(w, Origin::User | Origin::Installed);
        origins.iter().position(is_module).map(|i| line(frames[i], origins[i]))
    }

    /// The line of these frames, innermost first.
    pub fn of_frames(&self, frames: &[&Frame]) -> Site {
        let origins = self.0.stack(frames);
        let first = |wanted: Origin| origins.iter().position(|w| *w == wanted);
        let python = || origins.iter().position(|w| w.is_python());
        let native = |is: &dyn Fn(&Frame) -> bool| {
            (0..frames.len()).find(|i| !origins[*i].is_python() && is(frames[*i]))
        };
        let found = first(Origin::User)
            .or_else(|| first(Origin::Installed))
            .or_else(python)
            .or_else(|| native(&|f| is_autograd_node(&f.name)))
            .or_else(|| native(&|f| f.name.starts_with("at::_ops::")))
            .or_else(|| native(&|f| !is_machinery(f)))
            .or_else(|| native(&|_| true));
        found.map_or(Site::NoStack, |i| line(frames[i], origins[i]))
    }

    /// The line of frames that are in the `memtrace` key.
    pub(crate) fn of_code_lines(&self, frames: &[CodeLine]) -> Site {
        let frames: Vec<Frame> = frames.iter().map(Frame::from).collect();
        self.of_frames(&frames.iter().collect::<Vec<_>>())
    }
}

fn frames_of(tables: Tables<'_>, stack: Option<StackIx>) -> Vec<&Frame> {
    let stack = stack.and_then(|s| tables.stacks.get(s as usize));
    let indices = stack.map_or(&[][..], Vec::as_slice);
    indices.iter().filter_map(|f| tables.frames.get(*f as usize)).collect()
}

fn line(frame: &Frame, origin: Origin) -> Site {
    let Frame { name, filename, line } = frame.clone();
    if origin.is_python() {
        Site::Line { filename, line, name }
    } else {
        Site::Native { filename, line, name }
    }
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

    fn site_text(frames: &[(&str, &str, u64)]) -> String {
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
        Lines::new(&snapshot).site(snapshot.tables(), Some(0)).to_string()
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
        assert_eq!(site_text(&stack), "/home/user/train.py:12 train");
        assert_eq!(site_text(&[package, ("<module>", "<stdin>", 1)]), "<stdin>:1 <module>");
        assert_eq!(
            site_text(&[ALLOCATOR[0], package, standard]),
            format!("{}:125 forward", package.1)
        );
    }

    #[test]
    fn a_line_that_is_not_known_has_no_number() {
        for line in [0, NO_LINE] {
            assert_eq!(site_text(&[("main", "/home/me/a.py", line)]), "/home/me/a.py main");
            assert_eq!(site_text(&[("main", "/home/me/bin/a", NO_LINE)]), "/home/me/bin/a main");
            assert_eq!(site_text(&[("<module>", "", line)]), "(no file) <module>");
        }
    }

    #[test]
    fn a_program_that_is_an_installed_package_has_lines_of_its_own() {
        let torch =
            ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125);
        let model = ("forward", "/env/lib/python3.11/site-packages/acme/model.py", 4);
        let train = ("main", "/env/lib/python3.11/site-packages/acme/train.py", 6);
        let run = ("_run_code", "<frozen runpy>", 88);
        let command = ("<module>", "/env/bin/acme", 8);
        let installed = [ALLOCATOR[0], torch, model, train, run];
        assert_eq!(site_text(&installed), format!("{}:4 forward", model.1));
        assert_eq!(site_text(&[torch, model, train, command]), format!("{}:4 forward", model.1));
        let script = ("<module>", "/home/me/bin/train", 40);
        assert_eq!(site_text(&[torch, model, script]), "/home/me/bin/train:40 <module>");
    }

    #[test]
    fn the_second_line_is_the_librarys() {
        let frames = [
            ("at::empty()", "/env/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so", 77),
            ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125),
            ("forward", "/env/lib/python3.11/site-packages/transformers/modeling_llama.py", 312),
            ("train", "/home/me/train.py", 9),
        ];
        let frames = frames.map(|(name, filename, line)| Frame {
            name: name.to_owned(),
            filename: filename.to_owned(),
            line,
        });
        let snapshot = Snapshot {
            frames: frames.to_vec(),
            stacks: vec![vec![0, 1, 2, 3], vec![0, 1]],
            ..Snapshot::default()
        };
        let lines = Lines::new(&snapshot);
        let line = lines.module_line(snapshot.tables(), Some(0)).map(|l| l.to_string());
        assert_eq!(line, Some(format!("{}:312 forward", frames[2].filename)));
        assert_eq!(lines.site(snapshot.tables(), Some(0)).to_string(), "/home/me/train.py:9 train");
        assert_eq!(lines.module_line(snapshot.tables(), Some(1)), None);
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
        assert_eq!(site_text(&frames), "BmmBackward0::apply (libtorch_cpu.so)");
        assert_eq!(site_text(&frames[..3]), "at::_ops::bmm::call");
        // Of those inside each other it is the one that was called last.
        let outer = ("at::_ops::matmul::call(at::Tensor const&, at::Tensor const&)", "??", 0);
        assert_eq!(site_text(&[frames[0], frames[1], frames[2], outer]), "at::_ops::bmm::call");
        let node = "torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)";
        let reentrant = [frames[0], frames[1], frames[2], frames[3], (node, "??", 0)];
        assert_eq!(site_text(&reentrant), "BmmBackward0::apply (libtorch_cpu.so)");
    }

    #[test]
    fn native_programs_have_sites_too() {
        let load = ("(anonymous namespace)::load(char const*)", "/opt/app/engine.so", 4096);
        assert_eq!(
            site_text(&[("cudaMalloc", "/opt/libmemtrace.so", 9), ("??", "/lib/x.so", 1), load]),
            "load (engine.so)"
        );
        assert_eq!(site_text(&[ALLOCATOR[0]]), "torch::unwind::unwind");
        assert_eq!(site_text(&[]), "(no stack was recorded)");
    }
}

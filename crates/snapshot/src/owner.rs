//! Whose memory it is: the library that asked for it.
//!
//! The owner of an allocation is the first library on its native stack, seen from the call. The
//! CUDA runtime and driver, memtrace itself, and libraries that call functions for others (libffi,
//! the loader) are passed over. It follows from the recorded stack alone, so the process, `recover`
//! and `snapshot PID` give the same. Recorders keep the caller's return address in every stack of
//! the device and the host layer, also where the user wants no native frames.
//!
//! - Python's ctypes and cffi call for others, too, and so do NVIDIA's own
//!   bindings, the package `cuda`. Whoever called through them is the package (or
//!   the script) of the innermost Python frame.
//! - On a virtual GPU all of NVIDIA's libraries are one, under the driver's name. There the
//!   function says whose call it is: the real driver has none that begins with `nccl` or `cublas`.
//! - If only such libraries are known, the library itself is named:
//!   "libcudart" rather than a guess.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use memtrace_format::stacks::{RawFrame, StackId, Words};
use memtrace_origin::{Origin, file_name, package};
use memtrace_symbols::Namer;

/// What a file's name (without `lib`) or a Python package's begins with, and what everybody
/// calls it. The first that fits counts.
const KNOWN: &[(&str, &str)] = &[
    ("nccl", "NCCL"),
    ("cublasLt", "cuBLASLt"),
    ("cublas", "cuBLAS"),
    ("cudnn", "cuDNN"),
    ("cufft", "cuFFT"),
    ("cusparseLt", "cuSPARSELt"),
    ("cusparse", "cuSPARSE"),
    ("cusolver", "cuSOLVER"),
    ("curand", "cuRAND"),
    ("cutensor", "cuTENSOR"),
    ("nvshmem", "NVSHMEM"),
    ("nvinfer", "TensorRT"),
    ("nvjpeg", "nvJPEG"),
    ("cufile", "cuFile"),
    ("triton", "Triton"),
    ("xla", "JAX/XLA"),
    ("jax", "JAX/XLA"),
    ("pjrt_c_api_gpu", "JAX/XLA"),
    ("tensorflow", "TensorFlow"),
    ("cupy", "CuPy"),
    ("numba", "Numba"),
    ("onnxruntime", "ONNX Runtime"),
    ("rmm", "RMM"),
    ("cudf", "cuDF"),
    ("ucp", "UCX"),
    ("uct", "UCX"),
    ("ucm", "UCX"),
    ("deepspeed", "DeepSpeed"),
    ("vllm", "vLLM"),
    ("flash_attn", "FlashAttention"),
];

/// What everybody calls PyTorch's own.
const PYTORCH: &str = "PyTorch";
/// Its libraries, by name up to the first dot: whoever else's begin like that are not its own.
const OF_PYTORCH: [&str; 11] = [
    "libtorch",
    "libtorch_cpu",
    "libtorch_cuda",
    "libtorch_cuda_linalg",
    "libtorch_hip",
    "libtorch_python",
    "libc10",
    "libc10_cuda",
    "libc10_hip",
    "libcaffe2",
    "libcaffe2_gpu",
];

/// Functions that a virtual GPU has under the driver's name: what they begin with, and the library.
/// Those of `KNOWN` that NVIDIA ships.
const STOOD_FOR: [&str; 11] = [
    "nccl",
    "cublasLt",
    "cublas",
    "cudnn",
    "cufft",
    "cusparseLt",
    "cusparse",
    "cusolver",
    "curand",
    "nvshmem",
    "cufile",
];

/// Is this one of Python's ways of calling a C function?
fn is_foreign_call(path: &str, file: &str) -> bool {
    const LIBRARIES: [&str; 3] = ["libffi", "_ctypes", "_cffi_backend"];
    LIBRARIES.iter().any(|name| file.starts_with(name)) || package(path) == Some(BINDINGS)
}

/// NVIDIA's Python package (`cuda.bindings`, `cuda.core`), through which
/// Numba and others call the driver.
const BINDINGS: &str = "cuda";

/// Libraries that take memory for whoever calls them.
fn is_plumbing(file: &str) -> bool {
    const NAMES: [&str; 9] = [
        "libcudart",
        "libcuda.so",
        "libmemtrace",
        "ld-linux",
        "libc.so",
        "libpthread",
        "libdl.so",
        "linux-vdso",
        "libstdc++",
    ];
    NAMES.iter().any(|name| file.starts_with(name))
}

/// The name that everybody uses, or else the file's own.
fn known(file: &str) -> Option<&'static str> {
    let stem = file.strip_prefix("lib").unwrap_or(file);
    KNOWN.iter().find(|(start, _)| stem.starts_with(start)).map(|(_, name)| *name)
}

/// Whose a library is.
fn of_library(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.split('.').next().unwrap_or(file);
    if OF_PYTORCH.contains(&stem) || package(path) == Some("torch") {
        return PYTORCH.to_owned();
    }
    if let Some(name) = known(file) {
        return name.to_owned();
    }
    // Kernels' launchers are in Triton's cache, modules written with Cython in their package.
    let package = (path.contains("/triton/") || path.contains("/.triton/")).then_some("Triton");
    // A module's own name says little if it is a private one.
    let installed = self::package(path);
    let private = || installed.filter(|_| file.starts_with('_'));
    let package = package.or_else(|| installed.and_then(known)).or_else(private);
    let name = package.unwrap_or(file);
    name.split(".cpython-").next().unwrap_or(name).to_owned()
}

/// Whose a Python source file is.
fn of_source(path: &str, origin: Origin) -> String {
    match package(path) {
        _ if origin == Origin::PyTorch => PYTORCH.to_owned(),
        Some(package) => known(package).unwrap_or(package).to_owned(),
        None => file_name(path).to_owned(),
    }
}

/// What everything is called, and whose each call is.
pub(crate) struct Names<'a, W> {
    namer: &'a mut Namer<W>,
    owners: HashMap<StackId, Option<Rc<str>>>,
}

impl<W> Deref for Names<'_, W> {
    type Target = Namer<W>;

    fn deref(&self) -> &Namer<W> {
        self.namer
    }
}

impl<W> DerefMut for Names<'_, W> {
    fn deref_mut(&mut self) -> &mut Namer<W> {
        self.namer
    }
}

impl<W: Words> Names<'_, W> {
    /// Of everything that this namer names.
    pub fn of(namer: &mut Namer<W>) -> Names<'_, W> {
        Names { namer, owners: HashMap::new() }
    }

    /// Whose call the stack is; `None` if it has no native frame.
    pub fn owner(&mut self, id: StackId) -> Option<Rc<str>> {
        if let Some(known) = self.owners.get(&id) {
            return known.clone();
        }
        let owner = self.find_owner(id).map(|name| Rc::from(name.as_str()));
        self.owners.insert(id, owner.clone());
        owner
    }

    fn find_owner(&mut self, id: StackId) -> Option<String> {
        let recorded = self.recorded(id)?;
        let (mut passed, mut foreign) = (None, false);
        for frame in &recorded {
            let RawFrame::Native { pc, epoch } = *frame else { continue };
            let Some(path) = self.library_of(pc, epoch) else { continue };
            let file = path.rsplit('/').next().unwrap_or(path);
            let is_foreign = is_foreign_call(path, file);
            if !is_foreign && !is_plumbing(file) {
                if foreign {
                    break;
                }
                return Some(of_library(path));
            }
            foreign |= is_foreign;
            let file = file.to_owned();
            if file.starts_with("libcuda.so")
                && let Some(name) = stood_for(self.function(pc, epoch))
            {
                return Some(name.to_owned());
            }
            passed.get_or_insert(file);
        }
        if foreign && let Some(source) = self.innermost_source(&recorded) {
            let origin = self.places().source(&source);
            return Some(of_source(&source, origin));
        }
        passed
    }

    /// Who calls through Python's or NVIDIA's bindings; these have a few lines of their own.
    fn innermost_source(&self, recorded: &[RawFrame]) -> Option<String> {
        let places = self.places();
        let is_ctypes =
            |file: &str| places.source(file) == Origin::Standard && file.contains("/ctypes/");
        let mut files = recorded.iter().filter_map(|frame| match frame {
            RawFrame::Python { code, .. } => self.source_file(*code),
            _ => None,
        });
        files.find(|file| !is_ctypes(file) && package(file) != Some(BINDINGS))
    }
}

fn stood_for(function: &str) -> Option<&'static str> {
    STOOD_FOR.iter().find(|start| function.starts_with(**start)).and_then(|start| known(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_format::made::Made;
    use memtrace_symbols::Splice;

    /// A stack whose innermost frames are in these libraries, and the
    /// Python files that run outside of them.
    fn owner(libraries: &[&str], sources: &[&str]) -> Option<String> {
        let mut made = Made::of_words(5000);
        let mut frames = Vec::new();
        for (i, path) in (1_u64..).zip(libraries) {
            made.library(path, i << 16..(i << 16) + 4096, 0, None);
            frames.push(RawFrame::Native { pc: (i << 16) + 16, epoch: 0 });
        }
        for file in sources {
            let code = made.function("f", file, 1);
            frames.push(RawFrame::Python { code, unit: Some(0) });
        }
        let id = made.stack(&frames);
        let mut namer =
            Namer::new(&made.depot[..], &made.codes[..], &made.modules[..], Splice::PyTorch);
        Names::of(&mut namer).owner(id).map(|name| name.to_string())
    }

    #[test]
    fn the_first_library_that_is_no_plumbing_owns_it() {
        for (stack, name) in [
            (&["/a/libnccl.so.2", "/t/libtorch_cuda.so"][..], "NCCL"),
            (&["/a/libcudart.so.13", "/a/libcublasLt.so.13", "/a/libcublas.so.13"], "cuBLASLt"),
            (&["/m/libmemtrace.so", "/a/libcublas.so.13"], "cuBLAS"),
            (&["/t/lib/libc10_cuda.so", "/t/libtorch_cuda.so"], "PyTorch"),
            (&["/home/me/engine.so", "/usr/bin/server"], "engine.so"),
            (&["/usr/bin/server", "/lib/libc.so.6"], "server"),
            (&["/c/.triton/cache/ab/cuda_utils.cpython-311-x86_64-linux-gnu.so"], "Triton"),
            (
                &[
                    "/v/lib/python3.11/site-packages/cupy_backends/cuda/api/runtime.cpython-311-x86_64-linux-gnu.so",
                ],
                "CuPy",
            ),
            (&["/v/my.cpython-311-x86_64-linux-gnu.so"], "my"),
            (
                &["/v/lib/python3.11/site-packages/torch/_C.cpython-311-x86_64-linux-gnu.so"],
                "PyTorch",
            ),
            (&["/home/me/torch/torch_ops.cpython-311-x86_64-linux-gnu.so"], "torch_ops"),
            (&["/home/me/libtorch_mine.so"], "libtorch_mine.so"),
            (&["/v/lib/python3.11/site-packages/torchvision/_C.so"], "torchvision"),
            (&["/lib/libcudart.so.12"], "libcudart.so.12"),
            (&["/lib/libcudnn_ops.so.9"], "cuDNN"),
        ] {
            assert_eq!(owner(stack, &[]).as_deref(), Some(name), "{stack:?}");
        }
        assert_eq!(owner(&[], &["a.py"]), None);
    }

    #[test]
    fn who_calls_through_ctypes_is_the_python_code_that_does() {
        let ctypes =
            ["/lib/libffi.so.8", "/p/_ctypes.cpython-311-x86_64-linux-gnu.so", "/p/python3.11"];
        let numba = "/v/lib/python3.11/site-packages/numba/cuda/cudadrv/driver.py";
        assert_eq!(owner(&ctypes, &[numba, "/home/me/train.py"]).as_deref(), Some("Numba"));
        let loader = "/usr/lib/python3.11/ctypes/__init__.py";
        assert_eq!(
            owner(&ctypes[..1], &[loader, "/home/me/train.py"]).as_deref(),
            Some("train.py")
        );
        assert_eq!(owner(&ctypes, &[]).as_deref(), Some("libffi.so.8"));
        let numba = "/v/lib/python3.11/site-packages/numba_cuda/numba/cuda/cudadrv/driver.py";
        let own = "/v/lib/python3.11/site-packages/cuda/core/_memory.py";
        let bindings = [
            "/l/libcuda.so.1",
            "/v/lib/python3.11/site-packages/cuda/bindings/cydriver.cpython-311-x86_64-linux-gnu.so",
            "/v/lib/python3.11/site-packages/cuda/bindings/driver.cpython-311-x86_64-linux-gnu.so",
            "/p/python3.11",
        ];
        assert_eq!(owner(&bindings, &[own, numba, "/home/me/train.py"]).as_deref(), Some("Numba"));
        assert_eq!(owner(&bindings, &["/home/me/train.py"]).as_deref(), Some("train.py"));
        // Somebody else's folder of that name is his own.
        assert_eq!(owner(&["/home/me/cuda/engine.so"], &["a.py"]).as_deref(), Some("engine.so"));
    }
}

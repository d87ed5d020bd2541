//! Which versions the libraries claim to be.
//!
//! PyTorch compares a library's version with the one it was built with, and refuses an older
//! cuDNN. So the answer must fit the PyTorch in this process, and can't be a constant of
//! ours. NVIDIA's own libraries are not loaded and need not be installed, so the answer is
//! read from what pip wrote, in this order:
//!
//! 1. `MEMTRACE_VIRTUAL_CUDNN_VERSION` (cuDNN only: `9.10.2` or `91002`), for
//!    a PyTorch that pip did not install;
//! 2. the packages installed beside it (`nvidia_cudnn_cu13-9.26.0.51.dist-info`);
//! 3. the packages that its own metadata requires (`nvidia-cudnn-cu13==9.26.0.51`);
//! 4. a default for the CUDA version that its libraries are linked with.
//!
//! What was found before PyTorch came is not remembered (see [`program`]).

use crate::gpu::program::{self, toolkit};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// Major, minor, patch.
pub type Version = [u32; 3];

/// Packages by plain name (`cudnn`, `cublas`, `cuda-runtime`,
/// `cuda-toolkit`), without vendor and CUDA version.
type Packages = BTreeMap<String, Version>;

/// cuDNN's version.
pub fn cudnn() -> Version {
    let given = std::env::var(memtrace_options::VIRTUAL_CUDNN_VERSION.variable).ok();
    given.as_deref().and_then(parse_cudnn).or_else(|| package("cudnn")).unwrap_or([9, 26, 0])
}

/// CUDA's version: of the runtime, and of what comes with it. Patch is 0.
pub fn cuda() -> Version {
    let of = |name| package(name).map(|[major, minor, _]| [major, minor, 0]);
    let said = of("cuda-toolkit").or_else(|| of("cuda-runtime"));
    said.unwrap_or_else(|| toolkit().usual_version())
}

/// cuBLAS's version.
pub fn cublas() -> Version {
    package("cublas").unwrap_or_else(cuda)
}

/// NCCL's version.
pub fn nccl() -> Version {
    package("nccl").unwrap_or_else(|| toolkit().usual_nccl())
}

/// The version of any other package of NVIDIA's, by its plain name.
pub fn package(name: &str) -> Option<Version> {
    static FOUND: OnceLock<Packages> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return found.get(name).copied();
    }
    let site = program::torch()?.ancestors().nth(3)?.to_owned();
    FOUND.get_or_init(|| read_packages(&site)).get(name).copied()
}

/// `91002` or `9.10.2`.
fn parse_cudnn(text: &str) -> Option<Version> {
    match text.parse::<u32>() {
        Ok(number) if number >= 10_000 => Some([number / 10_000, number / 100 % 100, number % 100]),
        _ => parse(text),
    }
}

/// At least major and minor; what follows the third number is left out.
fn parse(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map(|part| part.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)])
}

/// `nvidia_cudnn_cu13` and `nvidia-cudnn-cu13` are `cudnn`; none if it is not NVIDIA's.
fn plain(package: &str) -> Option<String> {
    let name = package.to_ascii_lowercase().replace('_', "-");
    let name =
        name.strip_prefix("nvidia-").or_else(|| (name == "cuda-toolkit").then_some(&name))?;
    let tail = name.rsplit_once("-cu");
    let number = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
    Some(tail.filter(|(_, t)| number(t)).map_or(name, |(head, _)| head).to_owned())
}

fn read_packages(site: &Path) -> Packages {
    let mut packages = Packages::new();
    let mut required = Packages::new();
    for entry in fs::read_dir(site).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let Some(stem) = file.to_str().and_then(|f| f.strip_suffix(".dist-info")) else { continue };
        let Some((name, version)) = stem.split_once('-') else { continue };
        if name == "torch" {
            let metadata = fs::read_to_string(entry.path().join("METADATA")).unwrap_or_default();
            required = read_requirements(&metadata);
        } else if let (Some(name), Some(version)) = (plain(name), parse(version)) {
            packages.insert(name, version);
        }
    }
    for (name, version) in required {
        packages.entry(name).or_insert(version);
    }
    packages
}

/// Lines like `Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"`; older ones
/// put the version in brackets.
fn read_requirements(metadata: &str) -> Packages {
    let lines = metadata.lines().filter_map(|line| line.strip_prefix("Requires-Dist: "));
    lines
        .filter_map(|line| {
            let (name, version) = line.split(';').next()?.split_once("==")?;
            let name = name.split(['[', '(', ' ']).next()?;
            Some((plain(name)?, parse(version.trim_end_matches([')', ' ']))?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_vendor_and_cuda_version() {
        for (package, name) in [
            ("nvidia_cudnn_cu13", Some("cudnn")),
            ("nvidia-cuda-runtime", Some("cuda-runtime")),
            ("nvidia_cuda_runtime_cu12", Some("cuda-runtime")),
            ("nvidia_cublas", Some("cublas")),
            ("cuda_toolkit", Some("cuda-toolkit")),
            ("cuda_bindings", None),
            ("numpy", None),
        ] {
            assert_eq!(plain(package).as_deref(), name);
        }
    }

    #[test]
    fn requirements_in_both_spellings() {
        let found = read_requirements(
            "Name: torch\n\
             Requires-Dist: cuda-toolkit[cublas,cudart]==13.2.2; platform_system == \"Linux\"\n\
             Requires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == \"Linux\"\n\
             Requires-Dist: nvidia-nccl-cu12 (==2.21.5) ; platform_system == \"Linux\"\n\
             Requires-Dist: triton~=3.9.0\n",
        );
        assert_eq!(found.get("cuda-toolkit"), Some(&[13, 2, 2]));
        assert_eq!(found.get("cudnn"), Some(&[9, 26, 0]));
        assert_eq!(found.get("nccl"), Some(&[2, 21, 5]));
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn installed_before_required() {
        let site = std::env::temp_dir().join(format!("memtrace-versions-{}", std::process::id()));
        let torch = site.join("torch-2.15.0+cu132.dist-info");
        fs::create_dir_all(site.join("nvidia_cudnn_cu13-9.19.0.56.dist-info")).unwrap();
        fs::create_dir_all(&torch).unwrap();
        fs::write(
            torch.join("METADATA"),
            "Requires-Dist: nvidia-cudnn-cu13==9.26.0.51\nRequires-Dist: nvidia-nccl-cu13==2.30.7\n",
        )
        .unwrap();
        let found = read_packages(&site);
        fs::remove_dir_all(&site).unwrap();
        assert_eq!(found.get("cudnn"), Some(&[9, 19, 0]), "what is there counts");
        assert_eq!(found.get("nccl"), Some(&[2, 30, 7]), "what is not there is as required");
    }

    #[test]
    fn cudnn_versions_as_people_write_them() {
        assert_eq!(parse_cudnn("91002"), Some([9, 10, 2]));
        assert_eq!(parse_cudnn("9.10.2"), Some([9, 10, 2]));
        assert_eq!(parse_cudnn("9.10"), Some([9, 10, 0]));
        assert_eq!(parse_cudnn("new"), None);
    }
}

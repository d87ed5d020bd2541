//! Which major versions of CUDA the virtual GPU can be.

use core::fmt;

/// A major version of CUDA's toolkit.
///
/// It decides how several records are laid out, which parameters some functions have, and what
/// libraries are called. Whoever asks for one `match`es it, so a further version doesn't compile
/// before each of them has an answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Toolkit {
    /// CUDA 12.
    Cuda12,
    /// CUDA 13.
    Cuda13,
}

impl Toolkit {
    /// All that are known, the oldest first.
    pub const ALL: [Self; 2] = [Self::Cuda12, Self::Cuda13];

    /// What a program has that says nothing of it.
    pub const NEWEST: Self = Self::Cuda13;

    /// Its number.
    pub const fn major(self) -> u32 {
        match self {
            Self::Cuda12 => 12,
            Self::Cuda13 => 13,
        }
    }

    /// The one with this number.
    ///
    /// # Errors
    /// If there is none: what is not known must not be taken for something else.
    pub fn from_major(major: u32) -> Result<Self, UnknownToolkit> {
        Self::ALL.into_iter().find(|known| known.major() == major).ok_or(UnknownToolkit(major))
    }

    /// Its version, where no package says it: of the first minor version that PyTorch came with.
    pub const fn usual_version(self) -> [u32; 3] {
        match self {
            Self::Cuda12 => [12, 4, 0],
            Self::Cuda13 => [13, 0, 0],
        }
    }

    /// The version of NCCL that comes with it, where no package says it.
    pub const fn usual_nccl(self) -> [u32; 3] {
        match self {
            Self::Cuda12 => [2, 21, 5],
            Self::Cuda13 => [2, 28, 9],
        }
    }

    /// What CUPTI calls its version in this toolkit of this minor version.
    pub const fn cupti(self, minor: u32) -> u32 {
        match self {
            // It counted releases: 18, and then one for each minor version (12.4 had 22).
            Self::Cuda12 => 18 + minor,
            Self::Cuda13 => self.major() * 10_000 + minor * 100,
        }
    }

    /// The libraries that come with it and carry a number of its own.
    pub const fn libraries(self) -> &'static [&'static str] {
        match self {
            Self::Cuda12 => &[
                "libcudart.so.12",
                "libcublas.so.12",
                "libcublasLt.so.12",
                "libcufft.so.11",
                "libcusolver.so.11",
                "libcusolverMg.so.11",
                "libnvrtc.so.12",
                "libcupti.so.12",
                "libnvJitLink.so.12",
            ],
            Self::Cuda13 => &[
                "libcudart.so.13",
                "libcublas.so.13",
                "libcublasLt.so.13",
                "libcufft.so.12",
                "libcusolver.so.12",
                "libcusolverMg.so.12",
                "libnvrtc.so.13",
                "libcupti.so.13",
                "libnvJitLink.so.13",
            ],
        }
    }
}

/// A major version of CUDA that is none of [`Toolkit::ALL`]. As text it says what to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownToolkit(pub u32);

impl fmt::Display for UnknownToolkit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known: Vec<String> = Toolkit::ALL.iter().map(|t| t.major().to_string()).collect();
        write!(
            f,
            "this PyTorch is built for CUDA {}, which this memtrace doesn't know (it knows {}): use \
             a PyTorch for one of those, or a memtrace that knows it",
            self.0,
            known.join(" and ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_major_version_is_known_or_refused() {
        for known in Toolkit::ALL {
            assert_eq!(Toolkit::from_major(known.major()), Ok(known));
            assert_eq!(known.usual_version()[0], known.major());
        }
        assert_eq!(Toolkit::ALL.last(), Some(&Toolkit::NEWEST));
        for unknown in [0, 11, 14] {
            assert_eq!(Toolkit::from_major(unknown), Err(UnknownToolkit(unknown)));
        }
        let line = UnknownToolkit(14).to_string();
        assert!(line.contains("CUDA 14") && line.contains("12 and 13"), "{line}");
    }
}

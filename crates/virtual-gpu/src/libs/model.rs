//! Sizes that the real libraries would ask for, modelled.
//!
//! None of these are documented by NVIDIA, so each states where it comes from; none is measured.
//! They are used by `api/behaviour.tsv`, in elements unless they say bytes. What a model can't know
//! is 0, never a guess that looks like a measurement.
//!
//! Dense solvers: the work arrays that LAPACK documents for the routine of the same name, with a
//! block of 32 columns where LAPACK asks for "N times the optimal block size". cuSOLVER's
//! algorithms are not LAPACK's, but must hold the same intermediate results.

use crate::constants as c;
use crate::gpu;

/// Columns of a block in blocked factorizations.
const BLOCK: i64 = 32;

/// Bytes of one element of a `cudaDataType`; 0 if there is no such type.
#[allow(clippy::match_same_arms)] // one line for each width, real and complex
pub fn bytes(data_type: i64) -> i64 {
    let Ok(data_type) = i32::try_from(data_type) else { return 0 };
    match data_type {
        c::CUDA_C_64F | c::CUDA_C_64I | c::CUDA_C_64U => 16,
        c::CUDA_R_64F | c::CUDA_R_64I | c::CUDA_R_64U => 8,
        c::CUDA_C_32F | c::CUDA_C_32I | c::CUDA_C_32U => 8,
        c::CUDA_R_32F | c::CUDA_R_32I | c::CUDA_R_32U => 4,
        c::CUDA_C_16F | c::CUDA_C_16BF | c::CUDA_C_16I | c::CUDA_C_16U => 4,
        c::CUDA_R_16F | c::CUDA_R_16BF | c::CUDA_R_16I | c::CUDA_R_16U => 2,
        c::CUDA_C_8I | c::CUDA_C_8U => 2,
        c::CUDA_R_8I | c::CUDA_R_8U => 1,
        c::CUDA_R_8F_E4M3 | c::CUDA_R_8F_E5M2 | c::CUDA_R_8F_UE8M0 => 1,
        _ => 0,
    }
}

/// `potrf`, `getrf`, `geqrf`, `sytrf`, `orgqr`: one block of columns.
pub fn blocked(n: i64) -> i64 {
    n.max(1) * BLOCK
}

/// `ormqr`: a block of the side that is not reduced. 0 is left.
pub fn ormqr(side: i64, m: i64, n: i64) -> i64 {
    blocked(if side == 0 { n } else { m })
}

/// `syevd`: LAPACK's WORK with eigenvectors, or without (`jobz` 0).
pub fn syevd(jobz: i64, n: i64) -> i64 {
    if jobz == 0 { 2 * n + 1 } else { 1 + 6 * n + 2 * n * n }
}

/// `heevd`: LAPACK's WORK, and RWORK as half as many complex elements.
pub fn heevd(jobz: i64, n: i64) -> i64 {
    if jobz == 0 { n + 1 + (n + 1) / 2 } else { 2 * n + n * n + (1 + 5 * n + 2 * n * n) / 2 }
}

/// `gesvd`: LAPACK's WORK.
pub fn gesvd(m: i64, n: i64) -> i64 {
    let (small, large) = (m.min(n), m.max(n));
    (3 * small + large).max(5 * small).max(1)
}

/// Jacobi methods turn a copy of the matrix.
pub fn jacobi(m: i64, n: i64) -> i64 {
    m.max(1) * n.max(1)
}

/// `geev`: LAPACK's WORK with eigenvectors.
pub fn geev(n: i64) -> i64 {
    (4 * n).max(1)
}

/// Sorting by radix goes back and forth between two copies: bytes of the second one.
pub fn sort_copy(elements: i64, bytes_each: i64) -> i64 {
    elements.max(0) * bytes_each
}

/// cuDNN's dropout keeps the state of a random generator for each resident thread: bytes, taken as
/// 16 a thread (a Philox counter); an estimate.
pub fn dropout_states() -> i64 {
    let Ok(device) = gpu::device(gpu::current_device()) else { return 0 };
    let threads = device.profile.sms * device.profile.limits().max_threads_per_sm;
    i64::from(threads) * 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_of_types() {
        let width = |t: i32| bytes(t.into());
        assert_eq!([c::CUDA_R_16F, c::CUDA_R_16BF, c::CUDA_C_8I].map(width), [2, 2, 2]);
        assert_eq!([c::CUDA_R_32F, c::CUDA_R_32I, c::CUDA_C_16BF].map(width), [4, 4, 4]);
        assert_eq!([c::CUDA_R_64F, c::CUDA_R_64I, c::CUDA_C_32F].map(width), [8, 8, 8]);
        assert_eq!([c::CUDA_C_64F].map(width), [16]);
        assert_eq!([c::CUDA_R_8I, c::CUDA_R_8F_E4M3, c::CUDA_R_8F_E5M2].map(width), [1, 1, 1]);
        assert_eq!(width(-1), 0);
    }

    #[test]
    fn work_as_lapack_documents() {
        assert_eq!(syevd(1, 10), 261);
        assert_eq!(syevd(0, 10), 21);
        assert_eq!(gesvd(10, 4), 22);
        assert_eq!(gesvd(10, 10), 50);
    }
}

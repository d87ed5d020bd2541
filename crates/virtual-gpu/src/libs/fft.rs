//! cuFFT: plans and the work area that they need.
//!
//! *Work area, a model*: cuFFT's manual says that lengths made of the factors 2, 3, 5 and 7 have
//! kernels of their own. Others go through Bluestein's algorithm, which needs more memory. It
//! gives no sizes. So a plan whose lengths have only those factors is taken to need none, and
//! any other the size of its complex data once. Lower than the truth for long transforms in
//! several passes; not measured on a card.
//!
//! With automatic allocation, which is the default, the work area is the library's own, taken from
//! the device when the plan is made. PyTorch switches that off and brings its own.

use super::blas::property;
use super::{Library, Status, versions};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::NumberMap;
use crate::gpu::{self, memory};
use core::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

const FFT: Library = Library::Fft;

struct Plan {
    stream: u64,
    automatic: bool,
    /// Bytes of the work area, once the plan is made.
    size: Option<u64>,
    /// The library's own work area.
    own: Option<u64>,
}

/// cuFFT's handles are small integers, so they have a table of their own.
#[derive(Default)]
struct Plans {
    issued: u64,
    live: NumberMap<Plan>,
}

fn plans() -> MutexGuard<'static, Plans> {
    static PLANS: LazyLock<Mutex<Plans>> = LazyLock::new(Mutex::default);
    PLANS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plans {
    fn get(&mut self, plan: i32) -> Status<&mut Plan> {
        self.live.get_mut(&u64::from(plan as u32)).ok_or(c::CUFFT_INVALID_PLAN)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cufftCreate(out: Out<i32>) -> i32 {
    FFT.answer(|| {
        gpu::touch(gpu::current_device()).map_err(|_| c::CUFFT_SETUP_FAILED)?;
        let mut plans = plans();
        plans.issued += 1;
        let handle = plans.issued;
        FFT.give(out, handle as i32)?;
        let plan = Plan { stream: 0, automatic: true, size: None, own: None };
        plans.live.insert(handle, plan);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftDestroy(plan: i32) -> i32 {
    FFT.answer(|| {
        let plan = plans().live.remove(&u64::from(plan as u32)).ok_or(c::CUFFT_INVALID_PLAN)?;
        release(plan.own)
    })
}

fn release(own: Option<u64>) -> Status {
    own.map_or(Ok(()), |addr| memory::free(addr).map_err(|_| c::CUFFT_INTERNAL_ERROR))
}

#[unsafe(no_mangle)]
extern "C" fn cufftSetStream(plan: i32, stream: *mut c_void) -> i32 {
    FFT.answer(|| {
        plans().get(plan)?.stream = stream.addr() as u64;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftSetAutoAllocation(plan: i32, automatic: i32) -> i32 {
    FFT.answer(|| {
        plans().get(plan)?.automatic = automatic != 0;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftSetWorkArea(plan: i32, _area: *mut c_void) -> i32 {
    FFT.answer(|| {
        let own = plans().get(plan)?.own.take();
        release(own)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftGetSize(plan: i32, size: Out<usize>) -> i32 {
    FFT.answer(|| {
        let bytes = plans().get(plan)?.size.unwrap_or(0);
        FFT.give(size, bytes as usize)
    })
}

/// Bytes of one complex element of the type that the transform is computed in.
fn complex_bytes(computed_in: i32) -> Status<u64> {
    match computed_in {
        c::CUDA_C_16F | c::CUDA_C_16BF => Ok(4),
        c::CUDA_C_32F => Ok(8),
        c::CUDA_C_64F => Ok(16),
        _ => Err(c::CUFFT_INVALID_TYPE),
    }
}

/// The model of the work area; see the module's head.
fn work_bytes(lengths: &[i64], batch: i64, element: u64) -> Status<u64> {
    let positive = |n: &i64| u64::try_from(*n).ok().filter(|n| *n > 0);
    let lengths: Option<Vec<u64>> = lengths.iter().map(positive).collect();
    let lengths = lengths.filter(|l| !l.is_empty()).ok_or(c::CUFFT_INVALID_SIZE)?;
    let batch = positive(&batch).ok_or(c::CUFFT_INVALID_SIZE)?;
    if lengths.iter().all(|n| has_own_kernels(*n)) {
        return Ok(0);
    }
    let all = lengths.iter().chain([&batch]).try_fold(element, |bytes, n| bytes.checked_mul(*n));
    all.ok_or(c::CUFFT_INVALID_SIZE)
}

fn has_own_kernels(mut length: u64) -> bool {
    for factor in [2, 3, 5, 7] {
        while length.is_multiple_of(factor) {
            length /= factor;
        }
    }
    length == 1
}

fn make(plan: i32, lengths: &[i64], batch: i64, element: u64, size: Out<usize>) -> Status {
    let bytes = work_bytes(lengths, batch, element)?;
    FFT.give(size, bytes as usize)?;
    let mut plans = plans();
    let plan = plans.get(plan)?;
    release(plan.own.take())?;
    if plan.automatic && bytes > 0 {
        let area = memory::alloc(gpu::current_device(), bytes);
        plan.own = Some(area.map_err(|_| c::CUFFT_ALLOC_FAILED)?);
    }
    plan.size = Some(bytes);
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cufftXtMakePlanMany(
    plan: i32,
    rank: i32,
    lengths: In<i64>,
    _in_embed: In<i64>,
    _in_stride: i64,
    _in_distance: i64,
    _in_type: i32,
    _out_embed: In<i64>,
    _out_stride: i64,
    _out_distance: i64,
    _out_type: i32,
    batch: i64,
    size: Out<usize>,
    computed_in: i32,
) -> i32 {
    FFT.answer(|| {
        let lengths = lengths.list(rank.clamp(0, 3) as usize);
        make(plan, &lengths, batch, complex_bytes(computed_in)?, size)
    })
}

fn type_bytes(kind: i32) -> Status<u64> {
    match kind {
        c::CUFFT_R2C | c::CUFFT_C2R | c::CUFFT_C2C => Ok(8),
        c::CUFFT_D2Z | c::CUFFT_Z2D | c::CUFFT_Z2Z => Ok(16),
        _ => Err(c::CUFFT_INVALID_TYPE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cufftMakePlanMany64(
    plan: i32,
    rank: i32,
    lengths: In<i64>,
    _in_embed: In<i64>,
    _in_stride: i64,
    _in_distance: i64,
    _out_embed: In<i64>,
    _out_stride: i64,
    _out_distance: i64,
    kind: i32,
    batch: i64,
    size: Out<usize>,
) -> i32 {
    FFT.answer(|| {
        let lengths = lengths.list(rank.clamp(0, 3) as usize);
        make(plan, &lengths, batch, type_bytes(kind)?, size)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftMakePlanMany(
    plan: i32,
    rank: i32,
    lengths: In<i32>,
    _in_embed: In<i32>,
    _in_stride: i32,
    _in_distance: i32,
    _out_embed: In<i32>,
    _out_stride: i32,
    _out_distance: i32,
    kind: i32,
    batch: i32,
    size: Out<usize>,
) -> i32 {
    FFT.answer(|| {
        let lengths = lengths.list(rank.clamp(0, 3) as usize);
        let lengths: Vec<i64> = lengths.into_iter().map(i64::from).collect();
        make(plan, &lengths, batch.into(), type_bytes(kind)?, size)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftMakePlan1d(
    plan: i32,
    length: i32,
    kind: i32,
    batch: i32,
    size: Out<usize>,
) -> i32 {
    FFT.answer(|| make(plan, &[length.into()], batch.into(), type_bytes(kind)?, size))
}

fn execute(plan: i32) -> i32 {
    FFT.answer(|| {
        let stream = {
            let mut plans = plans();
            let plan = plans.get(plan)?;
            plan.size.ok_or(c::CUFFT_INVALID_PLAN)?;
            plan.stream
        };
        FFT.launch(stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cufftXtExec(plan: i32, _in: *mut c_void, _out: *mut c_void, _direction: i32) -> i32 {
    execute(plan)
}

#[unsafe(no_mangle)]
extern "C" fn cufftExecC2C(plan: i32, _in: *mut c_void, _out: *mut c_void, _direction: i32) -> i32 {
    execute(plan)
}

#[unsafe(no_mangle)]
extern "C" fn cufftExecZ2Z(plan: i32, _in: *mut c_void, _out: *mut c_void, _direction: i32) -> i32 {
    execute(plan)
}

#[unsafe(no_mangle)]
extern "C" fn cufftExecR2C(plan: i32, _in: *mut c_void, _out: *mut c_void) -> i32 {
    execute(plan)
}

#[unsafe(no_mangle)]
extern "C" fn cufftExecC2R(plan: i32, _in: *mut c_void, _out: *mut c_void) -> i32 {
    execute(plan)
}

#[unsafe(no_mangle)]
extern "C" fn cufftExecD2Z(plan: i32, _in: *mut c_void, _out: *mut c_void) -> i32 {
    execute(plan)
}

#[unsafe(no_mangle)]
extern "C" fn cufftExecZ2D(plan: i32, _in: *mut c_void, _out: *mut c_void) -> i32 {
    execute(plan)
}

fn version() -> versions::Version {
    versions::package("cufft").unwrap_or([12, 0, 0])
}

#[unsafe(no_mangle)]
extern "C" fn cufftGetVersion(out: Out<i32>) -> i32 {
    let [major, minor, patch] = version();
    FFT.answer(|| FFT.give(out, (major * 1000 + minor * 100 + patch) as i32))
}

#[unsafe(no_mangle)]
extern "C" fn cufftGetProperty(which: i32, value: Out<i32>) -> i32 {
    property(FFT, which, version(), value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lengths_with_other_factors_need_work_area() {
        assert_eq!(work_bytes(&[1024, 360, 7], 3, 8), Ok(0));
        assert_eq!(work_bytes(&[1024, 11], 3, 8), Ok(1024 * 11 * 3 * 8));
        assert_eq!(work_bytes(&[1009], 2, 16), Ok(1009 * 2 * 16));
        assert_eq!(work_bytes(&[0], 2, 16), Err(c::CUFFT_INVALID_SIZE));
        assert_eq!(work_bytes(&[], 2, 16), Err(c::CUFFT_INVALID_SIZE));
        assert_eq!(work_bytes(&[i64::MAX, 11], 2, 16), Err(c::CUFFT_INVALID_SIZE));
    }
}

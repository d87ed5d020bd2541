//! cuDNN's CTC loss: only its workspace.
//!
//! *A model*: the loss is computed from forward and backward probabilities in single precision.
//! Each has T × N × (2L + 1) numbers: T steps, N sequences, and labels of at most L letters with
//! blanks between them. Both are held. The sizes themselves are not documented, and not measured.

use super::{DNN, Status, shape};
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use core::ffi::c_void;

/// The longest label, if it was set.
static LOSSES: Registry<i64> = Registry::new(41);

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateCTCLossDescriptor(out: Out<*mut c_void>) -> i32 {
    super::create(&LOSSES, out, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyCTCLossDescriptor(loss: *mut c_void) -> i32 {
    super::destroy(&LOSSES, loss)
}

fn set_longest(loss: *mut c_void, longest: i32) -> i32 {
    DNN.answer(|| LOSSES.with(loss, |l| *l = longest.max(0).into()).ok_or(DNN.bad_value()))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetCTCLossDescriptorEx(
    loss: *mut c_void,
    _compute: i32,
    _normalization: i32,
    _gradient: i32,
) -> i32 {
    set_longest(loss, 0)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetCTCLossDescriptor_v8(
    loss: *mut c_void,
    _compute: i32,
    _normalization: i32,
    _gradient: i32,
    longest: i32,
) -> i32 {
    set_longest(loss, longest)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetCTCLossDescriptor_v9(
    loss: *mut c_void,
    _compute: i32,
    _normalization: i32,
    _gradient: i32,
    longest: i32,
) -> i32 {
    set_longest(loss, longest)
}

/// Steps and sequences: the first two dimensions of the probabilities.
fn steps_and_batch(probabilities: *mut c_void) -> Status<[i64; 2]> {
    shape(probabilities, |s| match s.dims[..] {
        [steps, batch, ..] => Ok([steps.into(), batch.into()]),
        _ => Err(DNN.bad_value()),
    })?
}

fn workspace(steps: i64, batch: i64, longest: i64) -> i64 {
    2 * steps * batch * (2 * longest + 1) * 4
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetCTCLossWorkspaceSize(
    _handle: *mut c_void,
    probabilities: *mut c_void,
    _gradients: *mut c_void,
    _labels: In<i32>,
    label_lengths: In<i32>,
    _input_lengths: In<i32>,
    _algorithm: i32,
    loss: *mut c_void,
    size: Out<i64>,
) -> i32 {
    DNN.answer(|| {
        LOSSES.with(loss, |_| ()).ok_or(DNN.bad_value())?;
        let [steps, batch] = steps_and_batch(probabilities)?;
        let lengths = label_lengths.list(batch.max(0) as usize);
        let longest = lengths.into_iter().max().unwrap_or(0).max(0);
        DNN.give(size, workspace(steps, batch, longest.into()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetCTCLossWorkspaceSize_v8(
    _handle: *mut c_void,
    _algorithm: i32,
    loss: *mut c_void,
    probabilities: *mut c_void,
    _gradients: *mut c_void,
    size: Out<i64>,
) -> i32 {
    DNN.answer(|| {
        let longest = LOSSES.with(loss, |l| *l).ok_or(DNN.bad_value())?;
        let [steps, batch] = steps_and_batch(probabilities)?;
        DNN.give(size, workspace(steps, batch, longest))
    })
}

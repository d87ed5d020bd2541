//! cuDNN's older convolution interface, which PyTorch takes when the backend is switched off.
//!
//! The one algorithm is the implicit product without precomputed indices: it exists for every
//! direction, is deterministic forward, and is documented to need no workspace.

use super::DNN;
use crate::constants as c;
use crate::gpu::border::Out;
use crate::layout::cuda13::cudnnConvolutionFwdAlgoPerfStruct as perf;
use core::ffi::c_void;

/// Writes the one result. The three directions' records have the same layout.
fn give_algorithm(wanted: i32, count: Out<i32>, results: Out<u8>, algorithm: i32) -> i32 {
    DNN.answer(|| {
        if wanted < 1 {
            return Err(DNN.bad_value());
        }
        results.clear(perf::SIZE).map_err(|_| DNN.bad_value())?;
        results.at(perf::algo.offset).give(algorithm);
        results.at(perf::status.offset).give(c::CUDNN_STATUS_SUCCESS);
        results.at(perf::time.offset).give(-1f32);
        results.at(perf::memory.offset).give(0usize);
        results.at(perf::determinism.offset).give(c::CUDNN_DETERMINISTIC);
        results.at(perf::mathType.offset).give(c::CUDNN_DEFAULT_MATH);
        DNN.give(count, 1)
    })
}

fn give_no_workspace(size: Out<usize>) -> i32 {
    DNN.answer(|| DNN.give(size, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionForwardAlgorithm_v7(
    _handle: *mut c_void,
    _x: *mut c_void,
    _w: *mut c_void,
    _convolution: *mut c_void,
    _y: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
) -> i32 {
    give_algorithm(wanted, count, results, c::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
    _handle: *mut c_void,
    _w: *mut c_void,
    _dy: *mut c_void,
    _convolution: *mut c_void,
    _dx: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
) -> i32 {
    give_algorithm(wanted, count, results, c::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    _handle: *mut c_void,
    _x: *mut c_void,
    _dy: *mut c_void,
    _convolution: *mut c_void,
    _dw: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
) -> i32 {
    give_algorithm(wanted, count, results, c::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnFindConvolutionForwardAlgorithmEx(
    _handle: *mut c_void,
    _x_layout: *mut c_void,
    _x: *const c_void,
    _w_layout: *mut c_void,
    _w: *const c_void,
    _convolution: *mut c_void,
    _y_layout: *mut c_void,
    _y: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
    _workspace: *mut c_void,
    _workspace_size: usize,
) -> i32 {
    give_algorithm(wanted, count, results, c::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnFindConvolutionBackwardDataAlgorithmEx(
    _handle: *mut c_void,
    _w_layout: *mut c_void,
    _w: *const c_void,
    _dy_layout: *mut c_void,
    _dy: *const c_void,
    _convolution: *mut c_void,
    _dx_layout: *mut c_void,
    _dx: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
    _workspace: *mut c_void,
    _workspace_size: usize,
) -> i32 {
    give_algorithm(wanted, count, results, c::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnFindConvolutionBackwardFilterAlgorithmEx(
    _handle: *mut c_void,
    _x_layout: *mut c_void,
    _x: *const c_void,
    _dy_layout: *mut c_void,
    _dy: *const c_void,
    _convolution: *mut c_void,
    _dw_layout: *mut c_void,
    _dw: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
    _workspace: *mut c_void,
    _workspace_size: usize,
) -> i32 {
    give_algorithm(wanted, count, results, c::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionForwardWorkspaceSize(
    _handle: *mut c_void,
    _x: *mut c_void,
    _w: *mut c_void,
    _convolution: *mut c_void,
    _y: *mut c_void,
    _algorithm: i32,
    size: Out<usize>,
) -> i32 {
    give_no_workspace(size)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardDataWorkspaceSize(
    _handle: *mut c_void,
    _w: *mut c_void,
    _dy: *mut c_void,
    _convolution: *mut c_void,
    _dx: *mut c_void,
    _algorithm: i32,
    size: Out<usize>,
) -> i32 {
    give_no_workspace(size)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardFilterWorkspaceSize(
    _handle: *mut c_void,
    _x: *mut c_void,
    _dy: *mut c_void,
    _convolution: *mut c_void,
    _dw: *mut c_void,
    _algorithm: i32,
    size: Out<usize>,
) -> i32 {
    give_no_workspace(size)
}

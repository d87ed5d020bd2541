//! cuDNN's older convolution interface, which PyTorch takes when the backend is switched off.
//!
//! There are two algorithms for each direction. One is the implicit product, with the
//! workspace that the backend would give. The other is documented to need none, for
//! callers who have no memory for the first.

use super::problem::{Operation, Problem, Tensor};
use super::{DNN, SHAPES, Shape, counts, workspace};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use crate::layout::all::cudnnConvolutionFwdAlgoPerfStruct as perf;
use core::ffi::c_void;

/// What a convolution's descriptor says.
#[derive(Clone, Default)]
struct Convolution {
    padding: Vec<i64>,
    stride: Vec<i64>,
    dilation: Vec<i64>,
}

static CONVOLUTIONS: Registry<Convolution> = Registry::new(44);

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateConvolutionDescriptor(out: Out<*mut c_void>) -> i32 {
    super::create(&CONVOLUTIONS, out, Convolution::default())
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyConvolutionDescriptor(convolution: *mut c_void) -> i32 {
    super::destroy(&CONVOLUTIONS, convolution)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetConvolutionNdDescriptor(
    convolution: *mut c_void,
    count: i32,
    padding: In<i32>,
    stride: In<i32>,
    dilation: In<i32>,
    _mode: i32,
    _compute_type: i32,
) -> i32 {
    DNN.answer(|| {
        let lists = [padding, stride, dilation];
        if !(1..=super::MAX_DIMS).contains(&count) || lists.iter().any(|list| list.is_null()) {
            return Err(DNN.bad_value());
        }
        let [padding, stride, dilation] = lists.map(|list| wide(&list.list(count as usize)));
        let set = Convolution { padding, stride, dilation };
        CONVOLUTIONS.with(convolution, |known| *known = set).ok_or(DNN.bad_value())
    })
}

fn wide(list: &[i32]) -> Vec<i64> {
    list.iter().copied().map(i64::from).collect()
}

impl Shape {
    fn tensor(&self) -> Tensor {
        if self.strides.is_empty() {
            let channels_last = self.format == c::CUDNN_TENSOR_NHWC;
            return Tensor { data_type: self.data_type, dims: wide(&self.dims), channels_last };
        }
        Tensor::strided(self.data_type, wide(&self.dims), &wide(&self.strides))
    }
}

/// The convolution that these descriptors are for; nothing where they don't fit each other.
fn problem(
    operation: Operation,
    tensors: [*mut c_void; 3],
    convolution: *mut c_void,
) -> Option<Problem> {
    let [x, w, y] = tensors.map(|handle| SHAPES.with(handle, |shape| shape.tensor()));
    let description = CONVOLUTIONS.with(convolution, |known| known.clone())?;
    let Convolution { padding, stride, dilation } = description;
    let (x, w, y) = (x?, w?, y?);
    let problem = Problem { operation, fused: false, x, w, y, padding, stride, dilation };
    problem.is_sound().then_some(problem)
}

/// The two algorithms: the implicit product with the backend's workspace, and the
/// one that is documented to need none.
const fn algorithms(operation: Operation) -> [i32; 2] {
    match operation {
        Operation::Forward => [
            c::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM,
            c::CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM,
        ],
        Operation::BackwardData => {
            [c::CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, c::CUDNN_CONVOLUTION_BWD_DATA_ALGO_0]
        }
        Operation::BackwardFilter => {
            [c::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, c::CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0]
        }
    }
}

/// Bytes that the convolution needs, counted as planned.
fn needed(operation: Operation, tensors: [*mut c_void; 3], convolution: *mut c_void) -> usize {
    let Some(problem) = problem(operation, tensors, convolution) else { return 0 };
    let (engines, source) = workspace::engines(&problem);
    // Without rounding: this interface's default.
    let engine = engines.iter().find(|engine| !engine.tensor_cores);
    let bytes = engine.map_or(0, |engine| engine.workspace);
    counts::convolution(&problem, source, bytes);
    usize::try_from(bytes).unwrap_or(0)
}

/// Writes as many results as are wanted. The three directions' records have the same layout.
fn give_algorithms(
    operation: Operation,
    tensors: [*mut c_void; 3],
    convolution: *mut c_void,
    (wanted, count, results): (i32, Out<i32>, Out<u8>),
) -> i32 {
    DNN.answer(|| {
        if wanted < 1 {
            return Err(DNN.bad_value());
        }
        let sizes = [needed(operation, tensors, convolution), 0];
        let found = algorithms(operation).into_iter().zip(sizes).take(wanted as usize);
        for (i, (algorithm, size)) in found.enumerate() {
            let result: Out<u8> = results.at(i * perf::SIZE);
            result.clear(perf::SIZE).map_err(|_| DNN.bad_value())?;
            result.at(perf::algo.offset).give(algorithm);
            result.at(perf::status.offset).give(c::CUDNN_STATUS_SUCCESS);
            result.at(perf::time.offset).give(-1f32);
            result.at(perf::memory.offset).give(size);
            // Those that need none are documented to add up in any order backward.
            let ordered = i == 0 || matches!(operation, Operation::Forward);
            let kind = if ordered { c::CUDNN_DETERMINISTIC } else { c::CUDNN_NON_DETERMINISTIC };
            result.at(perf::determinism.offset).give(kind);
            result.at(perf::mathType.offset).give(c::CUDNN_DEFAULT_MATH);
        }
        DNN.give(count, wanted.min(2))
    })
}

fn give_workspace(
    operation: Operation,
    tensors: [*mut c_void; 3],
    convolution: *mut c_void,
    (algorithm, size): (i32, Out<usize>),
) -> i32 {
    DNN.answer(|| {
        let needed = needed(operation, tensors, convolution);
        DNN.give(size, if algorithm == algorithms(operation)[1] { 0 } else { needed })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionForwardAlgorithm_v7(
    _handle: *mut c_void,
    x: *mut c_void,
    w: *mut c_void,
    convolution: *mut c_void,
    y: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
) -> i32 {
    give_algorithms(Operation::Forward, [x, w, y], convolution, (wanted, count, results))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
    _handle: *mut c_void,
    w: *mut c_void,
    dy: *mut c_void,
    convolution: *mut c_void,
    dx: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
) -> i32 {
    give_algorithms(Operation::BackwardData, [dx, w, dy], convolution, (wanted, count, results))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    _handle: *mut c_void,
    x: *mut c_void,
    dy: *mut c_void,
    convolution: *mut c_void,
    dw: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
) -> i32 {
    give_algorithms(Operation::BackwardFilter, [x, dw, dy], convolution, (wanted, count, results))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnFindConvolutionForwardAlgorithmEx(
    _handle: *mut c_void,
    x: *mut c_void,
    _x_data: *const c_void,
    w: *mut c_void,
    _w_data: *const c_void,
    convolution: *mut c_void,
    y: *mut c_void,
    _y_data: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
    _workspace: *mut c_void,
    _workspace_size: usize,
) -> i32 {
    give_algorithms(Operation::Forward, [x, w, y], convolution, (wanted, count, results))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnFindConvolutionBackwardDataAlgorithmEx(
    _handle: *mut c_void,
    w: *mut c_void,
    _w_data: *const c_void,
    dy: *mut c_void,
    _dy_data: *const c_void,
    convolution: *mut c_void,
    dx: *mut c_void,
    _dx_data: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
    _workspace: *mut c_void,
    _workspace_size: usize,
) -> i32 {
    give_algorithms(Operation::BackwardData, [dx, w, dy], convolution, (wanted, count, results))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnFindConvolutionBackwardFilterAlgorithmEx(
    _handle: *mut c_void,
    x: *mut c_void,
    _x_data: *const c_void,
    dy: *mut c_void,
    _dy_data: *const c_void,
    convolution: *mut c_void,
    dw: *mut c_void,
    _dw_data: *mut c_void,
    wanted: i32,
    count: Out<i32>,
    results: Out<u8>,
    _workspace: *mut c_void,
    _workspace_size: usize,
) -> i32 {
    give_algorithms(Operation::BackwardFilter, [x, dw, dy], convolution, (wanted, count, results))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionForwardWorkspaceSize(
    _handle: *mut c_void,
    x: *mut c_void,
    w: *mut c_void,
    convolution: *mut c_void,
    y: *mut c_void,
    algorithm: i32,
    size: Out<usize>,
) -> i32 {
    give_workspace(Operation::Forward, [x, w, y], convolution, (algorithm, size))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardDataWorkspaceSize(
    _handle: *mut c_void,
    w: *mut c_void,
    dy: *mut c_void,
    convolution: *mut c_void,
    dx: *mut c_void,
    algorithm: i32,
    size: Out<usize>,
) -> i32 {
    give_workspace(Operation::BackwardData, [dx, w, dy], convolution, (algorithm, size))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetConvolutionBackwardFilterWorkspaceSize(
    _handle: *mut c_void,
    x: *mut c_void,
    dy: *mut c_void,
    convolution: *mut c_void,
    dw: *mut c_void,
    algorithm: i32,
    size: Out<usize>,
) -> i32 {
    give_workspace(Operation::BackwardFilter, [x, dw, dy], convolution, (algorithm, size))
}

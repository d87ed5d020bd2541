//! How much workspace a convolution needs: a table that was measured, or else a model.
//!
//! NVIDIA documents neither which engine cuDNN takes nor what it needs. The model has no
//! constants that were fitted. It has three mechanisms, each the size of something that an
//! engine of its kind must keep in between:
//!
//! * *Layout.* Tensor cores work on channels-last data. cuDNN's manual says that it transposes
//!   and pads other data to call them ("Legacy API, Data and Filter Formats"). So what is not
//!   channels-last is copied. For a forward or backward-data convolution these are input,
//!   filter and output; for a filter's gradient, which is written as it is made, both inputs.
//!   Channels are padded to 16 bytes. A filter of one pixel is the same in both orders; with
//!   stride 1 the product needs no copies at all.
//! * *Partial sums.* The gradient of a one-pixel filter in single precision is one product for each
//!   image, whose results are added up: the batch times the filter.
//! * *Winograd.* A 3×3 filter, stride 1, in single precision is transformed to 4×4: 64
//!   bytes for each pair of channels. Two frameworks' authors found that they had to
//!   allow that (LBANN #437, Chainer #1093).
//!
//! What the model is held to, and by how much it is wrong, stands in `docs/cudnn.md`. It answers
//! for two-dimensional convolutions without groups of the types and cards named in [`model`]; of
//! all others it says that it doesn't know.
//!
//! An engine with a workspace is followed by one without: where memory is short,
//! PyTorch goes on to that, as on a card.

use super::problem::{Operation, Problem, Tensor};
use super::{element_bytes, table};
use crate::constants as c;
use crate::gpu;

/// How a convolution can be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Engine {
    /// Bytes that it needs.
    pub(super) workspace: i64,
    /// It rounds single precision to that of tensor cores, which a program may refuse.
    pub(super) tensor_cores: bool,
}

impl Engine {
    /// Needs nothing and can run everything.
    pub(super) const PLAIN: Self = Self { workspace: 0, tensor_cores: false };
}

/// Whence a workspace's size is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// From a table that was measured on such a card.
    Measured,
    /// From the model.
    Modelled,
    /// It is not.
    Unknown,
}

/// The engines for a convolution, the one that is taken first, and whence their needs are known.
pub(super) fn engines(problem: &Problem) -> (Vec<Engine>, Source) {
    if let Some(workspace) = table::find(problem) {
        return (chain(vec![Engine { workspace, tensor_cores: false }]), Source::Measured);
    }
    let sm = gpu::device(gpu::current_device()).map_or(0, |device| device.profile.sm);
    match model(problem, sm) {
        Some(engines) => (chain(engines), Source::Modelled),
        None => (vec![Engine::PLAIN], Source::Unknown),
    }
}

/// With an engine at the end that needs nothing.
fn chain(mut engines: Vec<Engine>) -> Vec<Engine> {
    if engines.last() != Some(&Engine::PLAIN) {
        engines.push(Engine::PLAIN);
    }
    engines
}

/// The model, for a compute capability times ten; nothing where it doesn't know.
fn model(problem: &Problem, sm: u32) -> Option<Vec<Engine>> {
    if problem.padding.len() != 2 || problem.groups() != 1 {
        return None;
    }
    let types = [problem.x.data_type, problem.w.data_type, problem.y.data_type];
    if types != [types[0]; 3] {
        return None;
    }
    let tensor_cores = tensor_cores(types[0], sm)?;
    let mut engines = Vec::new();
    if tensor_cores {
        let rounds = types[0] == c::CUDNN_DATA_FLOAT;
        engines.push(Engine { workspace: copies(problem), tensor_cores: rounds });
    }
    if types[0] == c::CUDNN_DATA_FLOAT {
        let tensors = [&problem.x, &problem.w, &problem.y];
        if !tensor_cores && tensors.iter().any(|tensor| tensor.channels_last) {
            return None;
        }
        engines.push(Engine { workspace: single_precision(problem), tensor_cores: false });
    }
    Some(engines)
}

/// Whether this type is a tensor core's on such a card. Nothing is known of cards from 10.0 on:
/// there the one network that was compared needed no copies, which is no rule yet.
const fn tensor_cores(data_type: i32, sm: u32) -> Option<bool> {
    match (data_type, sm) {
        (_, 100..) => None,
        (c::CUDNN_DATA_HALF, 70..) | (c::CUDNN_DATA_BFLOAT16 | c::CUDNN_DATA_FLOAT, 80..) => {
            Some(true)
        }
        (c::CUDNN_DATA_FLOAT, _) => Some(false),
        _ => None,
    }
}

/// A filter of one pixel over every pixel: a matrix product.
fn is_product(problem: &Problem) -> bool {
    problem.w.dims[2..].iter().chain(&problem.stride).all(|n| *n == 1)
        && problem.padding.iter().all(|n| *n == 0)
}

/// Bytes of the copies that tensor cores need.
fn copies(problem: &Problem) -> i64 {
    let Problem { operation, x, w, y, .. } = problem;
    let tensors: &[&Tensor] = match operation {
        Operation::BackwardFilter if is_product(problem) && x.dims[0] == 1 => &[],
        Operation::BackwardFilter => &[x, y],
        _ if is_product(problem) => &[],
        _ => &[x, w, y],
    };
    let copied = tensors.iter().filter(|tensor| !tensor.is_channels_last());
    copied.fold(0, |sum, tensor| sum.saturating_add(padded_bytes(tensor)))
}

/// Bytes of a tensor whose channels are padded to 16 bytes.
fn padded_bytes(tensor: &Tensor) -> i64 {
    let element = element_bytes(tensor.data_type);
    let others = tensor.dims.iter().enumerate().filter(|(i, _)| *i != 1);
    let channels = (tensor.dims[1].saturating_mul(element)).saturating_add(15) / 16 * 16;
    others.fold(channels, |product, (_, n)| product.saturating_mul(*n))
}

/// Bytes of what single precision without tensor cores keeps in between.
fn single_precision(problem: &Problem) -> i64 {
    let [k, c] = [problem.w.dims[0], problem.w.dims[1]];
    let pairs = k.saturating_mul(c);
    let winograd = problem.w.dims[2..] == [3, 3]
        && problem.stride == [1, 1]
        && problem.dilation == [1, 1]
        && problem.padding.iter().all(|n| (0..=2).contains(n));
    match (problem.operation, problem.x.dims[0]) {
        (Operation::BackwardFilter, images) if is_product(problem) && images > 1 => {
            pairs.saturating_mul(4).saturating_mul(images)
        }
        (Operation::Forward | Operation::BackwardData, _) if winograd => pairs.saturating_mul(64),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::problem::tests::square;
    use super::*;

    fn with_type(mut problem: Problem, data_type: i32) -> Problem {
        for tensor in [&mut problem.x, &mut problem.w, &mut problem.y] {
            tensor.data_type = data_type;
        }
        problem
    }

    fn first(problem: &Problem, sm: u32) -> Option<Engine> {
        model(problem, sm).map(|engines| engines[0])
    }

    /// ResNet-50's last stage, batch 32, on a T4: what its four published peaks are made of.
    #[test]
    fn gradients_of_one_pixel_are_added_up_over_the_batch() {
        let problem = square(Operation::BackwardFilter, [32, 512, 2048, 7, 1, 1]);
        assert_eq!(first(&problem, 75).map(|e| e.workspace), Some(134_217_728));
        let single = square(Operation::BackwardFilter, [1, 512, 2048, 7, 1, 1]);
        assert_eq!(first(&single, 75), Some(Engine::PLAIN));
        let strided = square(Operation::BackwardFilter, [32, 512, 2048, 14, 1, 2]);
        assert_eq!(first(&strided, 75), Some(Engine::PLAIN));
        for operation in [Operation::Forward, Operation::BackwardData] {
            let problem = square(operation, [32, 512, 2048, 7, 1, 1]);
            assert_eq!(first(&problem, 75), Some(Engine::PLAIN));
        }
    }

    #[test]
    fn tensor_cores_copy_what_is_not_channels_last() {
        let half =
            |operation| with_type(square(operation, [32, 512, 1024, 28, 3, 2]), c::CUDNN_DATA_HALF);
        let (x, w, y) = (32 * 512 * 28 * 28 * 2, 512 * 1024 * 9 * 2, 32 * 1024 * 14 * 14 * 2);
        for (operation, bytes) in [
            (Operation::Forward, x + w + y),
            (Operation::BackwardData, x + w + y),
            (Operation::BackwardFilter, x + y),
        ] {
            let mut problem = half(operation);
            assert_eq!(first(&problem, 75).map(|e| e.workspace), Some(bytes), "{problem}");
            problem.x.channels_last = true;
            assert_eq!(first(&problem, 75).map(|e| e.workspace), Some(bytes - x), "{problem}");
            // Before tensor cores, and on cards of which nothing is known.
            assert_eq!(first(&problem, 60), None);
            assert_eq!(first(&problem, 120), None);
        }
    }

    /// Single precision may be rounded, or not: two engines, of which the
    /// program takes the one it allows.
    #[test]
    fn single_precision_has_both_engines_from_8_0_on() {
        let problem = square(Operation::Forward, [8, 64, 64, 56, 3, 1]);
        let engines = model(&problem, 86).expect("known");
        let tensor = 8 * 64 * 56 * 56 * 4;
        let copies = 2 * tensor + 64 * 64 * 9 * 4;
        assert_eq!(engines[0], Engine { workspace: copies, tensor_cores: true });
        // LBANN's res2a_branch2b: 256 KiB.
        assert_eq!(engines[1], Engine { workspace: 256 << 10, tensor_cores: false });
        assert_eq!(model(&problem, 75).expect("known"), [engines[1]]);
    }

    #[test]
    fn matrix_products_need_no_copies() {
        let half =
            |operation, n| with_type(square(operation, [n, 16, 32, 8, 1, 1]), c::CUDNN_DATA_HALF);
        for (operation, images, bytes) in [
            (Operation::Forward, 2, 0),
            (Operation::BackwardData, 2, 0),
            (Operation::BackwardFilter, 1, 0),
            (Operation::BackwardFilter, 2, 2 * (16 + 32) * 64 * 2),
        ] {
            let engine = first(&half(operation, images), 75).expect("known");
            assert_eq!(engine.workspace, bytes, "{operation:?} {images}");
        }
        // Three by three, or with padding, it is none.
        let single = square(Operation::BackwardFilter, [4, 16, 32, 8, 1, 1]);
        assert_eq!(first(&single, 75).map(|e| e.workspace), Some(16 * 32 * 4 * 4));
        let mut wide = square(Operation::BackwardFilter, [4, 16, 32, 8, 3, 1]);
        wide.padding = vec![0, 0];
        let mut bordered = single;
        bordered.padding = vec![1, 1];
        for problem in [wide, bordered] {
            assert_eq!(first(&problem, 75), Some(Engine::PLAIN), "{problem}");
        }
    }

    #[test]
    fn only_some_filters_are_transformed() {
        let plain = square(Operation::Forward, [2, 8, 16, 9, 3, 1]);
        let bytes = |problem: &Problem| first(problem, 75).map(|e| e.workspace);
        assert_eq!(bytes(&plain), Some(8 * 16 * 64));
        let (mut strided, mut spread, mut far, mut other) =
            (plain.clone(), plain.clone(), plain.clone(), plain);
        strided.stride = vec![2, 2];
        spread.dilation = vec![2, 2];
        far.padding = vec![3, 3];
        other.operation = Operation::BackwardFilter;
        for problem in [strided, spread, far, other] {
            assert_eq!(bytes(&problem), Some(0), "{problem}");
        }
    }

    #[test]
    fn few_channels_are_padded() {
        let stem =
            with_type(square(Operation::BackwardFilter, [2, 3, 64, 224, 7, 2]), c::CUDNN_DATA_HALF);
        let bytes = 2 * 8 * 224 * 224 * 2 + 2 * 64 * 112 * 112 * 2;
        assert_eq!(first(&stem, 80).map(|e| e.workspace), Some(bytes));
    }

    #[test]
    fn what_is_not_modelled_is_not_answered() {
        let plain = square(Operation::Forward, [2, 8, 8, 9, 3, 1]);
        let mut grouped = plain.clone();
        grouped.w.dims[1] = 2;
        let mut last = plain.clone();
        last.x.channels_last = true;
        let mut three = plain.clone();
        for list in [&mut three.padding, &mut three.stride, &mut three.dilation] {
            list.push(1);
        }
        let double = with_type(plain.clone(), c::CUDNN_DATA_DOUBLE);
        let mut mixed = plain;
        mixed.y.data_type = c::CUDNN_DATA_HALF;
        for problem in [grouped, last, three, double, mixed] {
            assert_eq!(model(&problem, 75), None, "{problem}");
        }
    }

    /// The largest sizes that anyone could ask for don't overflow.
    #[test]
    fn huge_problems_saturate() {
        let huge = square(Operation::BackwardFilter, [i64::MAX / 4, 1 << 40, 1 << 40, 2, 1, 1]);
        assert_eq!(first(&huge, 75).map(|e| e.workspace), Some(i64::MAX));
        assert_eq!(first(&huge, 80).map(|e| e.workspace), Some(i64::MAX));
    }

    #[test]
    fn memory_may_be_short() {
        let chained = chain(vec![Engine { workspace: 5, tensor_cores: false }]);
        assert_eq!(chained.last(), Some(&Engine::PLAIN));
        assert_eq!(chain(vec![Engine::PLAIN]), [Engine::PLAIN]);
    }
}

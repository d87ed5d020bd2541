//! A convolution as cuDNN is asked for it: what decides how much workspace it needs.
//!
//! There are two ways to ask, the backend's operation graphs and the older descriptors. Both end
//! here, so that what is known of a convolution doesn't depend on how it was asked for. Equal
//! problems are one problem: programs plan each once and run it many times.

use crate::constants as c;
use std::fmt;

/// Which of the three products is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    /// The output, from input and filter.
    Forward,
    /// The gradient of the input.
    BackwardData,
    /// The gradient of the filter.
    BackwardFilter,
}

impl Operation {
    /// As it is written in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::BackwardData => "backward_data",
            Self::BackwardFilter => "backward_filter",
        }
    }
}

/// A tensor or a filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tensor {
    pub(super) data_type: i32,
    /// Batch (or output channels), channels, and the spatial dimensions.
    pub(super) dims: Vec<i64>,
    /// The channels are innermost, and the order matters.
    pub(super) channels_last: bool,
}

impl Tensor {
    /// The channels are innermost: said so, or both orders are one.
    pub(super) fn is_channels_last(&self) -> bool {
        self.channels_last || self.dims[1] == 1 || self.dims[2..].iter().all(|n| *n == 1)
    }

    /// A tensor whose layout follows from its strides.
    pub(super) fn strided(data_type: i32, dims: Vec<i64>, strides: &[i64]) -> Self {
        let several = dims.get(1).is_some_and(|n| *n > 1) && dims.iter().skip(2).any(|n| *n > 1);
        let channels_last = several && strides.get(1) == Some(&1);
        Self { data_type, dims, channels_last }
    }
}

/// A convolution.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Problem {
    pub(super) operation: Operation,
    /// Another operation of the same graph follows (a bias, an activation).
    pub(super) fused: bool,
    /// The input, or its gradient.
    pub(super) x: Tensor,
    /// The filter, or its gradient.
    pub(super) w: Tensor,
    /// The output, or its gradient.
    pub(super) y: Tensor,
    pub(super) padding: Vec<i64>,
    pub(super) stride: Vec<i64>,
    pub(super) dilation: Vec<i64>,
}

impl Problem {
    /// Sizes fit each other; what doesn't is not looked into any further.
    pub(super) fn is_sound(&self) -> bool {
        let spatial = self.padding.len();
        (1..=3).contains(&spatial)
            && [&self.stride, &self.dilation].iter().all(|list| list.len() == spatial)
            && [&self.x, &self.w, &self.y].iter().all(|tensor| {
                tensor.dims.len() == spatial + 2 && tensor.dims.iter().all(|n| *n > 0)
            })
    }

    /// Groups of channels that have nothing to do with each other.
    pub(super) fn groups(&self) -> i64 {
        (self.x.dims[1] / self.w.dims[1]).max(1)
    }
}

/// The name of a type in tables; a number where it has none that matters here.
fn type_name(data_type: i32) -> String {
    match data_type {
        c::CUDNN_DATA_FLOAT => "float32".to_owned(),
        c::CUDNN_DATA_DOUBLE => "float64".to_owned(),
        c::CUDNN_DATA_HALF => "float16".to_owned(),
        c::CUDNN_DATA_BFLOAT16 => "bfloat16".to_owned(),
        other => format!("type{other}"),
    }
}

/// `3x3`
fn joined(list: &[i64]) -> String {
    list.iter().map(i64::to_string).collect::<Vec<_>>().join("x")
}

/// `forward float32 nchw 32x64x56x56 64x64x3x3 pad 1x1 stride 1x1 dilation 1x1 groups
/// 1`: what a table's line begins with.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.x.channels_last || self.y.channels_last { "nhwc" } else { "nchw" };
        let fused = if self.fused { "_fused" } else { "" };
        write!(
            f,
            "{}{fused} {} {layout} {} {} pad {} stride {} dilation {} groups {}",
            self.operation.name(),
            type_name(self.x.data_type),
            joined(&self.x.dims),
            joined(&self.w.dims),
            joined(&self.padding),
            joined(&self.stride),
            joined(&self.dilation),
            self.groups()
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A square two-dimensional convolution of single precision: batch,
    /// channels in and out, edge, filter, stride.
    pub(in super::super) fn square(
        operation: Operation,
        [n, c, k, edge, filter, stride]: [i64; 6],
    ) -> Problem {
        let tensor = |dims: [i64; 4]| Tensor {
            data_type: c::CUDNN_DATA_FLOAT,
            dims: dims.to_vec(),
            channels_last: false,
        };
        let pad = filter / 2;
        let out = (edge + 2 * pad - filter) / stride + 1;
        Problem {
            operation,
            fused: false,
            x: tensor([n, c, edge, edge]),
            w: tensor([k, c, filter, filter]),
            y: tensor([n, k, out, out]),
            padding: vec![pad; 2],
            stride: vec![stride; 2],
            dilation: vec![1; 2],
        }
    }

    #[test]
    fn a_problem_in_words() {
        let text = square(Operation::BackwardFilter, [32, 64, 128, 56, 3, 2]).to_string();
        let said = "backward_filter float32 nchw 32x64x56x56 128x64x3x3 pad 1x1 stride 2x2 dilation 1x1 groups 1";
        assert_eq!(text, said);
    }

    #[test]
    fn layout_follows_from_strides() {
        let last = |dims: [i64; 4], strides: [i64; 4]| {
            Tensor::strided(0, dims.to_vec(), &strides).channels_last
        };
        assert!(last([2, 8, 4, 4], [128, 1, 32, 8]));
        assert!(!last([2, 8, 4, 4], [128, 16, 4, 1]));
        // Of one channel or one pixel both layouts are the same.
        assert!(!last([2, 1, 4, 4], [16, 1, 4, 1]));
        assert!(!last([2, 8, 1, 1], [8, 1, 1, 1]));
    }

    #[test]
    fn what_does_not_fit_is_not_looked_into() {
        let mut problem = square(Operation::Forward, [1, 3, 8, 9, 3, 1]);
        assert!(problem.is_sound());
        problem.w.dims[1] = 0;
        assert!(!problem.is_sound());
        problem.w.dims[1] = 3;
        problem.stride.pop();
        assert!(!problem.is_sound());
    }
}

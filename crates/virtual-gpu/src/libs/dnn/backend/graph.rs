//! Which convolution an operation graph holds.

use super::super::problem::{Operation, Problem, Tensor};
use super::{Bag, Value};
use crate::constants as c;
use std::sync::Arc;

/// Attributes of a convolution's node: its description, the filter, the input and the output.
const fn attributes(operation: Operation) -> [i32; 4] {
    match operation {
        Operation::Forward => [
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
        ],
        Operation::BackwardData => [
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
        ],
        Operation::BackwardFilter => [
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
            c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
        ],
    }
}

const fn operation(kind: i32) -> Option<Operation> {
    match kind {
        c::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR => Some(Operation::Forward),
        c::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR => {
            Some(Operation::BackwardData)
        }
        c::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR => {
            Some(Operation::BackwardFilter)
        }
        _ => None,
    }
}

impl Bag {
    fn bags(&self, name: i32) -> &[Arc<Self>] {
        match self.attributes.get(&name) {
            Some(Value::Bags(bags)) => bags,
            _ => &[],
        }
    }

    fn bag(&self, name: i32) -> Option<&Self> {
        self.bags(name).first().map(AsRef::as_ref)
    }

    fn numbers(&self, name: i32) -> Vec<i64> {
        match self.attributes.get(&name) {
            Some(Value::Plain { count, bytes }) if bytes.len() as i64 == count * 8 => {
                bytes.as_chunks().0.iter().map(|eight| i64::from_ne_bytes(*eight)).collect()
            }
            _ => Vec::new(),
        }
    }

    fn tensor(&self, name: i32) -> Option<Tensor> {
        let bag = self.bag(name)?;
        let Some(Value::Plain { bytes, .. }) = bag.attributes.get(&c::CUDNN_ATTR_TENSOR_DATA_TYPE)
        else {
            return None;
        };
        let data_type = i32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let strides = bag.numbers(c::CUDNN_ATTR_TENSOR_STRIDES);
        Some(Tensor::strided(data_type, bag.numbers(c::CUDNN_ATTR_TENSOR_DIMENSIONS), &strides))
    }

    /// The graph behind an engine's configuration or behind a plan.
    fn graph(&self) -> Option<&Self> {
        let configuration = self.bag(c::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).unwrap_or(self);
        let engine = configuration.bag(c::CUDNN_ATTR_ENGINECFG_ENGINE)?;
        engine.bag(c::CUDNN_ATTR_ENGINE_OPERATION_GRAPH)
    }

    /// The convolution that an engine's configuration or a plan is for, if it is for one.
    pub(super) fn problem(&self) -> Option<Problem> {
        let nodes = self.graph()?.bags(c::CUDNN_ATTR_OPERATIONGRAPH_OPS);
        let (node, operation) =
            nodes.iter().find_map(|node| Some((node, operation(node.kind)?)))?;
        let [description, w, x, y] = attributes(operation);
        let description = node.bag(description)?;
        let problem = Problem {
            operation,
            fused: nodes.len() > 1,
            x: node.tensor(x)?,
            w: node.tensor(w)?,
            y: node.tensor(y)?,
            padding: description.numbers(c::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS),
            stride: description.numbers(c::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES),
            dilation: description.numbers(c::CUDNN_ATTR_CONVOLUTION_DILATIONS),
        };
        problem.is_sound().then_some(problem)
    }
}

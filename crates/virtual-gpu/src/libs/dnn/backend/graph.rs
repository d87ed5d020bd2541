//! Which convolution an operation graph holds, and what its engines need.

use super::super::counts;
use super::super::problem::{Operation, Problem, Tensor};
use super::super::workspace::{self, Engine};
use super::{Descriptor, Value};
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

impl Descriptor {
    fn descriptors(&self, name: i32) -> &[Arc<Self>] {
        match self.attributes.get(&name) {
            Some(Value::Descriptors(descriptors)) => descriptors,
            _ => &[],
        }
    }

    fn descriptor(&self, name: i32) -> Option<&Self> {
        self.descriptors(name).first().map(AsRef::as_ref)
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
        let desc = self.descriptor(name)?;
        let Some(Value::Plain { bytes, .. }) = desc.attributes.get(&c::CUDNN_ATTR_TENSOR_DATA_TYPE)
        else {
            return None;
        };
        let data_type = i32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let strides = desc.numbers(c::CUDNN_ATTR_TENSOR_STRIDES);
        Some(Tensor::strided(data_type, desc.numbers(c::CUDNN_ATTR_TENSOR_DIMENSIONS), &strides))
    }

    /// The engine of a configuration or of a plan, or this one.
    fn engine_descriptor(&self) -> &Self {
        let configuration =
            self.descriptor(c::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).unwrap_or(self);
        configuration.descriptor(c::CUDNN_ATTR_ENGINECFG_ENGINE).unwrap_or(configuration)
    }

    /// The graph behind an engine, a configuration, a plan or heuristics, or this one.
    fn graph(&self) -> &Self {
        let engine = self.engine_descriptor();
        let graph = engine.descriptor(c::CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
        graph.or_else(|| self.descriptor(c::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)).unwrap_or(self)
    }

    /// The convolution that this is for, if it is for one.
    fn problem(&self) -> Option<Problem> {
        let nodes = self.graph().descriptors(c::CUDNN_ATTR_OPERATIONGRAPH_OPS);
        let (node, operation) =
            nodes.iter().find_map(|node| Some((node, operation(node.kind)?)))?;
        let [description, w, x, y] = attributes(operation);
        let description = node.descriptor(description)?;
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

    /// The engines for the graph; every graph has one.
    pub(super) fn engines(&self) -> Vec<Engine> {
        self.problem().map_or_else(|| vec![Engine::PLAIN], |problem| workspace::engines(&problem).0)
    }

    /// The engine that this is about. A number that no engine has is
    /// refused by nobody, and needs nothing.
    pub(super) fn engine(&self) -> Engine {
        let index = self.engine_descriptor().numbers(c::CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
        let index = index.first().and_then(|index| usize::try_from(*index).ok());
        index.and_then(|i| self.engines().get(i).copied()).unwrap_or(Engine::PLAIN)
    }

    /// Bytes that this plan needs; the plan is counted.
    pub(super) fn planned(&self) -> i64 {
        let bytes = self.engine().workspace;
        match self.problem() {
            Some(problem) => {
                counts::convolution(&problem, workspace::engines(&problem).1, bytes);
            }
            None => counts::other(),
        }
        bytes
    }
}

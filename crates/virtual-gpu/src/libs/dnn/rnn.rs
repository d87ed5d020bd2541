//! cuDNN's recurrent networks: where each weight lies, and how much space a pass needs.
//!
//! The weight space is one buffer. It holds the matrices layer by layer and direction by direction:
//! the input matrices of all gates, then the recurrent ones, then the projection. Behind all
//! matrices are the biases, in the same order. PyTorch copies its parameters into it and checks
//! every address and shape, so the layout is fixed by that, and it is dense.
//!
//! *Temporary space*, a model: the manual gives no sizes. The reserve of a training pass must hold
//! what the backward pass needs and can't compute again cheaply. That is the gates of every step
//! and layer, the cell state of an LSTM, and the output of each layer but the last. The workspace
//! holds one layer's gates. In inference no reserve is needed. Lower bounds, not measured.

use super::{DNN, Shape, Status, element_bytes, shape};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use core::ffi::c_void;

/// What `cudnnSetRNNDescriptor_v8` says, as far as sizes go.
#[derive(Clone, Copy, Default)]
struct Rnn {
    mode: i32,
    bias: i32,
    directions: i64,
    data_type: i32,
    input: i64,
    hidden: i64,
    projection: i64,
    layers: i64,
}

/// What `cudnnSetRNNDataDescriptor` says.
#[derive(Clone, Copy, Default)]
struct Sequence {
    length: i64,
    batch: i64,
}

static RNNS: Registry<Rnn> = Registry::new(39);
static SEQUENCES: Registry<Sequence> = Registry::new(40);

/// A matrix or a bias within the weight space: its offset and shape, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    offset: i64,
    rows: i64,
    columns: i64,
}

impl Rnn {
    fn gates(&self) -> i64 {
        match self.mode {
            c::CUDNN_LSTM => 4,
            c::CUDNN_GRU => 3,
            _ => 1,
        }
    }

    fn biases(&self) -> i64 {
        match self.bias {
            c::CUDNN_RNN_NO_BIAS => 0,
            c::CUDNN_RNN_DOUBLE_BIAS => 2,
            _ => 1,
        }
    }

    fn projects(&self) -> bool {
        self.projection > 0 && self.projection < self.hidden
    }

    /// Width of a layer's output, one direction.
    fn output(&self) -> i64 {
        if self.projects() { self.projection } else { self.hidden }
    }

    /// Width of the input of a layer.
    fn input_of(&self, pseudo_layer: i64) -> i64 {
        if pseudo_layer < self.directions { self.input } else { self.output() * self.directions }
    }

    /// Layers times directions.
    fn pseudo_layers(&self) -> i64 {
        self.layers * self.directions
    }

    /// Elements of the matrices of one pseudo-layer.
    fn matrices(&self, pseudo_layer: i64) -> i64 {
        let gates = self.gates() * self.hidden * (self.input_of(pseudo_layer) + self.output());
        gates + if self.projects() { self.projection * self.hidden } else { 0 }
    }

    fn matrices_before(&self, pseudo_layer: i64) -> i64 {
        (0..pseudo_layer).map(|layer| self.matrices(layer)).sum()
    }

    fn weights(&self) -> i64 {
        let biases = self.pseudo_layers() * self.biases() * self.gates() * self.hidden;
        self.matrices_before(self.pseudo_layers()) + biases
    }

    /// The matrix of a linear layer: first the gates of the input, then those of the state,
    /// then the projection, if there is one.
    fn matrix(&self, pseudo_layer: i64, linear: i64) -> Option<Part> {
        let (gates, hidden) = (self.gates(), self.hidden);
        let (input, state) = (self.input_of(pseudo_layer), self.output());
        let start = self.matrices_before(pseudo_layer);
        if linear < gates {
            let offset = start + linear * hidden * input;
            return Some(Part { offset, rows: hidden, columns: input });
        }
        let start = start + gates * hidden * input;
        if linear < 2 * gates {
            let offset = start + (linear - gates) * hidden * state;
            return Some(Part { offset, rows: hidden, columns: state });
        }
        let offset = start + gates * hidden * state;
        (linear == 2 * gates && self.projects()).then_some(Part {
            offset,
            rows: self.projection,
            columns: hidden,
        })
    }

    fn bias(&self, pseudo_layer: i64, linear: i64) -> Option<Part> {
        let (gates, biases) = (self.gates(), self.biases());
        let (first, last) = match self.bias {
            c::CUDNN_RNN_SINGLE_REC_BIAS => (gates, 2 * gates),
            _ => (0, biases * gates),
        };
        (first..last).contains(&linear).then(|| {
            let before = pseudo_layer * biases * gates + linear - first;
            let offset = self.matrices_before(self.pseudo_layers()) + before * self.hidden;
            Part { offset, rows: self.hidden, columns: 1 }
        })
    }

    /// Bytes of workspace and reserve; see the module's head.
    fn temporary(&self, sequence: Sequence, training: bool) -> (i64, i64) {
        let element = element_bytes(self.data_type);
        let steps = sequence.length * sequence.batch * self.directions;
        let gates = steps * self.gates() * self.hidden * element;
        if !training {
            return (gates, 0);
        }
        let cells = if self.mode == c::CUDNN_LSTM { steps * self.hidden * element } else { 0 };
        let outputs = steps * self.output() * element * (self.layers - 1);
        (gates, (gates + cells) * self.layers + outputs)
    }
}

fn rnn(handle: *mut c_void) -> Status<Rnn> {
    RNNS.with(handle, |rnn| *rnn).ok_or(DNN.bad_value())
}

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateRNNDescriptor(out: Out<*mut c_void>) -> i32 {
    super::create(&RNNS, out, Rnn::default())
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyRNNDescriptor(handle: *mut c_void) -> i32 {
    super::destroy(&RNNS, handle)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetRNNDescriptor_v8(
    handle: *mut c_void,
    _algorithm: i32,
    mode: i32,
    bias: i32,
    direction: i32,
    _input_mode: i32,
    data_type: i32,
    _math_precision: i32,
    _math_type: i32,
    input: i32,
    hidden: i32,
    projection: i32,
    layers: i32,
    _dropout: *mut c_void,
    _flags: u32,
) -> i32 {
    DNN.answer(|| {
        if input < 1 || hidden < 1 || projection < 0 || layers < 1 {
            return Err(DNN.bad_value());
        }
        let set = Rnn {
            mode,
            bias,
            directions: if direction == c::CUDNN_BIDIRECTIONAL { 2 } else { 1 },
            data_type,
            input: input.into(),
            hidden: hidden.into(),
            projection: projection.into(),
            layers: layers.into(),
        };
        RNNS.with(handle, |rnn| *rnn = set).ok_or(DNN.bad_value())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateRNNDataDescriptor(out: Out<*mut c_void>) -> i32 {
    super::create(&SEQUENCES, out, Sequence::default())
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyRNNDataDescriptor(handle: *mut c_void) -> i32 {
    super::destroy(&SEQUENCES, handle)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetRNNDataDescriptor(
    handle: *mut c_void,
    _data_type: i32,
    _layout: i32,
    length: i32,
    batch: i32,
    _vector: i32,
    _lengths: In<i32>,
    _fill: *mut c_void,
) -> i32 {
    DNN.answer(|| {
        if length < 1 || batch < 1 {
            return Err(DNN.bad_value());
        }
        let set = Sequence { length: length.into(), batch: batch.into() };
        SEQUENCES.with(handle, |sequence| *sequence = set).ok_or(DNN.bad_value())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightSpaceSize(
    _handle: *mut c_void,
    network: *mut c_void,
    size: Out<i64>,
) -> i32 {
    DNN.answer(|| {
        let network = rnn(network)?;
        DNN.give(size, network.weights() * element_bytes(network.data_type))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNTempSpaceSizes(
    _handle: *mut c_void,
    network: *mut c_void,
    mode: i32,
    sequence: *mut c_void,
    workspace: Out<i64>,
    reserve: Out<i64>,
) -> i32 {
    DNN.answer(|| {
        let sequence = SEQUENCES.with(sequence, |s| *s).ok_or(DNN.bad_value())?;
        let training = mode == c::CUDNN_FWD_MODE_TRAINING;
        let (work, kept) = rnn(network)?.temporary(sequence, training);
        workspace.give(work);
        reserve.give(kept);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightParams(
    _handle: *mut c_void,
    network: *mut c_void,
    pseudo_layer: i32,
    space_size: usize,
    space: u64,
    linear: i32,
    matrix: *mut c_void,
    matrix_addr: Out<u64>,
    bias: *mut c_void,
    bias_addr: Out<u64>,
) -> i32 {
    DNN.answer(|| {
        let network = rnn(network)?;
        let (layer, linear) = (i64::from(pseudo_layer), i64::from(linear));
        let element = element_bytes(network.data_type);
        let fits = network.weights() * element <= space_size as i64;
        if !(0..network.pseudo_layers()).contains(&layer) || linear < 0 || !fits {
            return Err(DNN.bad_value());
        }
        let places = [
            (network.matrix(layer, linear), matrix, matrix_addr),
            (network.bias(layer, linear), bias, bias_addr),
        ];
        for (part, descriptor, addr) in places {
            addr.give(part.map_or(0, |p| space + (p.offset * element) as u64));
            if !descriptor.is_null() {
                let known = part.map_or_else(Shape::default, |p| p.shape(&network));
                shape(descriptor, |s| *s = known)?;
            }
        }
        Ok(())
    })
}

impl Part {
    fn shape(self, network: &Rnn) -> Shape {
        let (rows, columns) = (self.rows as i32, self.columns as i32);
        Shape {
            data_type: network.data_type,
            format: 0,
            dims: vec![1, rows, columns],
            strides: vec![rows * columns, columns, 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lstm() -> Rnn {
        Rnn {
            mode: c::CUDNN_LSTM,
            bias: c::CUDNN_RNN_DOUBLE_BIAS,
            directions: 2,
            data_type: c::CUDNN_DATA_FLOAT,
            input: 10,
            hidden: 6,
            projection: 0,
            layers: 2,
        }
    }

    /// Parts neither overlap nor leave a hole.
    #[test]
    fn the_weight_space_is_dense() {
        let projected = Rnn { projection: 4, ..lstm() };
        let gru = Rnn { mode: c::CUDNN_GRU, bias: c::CUDNN_RNN_SINGLE_REC_BIAS, ..lstm() };
        let plain =
            Rnn { mode: c::CUDNN_RNN_TANH, bias: c::CUDNN_RNN_NO_BIAS, directions: 1, ..lstm() };
        for network in [lstm(), projected, gru, plain] {
            let mut parts = Vec::new();
            for layer in 0..network.pseudo_layers() {
                for linear in 0..=2 * network.gates() {
                    parts.extend(network.matrix(layer, linear));
                    parts.extend(network.bias(layer, linear));
                }
            }
            parts.sort_by_key(|p| p.offset);
            let mut end = 0;
            for part in parts {
                assert_eq!(part.offset, end, "{part:?}");
                end += part.rows * part.columns;
            }
            assert_eq!(end, network.weights());
        }
    }

    /// PyTorch's own count of an LSTM's parameters.
    #[test]
    fn as_many_weights_as_parameters() {
        let layer = |input: i64| 4 * 6 * input + 4 * 6 * 6 + 2 * 4 * 6;
        assert_eq!(lstm().weights(), 2 * layer(10) + 2 * layer(12));
    }

    #[test]
    fn only_training_needs_a_reserve() {
        let sequence = Sequence { length: 5, batch: 3 };
        assert_eq!(lstm().temporary(sequence, false).1, 0);
        let (work, kept) = lstm().temporary(sequence, true);
        assert_eq!(work, 5 * 3 * 2 * 4 * 6 * 4);
        assert_eq!(kept, 2 * (work + 5 * 3 * 2 * 6 * 4) + 5 * 3 * 2 * 6 * 4);
    }
}

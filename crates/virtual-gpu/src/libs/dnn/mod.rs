//! cuDNN: versions, and the descriptors of tensors and filters, which PyTorch reads back.
//!
//! Which engine cuDNN would choose and what it would need is documented nowhere. What
//! convolutions need is looked up in a table that was measured, or modelled, or not known
//! (`workspace`). How often it was each of these is counted and reported (`counts`). *Not
//! modelled*: the workspaces of other plans, answered as 0 and counted as well, and the reserve
//! of batch normalization. And every operation is taken to be supported, where a real engine
//! might refuse and PyTorch might fall back.

mod backend;
mod convolution;
pub mod counts;
mod ctc;
mod problem;
mod rnn;
mod table;
mod workspace;

use super::blas::property;
use super::{Library, Status, versions};
use crate::constants as c;
use crate::constants::status_name;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use core::ffi::{c_char, c_void};

const DNN: Library = Library::Dnn;

/// Most dimensions of a tensor.
const MAX_DIMS: i32 = 8;

/// A tensor's or a filter's shape.
#[derive(Clone, Default)]
struct Shape {
    data_type: i32,
    /// Of filters.
    format: i32,
    dims: Vec<i32>,
    /// Of tensors.
    strides: Vec<i32>,
}

static SHAPES: Registry<Shape> = Registry::new(37);

fn shape<R>(handle: *mut c_void, use_it: impl FnOnce(&mut Shape) -> R) -> Status<R> {
    SHAPES.with(handle, use_it).ok_or(DNN.bad_value())
}

/// Hands out a new object of a registry.
fn create<T>(registry: &Registry<T>, out: Out<*mut c_void>, object: T) -> i32 {
    DNN.answer(|| {
        if out.is_null() {
            return Err(DNN.bad_value());
        }
        DNN.give(out, registry.insert(object))
    })
}

/// Takes an object back; null is nobody's.
fn destroy<T>(registry: &Registry<T>, handle: *mut c_void) -> i32 {
    if handle.is_null() || registry.remove(handle).is_some() { 0 } else { DNN.bad_value() }
}

/// Bytes of one element of a `cudnnDataType_t`; types of less than a byte count as one.
fn element_bytes(data_type: i32) -> i64 {
    match data_type {
        c::CUDNN_DATA_COMPLEX_FP64 => 16,
        c::CUDNN_DATA_DOUBLE | c::CUDNN_DATA_INT64 | c::CUDNN_DATA_COMPLEX_FP32 => 8,
        c::CUDNN_DATA_FLOAT | c::CUDNN_DATA_INT32 | c::CUDNN_DATA_UINT32 => 4,
        c::CUDNN_DATA_HALF | c::CUDNN_DATA_BFLOAT16 => 2,
        _ => 1,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetVersion() -> usize {
    let [major, minor, patch] = versions::cudnn();
    // The scheme changed with version 9.
    let scale = if major >= 9 { 10_000 } else { 1000 };
    (major * scale + minor * 100 + patch) as usize
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetCudartVersion() -> usize {
    let [major, minor, _] = versions::cuda();
    (major * 1000 + minor * 10) as usize
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetProperty(which: i32, value: Out<i32>) -> i32 {
    property(DNN, which, versions::cudnn(), value)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetErrorString(status: i32) -> *const c_char {
    status_name("CUDNN_STATUS_", status)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetLastErrorString(message: Out<c_char>, room: usize) {
    // Without room there is nowhere to say it.
    let _ = message.text("", room);
}

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateTensorDescriptor(out: Out<*mut c_void>) -> i32 {
    create(&SHAPES, out, Shape::default())
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyTensorDescriptor(tensor: *mut c_void) -> i32 {
    destroy(&SHAPES, tensor)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetTensorNdDescriptor(
    tensor: *mut c_void,
    data_type: i32,
    count: i32,
    dims: In<i32>,
    strides: In<i32>,
) -> i32 {
    DNN.answer(|| {
        if !(1..=MAX_DIMS).contains(&count) || dims.is_null() || strides.is_null() {
            return Err(DNN.bad_value());
        }
        let (dims, strides) = (dims.list(count as usize), strides.list(count as usize));
        shape(tensor, |s| *s = Shape { data_type, format: 0, dims, strides })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetTensorNdDescriptor(
    tensor: *mut c_void,
    room: i32,
    data_type: Out<i32>,
    count: Out<i32>,
    dims: Out<i32>,
    strides: Out<i32>,
) -> i32 {
    DNN.answer(|| {
        let shape = shape(tensor, |s| s.clone())?;
        data_type.give(shape.data_type);
        count.give(shape.dims.len() as i32);
        dims.fill(&shape.dims, room.max(0) as usize);
        strides.fill(&shape.strides, room.max(0) as usize);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateFilterDescriptor(out: Out<*mut c_void>) -> i32 {
    create(&SHAPES, out, Shape::default())
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyFilterDescriptor(filter: *mut c_void) -> i32 {
    destroy(&SHAPES, filter)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetFilterNdDescriptor(
    filter: *mut c_void,
    data_type: i32,
    format: i32,
    count: i32,
    dims: In<i32>,
) -> i32 {
    DNN.answer(|| {
        if !(1..=MAX_DIMS).contains(&count) || dims.is_null() {
            return Err(DNN.bad_value());
        }
        let dims = dims.list(count as usize);
        shape(filter, |s| *s = Shape { data_type, format, dims, strides: Vec::new() })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetFilterNdDescriptor(
    filter: *mut c_void,
    room: i32,
    data_type: Out<i32>,
    format: Out<i32>,
    count: Out<i32>,
    dims: Out<i32>,
) -> i32 {
    DNN.answer(|| {
        let shape = shape(filter, |s| s.clone())?;
        data_type.give(shape.data_type);
        format.give(shape.format);
        count.give(shape.dims.len() as i32);
        dims.fill(&shape.dims, room.max(0) as usize);
        Ok(())
    })
}

//! cuBLASLt: descriptors, preferences and one algorithm.
//!
//! A descriptor is the set of its attributes. The heuristic knows one algorithm, which always
//! applies and needs no workspace. PyTorch allocates its own workspace before it asks, of its own
//! size, as it does with a card. An algorithm is a record of the caller's, 64 bytes that only the
//! library reads. Ours has a mark, the algorithm's number, and the configuration that was set.

use super::blas::{property, version_number};
use super::{Library, Status, versions};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use crate::layout::all::cublasLtMatmulHeuristicResult_t as heuristic;
use core::ffi::c_void;
use std::collections::BTreeMap;

const LT: Library = Library::BlasLt;

/// What was set in a descriptor, as bytes.
type Attributes = BTreeMap<i32, Vec<u8>>;

static DESCRIPTORS: Registry<Attributes> = Registry::new(34);

/// The largest attribute there is: a pointer, or four 64-bit numbers in a row.
const LARGEST: usize = 64;

fn create(out: Out<*mut c_void>, attributes: Attributes) -> i32 {
    LT.answer(|| {
        if out.is_null() {
            return Err(LT.bad_value());
        }
        LT.give(out, DESCRIPTORS.insert(attributes))
    })
}

fn destroy(descriptor: *mut c_void) -> i32 {
    LT.answer(|| match DESCRIPTORS.remove(descriptor) {
        Some(_) => Ok(()),
        None if descriptor.is_null() => Ok(()),
        None => Err(LT.bad_value()),
    })
}

fn set(descriptor: *mut c_void, attribute: i32, value: In<u8>, size: usize) -> i32 {
    LT.answer(|| {
        if value.is_null() || size == 0 || size > LARGEST {
            return Err(LT.bad_value());
        }
        let bytes = value.list(size);
        let found = DESCRIPTORS.with(descriptor, |d| d.insert(attribute, bytes));
        found.map(drop).ok_or(LT.bad_value())
    })
}

/// The protocol of all getters: without room, only the size is given.
fn get(
    descriptor: *mut c_void,
    attribute: i32,
    out: Out<u8>,
    room: usize,
    written: Out<usize>,
) -> i32 {
    LT.answer(|| {
        let value = DESCRIPTORS.with(descriptor, |d| d.get(&attribute).cloned()).flatten();
        copy_out(&value.ok_or(LT.bad_value())?, out, room, written)
    })
}

fn copy_out(value: &[u8], out: Out<u8>, room: usize, written: Out<usize>) -> Status {
    written.give(value.len());
    if room == 0 {
        return Ok(());
    }
    if out.is_null() || room < value.len() {
        return Err(LT.bad_value());
    }
    out.fill(value, room);
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescCreate(out: Out<*mut c_void>, compute: i32, scale: i32) -> i32 {
    create(
        out,
        Attributes::from([
            (c::CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, compute.to_ne_bytes().to_vec()),
            (c::CUBLASLT_MATMUL_DESC_SCALE_TYPE, scale.to_ne_bytes().to_vec()),
        ]),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescDestroy(descriptor: *mut c_void) -> i32 {
    destroy(descriptor)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescSetAttribute(
    descriptor: *mut c_void,
    attribute: i32,
    value: In<u8>,
    size: usize,
) -> i32 {
    set(descriptor, attribute, value, size)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescGetAttribute(
    descriptor: *mut c_void,
    attribute: i32,
    out: Out<u8>,
    room: usize,
    written: Out<usize>,
) -> i32 {
    get(descriptor, attribute, out, room, written)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutCreate(
    out: Out<*mut c_void>,
    data_type: i32,
    rows: u64,
    columns: u64,
    leading: i64,
) -> i32 {
    create(
        out,
        Attributes::from([
            (c::CUBLASLT_MATRIX_LAYOUT_TYPE, data_type.to_ne_bytes().to_vec()),
            (c::CUBLASLT_MATRIX_LAYOUT_ROWS, rows.to_ne_bytes().to_vec()),
            (c::CUBLASLT_MATRIX_LAYOUT_COLS, columns.to_ne_bytes().to_vec()),
            (c::CUBLASLT_MATRIX_LAYOUT_LD, leading.to_ne_bytes().to_vec()),
        ]),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutDestroy(descriptor: *mut c_void) -> i32 {
    destroy(descriptor)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutSetAttribute(
    descriptor: *mut c_void,
    attribute: i32,
    value: In<u8>,
    size: usize,
) -> i32 {
    set(descriptor, attribute, value, size)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutGetAttribute(
    descriptor: *mut c_void,
    attribute: i32,
    out: Out<u8>,
    room: usize,
    written: Out<usize>,
) -> i32 {
    get(descriptor, attribute, out, room, written)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceCreate(out: Out<*mut c_void>) -> i32 {
    create(out, Attributes::new())
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut c_void) -> i32 {
    destroy(preference)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: *mut c_void,
    attribute: i32,
    value: In<u8>,
    size: usize,
) -> i32 {
    set(preference, attribute, value, size)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixTransformDescCreate(out: Out<*mut c_void>, scale: i32) -> i32 {
    let scale = scale.to_ne_bytes().to_vec();
    create(out, Attributes::from([(c::CUBLASLT_MATRIX_TRANSFORM_DESC_SCALE_TYPE, scale)]))
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixTransformDescDestroy(descriptor: *mut c_void) -> i32 {
    destroy(descriptor)
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixTransformDescSetAttribute(
    descriptor: *mut c_void,
    attribute: i32,
    value: In<u8>,
    size: usize,
) -> i32 {
    set(descriptor, attribute, value, size)
}

/// `cublasLtMatmulAlgo_t`, as this library fills it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Algorithm {
    mark: u32,
    number: i32,
    /// Configuration attributes 1 to 14; they are numbers of at most 32 bits.
    configuration: [u32; 14],
}

const MARK: u32 = u32::from_le_bytes(*b"mtLt");
#[cfg(test)]
memtrace_layouts::same_layout!(Algorithm => cudarc::cublaslt::sys::cublasLtMatmulAlgo_t {
    mark: _,
    number: _,
    configuration: _,
});
const _: () = assert!(size_of::<Algorithm>() == 64);

impl Algorithm {
    const fn new(number: i32) -> Self {
        Self { mark: MARK, number, configuration: [0; 14] }
    }

    fn read(place: In<Algorithm>) -> Status<Self> {
        LT.take(place).and_then(|a| if a.mark == MARK { Ok(a) } else { Err(LT.bad_value()) })
    }

    /// A configuration attribute's value and its size.
    fn attribute(&mut self, attribute: i32) -> Status<(&mut u32, usize)> {
        let small =
            [c::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, c::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID];
        let size = if small.contains(&attribute) { 2 } else { 4 };
        let place = usize::try_from(attribute - 1).ok();
        let place = place.and_then(|at| self.configuration.get_mut(at));
        place.map(|value| (value, size)).ok_or(LT.bad_value())
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn cublasLtMatmulAlgoInit(
    _handle: *mut c_void,
    _compute: i32,
    _scale: i32,
    _a: i32,
    _b: i32,
    _c: i32,
    _d: i32,
    number: i32,
    out: Out<Algorithm>,
) -> i32 {
    LT.answer(|| LT.give(out, Algorithm::new(number)))
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn cublasLtMatmulAlgoConfigSetAttribute(
    algorithm: Out<Algorithm>,
    attribute: i32,
    value: In<u8>,
    size: usize,
) -> i32 {
    LT.answer(|| {
        let mut changed = algorithm.get().map_err(|_| LT.bad_value())?;
        let (place, expected) = changed.attribute(attribute)?;
        if size != expected || value.is_null() {
            return Err(LT.bad_value());
        }
        let mut bytes = [0; 4];
        bytes[..size].copy_from_slice(&value.list(size));
        *place = u32::from_ne_bytes(bytes);
        LT.give(algorithm, changed)
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn cublasLtMatmulAlgoConfigGetAttribute(
    algorithm: In<Algorithm>,
    attribute: i32,
    out: Out<u8>,
    room: usize,
    written: Out<usize>,
) -> i32 {
    LT.answer(|| {
        let mut algorithm = Algorithm::read(algorithm)?;
        if attribute == c::CUBLASLT_ALGO_CONFIG_ID {
            return copy_out(&algorithm.number.to_ne_bytes(), out, room, written);
        }
        let (value, size) = algorithm.attribute(attribute)?;
        copy_out(&value.to_ne_bytes()[..size], out, room, written)
    })
}

/// Writes a `cublasLtMatmulHeuristicResult_t`: this algorithm applies and needs no workspace.
fn write_result(out: Out<u8>, algorithm: Algorithm) -> Status {
    out.clear(heuristic::SIZE).map_err(|_| LT.bad_value())?;
    out.at(heuristic::algo.offset).give(algorithm);
    out.at(heuristic::workspaceSize.offset).give(0usize);
    out.at(heuristic::state.offset).give(c::CUBLAS_STATUS_SUCCESS);
    out.at(heuristic::wavesCount.offset).give(1f32);
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    operation: *mut c_void,
    _a: *mut c_void,
    _b: *mut c_void,
    _c: *mut c_void,
    _d: *mut c_void,
    _preference: *mut c_void,
    wanted: i32,
    results: Out<u8>,
    found: Out<i32>,
) -> i32 {
    LT.answer(|| {
        if wanted < 1 || DESCRIPTORS.with(operation, |_| ()).is_none() {
            return Err(LT.bad_value());
        }
        write_result(results, Algorithm::new(0))?;
        LT.give(found, 1)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulAlgoGetIds(
    _handle: *mut c_void,
    _compute: i32,
    _scale: i32,
    _a: i32,
    _b: i32,
    _c: i32,
    _d: i32,
    wanted: i32,
    ids: Out<i32>,
    found: Out<i32>,
) -> i32 {
    LT.answer(|| {
        if wanted > 0 {
            LT.give(ids, 0)?;
        }
        LT.give(found, 1)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulAlgoCheck(
    _handle: *mut c_void,
    _operation: *mut c_void,
    _a: *mut c_void,
    _b: *mut c_void,
    _c: *mut c_void,
    _d: *mut c_void,
    algorithm: In<Algorithm>,
    result: Out<u8>,
) -> i32 {
    LT.answer(|| write_result(result, Algorithm::read(algorithm)?))
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmul(
    _handle: *mut c_void,
    operation: *mut c_void,
    _alpha: *const c_void,
    _a: *const c_void,
    _a_layout: *mut c_void,
    _b: *const c_void,
    _b_layout: *mut c_void,
    _beta: *const c_void,
    _c: *const c_void,
    _c_layout: *mut c_void,
    _d: *mut c_void,
    _d_layout: *mut c_void,
    _algorithm: *const c_void,
    _workspace: *mut c_void,
    _workspace_size: usize,
    stream: *mut c_void,
) -> i32 {
    LT.answer(|| {
        DESCRIPTORS.with(operation, |_| ()).ok_or(LT.bad_value())?;
        LT.launch(stream.addr() as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixTransform(
    _handle: *mut c_void,
    transform: *mut c_void,
    _alpha: *const c_void,
    _a: *const c_void,
    _a_layout: *mut c_void,
    _beta: *const c_void,
    _b: *const c_void,
    _b_layout: *mut c_void,
    _c: *mut c_void,
    _c_layout: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    LT.answer(|| {
        DESCRIPTORS.with(transform, |_| ()).ok_or(LT.bad_value())?;
        LT.launch(stream.addr() as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    version_number() as usize
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetProperty(which: i32, value: Out<i32>) -> i32 {
    property(LT, which, versions::cublas(), value)
}

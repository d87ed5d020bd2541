//! cuSPARSELt: 2:4 structured sparsity.
//!
//! Its handles are records in the caller's memory, opaque to the caller. Ours begin with a mark
//! that distinguishes the kinds. Then comes what later calls need: a matrix keeps its size, and a
//! product keeps its matrices' order. Nothing else is read back.
//!
//! *Sizes*: of a 2:4 matrix half of the elements are stored, and two bits of index for each. The
//! library documents the layout no further, so the compressed size is that, rounded up to 16 bytes.
//! Workspaces and the compression's buffer are taken as 0: not documented, not measured.

use super::{Library, Status, model, versions};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use core::ffi::c_void;

const LT: Library = Library::Sparse;

/// The beginning of each of the caller's records, which are all larger.
#[repr(C)]
#[derive(Clone, Copy)]
struct Record {
    mark: u64,
    /// Of a matrix: rows, columns, bytes of one element.
    numbers: [i64; 3],
}

const HANDLE: u64 = u64::from_le_bytes(*b"mtspL.hd");
const MATRIX: u64 = u64::from_le_bytes(*b"mtspL.mt");
const PRODUCT: u64 = u64::from_le_bytes(*b"mtspL.pr");
const CHOICE: u64 = u64::from_le_bytes(*b"mtspL.ch");
const PLAN: u64 = u64::from_le_bytes(*b"mtspL.pl");

fn read(place: In<Record>, mark: u64) -> Status<Record> {
    LT.take(place).and_then(|r| if r.mark == mark { Ok(r) } else { Err(LT.bad_value()) })
}

fn write(handle: In<Record>, place: Out<Record>, mark: u64, numbers: [i64; 3]) -> Status {
    read(handle, HANDLE).map_err(|_| LT.not_initialized())?;
    LT.give(place, Record { mark, numbers })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtInit(handle: Out<Record>) -> i32 {
    LT.answer(|| LT.give(handle, Record { mark: HANDLE, numbers: [0; 3] }))
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtDestroy(handle: In<Record>) -> i32 {
    LT.answer(|| read(handle, HANDLE).map(drop))
}

fn matrix(handle: In<Record>, place: Out<Record>, rows: i64, columns: i64, value_type: i32) -> i32 {
    LT.answer(|| {
        let element = model::bytes(value_type.into());
        if rows < 1 || columns < 1 || element == 0 {
            return Err(LT.bad_value());
        }
        write(handle, place, MATRIX, [rows, columns, element])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtDenseDescriptorInit(
    handle: In<Record>,
    place: Out<Record>,
    rows: i64,
    columns: i64,
    _leading: i64,
    _alignment: u32,
    value_type: i32,
    _order: i32,
) -> i32 {
    matrix(handle, place, rows, columns, value_type)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtStructuredDescriptorInit(
    handle: In<Record>,
    place: Out<Record>,
    rows: i64,
    columns: i64,
    _leading: i64,
    _alignment: u32,
    value_type: i32,
    _order: i32,
    _sparsity: i32,
) -> i32 {
    matrix(handle, place, rows, columns, value_type)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatDescriptorDestroy(place: In<Record>) -> i32 {
    LT.answer(|| read(place, MATRIX).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulDescriptorInit(
    handle: In<Record>,
    place: Out<Record>,
    _op_a: i32,
    _op_b: i32,
    a: In<Record>,
    b: In<Record>,
    _c: In<Record>,
    _d: In<Record>,
    _compute: i32,
) -> i32 {
    LT.answer(|| {
        read(a, MATRIX)?;
        read(b, MATRIX)?;
        write(handle, place, PRODUCT, [0; 3])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulDescSetAttribute(
    _handle: In<Record>,
    product: In<Record>,
    _attribute: i32,
    _value: *const c_void,
    _size: usize,
) -> i32 {
    LT.answer(|| read(product, PRODUCT).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulAlgSelectionInit(
    handle: In<Record>,
    place: Out<Record>,
    product: In<Record>,
    _algorithm: i32,
) -> i32 {
    LT.answer(|| {
        read(product, PRODUCT)?;
        write(handle, place, CHOICE, [0; 3])
    })
}

/// Algorithm 0 is the only one.
const ALGORITHMS: i32 = 1;

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulAlgSetAttribute(
    _handle: In<Record>,
    choice: Out<Record>,
    attribute: i32,
    value: In<i32>,
    size: usize,
) -> i32 {
    LT.answer(|| {
        let mut record = choice.get().map_err(|_| LT.bad_value())?;
        if record.mark != CHOICE || size != 4 {
            return Err(LT.bad_value());
        }
        let value = LT.take(value)?;
        match attribute {
            c::CUSPARSELT_MATMUL_ALG_CONFIG_ID if !(0..ALGORITHMS).contains(&value) => {
                return Err(LT.bad_value());
            }
            c::CUSPARSELT_MATMUL_SPLIT_K => record.numbers[0] = value.into(),
            c::CUSPARSELT_MATMUL_SPLIT_K_MODE => record.numbers[1] = value.into(),
            c::CUSPARSELT_MATMUL_SPLIT_K_BUFFERS => record.numbers[2] = value.into(),
            _ => {}
        }
        LT.give(choice, record)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulAlgGetAttribute(
    _handle: In<Record>,
    choice: In<Record>,
    attribute: i32,
    out: Out<i32>,
    size: usize,
) -> i32 {
    LT.answer(|| {
        let record = read(choice, CHOICE)?;
        if size != 4 {
            return Err(LT.bad_value());
        }
        let value = match attribute {
            c::CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID => ALGORITHMS.into(),
            c::CUSPARSELT_MATMUL_SPLIT_K => record.numbers[0].max(1),
            c::CUSPARSELT_MATMUL_SPLIT_K_MODE => record.numbers[1],
            c::CUSPARSELT_MATMUL_SPLIT_K_BUFFERS => record.numbers[2],
            _ => 0,
        };
        LT.give(out, value as i32)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulPlanInit(
    handle: In<Record>,
    place: Out<Record>,
    product: In<Record>,
    choice: In<Record>,
) -> i32 {
    LT.answer(|| {
        read(product, PRODUCT)?;
        read(choice, CHOICE)?;
        write(handle, place, PLAN, [0; 3])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulPlanDestroy(plan: In<Record>) -> i32 {
    LT.answer(|| read(plan, PLAN).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulGetWorkspace(
    _handle: In<Record>,
    plan: In<Record>,
    size: Out<usize>,
) -> i32 {
    LT.answer(|| {
        read(plan, PLAN)?;
        LT.give(size, 0)
    })
}

fn multiply(plan: In<Record>, streams: In<u64>, count: i32) -> i32 {
    LT.answer(|| {
        read(plan, PLAN)?;
        // Without streams the product goes to the default stream.
        let first = if count > 0 { streams.list(1) } else { Vec::new() };
        LT.launch(first.first().copied().unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmul(
    _handle: In<Record>,
    plan: In<Record>,
    _alpha: *const c_void,
    _a: *const c_void,
    _b: *const c_void,
    _beta: *const c_void,
    _c: *const c_void,
    _d: *mut c_void,
    _workspace: *mut c_void,
    streams: In<u64>,
    count: i32,
) -> i32 {
    multiply(plan, streams, count)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtMatmulSearch(
    _handle: In<Record>,
    plan: In<Record>,
    _alpha: *const c_void,
    _a: *const c_void,
    _b: *const c_void,
    _beta: *const c_void,
    _c: *const c_void,
    _d: *mut c_void,
    _workspace: *mut c_void,
    streams: In<u64>,
    count: i32,
) -> i32 {
    multiply(plan, streams, count)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtSpMMACompressedSize2(
    _handle: In<Record>,
    sparse: In<Record>,
    size: Out<usize>,
    buffer: Out<usize>,
) -> i32 {
    LT.answer(|| {
        let [rows, columns, element] = read(sparse, MATRIX)?.numbers;
        LT.give(size, compressed_bytes(rows, columns, element) as usize)?;
        LT.give(buffer, 0)
    })
}

/// Half of the elements, and two bits for each.
fn compressed_bytes(rows: i64, columns: i64, element: i64) -> i64 {
    let stored = rows * columns / 2;
    (stored * element + stored / 4 + 15) / 16 * 16
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtSpMMACompress2(
    _handle: In<Record>,
    sparse: In<Record>,
    _is_a: i32,
    _op: i32,
    _dense: *const c_void,
    _compressed: *mut c_void,
    _buffer: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    LT.answer(|| {
        read(sparse, MATRIX)?;
        LT.launch(stream.addr() as u64)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseLtGetVersion(_handle: In<Record>, version: Out<i32>) -> i32 {
    let [major, minor, patch] = versions::package("cusparselt").unwrap_or([0, 8, 0]);
    LT.answer(|| LT.give(version, (major * 1000 + minor * 100 + patch) as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_precision_matrix_shrinks_to_nine_sixteenths() {
        assert_eq!(compressed_bytes(64, 64, 2), 64 * 64 * 2 * 9 / 16);
    }
}

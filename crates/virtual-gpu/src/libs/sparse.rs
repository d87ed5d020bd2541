//! cuSPARSE: matrices that know their size. The rest is in `api/behaviour.tsv`.
//!
//! A sparse matrix descriptor keeps rows, columns and the number of stored elements, because
//! programs allocate by them. For a product of sparse matrices that number depends on the data: it
//! stays what was given at creation (0), and so such a result is empty.

use super::blas::property;
use super::{Library, versions};
use crate::constants::status_name;
use crate::gpu::boundary::Out;
use crate::gpu::handle::Registry;
use core::ffi::{c_char, c_void};

const SPARSE: Library = Library::Sparse;

#[derive(Clone, Copy)]
struct Matrix {
    rows: i64,
    columns: i64,
    stored: i64,
}

static MATRICES: Registry<Matrix> = Registry::new(35);

fn create(out: Out<*mut c_void>, rows: i64, columns: i64, stored: i64) -> i32 {
    SPARSE.answer(|| {
        if out.is_null() || rows < 0 || columns < 0 || stored < 0 {
            return Err(SPARSE.bad_value());
        }
        SPARSE.give(out, MATRICES.insert(Matrix { rows, columns, stored }))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseCreateCsr(
    out: Out<*mut c_void>,
    rows: i64,
    columns: i64,
    stored: i64,
    _offsets: *mut c_void,
    _indices: *mut c_void,
    _values: *mut c_void,
    _offset_type: i32,
    _index_type: i32,
    _base: i32,
    _value_type: i32,
) -> i32 {
    create(out, rows, columns, stored)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseCreateCsc(
    out: Out<*mut c_void>,
    rows: i64,
    columns: i64,
    stored: i64,
    _offsets: *mut c_void,
    _indices: *mut c_void,
    _values: *mut c_void,
    _offset_type: i32,
    _index_type: i32,
    _base: i32,
    _value_type: i32,
) -> i32 {
    create(out, rows, columns, stored)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseCreateCoo(
    out: Out<*mut c_void>,
    rows: i64,
    columns: i64,
    stored: i64,
    _rows_of: *mut c_void,
    _columns_of: *mut c_void,
    _values: *mut c_void,
    _index_type: i32,
    _base: i32,
    _value_type: i32,
) -> i32 {
    create(out, rows, columns, stored)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseDestroySpMat(matrix: *mut c_void) -> i32 {
    SPARSE.answer(|| MATRICES.remove(matrix).map(drop).ok_or(SPARSE.bad_value()))
}

#[unsafe(no_mangle)]
extern "C" fn cusparseSpMatGetSize(
    matrix: *mut c_void,
    rows: Out<i64>,
    columns: Out<i64>,
    stored: Out<i64>,
) -> i32 {
    SPARSE.answer(|| {
        let found = MATRICES.with(matrix, |m| *m).ok_or(SPARSE.bad_value())?;
        SPARSE.give(rows, found.rows)?;
        SPARSE.give(columns, found.columns)?;
        SPARSE.give(stored, found.stored)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cusparseGetErrorName(status: i32) -> *const c_char {
    status_name("CUSPARSE_STATUS_", status)
}

#[unsafe(no_mangle)]
extern "C" fn cusparseGetErrorString(status: i32) -> *const c_char {
    status_name("CUSPARSE_STATUS_", status)
}

fn version() -> versions::Version {
    versions::package("cusparse").unwrap_or([12, 5, 0])
}

#[unsafe(no_mangle)]
extern "C" fn cusparseGetVersion(_handle: *mut c_void, out: Out<i32>) -> i32 {
    let [major, minor, patch] = version();
    SPARSE.answer(|| SPARSE.give(out, (major * 1000 + minor * 100 + patch) as i32))
}

#[unsafe(no_mangle)]
extern "C" fn cusparseGetProperty(which: i32, value: Out<i32>) -> i32 {
    property(SPARSE, which, version(), value)
}

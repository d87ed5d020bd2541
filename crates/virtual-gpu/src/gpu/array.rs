//! Arrays: memory for textures, in rows that only the device knows the layout of.
//!
//! Here it is rows at a pitch in ordinary device memory, so copies to and from arrays are copies of
//! rows. Mipmapped arrays and texture references are not supported.

use super::error::{Error, Result};
use super::handle::Table;
use super::work::{Rows, Shape};
use super::{kinds, memory};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Rows begin at multiples of this.
const PITCH: u64 = 512;

/// An array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    addr: u64,
    /// Bytes of an element.
    pub element: u64,
    /// Width, height and depth in elements; 0 for a dimension that it does not have.
    pub extent: [u64; 3],
    /// How the caller described an element, for it to read back.
    pub format: [i32; 5],
    /// Creation flags.
    pub flags: u32,
}

static ARRAYS: Mutex<Table<Array>> = Mutex::new(Table::new(kinds::ARRAY));

fn arrays() -> MutexGuard<'static, Table<Array>> {
    ARRAYS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Array {
    fn pitch(&self) -> Result<u64> {
        let width = self.extent[0].checked_mul(self.element);
        width.and_then(|width| width.checked_next_multiple_of(PITCH)).ok_or(Error::OUT_OF_MEMORY)
    }

    fn rows(&self) -> u64 {
        self.extent[1].max(1)
    }

    /// Where a row of bytes at this offset lies: bytes, rows, slices.
    pub fn place(&self, offset: [u64; 3]) -> Result<Rows> {
        let pitch = self.pitch()?;
        let slice = pitch * self.rows();
        let addr = self.addr + offset[0] + offset[1] * pitch + offset[2] * slice;
        Ok(Rows { addr, pitch, slice })
    }

    /// A block of this shape at this offset lies inside.
    pub fn check(&self, offset: [u64; 3], shape: Shape) -> Result {
        let room = [self.extent[0] * self.element, self.rows(), self.extent[2].max(1)];
        let wanted = [shape.width, shape.height, shape.depth];
        let fits = |i: usize| offset[i].checked_add(wanted[i]).is_some_and(|end| end <= room[i]);
        if (0..3).all(fits) { Ok(()) } else { Err(Error::INVALID_VALUE) }
    }
}

/// A new array on a device.
pub fn create(
    device: usize,
    element: u64,
    extent: [u64; 3],
    format: [i32; 5],
    flags: u32,
) -> Result<u64> {
    if element == 0 || extent[0] == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let mut array = Array { addr: 0, element, extent, format, flags };
    let size = array.pitch()?.checked_mul(array.rows());
    let size = size.and_then(|size| size.checked_mul(extent[2].max(1)));
    array.addr = memory::ledger().allocate(device, size.ok_or(Error::OUT_OF_MEMORY)?)?;
    Ok(arrays().insert(array))
}

/// The array behind a handle.
pub fn find(array: u64) -> Result<Array> {
    arrays().get(array).copied().ok_or(Error::INVALID_HANDLE)
}

/// Gives an array back.
pub fn destroy(array: u64) -> Result {
    let gone = arrays().remove(array).ok_or(Error::INVALID_HANDLE)?;
    memory::ledger().free(gone.addr)
}

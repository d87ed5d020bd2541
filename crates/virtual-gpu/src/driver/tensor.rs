//! Tensor maps: descriptions of tensors for the copy engine of compute capability 9.0.
//!
//! The record is opaque and read by kernels only, so it stays empty. What the driver checks is
//! checked, because programs learn from a refusal which layouts are possible.

use super::Code;
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::{self, Error, Result};
use crate::layout::all::CUtensorMap_st as layout;

fn encode(map: Out<u8>, rank: u32, addr: u64, dims: In<u64>, strides: In<u64>) -> Result {
    if !gpu::device(gpu::current_device())?.profile.limits().clusters {
        return Err(Error::NOT_SUPPORTED);
    }
    let rank = rank as usize;
    let sizes_fit = dims.list(rank).iter().all(|dim| (1..=1 << 32).contains(dim));
    let rows_fit = |stride: &u64| stride.is_multiple_of(16) && *stride < 1 << 40;
    let strides_fit = strides.list(rank.saturating_sub(1)).iter().all(rows_fit);
    let aligned = map.addr().is_multiple_of(64) && addr.is_multiple_of(16);
    if !(1..=5).contains(&rank) || !sizes_fit || !strides_fit || !aligned {
        return Err(Error::INVALID_VALUE);
    }
    map.clear(layout::SIZE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuTensorMapEncodeTiled(
    map: Out<u8>,
    _type: i32,
    rank: u32,
    addr: u64,
    dims: In<u64>,
    strides: In<u64>,
) -> Code {
    driver(|| encode(map, rank, addr, dims, strides))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuTensorMapEncodeIm2col(
    map: Out<u8>,
    _type: i32,
    rank: u32,
    addr: u64,
    dims: In<u64>,
    strides: In<u64>,
) -> Code {
    driver(|| encode(map, rank, addr, dims, strides))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuTensorMapEncodeIm2colWide(
    map: Out<u8>,
    _type: i32,
    rank: u32,
    addr: u64,
    dims: In<u64>,
    strides: In<u64>,
) -> Code {
    driver(|| encode(map, rank, addr, dims, strides))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuTensorMapReplaceAddress(map: Out<u8>, addr: u64) -> Code {
    driver(|| {
        map.check()?;
        if addr.is_multiple_of(16) { Ok(()) } else { Err(Error::INVALID_VALUE) }
    })
}

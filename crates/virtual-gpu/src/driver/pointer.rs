//! What an address is.

use super::Code;
use crate::constants as c;
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::memory::{Allocation, Origin, ledger};
use crate::gpu::{Error, Result, address, context};

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// What is known of an address: the allocation, with the memory that is mapped there if it is a
/// reservation.
fn find(addr: u64) -> Result<Allocation> {
    let ledger = ledger();
    let mut found = *ledger.find(addr).ok_or(Error::INVALID_VALUE)?;
    if found.origin == Origin::Reserved {
        found.device = ledger.device_mapped_at(addr).ok_or(Error::INVALID_VALUE)?;
    }
    Ok(found)
}

fn get(out: Out<u8>, number: i32, addr: u64) -> Result {
    let found = find(addr)?;
    let host = !address::is_device(addr);
    let flag = |yes: bool| out.cast::<i32>().set(yes.into());
    match number {
        c::CU_POINTER_ATTRIBUTE_CONTEXT => out.cast().set(context::primary(found.device)?),
        c::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            let pinned = matches!(found.origin, Origin::Host(_) | Origin::Registered(_));
            out.cast().set(if pinned { HOST } else { DEVICE })
        }
        c::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => out.cast().set(addr),
        c::CU_POINTER_ATTRIBUTE_HOST_POINTER if host => out.cast().set(addr),
        c::CU_POINTER_ATTRIBUTE_BUFFER_ID | c::CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
            out.cast().set(found.id)
        }
        c::CU_POINTER_ATTRIBUTE_IS_MANAGED => flag(found.origin == Origin::Managed),
        c::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => out.cast().set(found.device as i32),
        c::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => flag(found.origin == Origin::Heap),
        c::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | c::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            out.cast().set(found.start)
        }
        c::CU_POINTER_ATTRIBUTE_RANGE_SIZE | c::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
            out.cast().set(found.size)
        }
        c::CU_POINTER_ATTRIBUTE_MAPPED => flag(true),
        c::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => {
            let mapped = ledger().mapped_at(addr).map_or(0, |found| found.1.exports);
            out.cast().set(u64::from(mapped))
        }
        c::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => out.cast().set(3i32),
        c::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
            let Origin::Pool(pool) = found.origin else { return out.cast().set(0u64) };
            out.cast().set(pool)
        }
        c::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | c::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | c::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => flag(false),
        _ => Err(Error::INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(out: Out<u8>, number: i32, addr: u64) -> Code {
    driver(|| get(out, number, addr))
}

/// For an address that CUDA does not know, and for an attribute that it does not have,
/// the answer is 0 and the call succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttributes(
    count: u32,
    numbers: In<i32>,
    outs: In<Out<u8>>,
    addr: u64,
) -> Code {
    driver(|| {
        let numbers = numbers.list(count as usize);
        for (number, out) in numbers.into_iter().zip(outs.list(count as usize)) {
            if get(out, number, addr).is_err() {
                let wide = ![
                    c::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                    c::CU_POINTER_ATTRIBUTE_IS_MANAGED,
                    c::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                    c::CU_POINTER_ATTRIBUTE_MAPPED,
                    c::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                    c::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                    c::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                    c::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
                    c::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE,
                ]
                .contains(&number);
                out.clear(if wide { 8 } else { 4 })?;
            }
        }
        Ok(())
    })
}

/// Only one attribute can be set, and all copies are over when they return anyway.
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerSetAttribute(_value: u64, number: i32, addr: u64) -> Code {
    driver(|| {
        find(addr)?;
        if number == c::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
            Ok(())
        } else {
            Err(Error::INVALID_VALUE)
        }
    })
}

//! Limits of a device (`cudaLimit`): numbers that a program may set and read back.
//!
//! Nothing runs that could reach them. The stack and heap that a device keeps for kernels are part
//! of the context's own memory, and a change of them is not counted.

use super::error::{Error, Result};
use crate::constants as c;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Limit(i32);

impl Limit {
    /// From the number in the headers.
    pub fn from_code(code: i32) -> Result<Self> {
        match code {
            c::CU_LIMIT_STACK_SIZE..=c::CU_LIMIT_PERSISTING_L2_CACHE_SIZE => Ok(Self(code)),
            c::CU_LIMIT_SHMEM_SIZE..c::CU_LIMIT_MAX => Err(Error::UNSUPPORTED_LIMIT),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// What the CUDA manual gives as the default.
    fn default(self) -> u64 {
        match self.0 {
            c::CU_LIMIT_STACK_SIZE => 1024,
            c::CU_LIMIT_PRINTF_FIFO_SIZE => 1 << 20,
            c::CU_LIMIT_MALLOC_HEAP_SIZE => 8 << 20,
            c::CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH => 2,
            c::CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => 2048,
            c::CU_LIMIT_MAX_L2_FETCH_GRANULARITY => 64,
            _ => 0,
        }
    }
}

static SET: Mutex<BTreeMap<(usize, Limit), u64>> = Mutex::new(BTreeMap::new());

/// The limit of a device.
pub fn get(device: usize, limit: Limit) -> u64 {
    let set = SET.lock().unwrap_or_else(PoisonError::into_inner);
    set.get(&(device, limit)).copied().unwrap_or_else(|| limit.default())
}

/// Sets it.
pub fn set(device: usize, limit: Limit, value: u64) -> Result {
    super::device(device)?;
    SET.lock().unwrap_or_else(PoisonError::into_inner).insert((device, limit), value);
    Ok(())
}

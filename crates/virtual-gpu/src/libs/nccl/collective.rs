//! What collectives do to the small contents that are known.
//!
//! The rule is one: every rank holds what this rank holds. So a gather repeats this rank's part, a
//! sum is the value times the number of ranks, and a maximum is the value itself. A part that comes
//! from a peer is the part that this rank would have sent to itself. Where this rank holds nothing
//! that is known, the result is forgotten and reads as zeros.

use super::group::{self, Operation};
use super::{Comm, NCCL, Status, comm, memory};
use crate::constants as c;
use crate::gpu::contents;
use core::ffi::c_void;

/// Bytes of one element.
fn element_bytes(data_type: i32) -> Status<u64> {
    match data_type {
        c::ncclInt8 | c::ncclUint8 | c::ncclFloat8e4m3 | c::ncclFloat8e5m2 => Ok(1),
        c::ncclFloat16 | c::ncclBfloat16 => Ok(2),
        c::ncclInt32 | c::ncclUint32 | c::ncclFloat32 => Ok(4),
        c::ncclInt64 | c::ncclUint64 | c::ncclFloat64 => Ok(8),
        _ => Err(NCCL.bad_value()),
    }
}

/// Checks a call's arguments, and puts it on its stream.
fn start(handle: *mut c_void, count: usize, data_type: i32, stream: u64) -> Status<(Comm, u64)> {
    let comm = comm(handle)?;
    let bytes = (count as u64).checked_mul(element_bytes(data_type)?).ok_or(NCCL.bad_value())?;
    memory::connect(handle, comm)?;
    NCCL.launch(stream)?;
    Ok((comm, bytes))
}

/// Changes each element, knowing the number of ranks.
macro_rules! each {
    ($bytes:ident as $type:ty, $ranks:ident, $change:expr) => {
        for chunk in $bytes.chunks_exact_mut(size_of::<$type>()) {
            let change: fn($type, i32) -> $type = $change;
            let value = <$type>::from_ne_bytes(chunk.try_into().expect("a chunk's size"));
            chunk.copy_from_slice(&change(value, $ranks).to_ne_bytes());
        }
    };
}

/// The reduction of equal contributions of all ranks; `None` if it can't be known.
fn reduced(mut bytes: Vec<u8>, data_type: i32, operator: i32, ranks: i32) -> Option<Vec<u8>> {
    if matches!(operator, c::ncclMax | c::ncclMin | c::ncclAvg) || ranks == 1 {
        return (operator < c::ncclNumOps).then_some(bytes);
    }
    match (operator, data_type) {
        (c::ncclSum, c::ncclInt8 | c::ncclUint8) => {
            each!(bytes as u8, ranks, |v, n| v.wrapping_mul(n as u8));
        }
        (c::ncclSum, c::ncclInt32 | c::ncclUint32) => {
            each!(bytes as i32, ranks, |v, n| v.wrapping_mul(n));
        }
        (c::ncclSum, c::ncclInt64 | c::ncclUint64) => {
            each!(bytes as i64, ranks, |v, n| v.wrapping_mul(n.into()));
        }
        (c::ncclSum, c::ncclFloat32) => each!(bytes as f32, ranks, |v, n| v * n as f32),
        (c::ncclSum, c::ncclFloat64) => each!(bytes as f64, ranks, |v, n| v * f64::from(n)),
        (c::ncclProd, c::ncclInt8 | c::ncclUint8) => {
            each!(bytes as u8, ranks, |v, n| v.wrapping_pow(n as u32));
        }
        (c::ncclProd, c::ncclInt32 | c::ncclUint32) => {
            each!(bytes as i32, ranks, |v, n| v.wrapping_pow(n as u32));
        }
        (c::ncclProd, c::ncclInt64 | c::ncclUint64) => {
            each!(bytes as i64, ranks, |v, n| v.wrapping_pow(n as u32));
        }
        (c::ncclProd, c::ncclFloat32) => each!(bytes as f32, ranks, |v, n| v.powi(n)),
        (c::ncclProd, c::ncclFloat64) => each!(bytes as f64, ranks, |v, n| v.powi(n)),
        _ => return None,
    }
    Some(bytes)
}

fn reduce_into(to: u64, from: u64, bytes: u64, data_type: i32, operator: i32, ranks: i32) {
    let known = contents::read(from, bytes as usize);
    match known.and_then(|known| reduced(known, data_type, operator, ranks)) {
        Some(result) => contents::write(to, &result),
        None => contents::forget(to, bytes),
    }
}

/// The same bytes for every rank's place, one after the other.
fn repeat(to: u64, from: u64, bytes: u64, ranks: i32) {
    if bytes > contents::LIMIT as u64 {
        contents::forget(to, bytes.saturating_mul(ranks as u64));
        return;
    }
    // In place, this rank's part is where it must be already.
    for rank in 0..ranks as u64 {
        contents::copy(to + rank * bytes, from, bytes);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        repeat(to, from, bytes, comm.ranks);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    operator: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        reduce_into(to, from, bytes, data_type, operator, comm.ranks);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    operator: i32,
    root: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        if comm.rank == root {
            reduce_into(to, from, bytes, data_type, operator, comm.ranks);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    operator: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        let own = from + comm.rank as u64 * bytes;
        reduce_into(to, own, bytes, data_type, operator, comm.ranks);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    root: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        let own = comm.rank == root;
        group::perform(Operation::Broadcast { from: own.then_some(from), to, bytes });
        Ok(())
    })
}

/// In place: the root's buffer is this rank's, which holds the same.
#[unsafe(no_mangle)]
pub extern "C" fn ncclBcast(
    _buffer: u64,
    count: usize,
    data_type: i32,
    _root: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| start(handle, count, data_type, stream).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGather(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    root: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        if comm.rank == root {
            repeat(to, from, bytes, comm.ranks);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclScatter(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    root: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        if comm.rank == root {
            contents::copy(to, from + comm.rank as u64 * bytes, bytes);
        } else {
            contents::forget(to, bytes);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAlltoAll(
    from: u64,
    to: u64,
    count: usize,
    data_type: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        for peer in 0..comm.ranks {
            memory::connect_peer(handle, comm, peer, false)?;
            memory::connect_peer(handle, comm, peer, true)?;
        }
        repeat(to, from + comm.rank as u64 * bytes, bytes, comm.ranks);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    from: u64,
    count: usize,
    data_type: i32,
    peer: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        memory::connect_peer(handle, comm, peer, false)?;
        group::perform(Operation::Send { from, bytes, to_self: peer == comm.rank });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    data_type: i32,
    peer: i32,
    handle: *mut c_void,
    stream: u64,
) -> i32 {
    NCCL.answer(|| {
        let (comm, bytes) = start(handle, count, data_type, stream)?;
        memory::connect_peer(handle, comm, peer, true)?;
        group::perform(Operation::Receive { to, bytes });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<const N: usize>(bytes: [u8; N], data_type: i32, operator: i32) -> Option<Vec<u8>> {
        reduced(bytes.to_vec(), data_type, operator, 4)
    }

    #[test]
    fn equal_contributions() {
        let int = |v: i32| v.to_ne_bytes();
        assert_eq!(reduce(int(3), c::ncclInt32, c::ncclSum), Some(int(12).to_vec()));
        assert_eq!(reduce(int(3), c::ncclInt32, c::ncclProd), Some(int(81).to_vec()));
        for same in [c::ncclMax, c::ncclMin, c::ncclAvg] {
            assert_eq!(reduce(int(3), c::ncclInt32, same), Some(int(3).to_vec()));
        }
        let float = |v: f32| v.to_ne_bytes();
        assert_eq!(reduce(float(0.5), c::ncclFloat32, c::ncclSum), Some(float(2.0).to_vec()));
        assert_eq!(reduce([0; 2], c::ncclFloat16, c::ncclSum), None);
        assert_eq!(reduce(int(3), c::ncclInt32, c::ncclNumOps), None, "a user's operator");
    }

    #[test]
    fn elements() {
        assert_eq!(element_bytes(c::ncclBfloat16), Ok(2));
        assert_eq!(element_bytes(c::ncclNumTypes), Err(NCCL.bad_value()));
    }
}

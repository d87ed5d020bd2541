//! How full a device is, and who is on it.

use super::{Code, Status, answer, device, invalid};
use crate::constants as c;
use crate::gpu::boundary::Out;
use crate::layout::all::nvmlMemory_v2_st as version2;

/// Total, free, used.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(of: u64, out: Out<[u64; 3]>) -> Code {
    answer(|| {
        let gpu = device(of)?;
        let used = gpu.in_use();
        invalid(out.set([gpu.total(), gpu.total() - used, used]))
    })
}

/// The same, with what the system reserves apart: nothing, as the profile's size is what is left.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(of: u64, record: Out<u8>) -> Code {
    answer(|| {
        let gpu = device(of)?;
        let used = gpu.in_use();
        invalid(record.at(version2::total.offset).set(gpu.total()))?;
        invalid(record.at(version2::reserved.offset).set(0u64))?;
        invalid(record.at(version2::free.offset).set(gpu.total() - used))?;
        invalid(record.at(version2::used.offset).set(used))
    })
}

/// The window through which the host reaches device memory: all of it.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetBAR1MemoryInfo(of: u64, out: Out<[u64; 3]>) -> Code {
    answer(|| {
        let size = device(of)?.total().next_power_of_two();
        invalid(out.set([size, size, 0]))
    })
}

/// Fills in the list the way NVML does: too little room is an error that says how much is needed.
fn processes<T: Copy>(of: u64, count: Out<u32>, out: Out<T>, entry: fn(u32, u64) -> T) -> Status {
    let list: Vec<T> = device(of)?.holders().iter().map(|&(pid, used)| entry(pid, used)).collect();
    let room = invalid(count.get())? as usize;
    invalid(count.set(list.len() as u32))?;
    if list.len() > room {
        return Err(c::NVML_ERROR_INSUFFICIENT_SIZE);
    }
    if !list.is_empty() {
        invalid(out.check())?;
        out.fill(&list, room);
    }
    Ok(())
}

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Process {
    pid: u32,
    used: u64,
    instances: [u32; 2],
}

fn entry(pid: u32, used: u64) -> Process {
    /// No part of a GPU that was split up.
    const WHOLE: u32 = u32::MAX;
    Process { pid, used, instances: [WHOLE; 2] }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    of: u64,
    count: Out<u32>,
    out: Out<Process>,
) -> Code {
    answer(|| processes(of, count, out, entry))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    of: u64,
    count: Out<u32>,
    out: Out<Process>,
) -> Code {
    answer(|| processes(of, count, out, entry))
}

/// The first version has no instances.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses(
    of: u64,
    count: Out<u32>,
    out: Out<[u64; 2]>,
) -> Code {
    answer(|| processes(of, count, out, |pid, used| [pid.into(), used]))
}

/// Nobody draws.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    of: u64,
    count: Out<u32>,
    _out: u64,
) -> Code {
    answer(|| {
        device(of)?;
        invalid(count.set(0))
    })
}

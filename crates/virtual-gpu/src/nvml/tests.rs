//! NVML as monitoring programs call it. One test, as opening and closing is the process's.

use super::*;
use crate::gpu::boundary::{Out, Text};
use crate::layout::all::{nvmlGpuFabricInfo_v3_t as fabric, nvmlPciInfo_st as pci};
use core::ffi::{CStr, c_char};

#[test]
fn open_look_around_and_close() {
    let mut count = 0;
    assert_eq!(device::nvmlDeviceGetCount_v2(Out::to(&mut count)), c::NVML_ERROR_UNINITIALIZED);
    assert_eq!(system::nvmlShutdown(), c::NVML_ERROR_UNINITIALIZED);
    assert_eq!(system::nvmlInit_v2(), c::NVML_SUCCESS);
    assert_eq!(device::nvmlDeviceGetCount_v2(Out::to(&mut count)), c::NVML_SUCCESS);
    assert_eq!(count as usize, machine().gpus.len());

    let (mut gpu, mut same) = (0, 0);
    assert_eq!(device::nvmlDeviceGetHandleByIndex_v2(0, Out::to(&mut gpu)), c::NVML_SUCCESS);
    let beyond = device::nvmlDeviceGetHandleByIndex_v2(99, Out::to(&mut same));
    assert_eq!(beyond, c::NVML_ERROR_INVALID_ARGUMENT);
    for text in [c"0000:10:00.0", c"00000000:10:00.0"] {
        let found = device::nvmlDeviceGetHandleByPciBusId_v2(Text::of(text), Out::to(&mut same));
        assert_eq!((found, same), (c::NVML_SUCCESS, gpu));
    }
    let wrong = device::nvmlDeviceGetHandleByUUID(Text::of(c"GPU-1"), Out::to(&mut same));
    assert_eq!(wrong, c::NVML_ERROR_NOT_FOUND);

    let mut name = [0 as c_char; 64];
    assert_eq!(device::nvmlDeviceGetName(gpu, Out::to(&mut name[0]), 64), c::NVML_SUCCESS);
    // SAFETY: it was just written with its end.
    let text = unsafe { CStr::from_ptr(name.as_ptr()) };
    assert_eq!(text.to_str().unwrap(), machine().gpus[0].profile.name);
    let short = device::nvmlDeviceGetName(gpu, Out::to(&mut name[0]), 3);
    assert_eq!(short, c::NVML_ERROR_INSUFFICIENT_SIZE);

    let addr = crate::gpu::memory::alloc(0, 8 << 20).unwrap();
    let mut memory = [0; 3];
    assert_eq!(memory::nvmlDeviceGetMemoryInfo(gpu, Out::to(&mut memory)), c::NVML_SUCCESS);
    assert_eq!(memory[0], memory[1] + memory[2]);
    assert!(memory[2] >= 8 << 20, "used");
    crate::gpu::memory::free(addr).unwrap();

    let mut record = [0xffu8; pci::SIZE];
    assert_eq!(device::nvmlDeviceGetPciInfo_v3(gpu, Out::to(&mut record).cast()), c::NVML_SUCCESS);
    assert!(record[pci::busId.offset..].starts_with(b"00000000:10:00.0\0"));

    let mut record = [0xffu8; fabric::SIZE];
    let version = 0x0200_0000 + 36u32;
    record[..4].copy_from_slice(&version.to_le_bytes());
    let place = Out::to(&mut record).cast();
    assert_eq!(device::nvmlDeviceGetGpuFabricInfoV(gpu, place), c::NVML_SUCCESS);
    assert_eq!((record[fabric::state.offset], record[36]), (0, 0xff), "not beyond version 2");

    let mut room = 0;
    let list = memory::nvmlDeviceGetComputeRunningProcesses_v3;
    assert_eq!(list(gpu, Out::to(&mut room), Out::null()), c::NVML_ERROR_INSUFFICIENT_SIZE);
    assert_eq!(room, 1, "this process");

    assert_eq!(absent::nvmlDeviceGetTemperature(gpu), c::NVML_ERROR_NOT_SUPPORTED);
    assert_eq!(absent::nvmlDeviceGetTemperature(5), c::NVML_ERROR_INVALID_ARGUMENT);
    assert_eq!(system::nvmlShutdown(), c::NVML_SUCCESS);
}

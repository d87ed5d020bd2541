//! Devices: finding them, and what they are.

use super::{Code, Status, answer, device, handle, invalid};
use crate::constants as c;
use crate::gpu::attributes::pci_device_id;
use crate::gpu::boundary::{Out, Text};
use crate::gpu::config::{Gpu, machine};
use crate::layout::all::{nvmlGpuFabricInfo_v3_t as fabric, nvmlPciInfo_st as pci};
use core::ffi::c_char;

/// How many bytes `nvmlGpuFabricInfoV` has: its version field carries the size in the low bytes.
const SIZE_IN_VERSION: u32 = 0x00ff_ffff;

fn count(out: Out<u32>) -> Code {
    answer(|| invalid(out.set(machine().gpus.len() as u32)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(out: Out<u32>) -> Code {
    count(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount(out: Out<u32>) -> Code {
    count(out)
}

fn by_index(index: u32, out: Out<u64>) -> Code {
    answer(|| {
        let found = machine().gpus.get(index as usize).ok_or(c::NVML_ERROR_INVALID_ARGUMENT)?;
        invalid(out.set(handle(found)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, out: Out<u64>) -> Code {
    by_index(index, out)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex(index: u32, out: Out<u64>) -> Code {
    by_index(index, out)
}

fn find(out: Out<u64>, fits: impl Fn(&Gpu) -> bool) -> Status {
    let found = machine().gpus.iter().find(|gpu| fits(gpu)).ok_or(c::NVML_ERROR_NOT_FOUND)?;
    invalid(out.set(handle(found)))
}

fn by_pci(text: Text, out: Out<u64>) -> Code {
    answer(|| {
        let text = invalid(text.string())?;
        let mut parts = text.split(':').rev().skip(1);
        let bus = parts.next().and_then(|part| u32::from_str_radix(part, 16).ok());
        let bus = bus.ok_or(c::NVML_ERROR_INVALID_ARGUMENT)?;
        find(out, |gpu| gpu.pci_bus() == bus)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(text: Text, out: Out<u64>) -> Code {
    by_pci(text, out)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByPciBusId(text: Text, out: Out<u64>) -> Code {
    by_pci(text, out)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByUUID(text: Text, out: Out<u64>) -> Code {
    answer(|| {
        let text = invalid(text.string())?;
        find(out, |gpu| gpu.uuid_text() == text)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetIndex(of: u64, out: Out<u32>) -> Code {
    answer(|| invalid(out.set(device(of)?.index as u32)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMinorNumber(of: u64, out: Out<u32>) -> Code {
    answer(|| invalid(out.set(device(of)?.index as u32)))
}

fn text(out: Out<c_char>, room: u32, text: &str) -> Status {
    if (room as usize) <= text.len() {
        return Err(c::NVML_ERROR_INSUFFICIENT_SIZE);
    }
    invalid(out.text(text, room as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(of: u64, out: Out<c_char>, room: u32) -> Code {
    answer(|| text(out, room, &device(of)?.profile.name))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(of: u64, out: Out<c_char>, room: u32) -> Code {
    answer(|| text(out, room, &device(of)?.uuid_text()))
}

fn pci_info(of: u64, record: Out<u8>) -> Code {
    answer(|| {
        let gpu = device(of)?;
        invalid(record.clear(pci::SIZE))?;
        let legacy = gpu.pci_bus_id();
        invalid(record.at(pci::busIdLegacy.offset).text(&legacy, pci::busIdLegacy.size))?;
        invalid(record.at(pci::busId.offset).text(&format!("0000{legacy}"), pci::busId.size))?;
        invalid(record.at(pci::bus.offset).set(gpu.pci_bus()))?;
        invalid(record.at(pci::pciDeviceId.offset).set(pci_device_id(gpu)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(of: u64, record: Out<u8>) -> Code {
    pci_info(of, record)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v2(of: u64, record: Out<u8>) -> Code {
    pci_info(of, record)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo(of: u64, record: Out<u8>) -> Code {
    pci_info(of, record)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCudaComputeCapability(
    of: u64,
    major: Out<i32>,
    minor: Out<i32>,
) -> Code {
    answer(|| {
        let profile = &device(of)?.profile;
        invalid(major.set(profile.major() as i32))?;
        invalid(minor.set(profile.minor() as i32))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetArchitecture(of: u64, out: Out<u32>) -> Code {
    /// In the order of `nvmlDeviceArchitecture_t`, which begins with Kepler at 2.
    const NAMES: [&str; 6] = ["Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"];
    const VOLTA: u32 = 5;
    answer(|| {
        let own = device(of)?.profile.limits().architecture;
        let place = NAMES.iter().position(|name| *name == own).ok_or(c::NVML_ERROR_UNKNOWN)?;
        invalid(out.set(VOLTA + place as u32))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetNumGpuCores(of: u64, out: Out<u32>) -> Code {
    /// Of single precision, in a multiprocessor: CUDA C++ Programming Guide.
    const OF_HALF: [u32; 3] = [70, 75, 80];
    answer(|| {
        let profile = &device(of)?.profile;
        let each = if OF_HALF.contains(&profile.sm) { 64 } else { 128 };
        invalid(out.set(profile.sms * each))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryBusWidth(of: u64, out: Out<u32>) -> Code {
    answer(|| invalid(out.set(device(of)?.profile.bus_width_bits)))
}

/// Nothing lowers a clock here.
fn clock(of: u64, kind: i32, out: Out<u32>) -> Code {
    answer(|| {
        let profile = &device(of)?.profile;
        let khz = match kind {
            c::NVML_CLOCK_MEM => profile.memory_clock_khz,
            0..c::NVML_CLOCK_COUNT => profile.clock_khz,
            _ => return Err(c::NVML_ERROR_INVALID_ARGUMENT),
        };
        invalid(out.set(khz / 1000))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetClockInfo(of: u64, kind: i32, out: Out<u32>) -> Code {
    clock(of, kind, out)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMaxClockInfo(of: u64, kind: i32, out: Out<u32>) -> Code {
    clock(of, kind, out)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetEccMode(of: u64, now: Out<i32>, pending: Out<i32>) -> Code {
    answer(|| {
        let ecc = i32::from(device(of)?.profile.ecc);
        invalid(now.set(ecc))?;
        invalid(pending.set(ecc))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeMode(of: u64, out: Out<i32>) -> Code {
    answer(|| {
        device(of)?;
        invalid(out.set(0))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPersistenceMode(of: u64, out: Out<i32>) -> Code {
    answer(|| {
        device(of)?;
        invalid(out.set(c::NVML_FEATURE_ENABLED))
    })
}

/// The highest state: P0.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPerformanceState(of: u64, out: Out<i32>) -> Code {
    answer(|| {
        device(of)?;
        invalid(out.set(0))
    })
}

/// No time passes, so nothing is busy.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(of: u64, out: Out<[u32; 2]>) -> Code {
    answer(|| {
        device(of)?;
        invalid(out.set([0; 2]))
    })
}

/// All pairs reach each other, as CUDA says too.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetP2PStatus(of: u64, to: u64, _index: i32, out: Out<i32>) -> Code {
    answer(|| {
        device(of).and(device(to))?;
        invalid(out.set(c::NVML_P2P_STATUS_OK))
    })
}

/// Under one PCI host bridge: `NVML_TOPOLOGY_HOSTBRIDGE`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTopologyCommonAncestor(of: u64, to: u64, out: Out<i32>) -> Code {
    const HOST_BRIDGE: i32 = 30;
    answer(|| {
        device(of).and(device(to))?;
        invalid(out.set(HOST_BRIDGE))
    })
}

/// No fabric: state 0, which means that it is not supported. Version 2 and 3 differ in length
/// only, and say it in their version field.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGpuFabricInfoV(of: u64, record: Out<u8>) -> Code {
    answer(|| {
        device(of)?;
        let version: u32 = invalid(record.at(fabric::version.offset).get())?;
        let size = (version & SIZE_IN_VERSION) as usize;
        if size <= fabric::state.offset || size > fabric::SIZE {
            return Err(c::NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        invalid(record.clear(size))?;
        invalid(record.at(fabric::version.offset).set(version))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCurrPcieLinkGeneration(of: u64, out: Out<u32>) -> Code {
    answer(|| invalid(out.set(pcie_generation(device(of)?))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(of: u64, out: Out<u32>) -> Code {
    answer(|| invalid(out.set(pcie_generation(device(of)?))))
}

/// What NVIDIA's data sheets give for the architecture.
fn pcie_generation(gpu: &Gpu) -> u32 {
    match gpu.profile.sm {
        ..80 => 3,
        80..90 => 4,
        _ => 5,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(of: u64, out: Out<u32>) -> Code {
    lanes(of, out)
}

/// All of these cards have sixteen.
fn lanes(of: u64, out: Out<u32>) -> Code {
    const LANES: u32 = 16;
    answer(|| {
        device(of)?;
        invalid(out.set(LANES))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(of: u64, out: Out<u32>) -> Code {
    lanes(of, out)
}

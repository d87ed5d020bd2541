//! The runtime API as a program calls it. Tests share the process's machine, so they count nothing
//! that another one may change.

use super::copy::{Position, *};
use super::memory::*;
use super::*;
use crate::constants as c;
use crate::driver::fill::cudaMemset;
use crate::driver::function::cudaFuncSetAttribute;
use crate::driver::memory::{cudaFree, cudaHostRegister, cudaHostUnregister};
use crate::driver::stream::*;
use crate::gpu::boundary::{In, Out, Text};
use crate::layout::{cuda12, cuda13};
use core::ffi::{CStr, c_void};

const OK: Code = c::cudaSuccess;
const INVALID: Code = c::cudaErrorInvalidValue;

fn malloc(size: u64) -> u64 {
    let mut addr = 0;
    assert_eq!(cudaMalloc(Out::to(&mut addr), size), OK);
    addr
}

/// The address of something of the test's own that is written to.
fn place<T: ?Sized>(value: &mut T) -> u64 {
    core::ptr::from_mut(value).cast::<u8>().expose_provenance() as u64
}

/// The address of something of the test's own that is read.
fn host<T: ?Sized>(value: &T) -> u64 {
    core::ptr::from_ref(value).cast::<u8>().expose_provenance() as u64
}

#[test]
fn failures_are_kept_until_they_are_asked_for() {
    assert_eq!(cudaFree(0), OK);
    assert_eq!(cudaFree(12345), INVALID);
    assert_eq!(error::cudaPeekAtLastError(), INVALID);
    assert_eq!(cudaFree(0), OK, "a success does not wipe it out");
    assert_eq!(error::cudaGetLastError(), INVALID);
    assert_eq!(error::cudaGetLastError(), OK);
    // SAFETY: a constant string.
    let name = unsafe { CStr::from_ptr(error::cudaGetErrorName(INVALID)) };
    assert_eq!(name, c"cudaErrorInvalidValue");
}

#[test]
fn too_much_is_out_of_memory_and_nothing_is_nothing() {
    let mut addr = 1;
    assert_eq!(cudaMalloc(Out::to(&mut addr), 1 << 50), c::cudaErrorMemoryAllocation);
    assert_eq!((cudaMalloc(Out::to(&mut addr), 0), addr), (OK, 0));
    assert_eq!(cudaMalloc(Out::null(), 100), INVALID);
    let mut pitch = 0;
    assert_eq!(cudaMallocPitch(Out::to(&mut addr), Out::to(&mut pitch), 1000, 10), OK);
    assert_eq!((pitch, cudaFree(addr), cudaFree(addr)), (1024, OK, INVALID));
    let huge = Extent { width: u64::MAX, height: 2, depth: 2 };
    let mut pitched = PitchedPointer::default();
    assert_eq!(cudaMalloc3D(Out::to(&mut pitched), huge), c::cudaErrorMemoryAllocation);
}

#[test]
fn every_address_says_what_it_is() {
    let kind = |addr: u64| {
        let mut record = [0xffu8; 24];
        assert_eq!(cudaPointerGetAttributes(Out::to(&mut record).cast(), addr), OK);
        let number = |at: usize| i32::from_le_bytes(record[at..at + 4].try_into().unwrap());
        number(cuda12::cudaPointerAttributes::r#type.offset)
    };
    let (device, mut pinned, mut managed) = (malloc(5 << 20), 0, 0);
    assert_eq!(cudaHostAlloc(Out::to(&mut pinned), 100, 0), OK);
    assert_eq!(cudaMallocManaged(Out::to(&mut managed), 100, 1), OK);
    assert_eq!(kind(device + 1000), c::cudaMemoryTypeDevice);
    assert_eq!(kind(pinned), c::cudaMemoryTypeHost);
    assert_eq!(kind(managed), c::cudaMemoryTypeManaged);
    assert_eq!(kind(host(&0)), c::cudaMemoryTypeUnregistered);
    let own = vec![0u8; 4096];
    assert_eq!(cudaHostRegister(host(&own[0]), 4096, 0), OK);
    assert_eq!(kind(host(&own[10])), c::cudaMemoryTypeHost);
    assert_eq!(cudaHostUnregister(host(&own[0])), OK);
    assert_eq!(cudaHostUnregister(host(&own[0])), c::cudaErrorHostMemoryNotRegistered);
    assert_eq!(cudaFreeHost(device), INVALID);
    assert_eq!((cudaFreeHost(pinned), cudaFree(managed), cudaFree(device)), (OK, OK, OK));
    assert_eq!(kind(device), c::cudaMemoryTypeUnregistered);
}

#[test]
fn small_contents_come_back_and_large_ones_are_zeros() {
    let device = malloc(1 << 20);
    let (sent, mut got) = ([1u8, 2, 3, 4, 5, 6], [9u8; 6]);
    let to_host =
        |got: &mut [u8], from, size| cudaMemcpy(place(got), from, size, c::cudaMemcpyDeviceToHost);
    let down = c::cudaMemcpyHostToDevice;
    assert_eq!(cudaMemcpy(device, host(&sent), 6, down), OK);
    assert_eq!(to_host(&mut got, device, 6), OK);
    assert_eq!(got, sent);
    assert_eq!(cudaMemset(device + 2, 7, 2), OK);
    assert_eq!(to_host(&mut got, device, 6), OK);
    assert_eq!(got, [1, 2, 7, 7, 5, 6]);
    // Two rows of two bytes, three apart.
    assert_eq!(cudaMemcpy2D(device, 3, host(&sent), 2, 2, 2, down), OK);
    assert_eq!(to_host(&mut got[..2], device + 3, 2), OK);
    assert_eq!(got[..2], [3, 4]);
    let mut large = vec![1u8; 1 << 20];
    assert_eq!(to_host(&mut large, device, 1 << 20), OK);
    assert!(large.iter().all(|byte| *byte == 0));
    // Other tests allocate, too: memory is given out from the top.
    assert_eq!(to_host(&mut large, device - (1 << 40), 8), INVALID, "nobody's memory");
    assert_eq!(cudaMemcpy(device, host(&sent), 6, 9), c::cudaErrorInvalidMemcpyDirection);
    assert_eq!(cudaFree(device), OK);
}

#[test]
fn arrays_are_rows_and_volumes_are_slices() {
    let format = [32, 0, 0, 0, 0];
    let mut array = 0;
    assert_eq!(array::cudaMallocArray(Out::to(&mut array), In::from(&format), 4, 2, 0), OK);
    let (sent, mut got) = ([1u32, 2, 3, 4, 5, 6, 7, 8], [0u32; 8]);
    let down = c::cudaMemcpyHostToDevice;
    assert_eq!(cudaMemcpy2DToArray(array, 0, 0, host(&sent), 16, 16, 2, down), OK);
    assert_eq!(cudaMemcpy2DToArray(array, 0, 0, host(&sent), 16, 16, 3, down), INVALID);
    let copy = Copy3D {
        src_array: array,
        dst: PitchedPointer { addr: place(&mut got), pitch: 16, width: 16, height: 2 },
        extent: Extent { width: 4, height: 2, depth: 1 },
        dst_pos: Position::default(),
        kind: c::cudaMemcpyDeviceToHost,
        ..Copy3D::default()
    };
    assert_eq!(cudaMemcpy3D(In::from(&copy)), OK);
    assert_eq!(got, sent);
    let mut extent = Extent::default();
    let none = Out::null();
    assert_eq!(array::cudaArrayGetInfo(Out::null(), Out::to(&mut extent), none, array), OK);
    assert_eq!((extent.width, extent.height, extent.depth), (4, 2, 0));
    assert_eq!(array::cudaFreeArray(array), OK);
    assert_eq!(array::cudaFreeArray(array), c::cudaErrorInvalidResourceHandle);
}

#[test]
fn both_layouts_of_the_properties_say_the_same() {
    let gpu = crate::gpu::device(0).unwrap();
    let number = |record: &[u8], field: crate::layout::Field| {
        record[field.offset..][..field.size].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b))
    };
    let mut old = [0xffu8; cuda12::cudaDeviceProp::SIZE];
    let mut new = [0xffu8; cuda13::cudaDeviceProp::SIZE];
    assert_eq!(properties::cudaGetDeviceProperties_v2(Out::to(&mut old).cast(), 0), OK);
    assert_eq!(properties::cudaGetDeviceProperties(Out::to(&mut new).cast(), 0), OK);
    assert!(old.starts_with(gpu.profile.name.as_bytes()));
    for (record, total, sms, optin) in [
        (
            &old[..],
            cuda12::cudaDeviceProp::totalGlobalMem,
            cuda12::cudaDeviceProp::multiProcessorCount,
            cuda12::cudaDeviceProp::sharedMemPerBlockOptin,
        ),
        (
            &new[..],
            cuda13::cudaDeviceProp::totalGlobalMem,
            cuda13::cudaDeviceProp::multiProcessorCount,
            cuda13::cudaDeviceProp::sharedMemPerBlockOptin,
        ),
    ] {
        assert_eq!(number(record, total), gpu.total());
        assert_eq!(number(record, sms), u64::from(gpu.profile.sms));
        let limits = gpu.profile.limits();
        assert_eq!(number(record, optin), u64::from(limits.shared_per_block_optin));
    }
    assert_eq!(number(&old, cuda12::cudaDeviceProp::clockRate), gpu.profile.clock_khz.into());
    let wrong = properties::cudaGetDeviceProperties(Out::to(&mut new).cast(), 99);
    assert_eq!(wrong, c::cudaErrorInvalidDevice);
}

#[test]
fn launches_are_checked_as_the_card_would() {
    use super::launch::*;
    use super::register::*;
    let module = __cudaRegisterFatBinary(core::ptr::null()).addr() as u64;
    let function = host(&c"a kernel") + 1;
    __cudaRegisterFunction(module, function, 0, c"kernel".as_ptr());
    let launch = |grid: [u32; 3], block: [u32; 3], shared| {
        cudaLaunchKernel(function, grid.into(), block.into(), 0, shared, 0)
    };
    assert_eq!(launch([1; 3], [32, 1, 1], 0), OK);
    assert_eq!(launch([1; 3], [2048, 1, 1], 0), c::cudaErrorInvalidConfiguration);
    assert_eq!(launch([1, 70_000, 1], [32, 1, 1], 0), c::cudaErrorInvalidConfiguration);
    assert_eq!(launch([0, 1, 1], [32, 1, 1], 0), c::cudaErrorInvalidConfiguration);
    assert_eq!(launch([1; 3], [32, 1, 1], 100 << 10), INVALID, "more than was asked for");
    let most = c::cudaFuncAttributeMaxDynamicSharedMemorySize;
    assert_eq!(cudaFuncSetAttribute(function, most, 100 << 10), OK);
    assert_eq!(cudaFuncSetAttribute(function, most, 10 << 20), INVALID);
    assert_eq!(launch([1; 3], [32, 1, 1], 100 << 10), OK);
    let unknown = cudaLaunchKernel(7, [1; 3].into(), [1; 3].into(), 0, 0, 0);
    assert_eq!(unknown, c::cudaErrorInvalidDeviceFunction);
    let wide = [1 << 20, 1, 1].into();
    let cooperative = cudaLaunchCooperativeKernel(function, wide, [32, 1, 1].into(), 0, 0, 0);
    assert_eq!(cooperative, c::cudaErrorCooperativeLaunchTooLarge);
    let wrong_stream = cudaLaunchKernel(function, [1; 3].into(), [1; 3].into(), 0, 0, 0x1234);
    assert_eq!(wrong_stream, c::cudaErrorInvalidResourceHandle);
    __cudaUnregisterFatBinary(module);
    assert_eq!(launch([1; 3], [32, 1, 1], 0), c::cudaErrorInvalidDeviceFunction);
}

#[test]
fn a_configuration_waits_for_its_kernel() {
    use super::launch::*;
    assert_eq!(__cudaPushCallConfiguration([2, 3, 4].into(), [5, 6, 7].into(), 8, 9), OK);
    let (mut grid, mut block) = (Dim3::default(), Dim3::default());
    let (mut shared, mut stream) = (0, 0);
    let mut pop = || {
        __cudaPopCallConfiguration(
            Out::to(&mut grid),
            Out::to(&mut block),
            Out::to(&mut shared),
            Out::to(&mut stream),
        )
    };
    assert_eq!(pop(), OK);
    assert_eq!(pop(), c::cudaErrorMissingConfiguration);
    assert_eq!((grid.z, block.x, shared, stream), (4, 5, 8, 9));
}

#[test]
fn variables_have_an_address_and_hold_what_is_written() {
    use super::register::*;
    let module = __cudaRegisterFatBinary(core::ptr::null()).addr() as u64;
    let variable = host(&c"a variable");
    __cudaRegisterVar(module, variable, 0, c"v".as_ptr(), 0, 16);
    let (mut addr, mut size) = (0, 0);
    assert_eq!(cudaGetSymbolAddress(Out::to(&mut addr), variable), OK);
    assert_eq!(cudaGetSymbolSize(Out::to(&mut size), variable), OK);
    assert_eq!(size, 16);
    let (sent, mut got) = (0x0102_0304_u32, 0u32);
    let kind = c::cudaMemcpyDefault;
    assert_eq!(cudaMemcpyToSymbol(variable, host(&sent), 4, 12, kind), OK);
    assert_eq!(cudaMemcpyFromSymbol(place(&mut got), variable, 4, 12, kind), OK);
    assert_eq!(got, sent);
    assert_eq!(cudaMemcpyToSymbol(variable, host(&sent), 4, 13, kind), INVALID, "beyond its end");
    assert_eq!(cudaGetSymbolSize(Out::to(&mut size), 5), c::cudaErrorInvalidSymbol);
    __cudaUnregisterFatBinary(module);
}

#[test]
fn host_functions_run_and_strangers_are_refused() {
    unsafe extern "C" fn note(data: *mut c_void) {
        // SAFETY: the test passes its own variable.
        unsafe { *data.cast::<u32>() += 1 };
    }
    let mut stream = 0;
    assert_eq!(stream::cudaStreamCreate(Out::to(&mut stream)), OK);
    let mut called = 0u32;
    let data = (&raw mut called).cast();
    assert_eq!(cudaLaunchHostFunc(stream, Some(note), data), OK);
    assert_eq!(called, 1);
    assert_eq!(cudaLaunchHostFunc(stream, None, data), INVALID);
    assert_eq!(cudaStreamDestroy(stream), OK);
    let gone = c::cudaErrorInvalidResourceHandle;
    assert_eq!(cudaStreamSynchronize(stream), gone);
    assert_eq!(cudaEventQuery(stream), gone);
}

#[test]
fn driver_functions_are_found_by_name_and_version() {
    let (mut found, mut status) = (core::ptr::null(), 9);
    let mut ask = |name, version| {
        let place = Out::to(&mut found);
        let code = entry::cudaGetDriverEntryPointByVersion(
            Text::of(name),
            place,
            version,
            0,
            Out::to(&mut status),
        );
        (code, status, !found.is_null())
    };
    assert_eq!(ask(c"cuMemCreate", 12_000), (OK, c::cudaDriverEntryPointSuccess, true));
    let newer = c::cudaDriverEntryPointVersionNotSufficent;
    assert_eq!(ask(c"cuMemCreate", 9_000), (OK, newer, false));
    let unknown = c::cudaDriverEntryPointSymbolNotFound;
    assert_eq!(ask(c"cuMemConjure", 12_000), (OK, unknown, false));
}

#[test]
fn attributes_of_pools_as_documented() {
    use crate::driver::pool::*;
    use crate::gpu::call::pool::{Location, PoolProperties};
    let wanted = PoolProperties {
        allocation: c::cudaMemAllocationTypePinned,
        handles: 0,
        location: Location { kind: c::cudaMemLocationTypeDevice, id: 0 },
    };
    let mut pool = 0;
    assert_eq!(cudaMemPoolCreate(Out::to(&mut pool), In::from(&wanted)), OK);
    let mut addr = 0;
    assert_eq!(cudaMallocFromPoolAsync(Out::to(&mut addr), 1 << 20, pool, 0), OK);
    let get = |number| {
        let mut value = 0u64;
        assert_eq!(cudaMemPoolGetAttribute(pool, number, Out::to(&mut value).cast()), OK);
        value
    };
    assert_eq!(get(c::cudaMemPoolAttrUsedMemCurrent), 1 << 20);
    assert_eq!(get(c::cudaMemPoolAttrReservedMemCurrent), 32 << 20);
    assert_eq!(cudaFreeAsync(addr, 0), OK);
    assert_eq!(get(c::cudaMemPoolAttrUsedMemHigh), 1 << 20);
    let high = c::cudaMemPoolAttrUsedMemHigh;
    assert_eq!(cudaMemPoolSetAttribute(pool, high, In::from(&5u64).cast()), INVALID);
    assert_eq!(cudaMemPoolSetAttribute(pool, high, In::from(&0u64).cast()), OK);
    assert_eq!(get(high), 0);
    let host = PoolProperties { location: Location { kind: 2, id: 0 }, ..wanted };
    let mut other = 0;
    let refused = cudaMemPoolCreate(Out::to(&mut other), In::from(&host));
    assert_eq!(refused, c::cudaErrorNotSupported);
    assert_eq!(cudaMemPoolDestroy(pool), OK);
    assert_eq!(cudaMemPoolDestroy(pool), INVALID);
}

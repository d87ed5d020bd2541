//! The driver API as a program calls it. Tests share the process's machine, so they count nothing
//! that another one may change.

use super::*;
use crate::constants as c;
use crate::gpu::boundary::{In, Out, Text};
use crate::gpu::call::pool::{Access, Location};

const OK: Code = c::CUDA_SUCCESS;
const INVALID: Code = c::CUDA_ERROR_INVALID_VALUE;

/// Every test runs in a thread of its own, so without a context until it asks for one.
fn with_context() -> u64 {
    let mut primary = 0;
    assert_eq!(device::cuInit(0), OK);
    assert_eq!(context::cuDevicePrimaryCtxRetain(Out::to(&mut primary), 0), OK);
    assert_eq!(context::cuCtxSetCurrent(primary), OK);
    primary
}

/// The address of something of the test's own that is written to.
fn place<T: ?Sized>(value: &mut T) -> u64 {
    core::ptr::from_mut(value).cast::<u8>().expose_provenance() as u64
}

/// The address of something of the test's own that is read.
fn address<T: ?Sized>(value: &T) -> u64 {
    core::ptr::from_ref(value).cast::<u8>().expose_provenance() as u64
}

#[test]
fn without_a_context_calls_are_refused() {
    assert_eq!(device::cuInit(0), OK);
    let mut addr = 0;
    let refused = c::CUDA_ERROR_INVALID_CONTEXT;
    assert_eq!(memory::cuMemAlloc_v2(Out::to(&mut addr), 100), refused);
    assert_eq!(context::cuCtxPopCurrent_v2(Out::null()), refused);
    assert_eq!(context::cuCtxSetCurrent(12345), refused);
    let mut current = 1;
    assert_eq!((context::cuCtxGetCurrent(Out::to(&mut current)), current), (OK, 0));
    assert_eq!(device::cuInit(1), INVALID);
}

#[test]
fn memory_in_a_streams_order_needs_no_current_context_but_the_default_streams() {
    with_context();
    let (mut own, mut pool) = (0, 0);
    assert_eq!(stream::cuStreamCreate(Out::to(&mut own), 1), OK);
    assert_eq!(pool::cuDeviceGetDefaultMemPool(Out::to(&mut pool), 0), OK);
    let elsewhere = std::thread::spawn(move || {
        let mut addr = 0;
        for stream in 0..3 {
            let refused = c::CUDA_ERROR_INVALID_CONTEXT;
            assert_eq!(pool::cuMemAllocAsync(Out::to(&mut addr), 100, stream), refused);
            assert_eq!(
                pool::cuMemAllocFromPoolAsync(Out::to(&mut addr), 100, pool, stream),
                refused
            );
            assert_eq!(pool::cuMemFreeAsync(own, stream), refused);
        }
        assert_eq!(pool::cuMemAllocAsync(Out::to(&mut addr), 100, own), OK);
        assert_eq!(pool::cuMemFreeAsync(addr, own), OK);
        assert_eq!(pool::cuMemAllocFromPoolAsync(Out::to(&mut addr), 100, pool, own), OK);
        addr
    });
    let kept = elsewhere.join().expect("no panic");
    assert_eq!(pool::cuMemFreeAsync(kept, 0), OK);
    assert_eq!(stream::cuStreamDestroy_v2(own), OK);
}

#[test]
fn a_context_takes_with_it_what_is_in_it() {
    with_context();
    let (mut own, mut inside, mut outside) = (0, 0, 0);
    assert_eq!(memory::cuMemAlloc_v2(Out::to(&mut outside), 100), OK);
    assert_eq!(context::cuCtxCreate_v2(Out::to(&mut own), 0, 0), OK);
    assert_eq!(memory::cuMemAlloc_v2(Out::to(&mut inside), 200), OK);
    assert_eq!(context::cuCtxDestroy_v2(own), OK);
    assert_eq!(memory::cuMemFree_v2(inside), INVALID, "gone with its context");
    assert_eq!(memory::cuMemFree_v2(outside), OK);
}

#[test]
fn arrays_say_what_they_are() {
    with_context();
    let half4 = array::Descriptor2D::of([16, 2], 0x10, 4);
    let (mut handle, mut said) = (0, array::Descriptor2D::of([0, 0], 0, 0));
    assert_eq!(array::cuArrayCreate_v2(Out::to(&mut handle), In::from(&half4)), OK);
    assert_eq!(array::cuArrayGetDescriptor_v2(Out::to(&mut said), handle), OK);
    assert_eq!(said, half4);
    assert_eq!(array::cuArrayDestroy(handle), OK);
    let video = array::Descriptor2D::of([16, 2], 0xb0, 3);
    let refused = c::CUDA_ERROR_NOT_SUPPORTED;
    assert_eq!(array::cuArrayCreate_v2(Out::to(&mut handle), In::from(&video)), refused);
}

#[test]
fn contexts_are_a_stack() {
    let primary = with_context();
    let mut own = 0;
    assert_eq!(context::cuCtxCreate_v2(Out::to(&mut own), 0, 0), OK);
    let current = || {
        let mut current = 0;
        assert_eq!(context::cuCtxGetCurrent(Out::to(&mut current)), OK);
        current
    };
    assert_eq!(current(), own);
    let mut popped = 0;
    assert_eq!(context::cuCtxPopCurrent_v2(Out::to(&mut popped)), OK);
    assert_eq!((popped, current()), (own, primary));
    let (mut first, mut second) = (0, 0);
    assert_eq!(context::cuCtxGetId(own, Out::to(&mut first)), OK);
    assert_eq!(context::cuCtxGetId(0, Out::to(&mut second)), OK);
    assert_ne!(first, second);
    assert_eq!(context::cuCtxDestroy_v2(own), OK);
    assert_eq!(context::cuCtxPushCurrent_v2(own), c::CUDA_ERROR_INVALID_CONTEXT);
    assert_eq!(context::cuCtxDestroy_v2(primary), c::CUDA_ERROR_INVALID_CONTEXT);
}

#[test]
fn memory_and_what_is_known_of_it() {
    with_context();
    let mut addr = 0;
    assert_eq!(memory::cuMemAlloc_v2(Out::to(&mut addr), 0), INVALID);
    assert_eq!(memory::cuMemAlloc_v2(Out::to(&mut addr), 3 << 20), OK);
    let (mut base, mut size) = (0, 0);
    let range = memory::cuMemGetAddressRange_v2(Out::to(&mut base), Out::to(&mut size), addr + 99);
    assert_eq!((range, base, size), (OK, addr, 3 << 20));
    let (mut kind, mut managed) = (0u32, 7i32);
    let numbers = [c::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, c::CU_POINTER_ATTRIBUTE_IS_MANAGED];
    let places = [Out::to(&mut kind).cast(), Out::to(&mut managed).cast()];
    let ask = |addr| {
        pointer::cuPointerGetAttributes(2, In::from(&numbers[0]), In::from(&places[0]), addr)
    };
    assert_eq!(ask(addr), OK);
    assert_eq!((core::hint::black_box(kind), core::hint::black_box(managed)), (2, 0));
    assert_eq!(ask(address(&kind)), OK, "an address that nobody knows is no error here");
    assert_eq!(core::hint::black_box(kind), 0);
    let unknown = pointer::cuPointerGetAttribute(Out::to(&mut kind).cast(), numbers[0], 5);
    assert_eq!(unknown, INVALID);
    let (word, mut got) = (0xdead_beef_u32, 0u32);
    assert_eq!(fill::cuMemsetD32_v2(addr, word, 4), OK);
    assert_eq!(copy::cuMemcpyDtoH_v2(place(&mut got), addr + 8, 4), OK);
    assert_eq!(got, word);
    assert_eq!(memory::cuMemFree_v2(addr), OK);
    assert_eq!(memory::cuMemFree_v2(addr), INVALID);
}

#[test]
fn virtual_memory_from_reservation_to_release() {
    const SIZE: u64 = 4 << 20;
    with_context();
    let properties = {
        let mut bytes = [0u8; 32];
        bytes[0] = 1;
        bytes[4] = c::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as u8;
        bytes[8] = c::CU_MEM_LOCATION_TYPE_DEVICE as u8;
        bytes
    };
    let wanted = In::from(&properties).cast();
    let (mut place, mut handle, mut granularity) = (0, 0, 0);
    let ask = vmm::cuMemGetAllocationGranularity(Out::to(&mut granularity), wanted, 0);
    assert_eq!((ask, granularity), (OK, 2 << 20));
    assert_eq!(vmm::cuMemAddressReserve(Out::to(&mut place), 64 << 20, 0, 0, 0), OK);
    assert_eq!(vmm::cuMemCreate(Out::to(&mut handle), SIZE + 1, wanted, 0), INVALID);
    assert_eq!(vmm::cuMemCreate(Out::to(&mut handle), SIZE, wanted, 0), OK);
    assert_eq!(vmm::cuMemMap(place, SIZE, 0, handle, 0), OK);
    let location = Location { kind: c::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let access = Access { location, flags: 3 };
    assert_eq!(vmm::cuMemSetAccess(place, SIZE, In::from(&access), 1), OK);
    let mut flags = 0;
    assert_eq!(vmm::cuMemGetAccess(Out::to(&mut flags), In::from(&location), place), OK);
    assert_eq!(flags, 3);

    let (mut fd, mut again) = (-1, 0);
    let posix = c::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let fabric = c::CU_MEM_HANDLE_TYPE_FABRIC;
    let export =
        |fd: &mut i32, kind| vmm::cuMemExportToShareableHandle(Out::to(fd), handle, kind, 0);
    assert_eq!(export(&mut fd, fabric), c::CUDA_ERROR_NOT_SUPPORTED);
    assert_eq!(export(&mut fd, posix), OK);
    let shared = core::ptr::without_provenance(fd as usize);
    assert_eq!(vmm::cuMemImportFromShareableHandle(Out::to(&mut again), shared, posix), OK);
    assert_eq!(again, handle, "the same memory in the same process");
    // SAFETY: the descriptor was made for this test.
    assert_eq!(unsafe { libc::close(fd) }, 0);

    assert_eq!(vmm::cuMemRelease(handle), OK);
    assert_eq!(vmm::cuMemRelease(handle), OK, "the import was one more");
    assert_eq!(vmm::cuMemRelease(handle), INVALID);
    assert_eq!(vmm::cuMemAddressFree(place, 64 << 20), INVALID, "still mapped");
    assert_eq!(vmm::cuMemUnmap(place, SIZE), OK);
    assert_eq!(vmm::cuMemAddressFree(place, 64 << 20), OK);
}

#[test]
fn modules_give_functions_that_can_be_launched() {
    with_context();
    let image = *b"// some code in PTX\0";
    let (mut module, mut function) = (0, 0);
    assert_eq!(module::cuModuleLoadData(Out::to(&mut module), In::from(&image[0])), OK);
    let name = Text::of(c"kernel");
    assert_eq!(module::cuModuleGetFunction(Out::to(&mut function), module, name), OK);
    let launch = |threads| function::cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, 0, 0);
    assert_eq!(launch(128), OK);
    assert_eq!(launch(4096), INVALID, "the driver has no code of its own for this");
    let mut blocks = 0;
    let place = Out::to(&mut blocks);
    assert_eq!(function::cuOccupancyMaxActiveBlocksPerMultiprocessor(place, function, 1024, 0), OK);
    assert!(blocks > 0);
    let (mut grid, mut block) = (0, 0);
    let best = function::cuOccupancyMaxPotentialBlockSize(
        Out::to(&mut grid),
        Out::to(&mut block),
        function,
        None,
        0,
        0,
    );
    assert_eq!((best, block), (OK, 1024));
    assert_eq!(module::cuModuleUnload(module), OK);
    assert_eq!(launch(128), c::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(module::cuModuleLoadData(Out::to(&mut module), In::null()), INVALID);
}

#[test]
fn the_linker_gives_an_image_that_loads() {
    with_context();
    let mut link = core::ptr::null_mut();
    assert_eq!(link::cuLinkCreate_v2(0, 0, 0, Out::to(&mut link)), OK);
    assert_eq!(link::cuLinkAddData_v2(link, 1, address(&1)), OK);
    let (mut image, mut size) = (core::ptr::null(), 0);
    assert_eq!(link::cuLinkComplete(link, Out::to(&mut image), Out::to(&mut size)), OK);
    assert!(size > 0);
    let mut module = 0;
    // SAFETY: the linker's image is a constant.
    let image = unsafe { &*image };
    assert_eq!(module::cuModuleLoadData(Out::to(&mut module), In::from(image)), OK);
    assert_eq!(link::cuLinkDestroy(link), OK);
    assert_eq!(link::cuLinkDestroy(link), c::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn undocumented_tables_are_refused() {
    let mut table = core::ptr::without_provenance(1);
    assert_eq!(entry::cuGetExportTable(Out::to(&mut table), 0), c::CUDA_ERROR_NOT_SUPPORTED);
    assert!(table.is_null());
}

#[test]
fn names_of_errors() {
    let mut name = core::ptr::null();
    assert_eq!(entry::cuGetErrorName(2, Out::to(&mut name)), OK);
    // SAFETY: a constant string.
    assert_eq!(unsafe { core::ffi::CStr::from_ptr(name) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(entry::cuGetErrorName(123_456, Out::to(&mut name)), INVALID);
    assert!(name.is_null());
}

#[test]
fn streams_write_words_in_order() {
    with_context();
    let (mut addr, mut stream) = (0, 0);
    assert_eq!(memory::cuMemAlloc_v2(Out::to(&mut addr), 4096), OK);
    assert_eq!(stream::cuStreamCreate(Out::to(&mut stream), 1), OK);
    assert_eq!(stream::cuStreamWriteValue64_v2(stream, addr + 8, 77, 0), OK);
    assert_eq!(stream::cuStreamWriteValue64_v2(stream, addr + 4, 77, 0), INVALID, "not aligned");
    assert_eq!(stream::cuStreamWaitValue32_v2(stream, addr, 1, 0), OK);
    let mut got = 0u64;
    assert_eq!(copy::cuMemcpyDtoHAsync_v2(place(&mut got), addr + 8, 8, stream), OK);
    assert_eq!(got, 77);
    assert_eq!(stream::cuStreamDestroy_v2(stream), OK);
    assert_eq!(memory::cuMemFree_v2(addr), OK);
}

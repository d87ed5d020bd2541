//! The functions of CUDA's that the allocator needs, found by name in
//! whatever the program has loaded.
//!
//! They are never linked, and never called by way of our own hooks: what the allocator asks of the
//! driver is recorded by the allocator itself. A function that is nowhere answers [`MISSING`].

use std::ffi::{c_char, c_int, c_void};

use crate::cuda::resolve::{self, MISSING};
use crate::real::Real;
use crate::record::guard;

/// Both APIs: all is well.
pub const SUCCESS: c_int = 0;
/// Both APIs: memory has run out.
pub const OUT_OF_MEMORY: c_int = 2;
/// `cudaStreamCaptureModeRelaxed`.
pub const RELAXED: c_int = 2;
/// `cudaEventDisableTiming`.
pub const DISABLE_TIMING: u32 = 2;
/// `cudaStreamCaptureStatusNone`.
pub const NOT_CAPTURING: c_int = 0;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
pub const RDMA_WITH_MAPPINGS: c_int = 110;

/// `CUmemLocation`, and whether it may be read and written (`CUmemAccessDesc`).
#[repr(C)]
pub struct Access {
    /// 1: a device.
    pub kind: c_int,
    /// Which.
    pub device: c_int,
    /// 3: reading and writing.
    pub flags: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub struct Properties {
    /// 1: pinned.
    pub kind: c_int,
    /// 0: no handles for other processes.
    pub handles: c_int,
    /// 1: on a device.
    pub location: c_int,
    /// Which.
    pub device: c_int,
    /// For Windows.
    pub windows: *mut c_void,
    /// Not compressed.
    pub compression: u8,
    /// Network cards may reach it.
    pub rdma: u8,
    /// No special use.
    pub usage: u16,
    /// To be 0.
    pub reserved: [u8; 4],
}

macro_rules! functions {
    ($($library:literal: $($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*);)*)*) => {$($(
        $(#[$doc])*
        ///
        /// # Safety
        /// As CUDA documents it.
        #[allow(non_snake_case, clippy::missing_safety_doc)]
        pub unsafe fn $name($($argument: $type),*) -> c_int {
            static REAL: Real = Real::new();
            let Some(real) = resolve::real(&REAL, stringify!($name), $library) else { return MISSING };
            // SAFETY: the library documents this function with this
            // signature; the rest is the caller's.
            guard::nested(|| unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($type),*) -> c_int>(real)($($argument),*)
            })
        }
    )*)*};
}

functions! {
    "libcudart":
        /// The thread's device.
        cudaGetDevice(device: *mut c_int);
        /// Chooses the thread's device.
        cudaSetDevice(device: c_int);
        /// Free and total memory of the thread's device.
        cudaMemGetInfo(free: *mut usize, total: *mut usize);
        /// Memory.
        cudaMalloc(addr: *mut u64, size: usize);
        /// And back.
        cudaFree(addr: u64);
        /// An event.
        cudaEventCreateWithFlags(event: *mut u64, flags: u32);
        /// Records it.
        cudaEventRecord(event: u64, stream: u64);
        /// Whether it is done.
        cudaEventQuery(event: u64);
        /// Waits for it.
        cudaEventSynchronize(event: u64);
        /// Waits for a stream.
        cudaStreamSynchronize(stream: u64);
        /// Whether a stream is being captured.
        cudaStreamIsCapturing(stream: u64, status: *mut c_int);
        /// How strict captures are with this thread.
        cudaThreadExchangeStreamCaptureMode(mode: *mut c_int);
        /// The last error of this thread, which is forgotten.
        cudaGetLastError();
        /// How many devices there are.
        cudaGetDeviceCount(count: *mut c_int);
        /// Whether a device can reach another one's memory.
        cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
        /// A device's PCI address.
        cudaDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: c_int);
    "libcuda.so":
        /// The driver's number of a device.
        cuDeviceGet(device: *mut c_int, ordinal: c_int);
        /// A device's memory; needs no context.
        cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
        /// What a device can do.
        cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
        /// Addresses.
        cuMemAddressReserve(addr: *mut u64, size: usize, align: usize, wanted: u64, flags: u64);
        /// And back.
        cuMemAddressFree(addr: u64, size: usize);
        /// Physical memory.
        cuMemCreate(handle: *mut u64, size: usize, properties: *const Properties, flags: u64);
        /// Releases it; it goes when it is mapped nowhere.
        cuMemRelease(handle: u64);
        /// Puts it behind addresses.
        cuMemMap(addr: u64, size: usize, offset: usize, handle: u64, flags: u64);
        /// Takes it away.
        cuMemUnmap(addr: u64, size: usize);
        /// Who may use it.
        cuMemSetAccess(addr: u64, size: usize, access: *const Access, count: usize);
        /// What an error means.
        cuGetErrorString(error: c_int, words: *mut *const c_char);
}

/// The runtime's text for an error.
pub fn error_text(error: c_int) -> String {
    type Words = unsafe extern "C" fn(c_int) -> *const c_char;
    static REAL: Real = Real::new();
    let Some(real) = REAL.find("cudaGetErrorString", "libcudart") else {
        return format!("error {error}");
    };
    // SAFETY: the runtime documents this function with this signature; it
    // gives a constant C string.
    unsafe {
        let text = std::mem::transmute::<*mut c_void, Words>(real)(error);
        std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// The driver's text for an error; PyTorch's where it has none.
pub fn driver_error_text(error: c_int) -> String {
    let mut words = c"unknown error".as_ptr();
    // SAFETY: a place of ours; what the driver puts there is a constant C string, or
    // null for an error that it doesn't know.
    unsafe {
        if cuGetErrorString(error, &raw mut words) != SUCCESS || words.is_null() {
            words = c"unknown error".as_ptr();
        }
        std::ffi::CStr::from_ptr(words).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod layouts {
    use cudarc::driver::sys;
    use memtrace_layouts::same_layout;

    use super::{Access, Properties};

    same_layout!(
        Access = sys::CUmemAccessDesc { kind: location.type_, device: location.id, flags: flags }
    );
    same_layout!(
        Properties = sys::CUmemAllocationProp {
            kind: type_,
            handles: requestedHandleTypes,
            location: location.type_,
            device: location.id,
            windows: win32HandleMetaData,
            compression: allocFlags.compressionType,
            rdma: allocFlags.gpuDirectRDMACapable,
            usage: allocFlags.usage,
            reserved: allocFlags.reserved,
        }
    );
}

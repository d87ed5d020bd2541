//! The one table of interposed entry points. Exports, look-ups and documentation come from it.
//!
//! Each row makes a symbol that the loader finds before CUDA's own, because the library is preloaded. The
//! symbol is two instructions: it puts the address it will return to into the register after its last
//! argument and jumps to the handler of the same name. So a handler is an ordinary Rust function that also
//! knows who called, which is how PyTorch's allocator is told from everybody else; no frame of ours is pushed
//! in between, and the caller's stack stays as it was.
//!
//! The System V ABI for x86-64 passes the first six integer arguments in rdi, rsi, rdx, rcx, r8, r9; rows
//! therefore have at most five. Prototypes: NVIDIA's public headers for the runtime and driver API.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// A row of the table.
pub struct EntryPoint {
    /// The symbol.
    pub name: &'static str,
    /// Start of the file name of the library that has the real one.
    pub library: &'static str,
}

/// The register that the System V ABI gives to the argument after these.
macro_rules! next_register {
    () => {
        "rdi"
    };
    ($a:ident) => {
        "rsi"
    };
    ($a:ident $b:ident) => {
        "rdx"
    };
    ($a:ident $b:ident $c:ident) => {
        "rcx"
    };
    ($a:ident $b:ident $c:ident $d:ident) => {
        "r8"
    };
    ($a:ident $b:ident $c:ident $d:ident $e:ident) => {
        "r9"
    };
}

macro_rules! entry_points {
    ($( $library:literal $module:ident { $( $(#[$doc:meta])* $name:ident ( $($arg:ident : $ty:ty),* $(,)? ); )* } )*) => {
        /// Numbers of the rows, as events carry them; 0 is no entry point.
        #[allow(non_camel_case_types, missing_docs, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Api { None = 0, $($( $name, )*)* }

        /// All rows, by number.
        pub static ENTRY_POINTS: &[EntryPoint] = &[
            EntryPoint { name: "none", library: "" },
            $($( EntryPoint { name: stringify!($name), library: $library }, )*)*
        ];

        /// The exported symbols.
        pub mod exports {
            use super::*;
            $($(
                $(#[$doc])*
                ///
                /// # Safety
                /// As NVIDIA documents for the function of this name.
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                    core::arch::naked_asm!(
                        concat!("mov ", next_register!($($arg)*), ", [rsp]"),
                        "jmp {handler}",
                        handler = sym crate::hooks::$module::$name,
                    )
                }
            )*)*
        }

        /// The real functions.
        pub mod real {
            use super::*;
            $($(
                $(#[$doc])*
                ///
                /// # Safety
                /// As NVIDIA documents for the function of this name.
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub unsafe fn $name($($arg: $ty),*) -> c_int {
                    static REAL: crate::hooks::resolve::Real = crate::hooks::resolve::Real::new();
                    let Some(f) = REAL.get(Api::$name) else {
                        return crate::hooks::resolve::MISSING;
                    };
                    // SAFETY: the address is that of the function of this name in CUDA's own library, whose
                    // prototype NVIDIA's headers give as in this row; the arguments are the caller's own.
                    unsafe {
                        let f: unsafe extern "C" fn($($ty),*) -> c_int = std::mem::transmute(f);
                        f($($arg),*)
                    }
                }
            )*)*
        }
    };
}

/// `void *`.
pub type Ptr = *mut c_void;
/// `void **`: where an allocation's address goes.
pub type Out = *mut *mut c_void;
/// A stream or event handle, of which only the value matters.
pub type Handle = usize;

entry_points! {
    "libcudart.so" runtime {
        /// The number of devices; PyTorch's first call, which wakes the recorder.
        cudaGetDeviceCount(count: *mut c_int);
        /// Chooses the device of the calling thread.
        cudaSetDevice(device: c_int);
        /// Device memory.
        cudaMalloc(out: Out, size: usize);
        /// Device memory in rows.
        cudaMallocPitch(out: Out, pitch: *mut usize, width: usize, height: usize);
        /// Memory that moves between host and device.
        cudaMallocManaged(out: Out, size: usize, flags: c_uint);
        /// Device memory in stream order.
        cudaMallocAsync(out: Out, size: usize, stream: Handle);
        /// Device memory in stream order from a given pool.
        cudaMallocFromPoolAsync(out: Out, size: usize, pool: Handle, stream: Handle);
        /// Frees device memory.
        cudaFree(addr: Ptr);
        /// Frees device memory in stream order.
        cudaFreeAsync(addr: Ptr, stream: Handle);
        /// Page-locked host memory.
        cudaMallocHost(out: Out, size: usize);
        /// Page-locked host memory with flags.
        cudaHostAlloc(out: Out, size: usize, flags: c_uint);
        /// Frees page-locked host memory.
        cudaFreeHost(addr: Ptr);
        /// Page-locks memory of the program's own.
        cudaHostRegister(addr: Ptr, size: usize, flags: c_uint);
        /// Undoes `cudaHostRegister`.
        cudaHostUnregister(addr: Ptr);
        /// Free and total memory of the device.
        cudaMemGetInfo(free: *mut usize, total: *mut usize);
        /// Records an event on a stream.
        cudaEventRecord(event: Handle, stream: Handle);
        /// Asks whether an event has completed.
        cudaEventQuery(event: Handle);
        /// Waits for an event.
        cudaEventSynchronize(event: Handle);
        /// The address of a driver function, by name.
        cudaGetDriverEntryPoint(name: *const i8, out: Out, flags: c_ulonglong, status: *mut c_int);
        /// The address of a driver function, by name and version.
        cudaGetDriverEntryPointByVersion(name: *const i8, out: Out, version: c_uint, flags: c_ulonglong, status: *mut c_int);
    }
    "libcuda.so" driver {
        /// Device memory.
        cuMemAlloc_v2(out: Out, size: usize);
        /// Device memory in rows.
        cuMemAllocPitch_v2(out: Out, pitch: *mut usize, width: usize, height: usize, element: c_uint);
        /// Memory that moves between host and device.
        cuMemAllocManaged(out: Out, size: usize, flags: c_uint);
        /// Device memory in stream order.
        cuMemAllocAsync(out: Out, size: usize, stream: Handle);
        /// Device memory in stream order from a given pool.
        cuMemAllocFromPoolAsync(out: Out, size: usize, pool: Handle, stream: Handle);
        /// Frees device memory.
        cuMemFree_v2(addr: Ptr);
        /// Frees device memory in stream order.
        cuMemFreeAsync(addr: Ptr, stream: Handle);
        /// Page-locked host memory.
        cuMemAllocHost_v2(out: Out, size: usize);
        /// Page-locked host memory with flags.
        cuMemHostAlloc(out: Out, size: usize, flags: c_uint);
        /// Frees page-locked host memory.
        cuMemFreeHost(addr: Ptr);
        /// Page-locks memory of the program's own.
        cuMemHostRegister_v2(addr: Ptr, size: usize, flags: c_uint);
        /// Undoes `cuMemHostRegister`.
        cuMemHostUnregister(addr: Ptr);
        /// Reserves a range of addresses.
        cuMemAddressReserve(out: Out, size: usize, align: usize, addr: Ptr, flags: c_ulonglong);
        /// Maps memory into a reserved range.
        cuMemMap(addr: Ptr, size: usize, offset: usize, handle: u64, flags: c_ulonglong);
        /// Makes a mapped range accessible.
        cuMemSetAccess(addr: Ptr, size: usize, access: *const c_void, count: usize);
        /// Unmaps memory from a range.
        cuMemUnmap(addr: Ptr, size: usize);
    }
}

/// The name of a row, as snapshots show it.
pub fn name(api: u16) -> &'static str {
    ENTRY_POINTS.get(usize::from(api)).map_or("unknown", |e| e.name)
}

//! The one table of interposed entry points. Exports, handlers, look-ups
//! and documentation come from it.
//!
//! A row is a function of NVIDIA's public headers, with its arguments and its *role*
//! ([`super::roles`]). The role says what the call does to memory, and which argument says what. A
//! new entry point is one line. Rows whose role is `own` have a handler written by hand, in the
//! module that the section names. So have those that `shows`: they give out functions by name, too,
//! and are handed our hooks for that. A driver row begins with the version of CUDA in which its
//! interface appeared: `cuGetProcAddress` chooses by that.
//!
//! Each room keeps its own rows ([`crate::nccl::communicators`], [`crate::pytorch::workspaces`],
//! and here CUDA's), as a macro that hands them on. Three things are made of all rows: here their
//! numbers and what is known of each, in [`super::real`] the real functions, in [`super::hooks`]
//! our symbols and handlers. Nothing follows from the order of the rows.

use std::ffi::CStr;

pub(crate) use crate::nccl::communicators::rows as nccl_rows;
pub(crate) use crate::pytorch::workspaces::rows as cublas_rows;
use crate::record::hook::Tier;

/// A row of the table.
pub struct EntryPoint {
    /// The symbol.
    pub name: &'static str,
    /// The same for the loader.
    pub symbol: &'static CStr,
    /// Start of the file name of the library that has the real one.
    pub library: &'static str,
    /// Which of the libraries that stand on one another that is.
    pub tier: Tier,
    /// The version of CUDA in which a driver function's interface
    /// appeared; 0 if that doesn't matter.
    pub since: u32,
}

impl EntryPoint {
    /// The name under which `cuGetProcAddress` knows the function: without
    /// the suffixes of its interface.
    pub fn base(&self) -> &'static str {
        let name = self.plain();
        let (start, version) = name.rsplit_once("_v").unwrap_or((name, ""));
        let versioned = !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit());
        if versioned { start } else { name }
    }

    fn plain(&self) -> &'static str {
        ["_ptsz", "_ptds"]
            .iter()
            .find_map(|suffix| self.name.strip_suffix(suffix))
            .unwrap_or(self.name)
    }

    /// Is this the variant for a default stream per thread?
    pub fn is_per_thread(&self) -> bool {
        self.plain().len() < self.name.len()
    }
}

/// Real functions of one name that look-ups give out.
pub const TRAMPOLINES: usize = 4;

/// What of ours stands for a row.
pub struct Hook {
    /// What our symbols and trampolines jump to.
    pub handler: Code,
    /// Our functions that look-ups give out, each for one real function
    /// ([`super::routes::trampoline_for`]).
    pub trampolines: [Code; TRAMPOLINES],
    /// Whom the loader shows under the row's name: our symbol, or that of
    /// an interposer in front of us.
    pub exported: Code,
}

/// All of them, by the rows' numbers. They are made above ([`super::hooks`]) and handed down.
pub type Hooks = [Hook; ROWS];

/// The address of a function.
#[derive(Clone, Copy)]
pub struct Code(pub *const ());

// SAFETY: the address of a function is the same in every thread.
unsafe impl Sync for Code {}

macro_rules! entry_points {
    ([] { $( $library:literal $tier:ident $module:ident {
        $( $($since:literal)? $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) => $role:ident $( ( $($what:expr),* ) )? ; )*
    } )* }) => {
        /// Numbers of the rows, as events carry them; 0 is no entry point.
        #[allow(non_camel_case_types, missing_docs, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Api { None = 0, $($( $name, )*)* }

        impl Api {
            /// All of them, by number.
            const ALL: &[Api] = &[Api::None, $($( Api::$name, )*)*];
        }

        /// All rows, by number.
        pub static ENTRY_POINTS: [EntryPoint; ROWS] = [
            EntryPoint { name: "none", symbol: c"none", library: "", tier: Tier::Library, since: 0 },
            $($( EntryPoint {
                name: stringify!($name),
                symbol: match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(symbol) => symbol,
                    Err(_) => panic!("a name has no zero in it"),
                },
                library: $library,
                tier: Tier::$tier,
                since: 0 $( + $since )?,
            }, )*)*
        ];
    };
}

/// The runtime's rows, put behind those that stand there already and
/// handed on to the next macro of the list.
macro_rules! runtime_rows {
    ([$next:ident $($later:ident)*] { $($before:tt)* }) => {
        $next! { [$($later)*] {
            $($before)*
            "libcudart.so" Runtime runtime {
                // devices
                cudaGetDeviceCount(count: *mut c_int) => own;
                cudaSetDevice(device: c_int) => own;
                cudaDeviceReset() => resets(None);
                cudaThreadExit() => resets(None);
                cudaMemGetInfo(free: *mut usize, total: *mut usize) => own;

                // memory
                cudaMalloc(out: Out, size: usize) => allocates(What::Device, out, size, 0);
                cudaMallocPitch(out: Out, pitch: *mut usize, width: usize, height: usize) => allocates_rows(out, pitch, height);
                cudaMalloc3D(out: *mut PitchedPtr, extent: Extent) => allocates_slices(out, extent);
                cudaMallocManaged(out: Out, size: usize, flags: c_uint) => allocates(What::Managed, out, size, 0);
                cudaFree(addr: Ptr) => frees(What::Device, addr as usize, 0);
                cudaMallocArray(out: Out, format: *const ChannelFormat, width: usize, height: usize, flags: c_uint)
                    => allocates_array(out, ChannelFormat::bytes(format, Extent { width, height, depth: 0 }, 1));
                cudaMalloc3DArray(out: Out, format: *const ChannelFormat, extent: Extent, flags: c_uint)
                    => allocates_array(out, ChannelFormat::bytes(format, extent, 1));
                cudaMallocMipmappedArray(out: Out, format: *const ChannelFormat, extent: Extent, levels: c_uint, flags: c_uint)
                    => allocates_array(out, ChannelFormat::bytes(format, extent, levels));
                cudaFreeArray(array: Handle) => frees(What::Array, array, 0);
                cudaFreeMipmappedArray(array: Handle) => frees(What::Array, array, 0);

                // memory in stream order
                cudaMallocAsync(out: Out, size: usize, stream: Handle) => allocates(What::Pool, out, size, stream);
                cudaMallocAsync_ptsz(out: Out, size: usize, stream: Handle) => allocates(What::Pool, out, size, stream);
                cudaMallocFromPoolAsync(out: Out, size: usize, pool: Handle, stream: Handle)
                    => allocates_from(out, size, pool, stream);
                cudaMallocFromPoolAsync_ptsz(out: Out, size: usize, pool: Handle, stream: Handle)
                    => allocates_from(out, size, pool, stream);
                cudaFreeAsync(addr: Ptr, stream: Handle) => frees(What::Pool, addr as usize, stream);
                cudaFreeAsync_ptsz(addr: Ptr, stream: Handle) => frees(What::Pool, addr as usize, stream);
                cudaMemPoolCreate(out: Out, properties: *const PoolProperties)
                    => creates_pool(out, PoolProperties::device(properties));
                cudaMemPoolImportFromShareableHandle(out: Out, handle: Ptr, kind: c_uint, flags: c_uint) => creates_pool(out, None);
                cudaMemPoolDestroy(pool: Handle) => destroys(What::MemoryPool, pool);
                cudaMemPoolImportPointer(out: Out, pool: Handle, data: Ptr) => allocates(What::View, out, 0, 0);
                cudaMemPoolGetAttribute(pool: Handle, attribute: c_int, value: Ptr) => queries_reserved(ReservedBy::Pool(pool), attribute, value);
                cudaDeviceGetDefaultMemPool(out: Out, device: c_int) => queries_device(out, device);
                cudaDeviceGetMemPool(out: Out, device: c_int) => queries_device(out, device);
                cudaDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Ptr)
                    => queries_reserved(ReservedBy::Graphs(device), attribute, value);

                // memory of the host
                cudaMallocHost(out: Out, size: usize) => allocates(What::Pinned, out, size, 0);
                cudaHostAlloc(out: Out, size: usize, flags: c_uint) => allocates(What::Pinned, out, size, 0);
                cudaFreeHost(addr: Ptr) => frees(What::Pinned, addr as usize, 0);
                cudaHostRegister(addr: Ptr, size: usize, flags: c_uint) => registers(addr, size);
                cudaHostUnregister(addr: Ptr) => frees(What::Registered, addr as usize, 0);

                // memory of others
                cudaIpcOpenMemHandle(out: Out, handle: IpcHandle, flags: c_uint) => imports(out);
                cudaIpcCloseMemHandle(addr: Ptr) => frees(What::Imported, addr as usize, 0);
                cudaImportExternalMemory(out: Out, descriptor: *const ExternalDescriptor)
                    => allocates(What::External, out, ExternalDescriptor::bytes(descriptor), 0);
                cudaDestroyExternalMemory(handle: Handle) => frees(What::External, handle, 0);
                cudaExternalMemoryGetMappedBuffer(out: Out, handle: Handle, buffer: *const BufferDescriptor)
                    => allocates(What::View, out, BufferDescriptor::bytes(buffer), 0);

                // streams, events, graphs, libraries of kernels
                cudaStreamCreate(out: Out) => creates_stream(out);
                cudaStreamCreateWithFlags(out: Out, flags: c_uint) => creates_stream(out);
                cudaStreamCreateWithPriority(out: Out, flags: c_uint, priority: c_int) => creates_stream(out);
                cudaStreamDestroy(stream: Handle) => destroys_stream(stream);
                cudaEventRecord(event: Handle, stream: Handle) => own;
                cudaEventQuery(event: Handle) => own;
                cudaEventSynchronize(event: Handle) => own;
                // Until CUDA 12 this had three arguments, since then seven.
                cudaStreamGetCaptureInfo(stream: Handle, status: *mut c_int, id: Ptr, graph: Ptr, dependencies: Ptr, edges: Ptr, count: Ptr)
                    => own;
                cudaStreamGetCaptureInfo_v2(stream: Handle, status: *mut c_int, id: Ptr, graph: Ptr, dependencies: Ptr, count: Ptr) => own;
                cudaStreamGetCaptureInfo_v3(stream: Handle, status: *mut c_int, id: Ptr, graph: Ptr, dependencies: Ptr, edges: Ptr, count: Ptr)
                    => own;
                // Until CUDA 11 this had five arguments, since then three.
                cudaGraphInstantiate(out: Out, graph: Handle, a: usize, b: usize, c: usize) => creates(What::Executable, out);
                cudaGraphInstantiateWithFlags(out: Out, graph: Handle, flags: c_ulonglong) => creates(What::Executable, out);
                cudaGraphInstantiateWithParams(out: Out, graph: Handle, params: Ptr) => creates(What::Executable, out);
                cudaGraphInstantiateWithParams_ptsz(out: Out, graph: Handle, params: Ptr) => creates(What::Executable, out);
                cudaGraphExecDestroy(graph: Handle) => destroys(What::Executable, graph);
                cudaGraphAddMemAllocNode(out: Out, graph: Handle, after: Ptr, count: usize, node: *mut GraphAllocation)
                    => promises(node);
                cudaGraphAddMemFreeNode(out: Out, graph: Handle, after: Ptr, count: usize, addr: Ptr)
                    => frees(What::GraphNode, addr as usize, 0);
                cudaLibraryLoadData(out: Out, code: Ptr, jit: Ptr, jit_values: Ptr, n: c_uint, options: Ptr, values: Ptr, m: c_uint)
                    => creates(What::Module, out);
                cudaLibraryLoadFromFile(out: Out, file: Ptr, jit: Ptr, jit_values: Ptr, n: c_uint, options: Ptr, values: Ptr, m: c_uint)
                    => creates(What::Module, out);
                cudaLibraryUnload(library: Handle) => destroys(What::Module, library);

                // the driver's functions by name
                cudaGetDriverEntryPoint(name: *const c_char, out: Out, flags: c_ulonglong, status: *mut c_int) => shows;
                cudaGetDriverEntryPoint_ptsz(name: *const c_char, out: Out, flags: c_ulonglong, status: *mut c_int) => shows;
                cudaGetDriverEntryPointByVersion(name: *const c_char, out: Out, version: c_uint, flags: c_ulonglong, status: *mut c_int) => shows;
                cudaGetDriverEntryPointByVersion_ptsz(name: *const c_char, out: Out, version: c_uint, flags: c_ulonglong, status: *mut c_int) => shows;
            }
        } }
    };
}
pub(crate) use runtime_rows;

/// The driver's rows, likewise.
macro_rules! driver_rows {
    ([$next:ident $($later:ident)*] { $($before:tt)* }) => {
        $next! { [$($later)*] {
            $($before)*
            "libcuda.so" Driver driver {
                // contexts
                2000 cuCtxCreate(out: Out, flags: c_uint, device: c_int) => creates_context(out, device);
                3020 cuCtxCreate_v2(out: Out, flags: c_uint, device: c_int) => creates_context(out, device);
                11040 cuCtxCreate_v3(out: Out, affinity: Ptr, count: c_int, flags: c_uint, device: c_int) => creates_context(out, device);
                12050 cuCtxCreate_v4(out: Out, params: Ptr, flags: c_uint, device: c_int) => creates_context(out, device);
                12040 cuGreenCtxCreate(out: Out, resources: Ptr, device: c_int, flags: c_uint) => creates_green(out, device);
                12040 cuGreenCtxDestroy(green: Handle) => destroys_context(green);
                12040 cuCtxFromGreenCtx(out: Out, green: Handle) => queries_device(out, place::device_of(green).into());
                2000 cuCtxDestroy(context: Handle) => destroys_context(context);
                4000 cuCtxDestroy_v2(context: Handle) => destroys_context(context);
                4000 cuCtxSetCurrent(context: Handle) => sets_context(context);
                2000 cuCtxPushCurrent(context: Handle) => pushes_context(context);
                4000 cuCtxPushCurrent_v2(context: Handle) => pushes_context(context);
                2000 cuCtxPopCurrent(out: Out) => pops_context();
                4000 cuCtxPopCurrent_v2(out: Out) => pops_context();
                7000 cuDevicePrimaryCtxRetain(out: Out, device: c_int) => retains_primary(out, device);
                7000 cuDevicePrimaryCtxRelease(device: c_int) => releases_primary(device);
                11000 cuDevicePrimaryCtxRelease_v2(device: c_int) => releases_primary(device);
                7000 cuDevicePrimaryCtxReset(device: c_int) => resets(Some(device));
                11000 cuDevicePrimaryCtxReset_v2(device: c_int) => resets(Some(device));

                // memory. The oldest interfaces are from 32-bit days:
                // addresses and sizes of 32 bits.
                2000 cuMemAlloc(out: *mut u32, size: c_uint) => passes_old();
                2000 cuMemAllocPitch(out: *mut u32, pitch: *mut u32, width: c_uint, height: c_uint, element: c_uint) => passes_old();
                2000 cuMemFree(addr: u32) => passes_old();
                3020 cuMemGetInfo_v2(free: *mut usize, total: *mut usize) => own;
                3020 cuMemAlloc_v2(out: Out, size: usize) => allocates(What::Device, out, size, 0);
                3020 cuMemAllocPitch_v2(out: Out, pitch: *mut usize, width: usize, height: usize, element: c_uint)
                    => allocates_rows(out, pitch, height);
                6000 cuMemAllocManaged(out: Out, size: usize, flags: c_uint) => allocates(What::Managed, out, size, 0);
                3020 cuMemFree_v2(addr: Ptr) => frees(What::Device, addr as usize, 0);
                2000 cuArrayCreate(out: Out, descriptor: *const ArrayDescriptor<2, u32>)
                    => allocates_array(out, ArrayDescriptor::bytes(descriptor, 1));
                3020 cuArrayCreate_v2(out: Out, descriptor: *const ArrayDescriptor<2, u64>)
                    => allocates_array(out, ArrayDescriptor::bytes(descriptor, 1));
                2000 cuArray3DCreate(out: Out, descriptor: *const ArrayDescriptor<3, u32>)
                    => allocates_array(out, ArrayDescriptor::bytes(descriptor, 1));
                3020 cuArray3DCreate_v2(out: Out, descriptor: *const ArrayDescriptor<3, u64>)
                    => allocates_array(out, ArrayDescriptor::bytes(descriptor, 1));
                5000 cuMipmappedArrayCreate(out: Out, descriptor: *const ArrayDescriptor<3, u64>, levels: c_uint)
                    => allocates_array(out, ArrayDescriptor::bytes(descriptor, levels));
                2000 cuArrayDestroy(array: Handle) => frees(What::Array, array, 0);
                5000 cuMipmappedArrayDestroy(array: Handle) => frees(What::Array, array, 0);

                // memory in stream order
                11020 cuMemAllocAsync(out: Out, size: usize, stream: Handle) => allocates(What::Pool, out, size, stream);
                11020 cuMemAllocAsync_ptsz(out: Out, size: usize, stream: Handle) => allocates(What::Pool, out, size, stream);
                11020 cuMemAllocFromPoolAsync(out: Out, size: usize, pool: Handle, stream: Handle)
                    => allocates_from(out, size, pool, stream);
                11020 cuMemAllocFromPoolAsync_ptsz(out: Out, size: usize, pool: Handle, stream: Handle)
                    => allocates_from(out, size, pool, stream);
                11020 cuMemFreeAsync(addr: Ptr, stream: Handle) => frees(What::Pool, addr as usize, stream);
                11020 cuMemFreeAsync_ptsz(addr: Ptr, stream: Handle) => frees(What::Pool, addr as usize, stream);
                11020 cuMemPoolCreate(out: Out, properties: *const PoolProperties)
                    => creates_pool(out, PoolProperties::device(properties));
                11020 cuMemPoolImportFromShareableHandle(out: Out, handle: Ptr, kind: c_uint, flags: c_ulonglong)
                    => creates_pool(out, None);
                11020 cuMemPoolDestroy(pool: Handle) => destroys(What::MemoryPool, pool);
                11020 cuMemPoolImportPointer(out: Out, pool: Handle, data: Ptr) => allocates(What::View, out, 0, 0);
                11020 cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: Ptr) => queries_reserved(ReservedBy::Pool(pool), attribute, value);
                11020 cuDeviceGetDefaultMemPool(out: Out, device: c_int) => queries_device(out, device);
                11020 cuDeviceGetMemPool(out: Out, device: c_int) => queries_device(out, device);
                13000 cuMemGetDefaultMemPool(out: Out, location: *const Location, kind: c_int)
                    => queries_device(out, Location::device(location).unwrap_or(-1));
                13000 cuMemGetMemPool(out: Out, location: *const Location, kind: c_int)
                    => queries_device(out, Location::device(location).unwrap_or(-1));
                11040 cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Ptr)
                    => queries_reserved(ReservedBy::Graphs(device), attribute, value);

                // memory of the host
                2000 cuMemAllocHost(out: Out, size: c_uint) => allocates(What::Pinned, out, size as usize, 0);
                3020 cuMemAllocHost_v2(out: Out, size: usize) => allocates(What::Pinned, out, size, 0);
                2020 cuMemHostAlloc(out: Out, size: usize, flags: c_uint) => allocates(What::Pinned, out, size, 0);
                2000 cuMemFreeHost(addr: Ptr) => frees(What::Pinned, addr as usize, 0);
                4000 cuMemHostRegister(addr: Ptr, size: usize, flags: c_uint) => registers(addr, size);
                6050 cuMemHostRegister_v2(addr: Ptr, size: usize, flags: c_uint) => registers(addr, size);
                4000 cuMemHostUnregister(addr: Ptr) => frees(What::Registered, addr as usize, 0);

                // addresses and physical memory
                10020 cuMemAddressReserve(out: Out, size: usize, align: usize, addr: Ptr, flags: c_ulonglong) => own;
                10020 cuMemAddressFree(addr: Ptr, size: usize) => unreserves(addr as usize, size);
                10020 cuMemCreate(out: *mut u64, size: usize, properties: *const MemoryProperties, flags: c_ulonglong)
                    => creates_physical(out, size, properties);
                10020 cuMemRelease(handle: u64) => releases_physical(handle);
                11000 cuMemRetainAllocationHandle(out: *mut u64, addr: Ptr) => retains_physical(out);
                10020 cuMemImportFromShareableHandle(out: *mut u64, handle: Ptr, kind: c_uint) => names_physical(What::Imported, out);
                10020 cuMemMap(addr: Ptr, size: usize, offset: usize, handle: u64, flags: c_ulonglong) => own;
                10020 cuMemUnmap(addr: Ptr, size: usize) => own;
                10020 cuMemSetAccess(addr: Ptr, size: usize, access: *const c_void, count: usize) => own;
                12010 cuMulticastCreate(out: *mut u64, properties: *const c_void) => names_physical(What::Multicast, out);

                // memory of others
                4010 cuIpcOpenMemHandle(out: Out, handle: IpcHandle, flags: c_uint) => imports(out);
                11000 cuIpcOpenMemHandle_v2(out: Out, handle: IpcHandle, flags: c_uint) => imports(out);
                4010 cuIpcCloseMemHandle(addr: Ptr) => frees(What::Imported, addr as usize, 0);
                10000 cuImportExternalMemory(out: Out, descriptor: *const ExternalDescriptor)
                    => allocates(What::External, out, ExternalDescriptor::bytes(descriptor), 0);
                10000 cuDestroyExternalMemory(handle: Handle) => frees(What::External, handle, 0);
                10000 cuExternalMemoryGetMappedBuffer(out: Out, handle: Handle, buffer: *const BufferDescriptor)
                    => allocates(What::View, out, BufferDescriptor::bytes(buffer), 0);

                // streams, graphs, modules and libraries of kernels
                2000 cuStreamCreate(out: Out, flags: c_uint) => creates_stream(out);
                5050 cuStreamCreateWithPriority(out: Out, flags: c_uint, priority: c_int) => creates_stream(out);
                2000 cuStreamDestroy(stream: Handle) => destroys_stream(stream);
                4000 cuStreamDestroy_v2(stream: Handle) => destroys_stream(stream);
                10000 cuGraphInstantiate(out: Out, graph: Handle, node: Out, log: Ptr, size: usize) => creates(What::Executable, out);
                11000 cuGraphInstantiate_v2(out: Out, graph: Handle, node: Out, log: Ptr, size: usize) => creates(What::Executable, out);
                11040 cuGraphInstantiateWithFlags(out: Out, graph: Handle, flags: c_ulonglong) => creates(What::Executable, out);
                12000 cuGraphInstantiateWithParams(out: Out, graph: Handle, params: Ptr) => creates(What::Executable, out);
                12000 cuGraphInstantiateWithParams_ptsz(out: Out, graph: Handle, params: Ptr) => creates(What::Executable, out);
                10000 cuGraphExecDestroy(graph: Handle) => destroys(What::Executable, graph);
                11040 cuGraphAddMemAllocNode(out: Out, graph: Handle, after: Ptr, count: usize, node: *mut GraphAllocation)
                    => promises(node);
                11040 cuGraphAddMemFreeNode(out: Out, graph: Handle, after: Ptr, count: usize, addr: Ptr)
                    => frees(What::GraphNode, addr as usize, 0);
                12020 cuGraphAddNode(out: Out, graph: Handle, after: Ptr, count: usize, node: *mut GraphNode) => adds_node(node);
                12030 cuGraphAddNode_v2(out: Out, graph: Handle, after: Ptr, edges: Ptr, count: usize, node: *mut GraphNode)
                    => adds_node(node);
                2000 cuModuleLoad(out: Out, file: Ptr) => creates(What::Module, out);
                2000 cuModuleLoadData(out: Out, image: Ptr) => creates(What::Module, out);
                2010 cuModuleLoadDataEx(out: Out, image: Ptr, count: c_uint, options: Ptr, values: Ptr) => creates(What::Module, out);
                2000 cuModuleLoadFatBinary(out: Out, image: Ptr) => creates(What::Module, out);
                2000 cuModuleUnload(module: Handle) => destroys(What::Module, module);
                12000 cuLibraryLoadData(out: Out, code: Ptr, jit: Ptr, jit_values: Ptr, n: c_uint, options: Ptr, values: Ptr, m: c_uint)
                    => creates(What::Module, out);
                12000 cuLibraryLoadFromFile(out: Out, file: Ptr, jit: Ptr, jit_values: Ptr, n: c_uint, options: Ptr, values: Ptr, m: c_uint)
                    => creates(What::Module, out);
                12000 cuLibraryUnload(library: Handle) => destroys(What::Module, library);

                // functions by name
                11030 cuGetProcAddress(name: *const c_char, out: Out, version: c_int, flags: u64) => shows;
                12000 cuGetProcAddress_v2(name: *const c_char, out: Out, version: c_int, flags: u64, status: *mut c_int) => shows;
            }
        } }
    };
}
pub(crate) use driver_rows;

runtime_rows! { [cublas_rows nccl_rows driver_rows entry_points] {} }

/// How many rows there are, with row 0.
pub const ROWS: usize = Api::ALL.len();

impl Api {
    /// The row with this number, if there is one.
    pub fn from_number(n: usize) -> Option<Api> {
        Api::ALL.get(n).copied()
    }
}

/// The rows of the driver's functions.
pub fn of_driver() -> impl Iterator<Item = (Api, &'static EntryPoint)> {
    let rows = Api::ALL.iter().copied().zip(&ENTRY_POINTS);
    rows.filter(|(_, row)| row.tier == Tier::Driver)
}

/// The name of a row, as snapshots show it.
pub fn name(api: u16) -> &'static str {
    ENTRY_POINTS.get(usize::from(api)).map_or("unknown", |e| e.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rows_number_is_its_place() {
        assert_eq!(Api::ALL.len(), ENTRY_POINTS.len());
        for (n, row) in ENTRY_POINTS.iter().enumerate().skip(1) {
            let api = Api::from_number(n).expect("a row");
            assert_eq!((api as usize, format!("{api:?}").as_str()), (n, row.name));
        }
        assert_eq!(Api::from_number(ROWS), None);
    }
}

//! The one table of interposed entry points. Exports, handlers, look-ups and documentation come from it.
//!
//! A row is a function of NVIDIA's public headers, with its arguments and its *role* ([`crate::cuda::roles`]): what the call
//! does to memory, and which argument says what. A new door is one line here. Rows whose role is `own` have a
//! handler written by hand, in the module that the section names. A driver row begins with the version of CUDA in
//! which its interface appeared: `cuGetProcAddress` chooses by that.
//!
//! Each row makes a symbol that the loader finds before CUDA's own, because the library is preloaded. Behind it are
//! a few instructions: where the caller's calls go to CUDA ([`crate::cuda::routes`]), they put the address that the call will
//! return to and the real function's into the first two floating-point registers and jump to the row's handler. None of
//! CUDA's functions has a floating-point argument, so these registers are free, however many other arguments there are,
//! in registers or on the stack. So a handler is an ordinary Rust function that also knows who called, which is how
//! PyTorch's allocator is told from everybody else; no frame of ours is pushed in between, and the caller's stack stays
//! as it was. Until it is known that a call is CUDA's, no register that an argument may lie in is touched: a library's own
//! function may have the same name and any signature.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use memtrace_format::event::What;

use crate::cuda::contexts::Keeper;
use crate::cuda::records::{
    ArrayDescriptor, BufferDescriptor, ChannelFormat, Extent, ExternalDescriptor, GraphAllocation,
    GraphNode, IpcHandle, Location, MemoryProperties, PitchedPtr, PoolProperties,
};
use crate::cuda::routes::{DOORS, NOWHERE, ROUTES, Row, TARGETS, missing};
use crate::nccl::communicators::UniqueId;
use crate::record::door::Door;

/// A row of the table.
pub struct EntryPoint {
    /// The symbol.
    pub name: &'static str,
    /// The same for the loader.
    pub symbol: &'static CStr,
    /// Start of the file name of the library that has the real one.
    pub library: &'static str,
    /// The version of CUDA in which a driver function's interface appeared; 0 if that doesn't matter.
    pub since: u32,
    /// What our symbols and doors jump to.
    pub handler: Export,
    /// Our functions that look-ups give out, each for one real function ([`crate::cuda::routes::door_for`]).
    pub doors: [Export; DOORS],
    /// Whom the loader shows under the row's name: our symbol, or that of an interposer in front of us.
    pub exported: Export,
}

/// The address of one of our symbols.
#[derive(Clone, Copy)]
pub struct Export(pub *const ());

// SAFETY: the address of a function is the same in every thread.
unsafe impl Sync for Export {}

impl EntryPoint {
    /// The name under which `cuGetProcAddress` knows the function: without the suffixes of its interface.
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

/// An address in a register that no argument needs.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Address(f64);

impl Address {
    fn get(self) -> usize {
        self.0.to_bits() as usize
    }
}

/// `void *`, or a device address.
pub type Ptr = *mut c_void;
/// `void **`: where an allocation's address or an object's handle goes.
pub type Out = *mut *mut c_void;
/// A handle, of which only the value matters.
pub type Handle = usize;

/// One line of a row of [`ROUTES`]: is the caller in this library, then and after the function is read? See `Line`.
macro_rules! line {
    ($first:literal, $length:literal, $real:literal) => {
        concat!(
            "mov r11, qword ptr [rsp]\n",
            "sub r11, qword ptr [rip + {row} + {at} + ",
            $first,
            "]\n",
            "cmp r11, qword ptr [rip + {row} + {at} + ",
            $length,
            "]\n",
            "jae 2f\n",
            "mov r10, qword ptr [rip + {row} + {at} + ",
            $real,
            "]\n",
            "mov r11, qword ptr [rsp]\n",
            "sub r11, qword ptr [rip + {row} + {at} + ",
            $first,
            "]\n",
            "cmp r11, qword ptr [rip + {row} + {at} + ",
            $length,
            "]\n",
            "jae 2f\n",
            "movq xmm0, qword ptr [rsp]\n",
            "movq xmm1, r10\n",
            "jmp {handler}\n",
            "2:\n",
        )
    };
}

/// The first lines of a row of [`ROUTES`], one after the other; falls through where the caller is in none.
macro_rules! by_caller {
    () => {
        concat!(line!(0, 8, 16), line!(24, 32, 40), line!(48, 56, 64), line!(72, 80, 88))
    };
}

macro_rules! entry_points {
    ($( $library:literal $module:ident {
        $( $($since:literal)? $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) => $role:ident $( ( $($what:expr),* ) )? ; )*
    } )*) => {
        /// Numbers of the rows, as events carry them; 0 is no entry point.
        #[allow(non_camel_case_types, missing_docs, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Api { None = 0, $($( $name, )*)* }

        /// All rows, by number.
        pub static ENTRY_POINTS: &[EntryPoint] = &[
            EntryPoint {
                name: "none",
                symbol: c"none",
                library: "",
                since: 0,
                handler: Export(std::ptr::null()),
                doors: [Export(std::ptr::null()); DOORS],
                exported: Export(std::ptr::null()),
            },
            $($( EntryPoint {
                name: stringify!($name),
                symbol: match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(symbol) => symbol,
                    Err(_) => panic!("a name has no zero in it"),
                },
                library: $library,
                since: 0 $( + $since )?,
                handler: Export(handlers::$name as *const ()),
                doors: [
                    Export(doors::$name::<0> as *const ()),
                    Export(doors::$name::<1> as *const ()),
                    Export(doors::$name::<2> as *const ()),
                    Export(doors::$name::<3> as *const ()),
                ],
                exported: Export(exports::$name as *const ()),
            }, )*)*
        ];

        /// The exported symbols.
        pub mod exports {
            use super::*;
            $($(
                #[doc = concat!("`", stringify!($name), "`, recorded and passed on.")]
                ///
                /// # Safety
                /// As NVIDIA documents for the function of this name.
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                    core::arch::naked_asm!(
                        by_caller!(),
                        "mov r11d, {api}",
                        "jmp {unknown}",
                        row = sym ROUTES,
                        at = const Api::$name as usize * size_of::<Row>(),
                        api = const Api::$name as u32,
                        handler = sym super::handlers::$name,
                        unknown = sym crate::cuda::routes::unknown,
                    )
                }
            )*)*
        }

        /// What look-ups give out. Not the exported symbols: these may stand for an interposer in front of us, which may be
        /// the one that asks; and where they lead depends on who calls.
        mod doors {
            use super::*;
            $($(
                #[allow(non_snake_case)]
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $name<const DOOR: usize>() {
                    core::arch::naked_asm!(
                        "movq xmm0, qword ptr [rsp]",
                        "movq xmm1, qword ptr [rip + {targets} + {at}]",
                        "jmp {handler}",
                        targets = sym TARGETS,
                        at = const (Api::$name as usize * DOORS + DOOR) * size_of::<usize>(),
                        handler = sym super::handlers::$name,
                    )
                }
            )*)*
        }

        /// What the symbols and the doors jump to.
        mod handlers {
            use super::*;
            $($(
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub(super) unsafe extern "C-unwind" fn $name($($arg: $ty,)* caller: Address, real: Address) -> c_int {
                    let caller = crate::cuda::interposers::behind(caller.get());
                    let door = Door { api: Api::$name as u16, caller, real: real.get() };
                    let code = entry_points!(@do door $module $name ($($arg),*) $role $( ( $($what),* ) )?);
                    door.used();
                    code
                }
            )*)*
        }

        /// The real functions.
        pub mod real {
            use super::*;
            $($(
                #[doc = concat!("The real `", stringify!($name), "`.")]
                ///
                /// # Safety
                /// As NVIDIA documents for the function of this name.
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub unsafe fn $name(door: Door $(, $arg: $ty)*) -> c_int {
                    if door.real <= NOWHERE {
                        return missing(door.api);
                    }
                    // SAFETY: the address is that of CUDA's function of this name (`routes`), whose
                    // prototype NVIDIA's headers give as in this row; the arguments are the caller's own.
                    unsafe {
                        let f: unsafe extern "C-unwind" fn($($ty),*) -> c_int = std::mem::transmute(door.real);
                        f($($arg),*)
                    }
                }
            )*)*
        }
    };
    (@by runtime) => { crate::cuda::calls::of_runtime };
    (@by driver) => { crate::cuda::calls::of_driver };
    (@do $door:ident driver $name:ident ($($arg:ident),*) own) => {
        crate::cuda::calls::of_driver($door, || crate::cuda::driver::$name($door $(, $arg)*))
    };
    (@do $door:ident runtime $name:ident ($($arg:ident),*) own) => {
        crate::cuda::runtime::$name($door $(, $arg)*)
    };
    (@do $door:ident cublas $name:ident ($($arg:ident),*) $role:ident ( $($what:expr),* )) => {
        // SAFETY: the arguments are the caller's own, passed on unchanged.
        crate::pytorch::workspaces::$role($door $(, $what)*, || unsafe { real::$name($door $(, $arg)*) })
    };
    (@do $door:ident nccl $name:ident ($($arg:ident),*) $role:ident ( $($what:expr),* )) => {
        // SAFETY: the arguments are the caller's own: passed on unchanged, and read as the real function does.
        unsafe { crate::nccl::communicators::$role($door $(, $what)*, || real::$name($door $(, $arg)*)) }
    };
    (@do $door:ident $module:ident $name:ident ($($arg:ident),*) $role:ident ( $($what:expr),* )) => {
        // SAFETY: the arguments are the caller's own: passed on unchanged, and read as the real function does.
        unsafe {
            let _under_way = crate::cuda::contexts::UnderWay::begin();
            entry_points!(@by $module)($door, || {
                crate::cuda::roles::$role($door $(, $what)*, || real::$name($door $(, $arg)*))
            })
        }
    };
}

entry_points! {
    "libcudart.so" runtime {
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
        cudaMemPoolGetAttribute(pool: Handle, attribute: c_int, value: Ptr) => tells_reserved(Keeper::Pool(pool), attribute, value);
        cudaDeviceGetDefaultMemPool(out: Out, device: c_int) => tells_pool(out, device);
        cudaDeviceGetMemPool(out: Out, device: c_int) => tells_pool(out, device);
        cudaDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Ptr)
            => tells_reserved(Keeper::Graphs(device), attribute, value);

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
        cudaGetDriverEntryPoint(name: *const c_char, out: Out, flags: c_ulonglong, status: *mut c_int) => own;
        cudaGetDriverEntryPoint_ptsz(name: *const c_char, out: Out, flags: c_ulonglong, status: *mut c_int) => own;
        cudaGetDriverEntryPointByVersion(name: *const c_char, out: Out, version: c_uint, flags: c_ulonglong, status: *mut c_int) => own;
        cudaGetDriverEntryPointByVersion_ptsz(name: *const c_char, out: Out, version: c_uint, flags: c_ulonglong, status: *mut c_int) => own;
    }
    // cuBLAS itself, which is told of the workspaces that PyTorch takes for it.
    "libcublas.so" cublas {
        cublasSetWorkspace_v2(of: Handle, workspace: Ptr, size: usize) => takes_workspace(workspace);
    }
    "libcublasLt.so" cublas {
        cublasLtMatmul(
            of: Handle, computation: Ptr, alpha: Ptr, a: Ptr, a_layout: Ptr, b: Ptr, b_layout: Ptr, beta: Ptr, c: Ptr, c_layout: Ptr,
            d: Ptr, d_layout: Ptr, algorithm: Ptr, workspace: Ptr, size: usize, stream: Handle,
        ) => takes_workspace(workspace);
    }
    // NCCL itself, whose calls say for which communicator its memory is.
    "libnccl.so" nccl {
        ncclCommInitRank(out: Out, ranks: c_int, id: UniqueId, rank: c_int) => makes(out, ranks, rank);
        ncclCommInitRankConfig(out: Out, ranks: c_int, id: UniqueId, rank: c_int, config: Ptr) => makes(out, ranks, rank);
        ncclCommInitRankScalable(out: Out, ranks: c_int, rank: c_int, ids: c_int, id: Ptr, config: Ptr) => makes(out, ranks, rank);
        ncclCommInitAll(out: Out, count: c_int, devices: *const c_int) => makes_all(out, count);
        ncclCommSplit(of: Handle, color: c_int, key: c_int, out: Out, config: Ptr) => splits(out);
        ncclCommFinalize(of: Handle) => works(of);
        ncclCommDestroy(of: Handle) => ends(of);
        ncclCommAbort(of: Handle) => ends(of);
        ncclGroupStart() => starts_group();
        ncclGroupEnd() => ends_group();
        ncclAllReduce(from: *const c_void, to: Ptr, count: usize, kind: c_int, op: c_int, of: Handle, stream: Handle) => sends(of);
        ncclReduce(from: *const c_void, to: Ptr, count: usize, kind: c_int, op: c_int, root: c_int, of: Handle, stream: Handle) => sends(of);
        ncclReduceScatter(from: *const c_void, to: Ptr, count: usize, kind: c_int, op: c_int, of: Handle, stream: Handle) => sends(of);
        ncclAllGather(from: *const c_void, to: Ptr, count: usize, kind: c_int, of: Handle, stream: Handle) => sends(of);
        ncclBroadcast(from: *const c_void, to: Ptr, count: usize, kind: c_int, root: c_int, of: Handle, stream: Handle) => sends(of);
        ncclBcast(at: Ptr, count: usize, kind: c_int, root: c_int, of: Handle, stream: Handle) => sends(of);
        ncclSend(from: *const c_void, count: usize, kind: c_int, peer: c_int, of: Handle, stream: Handle) => sends(of);
        ncclRecv(to: Ptr, count: usize, kind: c_int, peer: c_int, of: Handle, stream: Handle) => sends(of);
    }
    "libcuda.so" driver {
        // contexts
        2000 cuCtxCreate(out: Out, flags: c_uint, device: c_int) => creates_context(out, device);
        3020 cuCtxCreate_v2(out: Out, flags: c_uint, device: c_int) => creates_context(out, device);
        11040 cuCtxCreate_v3(out: Out, affinity: Ptr, count: c_int, flags: c_uint, device: c_int) => creates_context(out, device);
        12050 cuCtxCreate_v4(out: Out, params: Ptr, flags: c_uint, device: c_int) => creates_context(out, device);
        12040 cuGreenCtxCreate(out: Out, resources: Ptr, device: c_int, flags: c_uint) => creates_green(out, device);
        12040 cuGreenCtxDestroy(green: Handle) => destroys_context(green);
        12040 cuCtxFromGreenCtx(out: Out, green: Handle) => shows_green(out, green);
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

        // memory. The oldest interfaces are from 32-bit days: addresses and sizes of 32 bits.
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
        11020 cuMemPoolGetAttribute(pool: Handle, attribute: c_int, value: Ptr) => tells_reserved(Keeper::Pool(pool), attribute, value);
        11020 cuDeviceGetDefaultMemPool(out: Out, device: c_int) => tells_pool(out, device);
        11020 cuDeviceGetMemPool(out: Out, device: c_int) => tells_pool(out, device);
        13000 cuMemGetDefaultMemPool(out: Out, location: *const Location, kind: c_int)
            => tells_pool(out, Location::device(location).unwrap_or(-1));
        13000 cuMemGetMemPool(out: Out, location: *const Location, kind: c_int)
            => tells_pool(out, Location::device(location).unwrap_or(-1));
        11040 cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_int, value: Ptr)
            => tells_reserved(Keeper::Graphs(device), attribute, value);

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
        11030 cuGetProcAddress(name: *const c_char, out: Out, version: c_int, flags: u64) => own;
        12000 cuGetProcAddress_v2(name: *const c_char, out: Out, version: c_int, flags: u64, status: *mut c_int) => own;
    }
}

/// How many rows there are, with row 0.
pub const ROWS: usize = Api::cuGetProcAddress_v2 as usize + 1;

impl Api {
    /// The row with this number, if there is one.
    pub fn from_number(n: usize) -> Option<Api> {
        // SAFETY: the numbers of the rows are 0 to ROWS - 1, without a gap, and the enumeration is a u16.
        (n < ROWS).then(|| unsafe { std::mem::transmute::<u16, Api>(n as u16) })
    }
}

/// The name of a row, as snapshots show it.
pub fn name(api: u16) -> &'static str {
    ENTRY_POINTS.get(usize::from(api)).map_or("unknown", |e| e.name)
}

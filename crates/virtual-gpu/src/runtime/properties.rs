//! `cudaDeviceProp`, in the layouts of CUDA 12 and 13.
//!
//! The record is a list of attributes under other names, plus the device's name, size and ids.
//! CUDA 12 programs ask for `cudaGetDeviceProperties_v2`, CUDA 13 programs for the plain name, so
//! the symbol says which layout is meant.

use super::{Code, ordinal};
#[allow(clippy::wildcard_imports, reason = "most of one enumeration")]
use crate::constants::*;
use crate::gpu::attributes::attribute;
use crate::gpu::boundary::{Out, runtime};
use crate::gpu::config::Gpu;
use crate::gpu::{self, Error, Result};
use crate::layout::{self, Field};

/// Writes numbers into a field, whose size says how wide each is.
fn put(record: Out<u8>, field: Field, gpu: &Gpu, numbers: &[i32]) -> Result {
    let width = field.size / numbers.len();
    for (i, &number) in numbers.iter().enumerate() {
        let value = attribute(gpu, number).ok_or(Error::INVALID_VALUE)?;
        let place = field.offset + i * width;
        match width {
            8 => record.at::<u64>(place).set(value as u64)?,
            4 => record.at::<i32>(place).set(value)?,
            _ => return Err(Error::UNKNOWN),
        }
    }
    Ok(())
}

macro_rules! attributes {
    ($toolkit:ident, $record:ident, $gpu:ident; $($field:ident: $($number:ident),+;)*) => {
        $(put($record, layout::$toolkit::cudaDeviceProp::$field, $gpu, &[$($number),+])?;)*
    };
}

/// What both layouts have.
macro_rules! common {
    ($toolkit:ident, $record:ident, $gpu:ident) => {
        use layout::$toolkit::cudaDeviceProp as fields;
        $record.clear(fields::SIZE)?;
        let name = $gpu.profile.name.as_ref();
        $record.at(fields::name.offset).text(name, fields::name.size)?;
        $record.at(fields::uuid.offset).set($gpu.uuid())?;
        $record.at(fields::totalGlobalMem.offset).set($gpu.total())?;
        attributes! { $toolkit, $record, $gpu;
            sharedMemPerBlock: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK;
            regsPerBlock: CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK;
            warpSize: CU_DEVICE_ATTRIBUTE_WARP_SIZE;
            memPitch: CU_DEVICE_ATTRIBUTE_MAX_PITCH;
            maxThreadsPerBlock: CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
            maxThreadsDim: CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
                CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z;
            maxGridSize: CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
                CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z;
            totalConstMem: CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY;
            major: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
            minor: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
            textureAlignment: CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT;
            texturePitchAlignment: CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT;
            multiProcessorCount: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            integrated: CU_DEVICE_ATTRIBUTE_INTEGRATED;
            canMapHostMemory: CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY;
            maxTexture1D: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH;
            maxTexture1DMipmap: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH;
            maxTexture2D: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT;
            maxTexture2DMipmap: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT;
            maxTexture2DLinear: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH;
            maxTexture2DGather: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT;
            maxTexture3D: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH;
            maxTexture3DAlt: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE;
            maxTextureCubemap: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH;
            maxTexture1DLayered: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS;
            maxTexture2DLayered: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS;
            maxTextureCubemapLayered: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS;
            maxSurface1D: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH;
            maxSurface2D: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT;
            maxSurface3D: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH;
            maxSurface1DLayered: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS;
            maxSurface2DLayered: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS;
            maxSurfaceCubemap: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH;
            maxSurfaceCubemapLayered: CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH,
                CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS;
            surfaceAlignment: CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT;
            concurrentKernels: CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS;
            ECCEnabled: CU_DEVICE_ATTRIBUTE_ECC_ENABLED;
            pciBusID: CU_DEVICE_ATTRIBUTE_PCI_BUS_ID;
            pciDeviceID: CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID;
            pciDomainID: CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID;
            tccDriver: CU_DEVICE_ATTRIBUTE_TCC_DRIVER;
            asyncEngineCount: CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
            unifiedAddressing: CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING;
            memoryBusWidth: CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH;
            l2CacheSize: CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
            persistingL2CacheMaxSize: CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE;
            maxThreadsPerMultiProcessor: CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR;
            streamPrioritiesSupported: CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED;
            globalL1CacheSupported: CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED;
            localL1CacheSupported: CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED;
            sharedMemPerMultiprocessor: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR;
            regsPerMultiprocessor: CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR;
            managedMemory: CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY;
            isMultiGpuBoard: CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD;
            multiGpuBoardGroupID: CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID;
            hostNativeAtomicSupported: CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED;
            pageableMemoryAccess: CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS;
            concurrentManagedAccess: CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
            computePreemptionSupported: CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED;
            canUseHostPointerForRegisteredMem:
                CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
            cooperativeLaunch: CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH;
            sharedMemPerBlockOptin: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
            pageableMemoryAccessUsesHostPageTables:
                CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
            directManagedMemAccessFromHost:
                CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST;
            maxBlocksPerMultiProcessor: CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR;
            accessPolicyMaxWindowSize: CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE;
            reservedSharedMemPerBlock: CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK;
            hostRegisterSupported: CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED;
            sparseCudaArraySupported: CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED;
            hostRegisterReadOnlySupported: CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
            timelineSemaphoreInteropSupported:
                CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED;
            memoryPoolsSupported: CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
            gpuDirectRDMASupported: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED;
            gpuDirectRDMAFlushWritesOptions:
                CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS;
            gpuDirectRDMAWritesOrdering: CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
            memoryPoolSupportedHandleTypes: CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES;
            deferredMappingCudaArraySupported:
                CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED;
            ipcEventSupported: CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED;
            clusterLaunch: CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH;
            unifiedFunctionPointers: CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS;
        }
    };
}

fn for_cuda12(record: Out<u8>, gpu: &Gpu) -> Result {
    common!(cuda12, record, gpu);
    attributes! { cuda12, record, gpu;
        clockRate: CU_DEVICE_ATTRIBUTE_CLOCK_RATE;
        computeMode: CU_DEVICE_ATTRIBUTE_COMPUTE_MODE;
        cooperativeMultiDeviceLaunch: CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH;
        deviceOverlap: CU_DEVICE_ATTRIBUTE_GPU_OVERLAP;
        kernelExecTimeoutEnabled: CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT;
        maxTexture1DLinear: CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH;
        memoryClockRate: CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE;
        singleToDoublePrecisionPerfRatio:
            CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO;
    }
    Ok(())
}

fn for_cuda13(record: Out<u8>, gpu: &Gpu) -> Result {
    common!(cuda13, record, gpu);
    attributes! { cuda13, record, gpu;
        deviceNumaConfig: CU_DEVICE_ATTRIBUTE_NUMA_CONFIG;
        deviceNumaId: CU_DEVICE_ATTRIBUTE_NUMA_ID;
        mpsEnabled: CU_DEVICE_ATTRIBUTE_MPS_ENABLED;
        hostNumaId: CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID;
        gpuPciDeviceID: CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID;
        gpuPciSubsystemID: CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID;
        hostNumaMultinodeIpcSupported: CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED;
    }
    Ok(())
}

/// In a CUDA 12 program this name means the layout of CUDA 11, which no program of ours asks for:
/// the headers of CUDA 12 make it `_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceProperties(record: Out<u8>, device: i32) -> Code {
    runtime(|| for_cuda13(record, gpu::device(ordinal(device)?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetDeviceProperties_v2(record: Out<u8>, device: i32) -> Code {
    runtime(|| for_cuda12(record, gpu::device(ordinal(device)?)?))
}

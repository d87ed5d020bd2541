//! The same records by others, who made them from NVIDIA's headers.

use cudarc::{driver::sys as driver, runtime::sys as runtime};
use memtrace_layouts::same_layout;

use super::{
    ArrayDescriptor, BufferDescriptor, ChannelFormat, Extent, ExternalDescriptor, GraphAllocation,
    GraphNode, IpcHandle, Location, MemoryProperties, PitchedPtr, PoolProperties,
};

same_layout!(IpcHandle = [driver::CUipcMemHandle, runtime::cudaIpcMemHandle_t] { 0: reserved });
same_layout!(Extent = runtime::cudaExtent { width: width, height: height, depth: depth });
same_layout!(PitchedPtr = runtime::cudaPitchedPtr { addr: ptr, pitch: pitch, x: xsize, y: ysize });
same_layout!(ChannelFormat => runtime::cudaChannelFormatDesc { bits: x .. w });
same_layout!(ArrayDescriptor<2, u64> = driver::CUDA_ARRAY_DESCRIPTOR {
    extent: Width .. Height,
    format: Format,
    channels: NumChannels,
});
same_layout!(ArrayDescriptor<3, u64> => driver::CUDA_ARRAY3D_DESCRIPTOR {
    extent: Width .. Depth,
    format: Format,
    channels: NumChannels,
});
same_layout!(Location = [driver::CUmemLocation, runtime::cudaMemLocation] { kind: type_, id: id });
same_layout!(PoolProperties => [driver::CUmemPoolProps, runtime::cudaMemPoolProps] {
    kind: allocType,
    handles: handleTypes,
    location: location,
});
same_layout!(MemoryProperties => driver::CUmemAllocationProp {
    kind: type_,
    handles: requestedHandleTypes,
    location: location,
});
same_layout!(GraphAllocation = [driver::CUDA_MEM_ALLOC_NODE_PARAMS_v1, driver::CUDA_MEM_ALLOC_NODE_PARAMS_v2, runtime::cudaMemAllocNodeParams, runtime::cudaMemAllocNodeParamsV2] {
    pool: poolProps.allocType..poolProps.location,
    rest_of_pool: poolProps.win32SecurityAttributes..poolProps.reserved,
    access: accessDescs,
    access_count: accessDescCount,
    size: bytesize,
    addr: dptr,
});
// The parameters are one of a union's, whose size is that of the largest.
same_layout!(GraphNode => [driver::CUgraphNodeParams, runtime::cudaGraphNodeParams] {
    kind: type_,
    reserved: reserved0,
    params: _,
});
const _: () = {
    use std::mem::offset_of;
    let at = offset_of!(GraphNode, params);
    assert!(at == offset_of!(driver::CUgraphNodeParams, __bindgen_anon_1));
    assert!(at == offset_of!(runtime::cudaGraphNodeParams, __bindgen_anon_1));
};
same_layout!(ExternalDescriptor => [driver::CUDA_EXTERNAL_MEMORY_HANDLE_DESC, runtime::cudaExternalMemoryHandleDesc] {
    kind: type_,
    handle: handle,
    size: size,
});
same_layout!(BufferDescriptor => [driver::CUDA_EXTERNAL_MEMORY_BUFFER_DESC, runtime::cudaExternalMemoryBufferDesc] {
    offset: offset,
    size: size,
});

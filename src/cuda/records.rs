//! Records of NVIDIA's public headers, as far as a hook reads them: where
//! memory is to lie, and how much of it.
//!
//! Fields that nobody here reads are left out where they come last. Sizes that overflow are capped,
//! not wrapped: the real call will have failed.

use std::ffi::{c_int, c_uint, c_void};

/// `void *`, or a device address.
pub type Ptr = *mut c_void;
/// `void **`: where an allocation's address or an object's handle goes.
pub type Out = *mut *mut c_void;
/// A handle, of which only the value matters.
pub type Handle = usize;

/// `cudaIpcMemHandle_t`, `CUipcMemHandle`: 64 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u8; 64]);

/// `cudaExtent`: elements, or bytes in the first place.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Extent {
    /// Elements (or bytes) of a row.
    pub width: usize,
    /// Rows; 0 for one dimension.
    pub height: usize,
    /// Slices or layers; 0 for two dimensions.
    pub depth: usize,
}

/// `cudaPitchedPtr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PitchedPtr {
    /// The address.
    pub addr: usize,
    /// From one row to the next, bytes.
    pub pitch: usize,
    x: usize,
    y: usize,
}

/// `cudaChannelFormatDesc`: bits of each channel.
#[repr(C)]
pub struct ChannelFormat {
    bits: [c_int; 4],
}

/// `CUDA_ARRAY_DESCRIPTOR` and `CUDA_ARRAY3D_DESCRIPTOR`, of the old and the new interface.
#[repr(C)]
pub struct ArrayDescriptor<const DIMENSIONS: usize, T> {
    extent: [T; DIMENSIONS],
    format: c_int,
    channels: c_uint,
}

/// `CUmemLocation`, `cudaMemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemPoolProps`, `cudaMemPoolProps`: their beginning.
#[repr(C)]
pub struct PoolProperties {
    kind: c_int,
    handles: c_int,
    location: Location,
}

/// `CUmemAllocationProp`: its beginning, which is that of pools.
pub type MemoryProperties = PoolProperties;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`, `cudaMemAllocNodeParams`.
#[repr(C)]
pub struct GraphAllocation {
    pool: PoolProperties,
    rest_of_pool: [u64; 9],
    access: usize,
    access_count: usize,
    /// Bytes.
    pub size: usize,
    /// The address that the memory will have.
    pub addr: usize,
}

/// `CUgraphNodeParams`: its beginning.
#[repr(C)]
pub struct GraphNode {
    kind: c_int,
    reserved: [c_int; 3],
    params: GraphAllocation,
}

/// What a node of a graph does to memory.
pub enum NodeMemory<'a> {
    /// It will allocate.
    Allocation(&'a GraphAllocation),
    /// It will free what is at this address.
    Free(usize),
}

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`, `cudaExternalMemoryHandleDesc`: their beginning.
#[repr(C)]
pub struct ExternalDescriptor {
    kind: c_int,
    handle: [u64; 2],
    size: u64,
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`, `cudaExternalMemoryBufferDesc`: their beginning.
#[repr(C)]
pub struct BufferDescriptor {
    offset: u64,
    size: u64,
}

#[cfg(test)]
mod layouts;

/// Elements of all levels, the first of which has this extent. Each further
/// level has half of it in each dimension.
fn elements(extent: Extent, levels: c_uint) -> usize {
    let mut sizes = [extent.width, extent.height, extent.depth];
    let mut sum = 0_usize;
    for _ in 0..levels.min(usize::BITS) {
        let product = |all: usize, n: &usize| all.saturating_mul((*n).max(1));
        sum = sum.saturating_add(sizes.iter().fold(1, product));
        sizes = sizes.map(|n| n / 2);
    }
    sum
}

impl ChannelFormat {
    /// Bytes of the elements of an array.
    ///
    /// # Safety
    /// The pointer is null or the program's.
    pub unsafe fn bytes(format: *const ChannelFormat, extent: Extent, levels: c_uint) -> usize {
        // SAFETY: promised by the caller.
        let Some(format) = (unsafe { format.as_ref() }) else { return 0 };
        let bits: usize = format.bits.iter().map(|b| usize::try_from(*b).unwrap_or(0)).sum();
        elements(extent, levels).saturating_mul(bits / 8)
    }
}

/// Bytes of one channel; 0 for formats whose elements have no whole size of
/// their own (compressed and planar ones).
fn channel_bytes(format: c_int) -> usize {
    match format {
        0x01 | 0x08 | 0xc0..=0xc2 | 0xc6..=0xc8 => 1,
        0x02 | 0x09 | 0x10 | 0xc3..=0xc5 | 0xc9..=0xcb => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => 0,
    }
}

impl<const DIMENSIONS: usize, T: Copy + Into<u64>> ArrayDescriptor<DIMENSIONS, T> {
    /// Bytes of the elements of an array.
    ///
    /// # Safety
    /// The pointer is null or the program's.
    pub unsafe fn bytes(descriptor: *const Self, levels: c_uint) -> usize {
        // SAFETY: promised by the caller.
        let Some(descriptor) = (unsafe { descriptor.as_ref() }) else { return 0 };
        let at = |i: usize| descriptor.extent.get(i).map_or(0, |n| (*n).into() as usize);
        let extent = Extent { width: at(0), height: at(1), depth: at(2) };
        let element = channel_bytes(descriptor.format).saturating_mul(descriptor.channels as usize);
        elements(extent, levels).saturating_mul(element)
    }
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`, and the same of the runtime.
const ON_DEVICE: c_int = 1;

impl Location {
    /// The device; none if it is the host.
    ///
    /// # Safety
    /// The pointer is null or the program's.
    pub unsafe fn device(location: *const Location) -> Option<c_int> {
        // SAFETY: promised by the caller.
        unsafe { location.as_ref() }.filter(|l| l.kind == ON_DEVICE).map(|l| l.id)
    }
}

impl PoolProperties {
    /// The device; none if it is the host.
    ///
    /// # Safety
    /// The pointer is null or the program's.
    pub unsafe fn device(properties: *const PoolProperties) -> Option<c_int> {
        // SAFETY: promised by the caller.
        unsafe { Location::device(&raw const properties.as_ref()?.location) }
    }
}

impl GraphAllocation {
    /// The device; none if it is the host.
    pub fn device(&self) -> Option<c_int> {
        // SAFETY: a reference of ours.
        unsafe { PoolProperties::device(&raw const self.pool) }
    }
}

impl GraphNode {
    /// What the node does to memory, if anything.
    ///
    /// # Safety
    /// The pointer is null or the program's, and lives as long as the answer.
    pub unsafe fn memory<'a>(node: *const GraphNode) -> Option<NodeMemory<'a>> {
        const ALLOCATION: c_int = 10; // CU_GRAPH_NODE_TYPE_MEM_ALLOC
        const FREE: c_int = 11; // CU_GRAPH_NODE_TYPE_MEM_FREE
        // SAFETY: promised by the caller. The record is a union behind its
        // kind; a free node's address comes first.
        unsafe {
            let node = node.as_ref()?;
            match node.kind {
                ALLOCATION => Some(NodeMemory::Allocation(&node.params)),
                FREE => Some(NodeMemory::Free((&raw const node.params).cast::<usize>().read())),
                _ => None,
            }
        }
    }
}

impl ExternalDescriptor {
    /// Bytes.
    ///
    /// # Safety
    /// The pointer is null or the program's.
    pub unsafe fn bytes(descriptor: *const ExternalDescriptor) -> usize {
        // SAFETY: promised by the caller.
        unsafe { descriptor.as_ref() }.map_or(0, |d| d.size as usize)
    }
}

impl BufferDescriptor {
    /// Bytes.
    ///
    /// # Safety
    /// The pointer is null or the program's.
    pub unsafe fn bytes(descriptor: *const BufferDescriptor) -> usize {
        // SAFETY: promised by the caller.
        unsafe { descriptor.as_ref() }.map_or(0, |d| d.size as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_arrays_are_counted_in_each_dimension_and_level() {
        let extent = |width, height, depth| Extent { width, height, depth };
        assert_eq!(elements(extent(10, 0, 0), 1), 10);
        assert_eq!(elements(extent(10, 3, 2), 1), 60);
        assert_eq!(elements(extent(8, 4, 0), 4), 32 + 8 + 2 + 1);
        assert_eq!(elements(extent(usize::MAX, 3, 0), 2), usize::MAX, "capped");
        let format = ChannelFormat { bits: [32, 32, 0, 0] };
        // SAFETY: a reference of ours.
        assert_eq!(unsafe { ChannelFormat::bytes(&raw const format, extent(10, 3, 0), 1) }, 240);
        let half4 = ArrayDescriptor { extent: [16_u64, 2], format: 0x10, channels: 4 };
        // SAFETY: a reference of ours.
        assert_eq!(unsafe { ArrayDescriptor::bytes(&raw const half4, 1) }, 256);
        // SAFETY: null is allowed.
        assert_eq!(unsafe { ChannelFormat::bytes(std::ptr::null(), extent(1, 1, 1), 1) }, 0);
    }
}

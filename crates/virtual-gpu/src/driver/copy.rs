//! Copies.

use super::{Code, current};
use crate::gpu::array;
use crate::gpu::boundary::{Api, In, driver};
use crate::gpu::call::copy::{self, at_once};
use crate::gpu::context;
use crate::gpu::work::{Action, Rows, Shape};
use crate::gpu::{Error, Result};
use crate::layout::all;

/// `CU_MEMORYTYPE_HOST`, `…_DEVICE`, `…_ARRAY`, `…_UNIFIED`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Side2D {
    x: u64,
    y: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: u64,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy2D {
    src: Side2D,
    dst: Side2D,
    width: u64,
    height: u64,
}

/// One side of `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`, which has a context where the former has
/// nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Side3D {
    x: u64,
    y: u64,
    z: u64,
    level: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    context: u64,
    pitch: u64,
    height: u64,
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Copy3D {
    src: Side3D,
    dst: Side3D,
    width: u64,
    height: u64,
    depth: u64,
}

const _: () = {
    assert!(size_of::<Copy2D>() == all::CUDA_MEMCPY2D_st::SIZE);
    assert!(size_of::<Copy3D>() == all::CUDA_MEMCPY3D_st::SIZE);
    assert!(core::mem::offset_of!(Side3D, pitch) == all::CUDA_MEMCPY3D_st::srcPitch.offset);
};

impl Side3D {
    fn place(&self, shape: Shape) -> Result<Rows> {
        let base = match self.kind {
            HOST => self.host,
            DEVICE | UNIFIED => self.device,
            ARRAY => {
                let array = array::find(self.array)?;
                let offset = [self.x, self.y, self.z];
                array.check(offset, shape)?;
                return array.place(offset);
            }
            _ => return Err(Error::INVALID_VALUE),
        };
        // A pitch of 0 means that rows follow each other.
        let pitch = if self.pitch == 0 { shape.width } else { self.pitch };
        let slice = pitch * if self.height == 0 { shape.height } else { self.height };
        let addr = base + self.x + self.y * pitch + self.z * slice;
        Ok(Rows { addr, pitch, slice })
    }
}

impl Side2D {
    fn with_depth(&self) -> Side3D {
        let Side2D { x, y, kind, host, device, array, pitch } = *self;
        Side3D { x, y, z: 0, level: 0, kind, host, device, array, context: 0, pitch, height: 0 }
    }
}

impl Copy2D {
    fn action(&self) -> Result<Action> {
        let shape = Shape::plane(self.width, self.height);
        let dst = self.dst.with_depth().place(shape)?;
        Ok(Action::Copy { dst, src: self.src.with_depth().place(shape)?, shape })
    }
}

impl Copy3D {
    pub(crate) fn action(&self) -> Result<Action> {
        let shape = Shape { width: self.width, height: self.height, depth: self.depth };
        Ok(Action::Copy { dst: self.dst.place(shape)?, src: self.src.place(shape)?, shape })
    }
}

/// A copy that the host waits for.
fn now(action: impl FnOnce() -> Result<Action>) -> Code {
    driver(|| {
        current()?;
        at_once(&action()?)
    })
}

/// A copy in stream order.
fn later(stream: u64, action: impl FnOnce() -> Result<Action>) -> Code {
    driver(|| {
        current()?;
        copy::later(Api::Driver, stream, action()?)
    })
}

/// A copy in a single row.
fn line(dst: u64, src: u64, size: u64) -> impl FnOnce() -> Result<Action> {
    move || Ok(Action::copy(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy(dst: u64, src: u64, size: u64) -> Code {
    now(line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(dst: u64, src: u64, size: u64, stream: u64) -> Code {
    later(stream, line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(dst: u64, src: u64, size: u64) -> Code {
    now(line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(dst: u64, src: u64, size: u64, stream: u64) -> Code {
    later(stream, line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(dst: u64, src: u64, size: u64) -> Code {
    now(line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(dst: u64, src: u64, size: u64, stream: u64) -> Code {
    later(stream, line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(dst: u64, src: u64, size: u64) -> Code {
    now(line(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(dst: u64, src: u64, size: u64, stream: u64) -> Code {
    later(stream, line(dst, src, size))
}

/// A copy between two contexts, which must exist.
fn between(dst: (u64, u64), src: (u64, u64), size: u64) -> impl FnOnce() -> Result<Action> {
    move || {
        for context in [dst.1, src.1] {
            context::find(context)?.ok_or(Error::INVALID_CONTEXT)?;
        }
        Ok(Action::copy(dst.0, src.0, size))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeer(dst: u64, to: u64, src: u64, from: u64, size: u64) -> Code {
    now(between((dst, to), (src, from), size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    dst: u64,
    to: u64,
    src: u64,
    from: u64,
    size: u64,
    stream: u64,
) -> Code {
    later(stream, between((dst, to), (src, from), size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy2D_v2(copy: In<Copy2D>) -> Code {
    now(|| copy.get()?.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy2DUnaligned_v2(copy: In<Copy2D>) -> Code {
    now(|| copy.get()?.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy2DAsync_v2(copy: In<Copy2D>, stream: u64) -> Code {
    later(stream, || copy.get()?.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy3D_v2(copy: In<Copy3D>) -> Code {
    now(|| copy.get()?.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy3DAsync_v2(copy: In<Copy3D>, stream: u64) -> Code {
    later(stream, || copy.get()?.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy3DPeer(copy: In<Copy3D>) -> Code {
    now(|| copy.get()?.action())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy3DPeerAsync(copy: In<Copy3D>, stream: u64) -> Code {
    later(stream, || copy.get()?.action())
}

/// Copies in stream order, one after the other.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyBatchAsync_v2(
    dsts: In<u64>,
    srcs: In<u64>,
    sizes: In<u64>,
    count: usize,
    _attributes: u64,
    _attribute_starts: u64,
    _attribute_count: usize,
    stream: u64,
) -> Code {
    driver(|| copy::batch(Api::Driver, [dsts, srcs, sizes], count, stream))
}

#[cfg(test)]
mod layouts {
    use cudarc::driver::sys;
    use memtrace_layouts::same_layout;

    use super::{Copy2D, Copy3D, Side2D, Side3D};

    same_layout!(Side2D => sys::CUDA_MEMCPY2D {
        x: srcXInBytes,
        y: srcY,
        kind: srcMemoryType,
        host: srcHost,
        device: srcDevice,
        array: srcArray,
        pitch: srcPitch,
    });
    same_layout!(
        Copy2D = sys::CUDA_MEMCPY2D {
            src: srcXInBytes..srcPitch,
            dst: dstXInBytes..dstPitch,
            width: WidthInBytes,
            height: Height,
        }
    );
    same_layout!(Side3D => sys::CUDA_MEMCPY3D {
        x: srcXInBytes,
        y: srcY,
        z: srcZ,
        level: srcLOD,
        kind: srcMemoryType,
        host: srcHost,
        device: srcDevice,
        array: srcArray,
        context: reserved0,
        pitch: srcPitch,
        height: srcHeight,
    });
    same_layout!(Side3D => sys::CUDA_MEMCPY3D_PEER {
        x: srcXInBytes,
        y: srcY,
        z: srcZ,
        level: srcLOD,
        kind: srcMemoryType,
        host: srcHost,
        device: srcDevice,
        array: srcArray,
        context: srcContext,
        pitch: srcPitch,
        height: srcHeight,
    });
    same_layout!(Copy3D = [sys::CUDA_MEMCPY3D, sys::CUDA_MEMCPY3D_PEER] {
        src: srcXInBytes..srcHeight,
        dst: dstXInBytes..dstHeight,
        width: WidthInBytes,
        height: Height,
        depth: Depth,
    });
}

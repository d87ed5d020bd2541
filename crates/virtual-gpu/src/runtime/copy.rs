//! Copies, and fills of volumes. Unlike the driver's, the runtime's have a direction and records of
//! their own.

use super::memory::{Extent, PitchedPointer};
use super::{Code, ordinal};
use crate::constants as c;
use crate::gpu::array;
use crate::gpu::boundary::{Api, In, runtime};
use crate::gpu::call::copy::{self, at_once};
use crate::gpu::work::{Action, Rows, Shape};
use crate::gpu::{Error, Result};

/// `cudaPos`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Position {
    pub x: u64,
    pub y: u64,
    pub z: u64,
}

/// `cudaMemcpy3DParms`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Copy3D {
    pub src_array: u64,
    pub src_pos: Position,
    pub src: PitchedPointer,
    pub dst_array: u64,
    pub dst_pos: Position,
    pub dst: PitchedPointer,
    pub extent: Extent,
    pub kind: i32,
}

/// `cudaMemcpy3DPeerParms`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyPeer3D {
    src_array: u64,
    src_pos: Position,
    src: PitchedPointer,
    src_device: i32,
    dst_array: u64,
    dst_pos: Position,
    dst: PitchedPointer,
    dst_device: i32,
    extent: Extent,
}

/// With unified addressing the addresses say where memory lies; the direction only has to be one.
fn direction(kind: i32) -> Result {
    match kind {
        c::cudaMemcpyHostToHost..=c::cudaMemcpyDefault => Ok(()),
        _ => Err(Error::INVALID_COPY_DIRECTION),
    }
}

/// Work on a stream.
pub(super) fn later(stream: u64, action: Action) -> Result {
    copy::later(Api::Runtime, stream, action)
}

fn line(dst: u64, src: u64, size: u64, kind: i32) -> Result<Action> {
    direction(kind)?;
    Ok(Action::copy(dst, src, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy(dst: u64, src: u64, size: u64, kind: i32) -> Code {
    runtime(|| at_once(&line(dst, src, size, kind)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyAsync(dst: u64, src: u64, size: u64, kind: i32, stream: u64) -> Code {
    runtime(|| later(stream, line(dst, src, size, kind)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyPeer(dst: u64, to: i32, src: u64, from: i32, size: u64) -> Code {
    runtime(|| {
        ordinal(to).and(ordinal(from))?;
        at_once(&Action::copy(dst, src, size))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyPeerAsync(
    dst: u64,
    to: i32,
    src: u64,
    from: i32,
    size: u64,
    stream: u64,
) -> Code {
    runtime(|| {
        ordinal(to).and(ordinal(from))?;
        later(stream, Action::copy(dst, src, size))
    })
}

fn plane(dst: Rows, src: Rows, width: u64, height: u64, kind: i32) -> Result<Action> {
    direction(kind)?;
    if (dst.pitch < width || src.pitch < width) && height > 1 {
        return Err(Error::INVALID_PITCH);
    }
    Ok(Action::Copy { dst, src, shape: Shape::plane(width, height) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2D(
    dst: u64,
    dst_pitch: u64,
    src: u64,
    src_pitch: u64,
    width: u64,
    height: u64,
    kind: i32,
) -> Code {
    let (dst, src) = (Rows::plane(dst, dst_pitch), Rows::plane(src, src_pitch));
    runtime(|| at_once(&plane(dst, src, width, height, kind)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DAsync(
    dst: u64,
    dst_pitch: u64,
    src: u64,
    src_pitch: u64,
    width: u64,
    height: u64,
    kind: i32,
    stream: u64,
) -> Code {
    let (dst, src) = (Rows::plane(dst, dst_pitch), Rows::plane(src, src_pitch));
    runtime(|| later(stream, plane(dst, src, width, height, kind)?))
}

/// A place in an array. An array's offsets and widths are in elements along a row.
fn in_array(array: u64, at: Position, shape: Shape) -> Result<Rows> {
    let array = array::find(array)?;
    let offset = [at.x * array.element, at.y, at.z];
    array.check(offset, shape)?;
    array.place(offset)
}

/// A place in pitched memory.
fn in_memory(pointer: PitchedPointer, at: Position) -> Rows {
    let slice = pointer.pitch * pointer.height;
    let addr = pointer.addr + at.x + at.y * pointer.pitch + at.z * slice;
    Rows { addr, pitch: pointer.pitch, slice }
}

/// `cudaMemcpy3DParms` as work.
pub(crate) fn volume(copy: &Copy3D) -> Result<Action> {
    direction(copy.kind)?;
    let Extent { mut width, height, depth } = copy.extent;
    // With an array on either side the width is in its elements.
    if let Some(array) = [copy.dst_array, copy.src_array].into_iter().find(|array| *array != 0) {
        width *= array::find(array)?.element;
    }
    let shape = Shape { width, height, depth };
    let place = |array, pointer, at| {
        if array == 0 { Ok(in_memory(pointer, at)) } else { in_array(array, at, shape) }
    };
    let dst = place(copy.dst_array, copy.dst, copy.dst_pos)?;
    let src = place(copy.src_array, copy.src, copy.src_pos)?;
    Ok(Action::Copy { dst, src, shape })
}

fn volume_between_peers(copy: &CopyPeer3D) -> Result<Action> {
    ordinal(copy.dst_device).and(ordinal(copy.src_device))?;
    volume(&Copy3D {
        src_array: copy.src_array,
        src_pos: copy.src_pos,
        src: copy.src,
        dst_array: copy.dst_array,
        dst_pos: copy.dst_pos,
        dst: copy.dst,
        extent: copy.extent,
        kind: c::cudaMemcpyDefault,
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy3D(copy: In<Copy3D>) -> Code {
    runtime(|| at_once(&volume(&copy.get()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy3DAsync(copy: In<Copy3D>, stream: u64) -> Code {
    runtime(|| later(stream, volume(&copy.get()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy3DPeer(copy: In<CopyPeer3D>) -> Code {
    runtime(|| at_once(&volume_between_peers(&copy.get()?)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy3DPeerAsync(copy: In<CopyPeer3D>, stream: u64) -> Code {
    runtime(|| later(stream, volume_between_peers(&copy.get()?)?))
}

fn array_plane(
    array: u64,
    at: Position,
    memory: Rows,
    width: u64,
    height: u64,
    to_array: bool,
) -> Result<Action> {
    // For these functions the offset along a row is in bytes.
    let shape = Shape::plane(width, height);
    let found = array::find(array)?;
    found.check([at.x, at.y, 0], shape)?;
    let place = found.place([at.x, at.y, 0])?;
    let (dst, src) = if to_array { (place, memory) } else { (memory, place) };
    Ok(Action::Copy { dst, src, shape })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DToArray(
    array: u64,
    x: u64,
    y: u64,
    src: u64,
    pitch: u64,
    width: u64,
    height: u64,
    kind: i32,
) -> Code {
    runtime(|| {
        direction(kind)?;
        let at = Position { x, y, z: 0 };
        at_once(&array_plane(array, at, Rows::plane(src, pitch), width, height, true)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DToArrayAsync(
    array: u64,
    x: u64,
    y: u64,
    src: u64,
    pitch: u64,
    width: u64,
    height: u64,
    kind: i32,
    stream: u64,
) -> Code {
    runtime(|| {
        direction(kind)?;
        let at = Position { x, y, z: 0 };
        later(stream, array_plane(array, at, Rows::plane(src, pitch), width, height, true)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DFromArray(
    dst: u64,
    pitch: u64,
    array: u64,
    x: u64,
    y: u64,
    width: u64,
    height: u64,
    kind: i32,
) -> Code {
    runtime(|| {
        direction(kind)?;
        let at = Position { x, y, z: 0 };
        at_once(&array_plane(array, at, Rows::plane(dst, pitch), width, height, false)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpy2DFromArrayAsync(
    dst: u64,
    pitch: u64,
    array: u64,
    x: u64,
    y: u64,
    width: u64,
    height: u64,
    kind: i32,
    stream: u64,
) -> Code {
    runtime(|| {
        direction(kind)?;
        let at = Position { x, y, z: 0 };
        later(stream, array_plane(array, at, Rows::plane(dst, pitch), width, height, false)?)
    })
}

fn fill(dst: Rows, byte: i32, shape: Shape) -> Action {
    Action::Fill { dst, pattern: [byte as u8; 4], unit: 1, shape }
}

fn fill_volume(pointer: PitchedPointer, byte: i32, extent: Extent) -> Action {
    let shape = Shape { width: extent.width, height: extent.height, depth: extent.depth };
    fill(in_memory(pointer, Position::default()), byte, shape)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset3D(pointer: PitchedPointer, byte: i32, extent: Extent) -> Code {
    runtime(|| at_once(&fill_volume(pointer, byte, extent)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset3DAsync(
    pointer: PitchedPointer,
    byte: i32,
    extent: Extent,
    stream: u64,
) -> Code {
    runtime(|| later(stream, fill_volume(pointer, byte, extent)))
}

#[cfg(test)]
mod layouts {
    use cudarc::runtime::sys;
    use memtrace_layouts::same_layout;

    use super::{Copy3D, CopyPeer3D, Position};

    same_layout!(Position = sys::cudaPos { x: x, y: y, z: z });
    same_layout!(
        Copy3D = sys::cudaMemcpy3DParms {
            src_array: srcArray,
            src_pos: srcPos,
            src: srcPtr,
            dst_array: dstArray,
            dst_pos: dstPos,
            dst: dstPtr,
            extent: extent,
            kind: kind,
        }
    );
    same_layout!(
        CopyPeer3D = sys::cudaMemcpy3DPeerParms {
            src_array: srcArray,
            src_pos: srcPos,
            src: srcPtr,
            src_device: srcDevice,
            dst_array: dstArray,
            dst_pos: dstPos,
            dst: dstPtr,
            dst_device: dstDevice,
            extent: extent,
        }
    );
}

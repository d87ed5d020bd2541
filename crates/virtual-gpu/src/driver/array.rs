//! Arrays, as far as they are memory.

use super::{Code, current};
use crate::gpu::array::{self, Array};
use crate::gpu::boundary::{In, Out, driver};
use crate::gpu::{Error, Result, work};

/// `CUDA_ARRAY_DESCRIPTOR`: width, height, and what an element is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor2D {
    extent: [u64; 2],
    element: Element,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor3D {
    extent: [u64; 3],
    element: Element,
    flags: u32,
}

/// `CUarray_format`, and how many channels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Element {
    format: i32,
    channels: u32,
}

#[cfg(test)]
impl Descriptor2D {
    pub(super) fn of(extent: [u64; 2], format: i32, channels: u32) -> Self {
        Self { extent, element: Element { format, channels } }
    }
}

const _: () = assert!(size_of::<Descriptor2D>() == 24 && size_of::<Descriptor3D>() == 40);

/// `cudaChannelFormatKind…`.
const SIGNED: i32 = 0;
const UNSIGNED: i32 = 1;
const FLOAT: i32 = 2;

/// `CU_AD_FORMAT_…`, and the same in the runtime's words: bits of a channel, and their kind.
const FORMATS: [(i32, i32, i32); 8] = [
    (0x01, 8, UNSIGNED),
    (0x02, 16, UNSIGNED),
    (0x03, 32, UNSIGNED),
    (0x08, 8, SIGNED),
    (0x09, 16, SIGNED),
    (0x0a, 32, SIGNED),
    (0x10, 16, FLOAT),
    (0x20, 32, FLOAT),
];

impl Element {
    /// Bytes, and the runtime's description. Formats of video and
    /// compressed textures are not offered.
    fn describe(self) -> Result<(u64, [i32; 5])> {
        let known = FORMATS.iter().find(|(format, ..)| *format == self.format);
        let (_, bits, kind) = *known.ok_or(Error::NOT_SUPPORTED)?;
        let of = |channel: u32| if channel < self.channels { bits } else { 0 };
        match self.channels {
            1 | 2 | 4 => {
                let bytes = u64::from(self.channels) * bits as u64 / 8;
                Ok((bytes, [of(0), of(1), of(2), of(3), kind]))
            }
            _ => Err(Error::INVALID_VALUE),
        }
    }

    fn of(array: &Array) -> Self {
        let [bits, .., kind] = array.format;
        let found = FORMATS.iter().find(|(_, b, k)| (*b, *k) == (bits, kind));
        let channels = array.format[..4].iter().filter(|bits| **bits > 0).count() as u32;
        Self { format: found.map_or(0, |(format, ..)| *format), channels }
    }
}

fn create(extent: [u64; 3], element: Element, flags: u32) -> Result<u64> {
    let device = current()?;
    work::guard()?;
    let (bytes, format) = element.describe()?;
    array::create(device, bytes, extent, format, flags)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayCreate_v2(out: Out<u64>, wanted: In<Descriptor2D>) -> Code {
    driver(|| {
        out.check()?;
        let Descriptor2D { extent: [width, height], element } = wanted.get()?;
        out.set(create([width, height, 0], element, 0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArray3DCreate_v2(out: Out<u64>, wanted: In<Descriptor3D>) -> Code {
    driver(|| {
        out.check()?;
        let Descriptor3D { extent, element, flags } = wanted.get()?;
        out.set(create(extent, element, flags)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayDestroy(array: u64) -> Code {
    driver(|| {
        current()?;
        work::guard()?;
        array::destroy(array)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayGetDescriptor_v2(out: Out<Descriptor2D>, array: u64) -> Code {
    driver(|| {
        let array = array::find(array)?;
        let [width, height, _] = array.extent;
        out.set(Descriptor2D { extent: [width, height], element: Element::of(&array) })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArray3DGetDescriptor_v2(out: Out<Descriptor3D>, array: u64) -> Code {
    driver(|| {
        let array = array::find(array)?;
        let element = Element::of(&array);
        out.set(Descriptor3D { extent: array.extent, element, flags: array.flags })
    })
}

#[cfg(test)]
mod layouts {
    use cudarc::driver::sys;
    use memtrace_layouts::same_layout;

    use super::{Descriptor2D, Descriptor3D, Element};

    same_layout!(
        Descriptor2D =
            sys::CUDA_ARRAY_DESCRIPTOR { extent: Width..Height, element: Format..NumChannels }
    );
    same_layout!(
        Descriptor3D = sys::CUDA_ARRAY3D_DESCRIPTOR {
            extent: Width..Depth,
            element: Format..NumChannels,
            flags: Flags,
        }
    );

    const _: () = {
        use core::mem::offset_of;
        let format = offset_of!(Descriptor2D, element) + offset_of!(Element, format);
        let channels = offset_of!(Descriptor2D, element) + offset_of!(Element, channels);
        assert!(format == offset_of!(sys::CUDA_ARRAY_DESCRIPTOR, Format));
        assert!(channels == offset_of!(sys::CUDA_ARRAY_DESCRIPTOR, NumChannels));
    };
}

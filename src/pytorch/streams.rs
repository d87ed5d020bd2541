//! PyTorch's streams: which one a thread works on, and what CUDA calls it.
//!
//! Every event of PyTorch's allocator has the stream of its request, which is the thread's current
//! one on that device. To ask PyTorch for it (`c10::cuda::getCurrentCUDAStream`) costs a hundred
//! instructions and four look-ups of thread-local words, a quarter of all that an event costs. A
//! thread's current stream only ever changes in `c10::cuda::setCurrentCUDAStream`. Everybody calls
//! that through its PLT, also `libc10_cuda.so` itself. So that function is defined here, and the
//! last answer is cached until the thread sets another stream.
//!
//! The cache must never be used where calls might go past our function. So it is used only if the
//! loader finds ours for the name. Now and then PyTorch is asked all the same, and the first
//! difference ends the cache for good.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::hot::HOT;
use crate::libraries::scopes;
use crate::os::message;
use crate::pytorch::names::{self, CUDA};
use crate::real::Real;
use crate::record::guard::{self, Local};

/// `c10::cuda::CUDAStream`: a device (type and index, a byte each, in the
/// first word) and a stream id.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CudaStream {
    device: u64,
    id: u64,
}

type CurrentStream = unsafe extern "C" fn(i8) -> CudaStream;
type RawStream = unsafe extern "C" fn(*const CudaStream) -> usize;

/// PyTorch's libraries are loaded: finds out who is called when somebody sets a stream.
pub fn attach() {
    let shown = scopes::default(names::SET_CURRENT_STREAM.symbol);
    HOT.streams.store(shown == Some(set_current as *const () as usize), Ordering::Relaxed);
}

/// `c10::cuda::setCurrentCUDAStream(CUDAStream)`.
///
/// # Safety
/// Called by PyTorch. Exported under this name with this signature in every 2.x; a 16-byte
/// trivial class is passed in two registers.
#[unsafe(export_name = names::set_current_stream!())]
pub unsafe extern "C-unwind" fn set_current(stream: CudaStream) {
    static REAL: Real = Real::new();
    guard::local(|local| local.current_stream.set(None));
    let names::Name { text, library, .. } = names::SET_CURRENT_STREAM;
    let Some(real) = REAL.find_anywhere(text, library) else {
        message!("no loaded library has {text}: the current stream stays what it was");
        return;
    };
    // SAFETY: as above.
    unsafe {
        let real: unsafe extern "C-unwind" fn(CudaStream) = std::mem::transmute(real);
        real(stream);
    }
}

/// The calling thread's current stream on a device (−1: the current one):
/// raw handle and device ordinal.
#[inline]
pub fn current(local: &Local, device: i8) -> (u64, i8) {
    if let Some((raw, on)) = local.current_stream.get()
        && on == device
        && HOT.streams.load(Ordering::Relaxed)
        && !local.is_sampled(ASK_EVERY)
    {
        return (raw, device);
    }
    ask(local, device)
}

/// Every so many visits of a thread's to the recorder the answer is compared with PyTorch's own.
const ASK_EVERY: u8 = 64;

fn ask(local: &Local, device: i8) -> (u64, i8) {
    static CURRENT: Real = Real::new();
    let name = names::CURRENT_STREAM;
    let Some(current) = CURRENT.find(name.text, name.library) else {
        return (0, local.device.get());
    };
    // SAFETY: exported by libc10_cuda under this name with this signature in every 2.x. A 16-byte
    // trivial class is returned in two registers, as `CudaStream` is.
    let stream = unsafe { std::mem::transmute::<*mut c_void, CurrentStream>(current)(device) };
    let answer = (raw(local, stream), (stream.device >> 8) as i8);
    if HOT.streams.load(Ordering::Relaxed) {
        compare(local, answer);
    }
    answer
}

fn compare(local: &Local, answer: (u64, i8)) {
    let before = local.current_stream.replace(Some(answer));
    if before.is_some_and(|(raw, device)| device == answer.1 && raw != answer.0) {
        HOT.streams.store(false, Ordering::Relaxed);
        local.current_stream.set(None);
        message!(
            "PyTorch's current stream was changed past memtrace: up to {ASK_EVERY} events of this thread may name the stream before. \
             From here on it is asked each time"
        );
    }
}

/// The handle of a stream. It never changes, and to ask for it costs PyTorch two calls of the CUDA
/// runtime: so the thread remembers its last one.
#[inline]
pub fn raw(local: &Local, stream: CudaStream) -> u64 {
    // In every 2.x the default stream has the id 0, and no other one has (`c10/core/Stream.h`).
    if stream.id == 0 { 0 } else { other(local, stream) }
}

fn other(local: &Local, stream: CudaStream) -> u64 {
    let (device, id, raw) = local.stream.get();
    if (device, id) == (stream.device, stream.id) {
        return raw;
    }
    let Some(find) = raw_stream() else { return 0 };
    // SAFETY: PyTorch's function, and a stream that came from PyTorch.
    let raw = unsafe { find(&raw const stream) as u64 };
    local.stream.set((stream.device, stream.id, raw));
    raw
}

/// `c10::cuda::CUDAStream::stream() const`.
fn raw_stream() -> Option<RawStream> {
    static RAW: Real = Real::new();
    let found = RAW.find(names::RAW_STREAM.text, names::RAW_STREAM.library)?;
    // SAFETY: exported by libc10_cuda under this name with this signature in every 2.x.
    Some(unsafe { std::mem::transmute::<*mut c_void, RawStream>(found) })
}

/// The number that PyTorch knows a stream of one of its own pools by; `None` of any other. Asking
/// for the handle of one only reads a table.
pub fn id(device: i8, handle: u64) -> Option<u64> {
    let raw = raw_stream()?;
    names::stream_ids().find(|&id| {
        let stream = CudaStream { device: u64::from(device as u8) << 8 | u64::from(CUDA), id };
        // SAFETY: PyTorch's function; the number is one that PyTorch makes.
        unsafe { raw(&raw const stream) as u64 == handle }
    })
}

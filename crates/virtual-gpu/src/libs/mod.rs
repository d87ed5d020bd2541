//! NVIDIA's libraries above the runtime, as far as programs like PyTorch call them.
//!
//! They compute nothing. What matters of them is memory: workspaces that they ask their callers
//! for, and that their calls are accepted or refused as on the card. So a *handle* is a stream and
//! some modes. A *descriptor* is what was set in it. A computation is a launch on the handle's
//! stream. The bulk of the functions is one line each in `api/behaviour.tsv`; only what has to
//! remember or to answer something is written here.
//!
//! What the real libraries take from the device by themselves is not known and not modelled:
//! cuBLAS's own workspace when none is set, kernel images. It shows only in `cudaMemGetInfo`.

mod blas;
mod blaslt;
mod cupti;
mod dnn;
mod fft;
pub mod model;
mod nccl;
pub use nccl::memory::SOURCE as NCCL_MEMORY;
mod nvrtc;
mod sparse;
mod sparselt;
pub mod versions;

pub use dnn::counts::json as planned;

#[cfg(test)]
mod tests;

use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use crate::gpu::{self, log};
use core::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Library {
    /// cuBLAS
    Blas,
    /// cuBLASLt
    BlasLt,
    /// cuDNN
    Dnn,
    /// cuFFT
    Fft,
    /// cuSOLVER
    Solver,
    /// cuSPARSE, and cuSPARSELt, which shares its codes
    Sparse,
    /// NCCL
    Nccl,
    /// NVRTC
    Nvrtc,
    /// CUPTI
    Cupti,
}

/// What a function of a library answers instead of success.
pub type Status<T = ()> = Result<T, i32>;

impl Library {
    /// Not initialized, bad parameter, execution failed, internal error.
    const fn codes(self) -> [i32; 4] {
        use crate::constants as c;
        match self {
            Self::Blas | Self::BlasLt => [
                c::CUBLAS_STATUS_NOT_INITIALIZED,
                c::CUBLAS_STATUS_INVALID_VALUE,
                c::CUBLAS_STATUS_EXECUTION_FAILED,
                c::CUBLAS_STATUS_INTERNAL_ERROR,
            ],
            Self::Dnn => [
                c::CUDNN_STATUS_NOT_INITIALIZED,
                c::CUDNN_STATUS_BAD_PARAM,
                c::CUDNN_STATUS_EXECUTION_FAILED,
                c::CUDNN_STATUS_INTERNAL_ERROR,
            ],
            Self::Fft => [
                c::CUFFT_SETUP_FAILED,
                c::CUFFT_INVALID_VALUE,
                c::CUFFT_EXEC_FAILED,
                c::CUFFT_INTERNAL_ERROR,
            ],
            Self::Solver => [
                c::CUSOLVER_STATUS_NOT_INITIALIZED,
                c::CUSOLVER_STATUS_INVALID_VALUE,
                c::CUSOLVER_STATUS_EXECUTION_FAILED,
                c::CUSOLVER_STATUS_INTERNAL_ERROR,
            ],
            Self::Sparse => [
                c::CUSPARSE_STATUS_NOT_INITIALIZED,
                c::CUSPARSE_STATUS_INVALID_VALUE,
                c::CUSPARSE_STATUS_EXECUTION_FAILED,
                c::CUSPARSE_STATUS_INTERNAL_ERROR,
            ],
            Self::Nccl => [
                c::ncclInvalidArgument,
                c::ncclInvalidArgument,
                c::ncclUnhandledCudaError,
                c::ncclInternalError,
            ],
            Self::Nvrtc => [
                c::NVRTC_ERROR_INVALID_PROGRAM,
                c::NVRTC_ERROR_INVALID_INPUT,
                c::NVRTC_ERROR_COMPILATION,
                c::NVRTC_ERROR_INTERNAL_ERROR,
            ],
            Self::Cupti => [
                c::CUPTI_ERROR_NOT_INITIALIZED,
                c::CUPTI_ERROR_INVALID_PARAMETER,
                c::CUPTI_ERROR_UNKNOWN,
                c::CUPTI_ERROR_UNKNOWN,
            ],
        }
    }

    /// "This is no handle of mine", or there is no GPU.
    pub const fn not_initialized(self) -> i32 {
        self.codes()[0]
    }

    /// "A parameter is wrong."
    pub const fn bad_value(self) -> i32 {
        self.codes()[1]
    }

    /// The library's answer. A panic does not cross into C: it becomes an internal error.
    pub fn answer(self, body: impl FnOnce() -> Status) -> i32 {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(Ok(())) => 0,
            Ok(Err(code)) => code,
            Err(_) => {
                log::warn_once("an internal error in a library; please report it");
                self.codes()[3]
            }
        }
    }

    /// Writes an answer to the caller's place; null is a bad parameter.
    pub fn give<T>(self, place: Out<T>, value: T) -> Status {
        place.set(value).map_err(|_| self.bad_value())
    }

    /// Reads what the caller points to; null is a bad parameter.
    pub fn take<T: Copy>(self, place: In<T>) -> Status<T> {
        place.get().map_err(|_| self.bad_value())
    }

    /// Puts a computation on a stream.
    pub fn launch(self, stream: u64) -> Status {
        match gpu::launch(core::ptr::without_provenance_mut(stream as usize)) {
            0 => Ok(()),
            _ => Err(self.codes()[2]),
        }
    }
}

/// A library handle: what `cublasCreate` and its like give out.
pub struct Session {
    library: Library,
    /// Where its work goes.
    pub stream: u64,
    /// Modes that can be read back, as the library numbers them.
    pub modes: [i32; 2],
}

static SESSIONS: Registry<Session> = Registry::new(32);
static OBJECTS: Registry<Library> = Registry::new(33);

/// Opens a session on the current device, which gets its context by that.
pub fn open(library: Library, out: Out<*mut c_void>) -> i32 {
    library.answer(|| {
        if out.is_null() {
            return Err(library.bad_value());
        }
        gpu::touch(gpu::current_device()).map_err(|_| library.not_initialized())?;
        library.give(out, SESSIONS.insert(Session { library, stream: 0, modes: [0; 2] }))
    })
}

/// Closes a session.
pub fn close(library: Library, handle: *mut c_void) -> i32 {
    library.answer(|| SESSIONS.remove(handle).map(drop).ok_or(library.not_initialized()))
}

/// Looks at or changes a session.
pub fn session<R>(
    library: Library,
    handle: *mut c_void,
    use_it: impl FnOnce(&mut Session) -> R,
) -> Status<R> {
    let own = |session: &mut Session| (session.library == library).then(|| use_it(session));
    SESSIONS.with(handle, own).flatten().ok_or(library.not_initialized())
}

/// Sets the stream of a session.
pub fn set_stream(library: Library, handle: *mut c_void, stream: *mut c_void) -> i32 {
    library.answer(|| session(library, handle, |s| s.stream = stream.addr() as u64))
}

/// Reads the stream of a session.
pub fn get_stream(library: Library, handle: *mut c_void, out: Out<u64>) -> i32 {
    library.answer(|| library.give(out, session(library, handle, |s| s.stream)?))
}

/// A computation of a library: a launch on its handle's stream.
pub fn compute(library: Library, handle: *mut c_void) -> i32 {
    library.answer(|| library.launch(session(library, handle, |s| s.stream)?))
}

/// Gives out an opaque object that holds nothing.
pub fn create(library: Library, out: Out<*mut c_void>) -> i32 {
    library.answer(|| {
        if out.is_null() {
            return Err(library.bad_value());
        }
        library.give(out, OBJECTS.insert(library))
    })
}

/// Takes an opaque object back. Null is nobody's, and destroying it is no error in any library.
pub fn destroy(library: Library, object: *mut c_void) -> i32 {
    if object.is_null() || OBJECTS.remove(object).is_some() { 0 } else { library.bad_value() }
}

/// Pointers as a C caller would pass them.
#[cfg(test)]
mod testing {
    use super::{In, Out};

    /// Where the callee reads.
    pub fn input<T, U>(place: &T) -> In<U> {
        let place = core::ptr::from_ref(place);
        // SAFETY: `In` is a transparent pointer.
        unsafe { core::mem::transmute(place) }
    }

    /// Where the callee writes.
    pub fn output<T, U>(place: &mut T) -> Out<U> {
        let place = core::ptr::from_mut(place);
        // SAFETY: `Out` is a transparent pointer.
        unsafe { core::mem::transmute(place) }
    }
}

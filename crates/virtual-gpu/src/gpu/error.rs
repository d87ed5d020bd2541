//! What a call may answer.
//!
//! Since CUDA 10.1 the runtime (`cudaError_t`) and the driver (`CUresult`) use the same numbers
//! for the same failures. A handful of errors only the runtime has. So one type serves both: its
//! number is the runtime's, and [`Error::driver`] gives the driver's where they part. Names and
//! texts are those the public headers and the public manual give, because programs print them and
//! some look for them ("out of memory").

use core::ffi::CStr;

/// A failure, as the runtime numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Error(i32);

/// What the functions of the virtual GPU return.
pub type Result<T = ()> = core::result::Result<T, Error>;

struct Row {
    error: Error,
    runtime: &'static CStr,
    driver: &'static CStr,
    text: &'static CStr,
}

macro_rules! errors {
    ($($name:ident = $code:literal, $runtime:literal, $driver:literal, $text:literal;)*) => {
        impl Error {
            $(#[doc = concat!("`", stringify!($runtime), "`")] pub const $name: Error = Error($code);)*
        }
        const ROWS: &[Row] = &[
            $(Row { error: Error::$name, runtime: $runtime, driver: $driver, text: $text },)*
        ];
    };
}

errors! {
    INVALID_VALUE = 1, c"cudaErrorInvalidValue", c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OUT_OF_MEMORY = 2, c"cudaErrorMemoryAllocation", c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NOT_INITIALIZED = 3, c"cudaErrorInitializationError", c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    DEINITIALIZED = 4, c"cudaErrorCudartUnloading", c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down";
    INVALID_CONFIGURATION = 9, c"cudaErrorInvalidConfiguration", c"", c"invalid configuration argument";
    INVALID_PITCH = 12, c"cudaErrorInvalidPitchValue", c"", c"invalid pitch argument";
    INVALID_SYMBOL = 13, c"cudaErrorInvalidSymbol", c"", c"invalid device symbol";
    INVALID_DEVICE_POINTER = 17, c"cudaErrorInvalidDevicePointer", c"", c"invalid device pointer";
    INVALID_COPY_DIRECTION = 21, c"cudaErrorInvalidMemcpyDirection", c"", c"invalid copy direction for memcpy";
    INSUFFICIENT_DRIVER = 35, c"cudaErrorInsufficientDriver", c"", c"CUDA driver version is insufficient for CUDA runtime version";
    MISSING_CONFIGURATION = 52, c"cudaErrorMissingConfiguration", c"", c"__global__ function call is not configured";
    INVALID_DEVICE_FUNCTION = 98, c"cudaErrorInvalidDeviceFunction", c"", c"invalid device function";
    NO_DEVICE = 100, c"cudaErrorNoDevice", c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"cudaErrorInvalidDevice", c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    INVALID_IMAGE = 200, c"cudaErrorInvalidKernelImage", c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid";
    INVALID_CONTEXT = 201, c"cudaErrorDeviceUninitialized", c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    PEER_ACCESS_UNSUPPORTED = 217, c"cudaErrorPeerAccessUnsupported", c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"peer access is not supported between these two devices";
    FILE_NOT_FOUND = 301, c"cudaErrorFileNotFound", c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found";
    INVALID_HANDLE = 400, c"cudaErrorInvalidResourceHandle", c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    ILLEGAL_STATE = 401, c"cudaErrorIllegalState", c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state";
    NOT_FOUND = 500, c"cudaErrorSymbolNotFound", c"CUDA_ERROR_NOT_FOUND", c"named symbol not found";
    NOT_READY = 600, c"cudaErrorNotReady", c"CUDA_ERROR_NOT_READY", c"device not ready";
    PEER_ACCESS_ALREADY_ENABLED = 704, c"cudaErrorPeerAccessAlreadyEnabled", c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, c"cudaErrorPeerAccessNotEnabled", c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE = 708, c"cudaErrorSetOnActiveProcess", c"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", c"cannot set while device is active in this process";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"cudaErrorHostMemoryAlreadyRegistered", c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"cudaErrorHostMemoryNotRegistered", c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region";
    COOPERATIVE_LAUNCH_TOO_LARGE = 720, c"cudaErrorCooperativeLaunchTooLarge", c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", c"too many blocks in cooperative launch";
    INVALID_CLUSTER_SIZE = 912, c"cudaErrorInvalidClusterSize", c"CUDA_ERROR_INVALID_CLUSTER_SIZE", c"cluster misconfiguration";
    UNSUPPORTED_LIMIT = 215, c"cudaErrorUnsupportedLimit", c"CUDA_ERROR_UNSUPPORTED_LIMIT", c"limit is not supported on this architecture";
    NOT_SUPPORTED = 801, c"cudaErrorNotSupported", c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    DRIVER_MISMATCH = 803, c"cudaErrorSystemDriverMismatch", c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"system has unsupported display driver / cuda driver combination";
    CAPTURE_UNSUPPORTED = 900, c"cudaErrorStreamCaptureUnsupported", c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = 901, c"cudaErrorStreamCaptureInvalidated", c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"operation failed destructors to a previous error during capture";
    CAPTURE_MERGE = 902, c"cudaErrorStreamCaptureMerge", c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"operation would result in a merge of separate capture sequences";
    CAPTURE_UNMATCHED = 903, c"cudaErrorStreamCaptureUnmatched", c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began";
    CAPTURE_UNJOINED = 904, c"cudaErrorStreamCaptureUnjoined", c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work";
    CAPTURE_ISOLATION = 905, c"cudaErrorStreamCaptureIsolation", c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream";
    CAPTURE_IMPLICIT = 906, c"cudaErrorStreamCaptureImplicit", c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, c"cudaErrorCapturedEvent", c"CUDA_ERROR_CAPTURED_EVENT", c"operation not permitted on an event last recorded in a capturing stream";
    CAPTURE_WRONG_THREAD = 908, c"cudaErrorStreamCaptureWrongThread", c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"attempt to terminate a thread-local capture sequence from another thread";
    GRAPH_EXEC_UPDATE_FAILURE = 910, c"cudaErrorGraphExecUpdateFailure", c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", c"the graph update was not performed because it included changes which violated constraints specific to instantiated graph update";
    UNKNOWN = 999, c"cudaErrorUnknown", c"CUDA_ERROR_UNKNOWN", c"unknown error";
}

impl Error {
    /// The runtime's number.
    pub const fn code(self) -> i32 {
        self.0
    }

    /// The driver's number.
    pub const fn driver(self) -> i32 {
        match self {
            Error::INVALID_CONFIGURATION
            | Error::INVALID_PITCH
            | Error::INVALID_DEVICE_POINTER
            | Error::INVALID_COPY_DIRECTION => Error::INVALID_VALUE.0,
            Error::INSUFFICIENT_DRIVER => Error::DRIVER_MISMATCH.0,
            Error::INVALID_SYMBOL => Error::NOT_FOUND.0,
            Error::INVALID_DEVICE_FUNCTION | Error::MISSING_CONFIGURATION => {
                Error::INVALID_HANDLE.0
            }
            other => other.0,
        }
    }
}

fn row(code: i32) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.error.0 == code)
}

/// `cudaGetErrorName`.
pub fn runtime_name(code: i32) -> &'static CStr {
    if code == 0 {
        return c"cudaSuccess";
    }
    row(code).map_or(c"unrecognized error code", |row| row.runtime)
}

/// `cudaGetErrorString`.
pub fn runtime_text(code: i32) -> &'static CStr {
    if code == 0 {
        return c"no error";
    }
    row(code).map_or(c"unrecognized error code", |row| row.text)
}

/// `cuGetErrorName`: none for a number that the driver does not have.
pub fn driver_name(code: i32) -> Option<&'static CStr> {
    if code == 0 {
        return Some(c"CUDA_SUCCESS");
    }
    row(code).map(|row| row.driver).filter(|name| !name.is_empty())
}

/// `cuGetErrorString`.
pub fn driver_text(code: i32) -> Option<&'static CStr> {
    driver_name(code).map(|_| runtime_text(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_one_row_and_a_driver_number_the_driver_knows() {
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[i + 1..].iter().all(|other| other.error != row.error));
            assert!(driver_name(row.error.driver()).is_some(), "{:?}", row.runtime);
        }
    }

    #[test]
    fn texts_that_programs_look_for() {
        assert_eq!(runtime_text(2), c"out of memory");
        assert_eq!(runtime_name(2), c"cudaErrorMemoryAllocation");
        assert_eq!(driver_name(2), Some(c"CUDA_ERROR_OUT_OF_MEMORY"));
        assert_eq!(driver_name(9), None);
        assert_eq!(runtime_name(0), c"cudaSuccess");
    }
}

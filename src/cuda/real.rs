//! The real functions behind the rows of the table, each with its row's prototype.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::records::{
    ArrayDescriptor, BufferDescriptor, ChannelFormat, Extent, ExternalDescriptor, GraphAllocation,
    GraphNode, Handle, IpcHandle, Location, MemoryProperties, Out, PitchedPtr, PoolProperties, Ptr,
};
use crate::cuda::resolve;
use crate::cuda::table::{ENTRY_POINTS, ROWS, cublas_rows, driver_rows, nccl_rows, runtime_rows};
use crate::nccl::communicators::UniqueId;
use crate::os::message;
use crate::record::hook::HookCall;

/// No function of this name is loaded. Below any function's address; 0 is
/// a trampoline whose function is gone.
pub const NOWHERE: usize = 1;

macro_rules! real_functions {
    ([] { $( $library:literal $tier:ident $module:ident {
        $( $($since:literal)? $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) => $role:ident $( ( $($what:expr),* ) )? ; )*
    } )* }) => { $($(
        #[doc = concat!("The real `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As NVIDIA documents for the function of this name.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $name(hook: HookCall $(, $arg: $ty)*) -> c_int {
            if hook.real <= NOWHERE {
                return missing(hook.api);
            }
            // SAFETY: the address is that of CUDA's function of this name (`routes`), whose
            // prototype NVIDIA's headers give as in this row; the arguments are the caller's own.
            unsafe {
                let f: unsafe extern "C-unwind" fn($($ty),*) -> c_int = std::mem::transmute(hook.real);
                f($($arg),*)
            }
        }
    )*)* };
}

runtime_rows! { [cublas_rows nccl_rows driver_rows real_functions] {} }

/// Passes a call on, for handlers that are written by hand.
macro_rules! forward {
    ($hook:expr, $name:ident ( $($arg:expr),* )) => {
        // SAFETY: the arguments are the caller's own, passed on unchanged.
        unsafe { $crate::cuda::real::$name($hook $(, $arg)*) }
    };
}
pub(super) use forward;

/// What a call answers whose real function is nowhere: a documented code of
/// that library's. Said once a function.
#[cold]
pub fn missing(api: u16) -> c_int {
    static WARNED: [AtomicBool; ROWS] = [const { AtomicBool::new(false) }; ROWS];
    let row = &ENTRY_POINTS[usize::from(api)];
    if !WARNED[usize::from(api)].swap(true, Ordering::Relaxed) {
        message!(
            "no loaded library has {}: the call fails as if memtrace were not there",
            row.name
        );
    }
    resolve::missing_in(row.library)
}

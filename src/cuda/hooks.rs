//! Our symbols, and the handlers behind them.
//!
//! Each row of the table makes a symbol that the loader finds before CUDA's own, because the
//! library is preloaded. Behind it are a few instructions. Where the caller's calls go to CUDA
//! ([`super::routes`]), they jump to the row's handler. They pass it the return address and the
//! real function's address in the first two floating-point registers. These are free, because none
//! of CUDA's functions has a floating-point argument. So a handler is an ordinary Rust function
//! that also knows who called, by which PyTorch's allocator is recognised. No frame of ours is
//! pushed in between, and the caller's stack stays as it was.
//!
//! Until it is known that a call is CUDA's, no register that an argument may lie in is touched. A
//! library's own function may have the same name and any signature.
//!
//! Modules below, which must know where the hooks are, are handed [`HOOKS`].

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use memtrace_format::event::What;

use crate::cuda::contexts::ReservedBy;
use crate::cuda::place;
use crate::cuda::real;
use crate::cuda::records::{
    ArrayDescriptor, BufferDescriptor, ChannelFormat, Extent, ExternalDescriptor, GraphAllocation,
    GraphNode, Handle, IpcHandle, Location, MemoryProperties, Out, PitchedPtr, PoolProperties, Ptr,
};
use crate::cuda::routes::{ROUTES, Row, TARGETS};
use crate::cuda::table::{
    Api, Code, Hook, Hooks, TRAMPOLINES, cublas_rows, driver_rows, nccl_rows, runtime_rows,
};
use crate::nccl::communicators::UniqueId;
use crate::record::hook::{HookCall, Tier};

/// A number in a register that no argument needs.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Word(f64);

impl Word {
    fn get(self) -> usize {
        self.0.to_bits() as usize
    }
}

/// One line of a row of [`ROUTES`]: is the caller in this library, then and
/// after the function is read? See `Line`.
macro_rules! line {
    ($first:literal, $length:literal, $real:literal) => {
        concat!(
            "mov r11, qword ptr [rsp]\n",
            "sub r11, qword ptr [rip + {row} + {at} + ",
            $first,
            "]\n",
            "cmp r11, qword ptr [rip + {row} + {at} + ",
            $length,
            "]\n",
            "jae 2f\n",
            "mov r10, qword ptr [rip + {row} + {at} + ",
            $real,
            "]\n",
            "mov r11, qword ptr [rsp]\n",
            "sub r11, qword ptr [rip + {row} + {at} + ",
            $first,
            "]\n",
            "cmp r11, qword ptr [rip + {row} + {at} + ",
            $length,
            "]\n",
            "jae 2f\n",
            "movq xmm0, qword ptr [rsp]\n",
            "movq xmm1, r10\n",
            "jmp {handler}\n",
            "2:\n",
        )
    };
}

/// The first lines of a row of [`ROUTES`], one after the other; falls
/// through where the caller is in none.
macro_rules! by_caller {
    () => {
        concat!(line!(0, 8, 16), line!(24, 32, 40), line!(48, 56, 64), line!(72, 80, 88))
    };
}

macro_rules! hooks {
    ([] { $( $library:literal $tier:ident $module:ident {
        $( $($since:literal)? $name:ident ( $($arg:ident : $ty:ty),* $(,)? ) => $role:ident $( ( $($what:expr),* ) )? ; )*
    } )* }) => {
        /// All of them.
        pub static HOOKS: Hooks = [
            Hook {
                handler: Code(std::ptr::null()),
                trampolines: [Code(std::ptr::null()); TRAMPOLINES],
                exported: Code(std::ptr::null()),
            },
            $($( Hook {
                handler: Code(handlers::$name as *const ()),
                trampolines: [
                    Code(trampolines::$name::<0> as *const ()),
                    Code(trampolines::$name::<1> as *const ()),
                    Code(trampolines::$name::<2> as *const ()),
                    Code(trampolines::$name::<3> as *const ()),
                ],
                exported: Code(exports::$name as *const ()),
            }, )*)*
        ];

        /// The exported symbols.
        pub mod exports {
            use super::*;
            $($(
                #[doc = concat!("`", stringify!($name), "`, recorded and passed on.")]
                ///
                /// # Safety
                /// As NVIDIA documents for the function of this name.
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
                    core::arch::naked_asm!(
                        by_caller!(),
                        "mov r11d, {api}",
                        "lea r10, [rip + {hooks}]",
                        "jmp {unknown}",
                        row = sym ROUTES,
                        at = const Api::$name as usize * size_of::<Row>(),
                        api = const Api::$name as u32,
                        hooks = sym HOOKS,
                        handler = sym super::handlers::$name,
                        unknown = sym crate::cuda::choose::unknown,
                    )
                }
            )*)*
        }

        /// The trampolines: what look-ups give out. They are not the exported symbols, for two
        /// reasons. A symbol may be that of an interposer in front of us, which may be the one that
        /// asks. And where a symbol leads depends on who calls.
        mod trampolines {
            use super::*;
            $($(
                #[allow(non_snake_case)]
                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn $name<const INDEX: usize>() {
                    core::arch::naked_asm!(
                        "movq xmm0, qword ptr [rsp]",
                        "movq xmm1, qword ptr [rip + {targets} + {at}]",
                        "jmp {handler}",
                        targets = sym TARGETS,
                        at = const (Api::$name as usize * TRAMPOLINES + INDEX) * size_of::<usize>(),
                        handler = sym super::handlers::$name,
                    )
                }
            )*)*
        }

        /// What the symbols and the trampolines jump to.
        mod handlers {
            use super::*;
            $($(
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub(super) unsafe extern "C-unwind" fn $name($($arg: $ty,)* caller: Word, real: Word) -> c_int {
                    let caller = crate::cuda::interposers::behind(caller.get());
                    let (api, tier) = (Api::$name as u16, Tier::$tier);
                    let hook = HookCall { api, tier, caller, real: real.get() };
                    let code = hooks!(@do hook $module $name ($($arg),*) $role $( ( $($what),* ) )?);
                    hook.used();
                    code
                }
            )*)*
        }
    };
    (@do $hook:ident runtime $name:ident ($($arg:ident),*) own) => {
        crate::cuda::runtime::$name($hook $(, $arg)*)
    };
    (@do $hook:ident runtime $name:ident ($($arg:ident),*) shows) => {
        crate::cuda::runtime::$name(&HOOKS, $hook $(, $arg)*)
    };
    (@do $hook:ident driver $name:ident ($($arg:ident),*) own) => {
        crate::cuda::calls::of_driver($hook, || crate::cuda::driver::$name($hook $(, $arg)*))
    };
    (@do $hook:ident driver $name:ident ($($arg:ident),*) shows) => {
        crate::cuda::calls::of_driver($hook, || crate::cuda::driver::$name(&HOOKS, $hook $(, $arg)*))
    };
    (@do $hook:ident cublas $name:ident ($($arg:ident),*) $role:ident ( $($what:expr),* )) => {
        // SAFETY: the arguments are the caller's own, passed on unchanged.
        crate::pytorch::workspaces::$role($hook $(, $what)*, || unsafe { real::$name($hook $(, $arg)*) })
    };
    (@do $hook:ident nccl $name:ident ($($arg:ident),*) $role:ident ( $($what:expr),* )) => {
        // SAFETY: the arguments are the caller's own: passed on unchanged,
        // and read as the real function does.
        unsafe { crate::nccl::communicators::$role($hook $(, $what)*, || real::$name($hook $(, $arg)*)) }
    };
    (@do $hook:ident $module:ident $name:ident ($($arg:ident),*) $role:ident ( $($what:expr),* )) => {
        // SAFETY: the arguments are the caller's own: passed on unchanged,
        // and read as the real function does.
        unsafe {
            let _under_way = crate::cuda::under_way::UnderWay::begin();
            hooks!(@by $module)($hook, || {
                crate::cuda::roles::$role($hook $(, $what)*, || real::$name($hook $(, $arg)*))
            })
        }
    };
    (@by runtime) => { crate::cuda::calls::of_runtime };
    (@by driver) => { crate::cuda::calls::of_driver };
}

runtime_rows! { [cublas_rows nccl_rows driver_rows hooks] {} }

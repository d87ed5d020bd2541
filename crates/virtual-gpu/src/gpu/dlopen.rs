//! `dlopen`, so that NVIDIA's own libraries are never mapped.
//!
//! Most of them are kept out by empty libraries of the same name, which the loader takes for them.
//! That does not help against an absolute path: PyTorch opens cuBLASLt and some that only a
//! compiler needs with one. So a path to such a library becomes just its name, if that name is
//! loaded. Else it becomes the name of this library, which answers for all of them.
//!
//! The loader finds a library's own search path by the address that called `dlopen`. So this must
//! be no call but a jump: the real function sees the caller as if we were not here.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// What NVIDIA's libraries, which we stand in for, begin with.
const NAMES: [&[u8]; 21] = [
    b"libcuda.so",
    b"libcudart.so",
    b"libcublas.so",
    b"libcublasLt.so",
    b"libcudnn",
    b"libcufft.so",
    b"libcufftw.so",
    b"libcufile.so",
    b"libcupti.so",
    b"libcurand.so",
    b"libcusolver.so",
    b"libcusolverMg.so",
    b"libcusparse.so",
    b"libcusparseLt.so",
    b"libnccl.so",
    b"libnvJitLink.so",
    b"libnvToolsExt.so",
    b"libnvidia-ml.so",
    b"libnvrtc-builtins.so",
    b"libnvrtc.so",
    b"libnvshmem_host.so",
];

static REAL: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

/// The next `dlopen` behind this library.
fn real() -> *mut c_void {
    let known = REAL.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: asks the loader for a symbol by name.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) };
    REAL.store(found, Relaxed);
    found
}

fn is_ours(name: &[u8]) -> bool {
    NAMES.iter().any(|known| name.starts_with(known))
}

/// The name under which this library is loaded.
const SELF: &CStr = c"libcuda.so.1";

/// A library is loaded under this name. Maps nothing.
///
/// # Safety
/// `open` is the loader's own `dlopen`, and `name` a C string.
unsafe fn is_loaded(open: Open, name: *const c_char) -> bool {
    // SAFETY: the caller's promise.
    let loaded = unsafe { open(name, libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if loaded.is_null() {
        return false;
    }
    // SAFETY: gives back the reference that was just taken.
    unsafe { libc::dlclose(loaded) };
    true
}

/// What to open in place of a path to one of NVIDIA's libraries.
///
/// # Safety
/// `path` is null or a C string, as `dlopen` takes it.
unsafe fn redirect(path: *const c_char) -> *const c_char {
    if path.is_null() {
        return path;
    }
    // SAFETY: not null, so a C string.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    let Some(slash) = text.iter().rposition(|byte| *byte == b'/') else { return path };
    let name = &text[slash + 1..];
    let open = real();
    if !is_ours(name) || open.is_null() {
        return path;
    }
    // SAFETY: the loader's own function of that type.
    let open: Open = unsafe { core::mem::transmute(open) };
    let name = name.as_ptr().cast();
    // SAFETY: the tail of a C string.
    if unsafe { is_loaded(open, name) } {
        return name;
    }
    // SAFETY: a C string; and a file that isn't there must stay so for the caller.
    let stands_in =
        unsafe { libc::access(path, libc::F_OK) == 0 && is_loaded(open, SELF.as_ptr()) };
    if stands_in { SELF.as_ptr() } else { path }
}

/// Decides and says where to jump: the path to open, and the real function.
///
/// # Safety
/// As for [`redirect`].
unsafe extern "C" fn decide(path: *const c_char, target: *mut *mut c_void) -> *const c_char {
    // SAFETY: our own caller's stack slot.
    unsafe { target.write(real()) };
    // SAFETY: the caller's promise.
    unsafe { redirect(path) }
}

/// The loader's `dlopen`, with the path changed where NVIDIA's own libraries would be mapped.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        // The flags survive the call, and the stack is aligned for it with one slot for the target.
        "push rsi",
        "sub rsp, 16",
        "mov rsi, rsp",
        "call {decide}",
        "mov r11, [rsp]",
        "add rsp, 16",
        "pop rsi",
        "mov rdi, rax",
        "jmp r11",
        decide = sym decide,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_we_stand_in_for() {
        assert!(is_ours(b"libcublasLt.so.13\0") && is_ours(b"libcudnn_ops.so.9\0"));
        assert!(!is_ours(b"libc10_cuda.so\0") && !is_ours(b"libtorch_cuda.so\0"));
    }

    #[test]
    fn a_path_to_something_else_stays() {
        for path in [c"/usr/lib/libm.so.6", c"libcublasLt.so.13", c"/nowhere/libcublasLt.so.99"] {
            // SAFETY: a C string.
            assert_eq!(unsafe { redirect(path.as_ptr()) }, path.as_ptr());
        }
        // SAFETY: null is allowed.
        assert!(unsafe { redirect(core::ptr::null()) }.is_null());
    }
}

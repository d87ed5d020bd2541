//! Is this process on a virtual GPU? Whoever reads a snapshot must know that it is an estimate.

use std::ffi::{c_char, c_int};

use memtrace_format::key::{Part, VirtualGpu};

use crate::libraries::scopes;

/// What the virtual GPU says of itself; `None` on real hardware.
pub fn stats() -> Option<VirtualGpu> {
    type Stats = unsafe extern "C" fn(*mut c_char, usize) -> c_int;
    // SAFETY: a look-up by name; the virtual GPU exports this function with this signature: it
    // writes at most `len` bytes of JSON and returns the length, or −1.
    let text = unsafe {
        let f: Stats = std::mem::transmute(scopes::default(c"memtrace_virtual_stats")?);
        let mut buffer = vec![0_u8; 16 << 10];
        let n = f(buffer.as_mut_ptr().cast(), buffer.len());
        buffer.truncate(usize::try_from(n).unwrap_or(0));
        buffer
    };
    let unknown = || VirtualGpu { profile: Some("unknown".to_owned()), ..VirtualGpu::default() };
    Some(serde_json::from_slice(&text).map_or_else(|_| unknown(), VirtualGpu::take))
}

//! Where a call goes whose caller is in none of its row's lines ([`super::routes`]): it is
//! looked up, with all registers saved.

use std::ops::Range;

use crate::cuda::callers::{self, Destination};
use crate::cuda::real::NOWHERE;
use crate::cuda::routes::ROUTES;
use crate::cuda::table::{ENTRY_POINTS, Hooks};
use crate::cuda::{resolve, shared_names};
use crate::stack;

/// Where a call jumps, and the real function for a handler; 0 if no handler takes the call.
#[repr(C)]
pub struct Choice {
    jump: usize,
    real: usize,
}

/// A call by symbol from a library that none of the lines is for: `r11` is the row, `r10` where our
/// hooks are. Every register that an argument may lie in is as it was when this jumps on.
#[unsafe(naked)]
pub unsafe extern "C" fn unknown() {
    core::arch::naked_asm!(
        "sub rsp, 216", // for the alignment, too
        "mov [rsp], rdi",
        "mov [rsp + 8], rsi",
        "mov [rsp + 16], rdx",
        "mov [rsp + 24], rcx",
        "mov [rsp + 32], r8",
        "mov [rsp + 40], r9",
        "mov [rsp + 48], rax", // how many vector registers an argument list uses
        "movups [rsp + 64], xmm0",
        "movups [rsp + 80], xmm1",
        "movups [rsp + 96], xmm2",
        "movups [rsp + 112], xmm3",
        "movups [rsp + 128], xmm4",
        "movups [rsp + 144], xmm5",
        "movups [rsp + 160], xmm6",
        "movups [rsp + 176], xmm7",
        "mov rdi, r11",
        "mov rsi, [rsp + 216]",
        "mov rdx, r10",
        "call {choose}",
        "mov r11, rax",
        "mov r10, rdx",
        "mov rdi, [rsp]",
        "mov rsi, [rsp + 8]",
        "mov rdx, [rsp + 16]",
        "mov rcx, [rsp + 24]",
        "mov r8, [rsp + 32]",
        "mov r9, [rsp + 40]",
        "mov rax, [rsp + 48]",
        "movups xmm0, [rsp + 64]",
        "movups xmm1, [rsp + 80]",
        "movups xmm2, [rsp + 96]",
        "movups xmm3, [rsp + 112]",
        "movups xmm4, [rsp + 128]",
        "movups xmm5, [rsp + 144]",
        "movups xmm6, [rsp + 160]",
        "movups xmm7, [rsp + 176]",
        "add rsp, 216",
        "test r10, r10",
        "jz 2f",
        "movq xmm0, qword ptr [rsp]",
        "movq xmm1, r10",
        "2:",
        "jmp r11",
        choose = sym choose,
    )
}

extern "C" fn choose(api: usize, caller: usize, hooks: &Hooks) -> Choice {
    let row = &ROUTES[api];
    if let Some((_, function)) = row.foreign.iter().find_map(|line| line.of(caller)) {
        return Choice { jump: function, real: 0 };
    }
    let (range, destination) =
        callers::find(api, caller).unwrap_or_else(|| stack::aside(|| find_out(api, caller, hooks)));
    row.has_called(range, destination);
    let handler = hooks[api].handler.0 as usize;
    match destination {
        Destination::Cuda(function) => Choice { jump: handler, real: function },
        Destination::Elsewhere(function) => Choice { jump: function, real: 0 },
        Destination::Nowhere => Choice { jump: handler, real: NOWHERE },
    }
}

fn find_out(api: usize, caller: usize, hooks: &Hooks) -> (Range<usize>, Destination) {
    let entry = &ENTRY_POINTS[api];
    let found = resolve::behind(entry, caller);
    shared_names::look(hooks);
    let destination = match found {
        Some(found) if resolve::is_cudas(entry, found) => Destination::Cuda(found),
        Some(found) => Destination::Elsewhere(found),
        None => Destination::Nowhere,
    };
    (callers::remember(api, caller, destination), destination)
}

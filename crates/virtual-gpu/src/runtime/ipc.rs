//! Memory and events of other processes.

use super::Code;
use crate::gpu::border::{Out, runtime};
use crate::gpu::memory::{EventTicket, MemoryTicket, book};
use crate::gpu::{self, Error, Result, context, work};

/// `cudaIpcMemHandle_t`, `cudaIpcEventHandle_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle([u8; 64]);

pub(crate) fn export_memory(addr: u64) -> Result<Handle> {
    Ok(Handle(book().export(addr)?.to_bytes()))
}

pub(crate) fn open_memory(handle: &Handle, device: usize) -> Result<u64> {
    let ticket = MemoryTicket::from_bytes(&handle.0).ok_or(Error::INVALID_VALUE)?;
    book().import(device, ticket)
}

pub(crate) fn export_event(event: u64) -> Result<Handle> {
    let gpu = gpu::device(work::work().exportable_event(event)?)?.index;
    Ok(Handle(EventTicket { pid: std::process::id(), gpu, id: event }.to_bytes()))
}

pub(crate) fn open_event(handle: &Handle, device: usize) -> Result<u64> {
    EventTicket::from_bytes(&handle.0).ok_or(Error::INVALID_VALUE)?;
    Ok(work::work().import_event(device))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcGetMemHandle(handle: Out<Handle>, addr: u64) -> Code {
    runtime(|| handle.set(export_memory(addr)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcOpenMemHandle(out: Out<u64>, handle: Handle, _flags: u32) -> Code {
    runtime(|| {
        out.check()?;
        out.set(open_memory(&handle, context::bind()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcCloseMemHandle(addr: u64) -> Code {
    runtime(|| book().close_import(addr))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcGetEventHandle(handle: Out<Handle>, event: u64) -> Code {
    runtime(|| handle.set(export_event(event)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaIpcOpenEventHandle(out: Out<u64>, handle: Handle) -> Code {
    runtime(|| {
        out.check()?;
        out.set(open_event(&handle, context::bind()?)?)
    })
}

// The handles go by value, so the size is part of the interface.
const _: () = assert!(size_of::<Handle>() == crate::layout::cuda12::cudaIpcMemHandle_st::SIZE);

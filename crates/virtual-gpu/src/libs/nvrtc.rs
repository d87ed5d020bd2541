//! NVRTC: programs that are never compiled.
//!
//! A program keeps its source and the names that were asked for. "Compiling" it always works,
//! since nothing is read; the image is a comment that says so, which is enough for
//! `cuModuleLoadData` here. A lowered name is the expression as it was given: it only has to
//! come back in `cuModuleGetFunction`.

use super::{Library, Status, versions};
use crate::constants as c;
use crate::constants::status_name;
use crate::gpu::boundary::{Out, Text};
use crate::gpu::handle::Registry;
use core::ffi::{CStr, c_char, c_void};
use std::ffi::CString;

const NVRTC: Library = Library::Nvrtc;
const IMAGE: &CStr = c"// memtrace virtual GPU: nothing was compiled\n";

struct Program {
    compiled: bool,
    names: Vec<CString>,
}

static PROGRAMS: Registry<Program> = Registry::new(36);

fn program<R>(program: *mut c_void, use_it: impl FnOnce(&mut Program) -> R) -> Status<R> {
    PROGRAMS.with(program, use_it).ok_or(c::NVRTC_ERROR_INVALID_PROGRAM)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcVersion(major: Out<i32>, minor: Out<i32>) -> i32 {
    let [cuda_major, cuda_minor, _] = versions::cuda();
    NVRTC.answer(|| {
        NVRTC.give(major, cuda_major as i32)?;
        NVRTC.give(minor, cuda_minor as i32)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcCreateProgram(
    out: Out<*mut c_void>,
    source: Text,
    _name: Text,
    _count: i32,
    _headers: *const c_void,
    _include_names: *const c_void,
) -> i32 {
    NVRTC.answer(|| {
        if out.is_null() || source.is_null() {
            return Err(NVRTC.bad_value());
        }
        NVRTC.give(out, PROGRAMS.insert(Program { compiled: false, names: Vec::new() }))
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcDestroyProgram(place: Out<*mut c_void>) -> i32 {
    NVRTC.answer(|| {
        let handle = place.get().map_err(|_| NVRTC.bad_value())?;
        PROGRAMS.remove(handle).ok_or(c::NVRTC_ERROR_INVALID_PROGRAM)?;
        NVRTC.give(place, core::ptr::null_mut())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcAddNameExpression(handle: *mut c_void, expression: Text) -> i32 {
    NVRTC.answer(|| {
        let name = expression.string().map_err(|_| NVRTC.bad_value())?;
        let name = CString::new(name).map_err(|_| NVRTC.bad_value())?;
        program(handle, |p| {
            if p.compiled {
                return Err(c::NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION);
            }
            p.names.push(name);
            Ok(())
        })?
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcCompileProgram(
    handle: *mut c_void,
    _count: i32,
    _options: *const c_void,
) -> i32 {
    NVRTC.answer(|| program(handle, |p| p.compiled = true))
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetLoweredName(
    handle: *mut c_void,
    expression: Text,
    out: Out<*const c_char>,
) -> i32 {
    NVRTC.answer(|| {
        let name = expression.string().map_err(|_| NVRTC.bad_value())?;
        let found = program(handle, |p| {
            if !p.compiled {
                return Err(c::NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION);
            }
            let found = p.names.iter().find(|n| n.to_bytes() == name.as_bytes());
            // The text belongs to the program and lives as long, as the manual says.
            found.map(|n| n.as_ptr()).ok_or(c::NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID)
        })??;
        NVRTC.give(out, found)
    })
}

/// The length of a text with its end.
fn give_size(handle: *mut c_void, text: &CStr, size: Out<usize>) -> i32 {
    NVRTC.answer(|| {
        program(handle, |_| ())?;
        NVRTC.give(size, text.to_bytes_with_nul().len())
    })
}

/// A text, into room that the caller made for it.
fn give_text(handle: *mut c_void, text: &CStr, out: Out<u8>) -> i32 {
    NVRTC.answer(|| {
        program(handle, |_| ())?;
        if out.is_null() {
            return Err(NVRTC.bad_value());
        }
        let bytes = text.to_bytes_with_nul();
        out.fill(bytes, bytes.len());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetPTXSize(handle: *mut c_void, size: Out<usize>) -> i32 {
    give_size(handle, IMAGE, size)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetPTX(handle: *mut c_void, out: Out<u8>) -> i32 {
    give_text(handle, IMAGE, out)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetCUBINSize(handle: *mut c_void, size: Out<usize>) -> i32 {
    give_size(handle, IMAGE, size)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetCUBIN(handle: *mut c_void, out: Out<u8>) -> i32 {
    give_text(handle, IMAGE, out)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetProgramLogSize(handle: *mut c_void, size: Out<usize>) -> i32 {
    give_size(handle, c"", size)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetProgramLog(handle: *mut c_void, out: Out<u8>) -> i32 {
    give_text(handle, c"", out)
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetNumSupportedArchs(count: Out<i32>) -> i32 {
    NVRTC.answer(|| NVRTC.give(count, memtrace_devices::Limits::known().count() as i32))
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetSupportedArchs(out: Out<i32>) -> i32 {
    NVRTC.answer(|| {
        if out.is_null() {
            return Err(NVRTC.bad_value());
        }
        let known: Vec<i32> = memtrace_devices::Limits::known().map(|sm| sm as i32).collect();
        out.fill(&known, known.len());
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(status: i32) -> *const c_char {
    status_name("NVRTC_", status)
}

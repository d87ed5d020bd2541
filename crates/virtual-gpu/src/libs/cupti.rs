//! CUPTI: a profiler may attach; there is nothing for it to record.
//!
//! No kernel runs, so no activity record is ever made and no buffer asked for. Every
//! kind can be enabled, and the next record is never there. So PyTorch's profiler does
//! the part that has a meaning here, the host's. Counters and metrics, which would
//! have to be made up, are not supported.

use super::{Library, versions};
use crate::constants as c;
use crate::constants::status_name;
use crate::gpu::boundary::Out;
use crate::gpu::program;
use core::cell::RefCell;
use core::ffi::{c_char, c_void};
use std::collections::BTreeMap;

const CUPTI: Library = Library::Cupti;

thread_local! {
    /// Ids that a thread pushed, a stack for each kind.
    static CORRELATIONS: RefCell<BTreeMap<i32, Vec<u64>>> = const { RefCell::new(BTreeMap::new()) };
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityPushExternalCorrelationId(kind: i32, id: u64) -> i32 {
    // A thread that is ending has no stack any more, and nobody who would ask for it.
    let _ = CORRELATIONS.try_with(|all| all.borrow_mut().entry(kind).or_default().push(id));
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityPopExternalCorrelationId(kind: i32, last: Out<u64>) -> i32 {
    CUPTI.answer(|| {
        let pop = |all: &RefCell<BTreeMap<i32, Vec<u64>>>| {
            all.borrow_mut().get_mut(&kind).and_then(Vec::pop)
        };
        let id = CORRELATIONS.try_with(pop).ok().flatten().ok_or(c::CUPTI_ERROR_QUEUE_EMPTY)?;
        last.give(id);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNextRecord(
    _buffer: *mut c_void,
    _valid: usize,
    record: Out<*mut c_void>,
) -> i32 {
    record.give(core::ptr::null_mut());
    c::CUPTI_ERROR_MAX_LIMIT_REACHED
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetVersion(version: Out<u32>) -> i32 {
    let [_, minor, _] = versions::cuda();
    let number = program::toolkit().cupti(minor);
    CUPTI.answer(|| CUPTI.give(version, number))
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetResultString(status: i32, out: Out<*const c_char>) -> i32 {
    let name =
        if status == 0 { c"CUPTI_SUCCESS".as_ptr() } else { status_name("CUPTI_ERROR_", status) };
    CUPTI.answer(|| CUPTI.give(out, name))
}

//! What PyTorch calls us for, whenever it is there: `record_function`
//! ranges and backward functions.
//!
//! *User scopes* (`torch.profiler.record_function`, and PyTorch's own: optimizer steps, DDP, FSDP)
//! become ranges; *backward functions* are [`backward`]'s.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::labels::{self, store};
use crate::pytorch::names::{BACKWARD, USER};
use crate::pytorch::{backward, changes, operators, record_functions};

static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Asks PyTorch to call us, once it is loaded. Cheap when that is done.
pub fn attach() {
    if ATTACHED.load(Ordering::Relaxed) {
        return;
    }
    labels::listen(|local, label| {
        backward::label_changed(label);
        changes::label(local);
    });
    if record_functions::learn() {
        ATTACHED.store(true, Ordering::Relaxed);
        record_functions::add(USER, user_begins, user_ends);
        record_functions::add(BACKWARD, backward::begins, backward::ends);
        backward::label_changed(labels::current()); // which it may have been for long
    }
}

unsafe extern "C" fn user_begins(
    result: *mut *mut c_void,
    function: *const u8,
) -> *mut *mut c_void {
    // SAFETY: PyTorch hands in a live `RecordFunction`; its name is a C string or null.
    unsafe {
        let name = record_functions::name(function).to_bytes();
        match phase(name) {
            Some(phase) => labels::push_phase(phase),
            None => labels::push(name),
        };
        operators::range(true);
        record_functions::nothing(result)
    }
}

/// PyTorch's optimizers name their work `Optimizer.step#AdamW.step`, its wrappers
/// of models `….forward`, in every 2.x.
fn phase(name: &[u8]) -> Option<&'static [u8]> {
    match name {
        b"DistributedDataParallel.forward" | b"FullyShardedDataParallel.forward" => {
            Some(store::FORWARD)
        }
        name if name.starts_with(b"Optimizer.step#") => Some(store::OPTIMIZER_STEP),
        name if name.starts_with(b"Optimizer.zero_grad#") => Some(b"zero_grad"),
        _ => None,
    }
}

unsafe extern "C" fn user_ends(_: *const u8, _: *mut c_void) {
    operators::range(false);
    labels::pop();
}

//! Events of the entry points: what most of them have in common.

use memtrace_format::event::{
    Event, FLAG_FAILED, Kind, Layer, NO_STACK, OUT_OF_MEMORY, Pool, RefusalEvent, What,
};

use crate::cuda::{devices, place};
use crate::nccl::communicators;
use crate::pytorch::allocator;
use crate::record::Recorder;
use crate::record::guard::event;
use crate::record::guard::{self, Local};
use crate::record::hook::HookCall;
use crate::stack::Site;

pub(super) fn layer_of(what: What) -> Layer {
    if matches!(what, What::Pinned | What::Registered) { Layer::Host } else { Layer::Device }
}

/// What happens at this entry point, here and now.
pub(super) fn of_door(hook: HookCall, local: &Local, said: Event) -> Event {
    let pool = Pool(communicators::at_work());
    Event { api: hook.api, pool, ..event(local, said) }
}

/// Writes an event about a call that failed.
#[cold]
pub(super) fn failed(recorder: &Recorder, mut event: Event) {
    let is_oom = RefusalEvent::of(&event).answer == OUT_OF_MEMORY;
    if is_oom && event.layer == Layer::Device && event.device == place::current().device {
        event.addr = devices::free_now();
    }
    let ticket = recorder.write(&event);
    // PyTorch tries again, and reports what came of it.
    if is_oom && event.layer != Layer::Framework {
        recorder.mailbox.out_of_memory(ticket);
    }
}

/// Writes an event about a handle or a range, unless PyTorch's allocator is at work. Call outside
/// the real call.
pub(super) fn note(hook: HookCall, said: Event) {
    write(hook, None, said);
}

/// The same, where it is known on which device.
pub(super) fn note_on(hook: HookCall, device: i8, said: Event) {
    write(hook, Some(device), said);
}

fn write(hook: HookCall, device: Option<i8>, said: Event) {
    if allocator::is_caller(hook.caller) {
        return;
    }
    guard::observe(|recorder, local| {
        let stack = match said.kind {
            Kind::Create | Kind::HandleCreate | Kind::Map | Kind::Reserve => {
                recorder.stacks.capture_call(&local.stacks, Site::Alloc, hook.caller)
            }
            Kind::Destroy | Kind::HandleRelease | Kind::Unmap | Kind::Reset => {
                recorder.stack_of_freeing_call(local, hook.caller)
            }
            _ => NO_STACK,
        };
        let device = device.unwrap_or(local.device.get());
        let event = Event { stack, device, ..of_door(hook, local, said) };
        if event.flags & FLAG_FAILED == 0 {
            recorder.write(&event);
        } else {
            failed(recorder, event);
        }
        // What has no size shows in how full the device is.
        let sized = !matches!(said.what, What::Context | What::Module | What::Executable);
        match said.kind {
            Kind::Create | Kind::Destroy if sized => {}
            Kind::Create | Kind::Destroy | Kind::Reset => recorder.mailbox.measure(),
            _ => {}
        }
    });
}

//! The message when memory has run out: PyTorch's words and numbers,
//! because programs and people look for them.
//!
//! The words were observed on 2.15. How much each process has on the device is asked of NVML, as
//! PyTorch does; where NVML does not know, the message leaves that out.

use std::ffi::{c_char, c_int};
use std::fmt::Write as _;

use memtrace_caching::{FailureCause, OutOfMemory};

use super::cuda;
use crate::process::measure;
use crate::record::guard;

/// A number of bytes as PyTorch writes it.
fn size(bytes: u64) -> String {
    let units = [(1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB")];
    let unit = units.iter().rev().find(|(unit, _)| bytes > *unit);
    match unit {
        Some((unit, name)) => format!("{:.2} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// The message of `torch.cuda.OutOfMemoryError`. `cached` is what lies in
/// free blocks of private pools.
pub fn text(device: c_int, failure: &OutOfMemory, cached: u64, expandable: bool) -> String {
    let mut text = "CUDA out of memory. ".to_owned();
    match failure.why {
        FailureCause::Absurd => return text + "Tried to allocate more than 1EB memory.",
        FailureCause::Rejected => {
            return text
                + "Allocation was preemptively rejected because it would exceed \
                   per_process_memory_fraction limit. Requested size: "
                + &size(failure.segment);
        }
        FailureCause::Exhausted | FailureCause::Broken => {}
    }
    let in_use = failure.allocated + cached;
    let _ = write!(
        text,
        "Tried to allocate {}. GPU {device} has a total capacity of {} of which {} is free. {}",
        size(failure.segment),
        size(failure.device_total),
        size(failure.device_free),
        processes(device)
    );
    if let Some(limit) = failure.limit {
        let _ = write!(text, "{} allowed; ", size(limit));
    }
    let _ = write!(text, "Of the allocated memory {} is allocated by PyTorch", size(in_use));
    if cached > 0 {
        let _ =
            write!(text, ", with {} allocated in private pools (e.g., CUDA Graphs)", size(cached));
    }
    let rest = failure.reserved.saturating_sub(in_use);
    let _ = write!(text, ", and {} is reserved by PyTorch but unallocated.", size(rest));
    text.push_str(if expandable {
        " expandable_segments is enabled. If instead the process is running out of virtual address space (VSZ), \
         expandable segments may be over-reserving VA (each segment reserves ~9/8 of device memory, times the number of \
         streams); reduce it via PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / \
         expandable_segments_reserve_by_class."
    } else {
        " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to \
         avoid fragmentation.  See documentation for Memory Management  \
         (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    });
    text
}

fn processes(device: c_int) -> String {
    let mut address: [c_char; 32] = [0; 32];
    // SAFETY: a buffer of ours, as long as is said.
    let code = unsafe { cuda::cudaDeviceGetPCIBusId(address.as_mut_ptr(), 31, device) };
    if code != cuda::SUCCESS {
        return String::new();
    }
    let mut text = String::new();
    for (pid, used) in guard::nested(|| measure::processes_at(&address)) {
        let _ = if pid == std::process::id() {
            write!(text, "Including non-PyTorch memory, this process")
        } else {
            write!(text, "Process {pid}")
        };
        let _ = write!(text, " has {} memory in use. ", size(used));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_pytorch_writes_them() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1024, "1024 bytes"),
            (1025, "1.00 KiB"),
            (1 << 20, "1024.00 KiB"),
            (20 << 20, "20.00 MiB"),
            (10 << 40, "10240.00 GiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}

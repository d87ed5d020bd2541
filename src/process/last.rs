//! Is the background thread the last one of the process?
//!
//! A main thread that leaves by `pthread_exit` (or is cancelled) lets the others go on. The kernel
//! keeps it among the threads, as a zombie, until all have ended; its list of robust locks is gone
//! at once. Asking for that list takes a tenth of a microsecond. So the background thread asks each
//! time it wakes up, and looks at the other threads only once the list is gone.

use std::fs;

/// Have all other threads ended?
pub fn is_this_thread() -> bool {
    main_has_ended() && others_have_ended()
}

fn main_has_ended() -> bool {
    let (mut locks, mut size) = (1_usize, 0_usize);
    // SAFETY: asks for two words about a thread of this process; the places for them are ours.
    let code = unsafe {
        let main = libc::getpid();
        libc::syscall(libc::SYS_get_robust_list, main, &raw mut locks, &raw mut size)
    };
    code == 0 && locks == 0
}

/// As far as the kernel shows it; without `/proc`, they may have.
fn others_have_ended() -> bool {
    // SAFETY: gettid has no preconditions.
    let own = unsafe { libc::gettid() }.to_string();
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return true };
    threads.flatten().all(|thread| {
        thread.file_name().to_str() == Some(&own)
            || memtrace_files::read(thread.path().join("stat")).map_or(true, |s| has_ended(&s))
    })
}

/// In the text of a thread's `stat`. The name in brackets may have brackets in it.
fn has_ended(stat: &[u8]) -> bool {
    let state = stat.iter().rposition(|b| *b == b')').and_then(|end| stat.get(end + 2));
    state.is_none_or(|state| b"ZX".contains(state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_s_state_stands_behind_any_name() {
        assert!(has_ended(b"7 (a) R (b) Z 1 7 7"));
        assert!(!has_ended(b"7 (Z) S 1 7 7"));
        assert!(!main_has_ended() && !is_this_thread());
    }
}

//! Opening a file where nothing may be allocated: in a signal handler, or between `vfork` and `exec`. Elsewhere
//! [`memtrace_files`] opens files.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

/// Those below are standard input, output and error, also where they are closed.
const FIRST_OWN: c_int = 3;

/// A descriptor that the program doesn't take for one of its own; negative if the file can't be opened.
///
/// # Safety
/// `path` is a C string, or what the kernel answers with an error.
pub unsafe fn open(path: *const c_char, how: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: promised by the caller; a descriptor of our own.
    unsafe {
        let file = libc::open(path, how, mode);
        if !(0..FIRST_OWN).contains(&file) {
            return file;
        }
        let other = libc::fcntl(file, libc::F_DUPFD_CLOEXEC, FIRST_OWN);
        libc::close(file);
        other
    }
}

/// The process began without a standard error.
static MUTE: AtomicBool = AtomicBool::new(false);

/// When the library is loaded: is there a standard error? If not, 2 will be the number of some file of the program's, into
/// which no line of ours must go.
pub fn loading() {
    // SAFETY: only asks.
    MUTE.store(unsafe { libc::fcntl(2, libc::F_GETFD) } < 0, Ordering::Relaxed);
}

/// Writes to standard error, if there was one when the process began. What goes wrong is of no consequence.
pub fn say(text: &[u8]) {
    if !MUTE.load(Ordering::Relaxed) {
        // SAFETY: the buffer is valid for its length.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
}

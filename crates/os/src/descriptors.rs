//! Opening a file where nothing may be allocated: in a signal handler, or between `vfork` and
//! `exec`. Elsewhere [`memtrace_files`] opens files.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

/// Those below are standard input, output and error, also where they are closed.
const FIRST_OWN: c_int = 3;

/// A descriptor that the program doesn't take for one of its own; negative
/// if the file can't be opened.
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

/// Opens a plain file of this user's, without following a link and without waiting for anybody, as
/// [`memtrace_files::append`] does. Negative for anything else that has this name. Whoever made
/// that would read what is written, or have it believed.
pub fn open_own(path: &CStr, how: c_int) -> c_int {
    let careful = libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: a C string, our own descriptor, and a record of the right type, which
    // is read only if the call filled it.
    unsafe {
        let file = open(path.as_ptr(), how | careful, 0o600);
        let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
        if file >= 0 && libc::fstat(file, found.as_mut_ptr()) == 0 {
            let found = found.assume_init();
            if found.st_mode & libc::S_IFMT == libc::S_IFREG && found.st_uid == libc::geteuid() {
                return file;
            }
        }
        if file >= 0 {
            libc::close(file);
        }
        -1
    }
}

/// May this process have one more descriptor?
pub fn is_one_left() -> bool {
    // SAFETY: a C string, and our own descriptor.
    unsafe {
        let file = libc::open(c"/".as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
        let is_one =
            file >= 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EMFILE);
        if file >= 0 {
            libc::close(file);
        }
        is_one
    }
}

/// The process began without a standard error.
static MUTE: AtomicBool = AtomicBool::new(false);

/// When the library is loaded: is there a standard error? If not, 2 will be the number of some file
/// of the program's, into which no line of ours must go.
pub fn loading() {
    // SAFETY: only asks.
    MUTE.store(unsafe { libc::fcntl(2, libc::F_GETFD) } < 0, Ordering::Relaxed);
}

/// Writes to standard error, if there was one when the process began. What
/// goes wrong is of no consequence.
pub fn say(text: &[u8]) {
    if !MUTE.load(Ordering::Relaxed) {
        // SAFETY: the buffer is valid for its length.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
}

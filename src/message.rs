//! One line on stderr.
//!
//! Straight to file descriptor 2 in one write, so that lines of several processes don't mix, a closed
//! stderr is no error, and nothing of `std`'s stream locks is touched inside somebody else's process.

use crate::record::guard;

/// Writes `memtrace: …` and a newline to stderr.
#[macro_export]
macro_rules! message {
    ($($arg:tt)*) => { $crate::message::line(&format!($($arg)*)) };
}

/// Writes the line.
pub fn line(text: &str) {
    let line = format!("memtrace: {text}\n");
    // SAFETY: the buffer is valid for its length; a failed write is of no consequence.
    guard::uncancelled(|| unsafe { libc::write(2, line.as_ptr().cast(), line.len()) });
}

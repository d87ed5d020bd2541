//! Lines on stderr.
//!
//! Straight to file descriptor 2 in one write, so that lines of several processes don't mix and a
//! closed stderr is no error. Nothing of `std`'s stream locks is touched inside somebody else's
//! process. Names of the program's are written so that they are seen ([`memtrace_terminal`]).

use memtrace_terminal::{Page, shown};

use crate::descriptors;
use crate::signals;

/// Writes `memtrace: …` and a newline to stderr.
#[macro_export]
macro_rules! message {
    ($($arg:tt)*) => { $crate::message::line(&format!($($arg)*)) };
}

/// Writes the line.
pub fn line(text: &str) {
    write(&format!("memtrace: {}\n", shown(text)));
}

/// Writes all lines of a page, each of which says who speaks.
pub fn page(page: &Page) {
    write(&page.lines().fold(String::new(), |text, line| text + "memtrace: " + line + "\n"));
}

fn write(lines: &str) {
    signals::uncancelled(|| descriptors::say(lines.as_bytes()));
}

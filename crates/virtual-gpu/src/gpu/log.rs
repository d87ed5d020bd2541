//! What the virtual GPU says, and where: standard error, one line each, with its name in front.
//!
//! Lines go out with one `write` each, because the library lives in somebody else's process, where
//! several threads and children share the stream.

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock, PoisonError};

use memtrace_options::{Choices, VIRTUAL_LOG, VirtualLog};

/// Something the user should know.
pub fn warn(text: &str) {
    line(text);
}

/// Says `text` only once in this process, however often it is called.
pub fn warn_once(text: &str) {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned()) {
        line(text);
    }
}

/// `MEMTRACE_VIRTUAL_LOG`: how much is logged.
pub fn level() -> u8 {
    static LEVEL: OnceLock<u8> = OnceLock::new();
    let told = || VirtualLog::named(&std::env::var(VIRTUAL_LOG.variable).ok()?);
    *LEVEL.get_or_init(|| told().unwrap_or_default() as u8)
}

/// For those who debug the virtual GPU or a program on it.
pub fn debug(at: u8, text: impl FnOnce() -> String) {
    if level() >= at {
        line(&text());
    }
}

fn line(text: &str) {
    let line = format!("memtrace: virtual GPU: {text}\n");
    // Nothing can be reported if standard error is closed. SAFETY: the pointer
    // and length are those of one string.
    let _ = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

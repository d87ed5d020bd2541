//! The calling thread's `errno`, which a hook leaves as it was.
//!
//! A program may look at it after a call of its own into which ours has come. Real functions that
//! succeed leave it alone, and so must what we do beside them. Saved where work of ours is rare and
//! asks the system for something; an event asks for nothing.

use std::ffi::c_int;

/// Puts back what it was when this was made.
pub struct Kept(c_int);

impl Kept {
    /// As it is now.
    pub fn now() -> Kept {
        // SAFETY: the calling thread's own word.
        Kept(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: the calling thread's own word.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Runs something that may change it.
pub fn kept<R>(f: impl FnOnce() -> R) -> R {
    let _kept = Kept::now();
    f()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stays;

    #[test]
    fn it_is_put_back_also_after_a_panic() {
        // SAFETY: an impossible request.
        let fails = || unsafe { libc::close(-1) };
        assert!(!stays(|| _ = fails()) && stays(|| _ = kept(fails)));
        assert!(stays(|| {
            let panics = || {
                fails();
                std::panic::resume_unwind(Box::new(()));
            };
            let _ = std::panic::catch_unwind(|| kept(panics));
        }));
    }
}

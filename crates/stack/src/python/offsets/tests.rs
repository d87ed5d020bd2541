//! Interpreters that are none: what they say of themselves decides whether they are walked.

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;

use super::*;

/// What an interpreter exports that is looked at before the first walk.
struct Made {
    version: u64,
    /// The types of code objects and of frames, up to and with what frees an object.
    code: [AtomicUsize; 7],
    frame: [usize; 7],
    /// The beginning of `_PyRuntime`.
    block: [u64; 64],
}

thread_local! {
    /// It was asked for something else than its version.
    static WAS_USED: Cell<bool> = const { Cell::new(false) };
}

unsafe extern "C" fn used() -> usize {
    WAS_USED.set(true);
    0
}

impl Made {
    /// One of this version, laid out as that of the layout is.
    fn new(version: u64, layout: &Layout) -> Made {
        let mut made = Made { version, code: Default::default(), frame: [0; 7], block: [0; 64] };
        *made.code[TP_BASICSIZE / 8].get_mut() = layout.code_size;
        made.frame[TP_BASICSIZE / 8] = layout.frame_size;
        made.block[..2].copy_from_slice(&[u64::from_le_bytes(*b"xdebugpy"), version]);
        for (i, offset) in published_offsets(layout) {
            made.block[i] = offset as u64;
        }
        made
    }

    fn find(&self) -> Result<Runtime, Reason> {
        let symbol = |name: &CStr| {
            Some(match name.to_str().expect("ASCII") {
                "Py_Version" => (&raw const self.version).cast_mut().cast(),
                "PyCode_Type" => self.code.as_ptr().cast_mut().cast(),
                "PyFrame_Type" => self.frame.as_ptr().cast_mut().cast(),
                "_PyRuntime" => self.block.as_ptr().cast_mut().cast(),
                "PyGILState_GetThisThreadState" | "Py_IsFinalizing" => used as *mut c_void,
                _ => return None,
            })
        };
        WAS_USED.set(false);
        let found = find(&symbol);
        assert!(found.is_ok() || !WAS_USED.get(), "it is not walked, but was called");
        found
    }
}

/// Why it is not walked.
fn why(made: &Made) -> Option<Reason> {
    made.find().err()
}

#[test]
fn a_version_without_a_layout_is_not_walked_by_that_of_another() {
    for layout in &LAYOUTS {
        let hex = 3 << 24 | u64::from(layout.minor) << 16 | 0xf0;
        assert_eq!(why(&Made::new(hex, layout)), None, "3.{}", layout.minor);
        // However like it another one looks: older, newer, the next to come, and a Python 4.
        let newest = LAYOUTS[LAYOUTS.len() - 1].minor;
        for other in [0x0308_12f0, 0x0400_00f0, 3 << 24 | u64::from(newest + 1) << 16 | 0xf0]
            .into_iter()
            .chain((0x0e..0x20).map(|minor| 3 << 24 | minor << 16 | 0x01f0))
        {
            let known = LAYOUTS.iter().any(|l| other >> 16 == 0x300 | u64::from(l.minor));
            assert!(known || why(&Made::new(other, layout)) == Some(Reason::VersionUnknown));
        }
    }
}

#[test]
fn another_build_of_a_known_version_is_not_walked() {
    for layout in &LAYOUTS {
        let made = || Made::new(3 << 24 | u64::from(layout.minor) << 16 | 0xf0, layout);
        let failed = Some(Reason::LayoutCheckFailed);
        let mut larger = made();
        *larger.code[TP_BASICSIZE / 8].get_mut() += 8;
        assert_eq!(why(&larger), failed);
        let mut larger = made();
        larger.frame[TP_BASICSIZE / 8] += 8;
        assert_eq!(why(&larger), failed);
        if layout.minor < 13 {
            continue;
        }
        let mut free_threaded = made();
        free_threaded.block[2] = 1;
        assert_eq!(why(&free_threaded), Some(Reason::FreeThreaded));
        // Its type objects are larger, too; the reason is the one that a user can do something
        // about.
        *free_threaded.code[TP_BASICSIZE / 8].get_mut() += 48;
        assert_eq!(why(&free_threaded), Some(Reason::FreeThreaded));
        for (i, _) in published_offsets(layout) {
            let mut moved = made();
            moved.block[i] += 16;
            assert_eq!(why(&moved), failed, "word {i}");
        }
        for i in [0, 1] {
            let mut another = made();
            another.block[i] ^= 1 << 16;
            assert_eq!(why(&another), failed, "word {i}");
        }
    }
}

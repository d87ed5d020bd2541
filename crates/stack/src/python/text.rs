//! Python strings, read without Python.
//!
//! A compact string is a header and its characters, one, two or four bytes each; both are fixed
//! once the string exists. The cached UTF-8 form is not used: another thread may be making it.

use super::offsets::{Layout, OB_TYPE, STR_LENGTH, STR_STATE};
use super::read;

/// Longest text that is kept, in bytes of UTF-8; the rest is cut off.
const MAX_BYTES: usize = 4096;

static NOTHING: [u64; 1] = [0];

/// A string object that is alive.
#[derive(Clone, Copy)]
pub struct Text {
    data: usize,
    length: usize,
    width: usize,
}

impl Text {
    /// The string at `at`; empty if it is not a compact one (names and file names always are).
    ///
    /// # Safety
    /// `at` is 0 or a live `str` object.
    #[inline(always)]
    pub unsafe fn at(layout: &Layout, at: usize) -> Text {
        // Empty, and there is something to read before its end.
        let none = Text { data: (&raw const NOTHING) as usize + 8, length: 0, width: 1 };
        if at == 0 || !at.is_multiple_of(OB_TYPE) {
            return none;
        }
        // SAFETY: a live string object has these fields.
        let (length, state) =
            unsafe { (read::<usize>(at + STR_LENGTH), read::<u32>(at + STR_STATE)) };
        let (width, compact, ascii) =
            ((state >> 2 & 7) as usize, state >> 5 & 1 == 1, state >> 6 & 1 == 1);
        if !compact || !matches!(width, 1 | 2 | 4) {
            return none;
        }
        let header = if ascii { layout.ascii } else { layout.compact };
        Text { data: at + header, length, width }
    }

    /// The characters, as many as are kept. Half a surrogate pair becomes U+FFFD.
    pub fn chars(self) -> impl Iterator<Item = char> {
        let mut bytes = 0;
        (0..self.length)
            .map(move |i| {
                let at = self.data + i * self.width;
                // SAFETY: `i` is below the length of a live string whose
                // characters have this width.
                let point = unsafe {
                    match self.width {
                        1 => u32::from(read::<u8>(at)),
                        2 => u32::from(read::<u16>(at)),
                        _ => read::<u32>(at),
                    }
                };
                char::from_u32(point).unwrap_or(char::REPLACEMENT_CHARACTER)
            })
            .take_while(move |c| {
                bytes += c.len_utf8();
                bytes <= MAX_BYTES
            })
    }

    /// Length in UTF-8, as much as is kept.
    pub fn utf8_len(self) -> usize {
        self.chars().map(char::len_utf8).sum()
    }

    /// A number for the content: from its size, its beginning and its end, where file names differ.
    #[inline(always)]
    pub fn glimpse(self) -> u64 {
        let bytes = self.length * self.width;
        let end = self.data + bytes;
        if bytes < 16 {
            // SAFETY: the eight bytes before the end of a string are its own or its
            // header's; the header's are shifted out. Eight bytes from the beginning
            // are the string's if it has as many.
            unsafe {
                let kept = bytes.min(8) as u32;
                let last = read_word(end - 8).checked_shr(64 - 8 * kept).unwrap_or(0);
                let first = if bytes > 8 { read_word(self.data) } else { 0 };
                return first ^ last.rotate_left(23) ^ bytes as u64;
            }
        }
        // SAFETY: at least sixteen bytes, all of the live string.
        let [a, b, c] = unsafe { [read_word(self.data), read_word(end - 16), read_word(end - 8)] };
        a ^ b.rotate_left(23) ^ c.rotate_left(41) ^ bytes as u64
    }
}

/// Reads eight bytes at any address.
///
/// # Safety
/// They must be readable.
#[inline(always)]
pub unsafe fn read_word(at: usize) -> u64 {
    // SAFETY: as the caller promises.
    unsafe { (at as *const u64).read_unaligned() }
}

//! Sizes: what a request is rounded to, which pool it belongs to, how much
//! is asked of the driver for it.

use crate::settings::Settings;

/// Every block is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// Blocks up to this size live in the small pool.
pub const SMALL_LIMIT: u64 = 1 << 20;
/// Segments of the small pool.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// From this size on, a request gets a segment of its own size.
pub const OWN_SEGMENT: u64 = 10 << 20;
/// What such a segment is a multiple of.
pub const SEGMENT_STEP: u64 = 2 << 20;
/// Larger requests are refused before anything else happens: 2^60 bytes.
pub const ABSURD: u64 = 1 << 60;

/// The size of the block for a request of `size` bytes (below [`ABSURD`]).
pub fn round(settings: &Settings, size: u64) -> u64 {
    if size < MIN_BLOCK {
        return MIN_BLOCK;
    }
    let divisions = settings.divisions(size);
    if divisions > 1 && size > MIN_BLOCK.saturating_mul(divisions) {
        return round_to_division(size, divisions);
    }
    size.next_multiple_of(MIN_BLOCK)
}

/// Up to the next of `divisions` equal steps between two powers of two.
fn round_to_division(size: u64, divisions: u64) -> u64 {
    if size.is_power_of_two() {
        return size;
    }
    let floor = 1_u64 << size.ilog2();
    match floor >> divisions.ilog2() {
        0 => floor << 1,
        step => size.next_multiple_of(step),
    }
}

/// Whether a block of this (rounded) size belongs to the small pool.
pub fn is_small(rounded: u64) -> bool {
    rounded <= SMALL_LIMIT
}

/// What is asked of the driver when no cached block fits.
pub fn segment(settings: &Settings, rounded: u64) -> u64 {
    if is_small(rounded) {
        SMALL_SEGMENT
    } else if rounded < OWN_SEGMENT {
        settings.large_segment
    } else {
        rounded.next_multiple_of(SEGMENT_STEP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(conf: &str) -> Settings {
        Settings::parse(conf).expect("valid").settings
    }

    #[test]
    fn without_divisions_every_block_is_a_multiple_of_512() {
        let s = with("");
        for (size, rounded) in [(0, 512), (1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)] {
            assert_eq!(round(&s, size), rounded);
        }
        assert_eq!(segment(&s, 512), 2 << 20);
        assert_eq!(segment(&s, (1 << 20) + 512), 20 << 20);
        assert_eq!(segment(&s, 10 << 20), 10 << 20);
        assert_eq!(segment(&s, (10 << 20) + 512), 12 << 20);
        assert_eq!(segment(&with("large_segment_size_mb:64"), 2 << 20), 64 << 20);
    }

    #[test]
    fn divisions_step_between_powers_of_two() {
        let s = with("roundup_power2_divisions:4");
        assert_eq!(round(&s, 1200 << 10), 1280 << 10);
        assert_eq!(round(&s, 1 << 21), 1 << 21);
        // Not above 512 × 4: by 512 as ever.
        assert_eq!(round(&s, 2000), 2048);
        let s = with("roundup_power2_divisions:[64:8,>:1]");
        assert_eq!(round(&s, (64 << 20) + 1), 72 << 20);
        assert_eq!(round(&s, (128 << 20) + 1), (128 << 20) + 512);
    }
}

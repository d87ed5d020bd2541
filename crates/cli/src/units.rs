//! Numbers for people. Files and JSON hold bytes; only a screen gets these.

/// A size with three significant digits or so: `16.0 MiB`, `79.6 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        // A size is told in the largest unit of which it is a tenth or more, small ones in bytes.
        if bytes >= 1 << shift {
            let n = bytes as f64 / (1_u64 << shift) as f64;
            let digits = if n < 9.995 { 2 } else { 1 };
            return format!("{n:.digits$} {unit}");
        }
    }
    format!("{bytes} B")
}

/// A count with its thousands apart: `1,234,567`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count of things: `1 block`, `1,200 blocks`.
pub(crate) fn many(n: u64, thing: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {thing}{s}", count(n))
}

/// A time span.
pub(crate) fn span(us: i64) -> String {
    let s = us as f64 / 1e6;
    match us {
        i64::MIN..1_000 => format!("{us} µs"),
        1_000..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        1_000_000..600_000_000 => format!("{s:.2} s"),
        _ => format!("{:.1} min", s / 60.0),
    }
}

/// A share of a whole, 0 to 1.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (20 << 20, "20.0 MiB"),
            (10_470_000, "9.98 MiB"),
            (7_013_335_044, "6.53 GiB"),
            (85_899_345_920, "80.0 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn counts_and_spans() {
        assert_eq!(
            ["0", "999", "1,000", "1,234,567"],
            [0, 999, 1000, 1_234_567].map(count).as_slice()
        );
        assert_eq!([many(1, "block"), many(0, "block")], ["1 block", "0 blocks"]);
        let spans = [-5, 999, 168_000, 61_000_000, 3_600_000_000].map(span);
        assert_eq!(spans, ["-5 µs", "999 µs", "168.0 ms", "61.00 s", "60.0 min"]);
        assert_eq!(percent(0.0101), "1.0 %");
    }
}

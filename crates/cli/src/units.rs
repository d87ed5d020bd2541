//! Numbers for people. Files and JSON hold bytes; only a screen gets these.

/// A size with three significant digits or so: `16.0 MiB`, `79.6 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        // A size is printed in the largest unit of which it is a tenth or
        // more, small ones in bytes.
        if bytes >= 1 << shift {
            let n = bytes as f64 / (1_u64 << shift) as f64;
            let digits = if n < 9.995 { 2 } else { 1 };
            return format!("{n:.digits$} {unit}");
        }
    }
    format!("{bytes} B")
}

/// A size as people write it: `40GiB`, `40G`, `512MiB`, `1073741824`. All units are powers of 1024.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" | "kb" => 10,
        "m" | "mib" | "mb" => 20,
        "g" | "gib" | "gb" => 30,
        "t" | "tib" | "tb" => 40,
        other => {
            return Err(format!(
                "'{other}' is no unit of size; write 40GiB, 512MiB or a number of bytes"
            ));
        }
    };
    let n: f64 = number
        .parse()
        .map_err(|_| "write a size as 40GiB, 512MiB or a number of bytes".to_owned())?;
    let bytes = n * (1_u64 << shift) as f64;
    // Beyond 2^53 a card is no card.
    if bytes < 9e15 {
        Ok(bytes as u64)
    } else {
        Err("that is more memory than any card has".to_owned())
    }
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

/// The last row of a table that is cut: how many rows are not listed, whose sum is beside it.
pub(crate) fn more(rows: usize, thing: &str, all: usize) -> String {
    let s = if rows == 1 { "" } else { "s" };
    format!("({rows} more {thing}{s}, --top {all} shows them)")
}

/// Bytes and numbers, added up.
pub(crate) fn sum(rows: impl Iterator<Item = (u64, u64)>) -> (u64, u64) {
    rows.fold((0, 0), |(bytes, n), (b, m)| (bytes.saturating_add(b), n.saturating_add(m)))
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
    fn sizes_are_read() {
        for (text, bytes) in [
            ("40GiB", 40 << 30),
            ("40G", 40 << 30),
            ("1.5 gb", 3 << 29),
            ("512MiB", 512 << 20),
            ("0", 0),
            ("123", 123),
        ] {
            assert_eq!(parse(text), Ok(bytes));
        }
        for text in ["", "GiB", "40 X", "-4G", "1e9", "9999999T"] {
            assert!(parse(text).is_err(), "{text}");
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

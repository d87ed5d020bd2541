//! Text for a person: what a terminal, a log or a text file gets to see.
//!
//! Names of functions, files, labels and processes come from untrusted files and programs. Printed
//! as they are, they could move the cursor or change the title of a window. They could make up a
//! line that memtrace never wrote, or show code in another order than it runs in. So names reach a
//! screen only in a [`Page`], whose lines hold nothing but characters that are seen. Every other
//! one is written out, as `\n` or `\u{1b}`.
//!
//! A page is filled line by line with `writeln!`. What is in one call is one line,
//! however many the name in it would have made. Text of several lines is taken only from
//! the source code ([`Page::push_str`]).
//!
//! Names in a command that a user may copy are another matter: [`shell`].

#![forbid(unsafe_code)]
// Product names in prose are not code.
#![allow(clippy::doc_markdown)]

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::ops::Deref;

pub mod shell;

/// Lines of characters that are seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page(String);

impl Page {
    /// What `writeln!` calls: each call is one line.
    ///
    /// # Errors
    /// None; `writeln!` wants a result.
    pub fn write_fmt(&mut self, line: fmt::Arguments<'_>) -> fmt::Result {
        let line = line.to_string();
        self.0.push_str(&shown(line.strip_suffix('\n').unwrap_or(&line)));
        self.0.push('\n');
        Ok(())
    }

    /// Text of the source code, of any number of lines.
    pub fn push_str(&mut self, text: &'static str) {
        self.0.push_str(text);
    }

    /// Another page, below.
    pub fn append(&mut self, other: &Page) {
        self.0.push_str(&other.0);
    }

    /// The first `n` lines.
    #[must_use]
    pub fn first(&self, n: usize) -> Page {
        Page(self.0.split_inclusive('\n').take(n).collect())
    }
}

impl Deref for Page {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One line: every character that is not seen as itself is written out.
pub fn shown(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_seen) {
        return Cow::Borrowed(text);
    }
    let mut line = String::new();
    text.chars().for_each(|c| show(c, |c| line.push(c)));
    Cow::Owned(line)
}

/// Hands out what is shown of a character. Allocates nothing.
pub fn show(c: char, to: impl FnMut(char)) {
    match c {
        _ if is_seen(c) => std::iter::once(c).for_each(to),
        '\0' | '\t' | '\r' | '\n' => c.escape_default().for_each(to),
        _ => c.escape_unicode().for_each(to),
    }
}

/// JSON for a screen: the same text, in which characters that are not seen are written as JSON
/// writes them. They stand only inside of strings, apart from the ends of lines.
pub fn shown_json(json: &str) -> Cow<'_, str> {
    let is_fine = |c: char| c == '\n' || is_seen(c);
    if json.chars().all(is_fine) {
        return Cow::Borrowed(json);
    }
    Cow::Owned(json.chars().fold(String::new(), |mut text, c| {
        if is_fine(c) {
            text.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        }
        text
    }))
}

/// Is this character seen as itself, where it stands? Not: controls, marks of direction, spaces of
/// no width or another, characters that no font has, and those that Unicode lets a font ignore.
pub(crate) fn is_seen(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let ignorable = matches!(c,
        '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}');
    if ignorable {
        return false;
    }
    // An accent that stands behind its letter is seen; `escape_debug`
    // would write it out if it came first.
    let mut bytes = [b'a'; 5];
    let length = c.encode_utf8(&mut bytes[1..]).len();
    let pair = std::str::from_utf8(&bytes[..=length]).unwrap_or_default();
    pair.escape_debug().nth(1) == Some(c)
}

#[cfg(test)]
mod tests {
    use super::*;
    /// Escape sequences, C0 and C1, ends of lines of all kinds, marks of
    /// direction, characters of no width, tags.
    const UNSEEN: &str = "\0\x07\x08\t\n\r\x1b\x7f\u{80}\u{85}\u{9b}\u{9f}\u{a0}\u{ad}\u{61c}\u{180e}\u{200b}\u{200c}\u{200d}\u{200e}\u{200f}\
        \u{2028}\u{2029}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2060}\u{2063}\u{2066}\u{2067}\u{2068}\u{2069}\u{3164}\u{feff}\u{fff9}\u{fe0f}\u{e0041}\u{e0100}\u{e000}\u{10ffff}";

    #[test]
    fn what_is_not_seen_is_written_out() {
        for c in UNSEEN.chars() {
            let line = shown(&format!("a{c}b")).into_owned();
            assert!(!line.contains(c), "{c:?}");
            assert!(line.starts_with("a\\") && line.ends_with('b'), "{line}");
        }
        assert_eq!(shown("a\x1b[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert_eq!(shown("x\u{202e}yp.niart"), "x\\u{202e}yp.niart");
    }

    #[test]
    fn what_is_seen_stays() {
        for text in ["", r#"C:\Users\a "b" 'c'"#, "Grüße, 世界, привет, नमस्ते, e\u{301}, 🚀, µs …"]
        {
            assert!(matches!(shown(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn a_call_is_a_line() {
        let mut page = Page::default();
        let name = "a\nmemtrace: all is well\n";
        let _ = writeln!(page, "file {name}");
        let _ = writeln!(page);
        page.push_str("two\nlines\n");
        assert_eq!(&*page, "file a\\nmemtrace: all is well\\n\n\ntwo\nlines\n");
        assert_eq!(&*page.first(1), "file a\\nmemtrace: all is well\\n\n");
        let mut plain = String::new();
        let _ = write!(plain, "{page}");
        assert_eq!(plain, *page);
    }

    #[test]
    fn json_says_the_same_and_stays_json() {
        let value = serde_json::json!({ UNSEEN: [UNSEEN, "plain ü"] });
        let text = format!("{value:#}");
        let shown = shown_json(&text);
        assert!(UNSEEN.chars().all(|c| c == '\n' || !shown.contains(c)));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).expect("JSON"), value);
    }
}

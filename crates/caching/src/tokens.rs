//! A configuration in pieces: words, and the separators between them.

use crate::settings::ConfError;

const SEPARATORS: [char; 4] = [',', ':', '[', ']'];
const OUT_OF_BOUNDS: &str = "Index out of bounds in ConfigTokenizer";

/// Words and separators in order.
pub(crate) struct Tokens(Vec<String>);

impl Tokens {
    pub(crate) fn new(conf: &str) -> Tokens {
        let mut tokens = Vec::new();
        let mut word = String::new();
        for c in conf.chars().filter(|c| !c.is_ascii_whitespace()) {
            if SEPARATORS.contains(&c) {
                if !word.is_empty() {
                    tokens.push(std::mem::take(&mut word));
                }
                tokens.push(c.to_string());
            } else {
                word.push(c);
            }
        }
        if !word.is_empty() {
            tokens.push(word);
        }
        Tokens(tokens)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, i: usize) -> Result<&str, ConfError> {
        self.0.get(i).map(String::as_str).ok_or_else(|| {
            let last = self.0.iter().rfind(|t| t.len() > 1).map_or("", String::as_str);
            ConfError::new(OUT_OF_BOUNDS)
                .about(format!("a value or a bracket is missing after '{last}'"))
        })
    }

    pub(crate) fn is(&self, i: usize, token: &str) -> bool {
        self.0.get(i).is_some_and(|t| t == token)
    }

    /// Whether a list ends here.
    pub(crate) fn is_end(&self, i: usize) -> Result<bool, ConfError> {
        self.get(i).map(|t| t == "]")
    }

    pub(crate) fn boolean(&self, i: usize) -> Result<bool, ConfError> {
        match self.get(i)? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(ConfError::new(format!(
                "Expected 'True' or 'False' at index {i} in ConfigTokenizer but got '{other}'"
            ))),
        }
    }

    /// As `strtoull` reads: a sign, digits, and whatever follows is ignored.
    pub(crate) fn integer(&self, i: usize) -> Result<u64, ConfError> {
        let text = self.get(i)?;
        let about =
            || ConfError::new("stoull").about(format!("a number is expected, not '{text}'"));
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        if end == 0 {
            return Err(about());
        }
        let n: u64 = digits[..end].parse().map_err(|_| about())?;
        Ok(if negative { n.wrapping_neg() } else { n })
    }

    /// As `strtod` reads decimal numbers: the longest beginning that is one.
    pub(crate) fn float(&self, i: usize) -> Result<f64, ConfError> {
        let text = self.get(i)?;
        (1..=text.len())
            .rev()
            .filter_map(|end| text.get(..end))
            .find_map(|beginning| beginning.parse().ok())
            .ok_or_else(|| {
                ConfError::new("stod").about(format!("a number is expected, not '{text}'"))
            })
    }
}

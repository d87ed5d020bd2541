//! How a user says which GPUs there should be.
//!
//! ```text
//! NAME[*N][,lazy][,placement=WHERE]                    h100    a100-40*2    rtx4090,lazy
//! sm_CC,MEMORY,COUNTSM[*N][,lazy][,placement=WHERE]    sm_90,80GiB,132SM*8
//! ```
//!
//! `*N` asks for N equal GPUs. `lazy` lets work on streams finish as late as it may, when the host
//! next waits for something; without it, work finishes at once. The two runs bracket the real card.
//! `placement` says at which addresses memory is given out: as drivers do on Linux (the default) or
//! ascending, as on Windows and under WSL.
//!
//! A wrong word must end in one sentence that says what is wrong and what to write instead. It
//! never falls back to some other GPU.

use crate::Limits;
use crate::profiles::{CONTEXT_ESTIMATE, Profile, find, profiles};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;

/// The most GPUs of one machine.
pub const MAX_DEVICES: u32 = 16;
const MIN_MIB: u64 = 256;
const MAX_MIB: u64 = 1 << 20;
const MAX_SMS: u32 = 1024;
const EXAMPLE: &str =
    "write NAME[*N] or sm_90,80GiB,132SM[*N], and behind it ,lazy or ,placement=ascending";

/// At which addresses a card gives memory out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// As NVIDIA's driver does on Linux: large requests descend.
    #[default]
    Linux,
    /// The lowest address first, as on Windows and under WSL.
    Ascending,
}

impl Placement {
    const ALL: [(&'static str, Self); 2] = [("linux", Self::Linux), ("ascending", Self::Ascending)];

    fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// The GPUs of one virtual machine. Its `Display` is the canonical spelling and parses to itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The model; all GPUs are alike.
    pub profile: Profile,
    /// How many, 1 to [`MAX_DEVICES`].
    pub count: u32,
    /// Stream work finishes as late as possible.
    pub lazy: bool,
    /// At which addresses memory is given out.
    pub placement: Placement,
}

/// Why a text names no GPU: one line, with what to write instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError(String);

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SpecError {}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.profile.key)?;
        if self.count != 1 {
            write!(f, "*{}", self.count)?;
        }
        if self.lazy {
            f.write_str(",lazy")?;
        }
        if self.placement != Placement::default() {
            write!(f, ",placement={}", self.placement.name())?;
        }
        Ok(())
    }
}

impl FromStr for Spec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Spec::parse(text)
    }
}

impl Spec {
    /// Reads a specification.
    ///
    /// # Errors
    /// If it names no GPU that can be: the error says why and what to write.
    pub fn parse(text: &str) -> Result<Spec, SpecError> {
        let mut rest = text.trim();
        let (mut lazy, mut placement) = (false, Placement::default());
        while let Some((head, last)) = rest.rsplit_once(',') {
            match last.split_once('=') {
                Some((key, value)) if key.trim().eq_ignore_ascii_case("placement") => {
                    placement = parse_placement(value.trim())?;
                }
                None if last.trim().eq_ignore_ascii_case("lazy") => lazy = true,
                _ => break,
            }
            rest = head.trim_end();
        }
        let count = match rest.split_once('*') {
            Some((head, n)) => {
                rest = head.trim_end();
                parse_count(n.trim())?
            }
            None => 1,
        };
        let profile = if is_custom(rest) { parse_custom(rest)? } else { parse_name(rest)? };
        Ok(Spec { profile, count, lazy, placement })
    }
}

fn parse_placement(text: &str) -> Result<Placement, SpecError> {
    let found = Placement::ALL.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    found.map(|(_, placement)| *placement).ok_or_else(|| {
        SpecError(format!(
            "`placement={text}` is not a way to place memory: write placement=linux (the default) or \
             placement=ascending (Windows, WSL)"
        ))
    })
}

fn parse_count(text: &str) -> Result<u32, SpecError> {
    match text.parse::<u32>() {
        Ok(n @ 1..=MAX_DEVICES) => Ok(n),
        _ => Err(SpecError(format!(
            "`*{text}` is not a number of GPUs: write *1 to *{MAX_DEVICES}, for example h100*2"
        ))),
    }
}

fn is_custom(text: &str) -> bool {
    text.get(..3).is_some_and(|p| p.eq_ignore_ascii_case("sm_")) || text.contains(',')
}

fn parse_name(name: &str) -> Result<Profile, SpecError> {
    if name.is_empty() {
        return Err(SpecError(format!("no GPU is named: {EXAMPLE}")));
    }
    if let Some(profile) = find(name) {
        return Ok(profile.clone());
    }
    let all: Vec<&str> = profiles().iter().map(|p| p.key.as_ref()).collect();
    let hint = match nearest(name, &all) {
        Some(near) => format!("did you mean {near}? "),
        None => String::new(),
    };
    Err(SpecError(format!(
        "no GPU is called `{name}`: {hint}there are {}, or your own as sm_90,80GiB,132SM",
        all.join(", ")
    )))
}

fn parse_custom(text: &str) -> Result<Profile, SpecError> {
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let [sm, memory, sms] = parts[..] else {
        return Err(SpecError(format!("`{text}` is not a GPU: {EXAMPLE}")));
    };
    let sm = parse_sm(sm)?;
    let memory_mib = parse_memory(memory)?;
    let sms = parse_sms(sms)?;
    let size = if memory_mib.is_multiple_of(1024) {
        format!("{}GiB", memory_mib / 1024)
    } else {
        format!("{memory_mib}MiB")
    };
    // The card of the nearest kind lends what the user didn't say.
    let like = profiles()
        .iter()
        .filter(|p| p.sm <= sm)
        .max_by_key(|p| (p.sm, Reverse((p.sms.abs_diff(sms), p.memory_mib.abs_diff(memory_mib)))))
        .unwrap_or(&profiles()[0]);
    Ok(Profile {
        key: Cow::Owned(format!("sm_{sm},{size},{sms}SM")),
        name: Cow::Owned(format!("memtrace virtual GPU sm_{sm}")),
        sm,
        memory_mib,
        memory_source: "given by the user",
        sms,
        context_mib: like.context_mib.min(memory_mib / 4),
        context_source: CONTEXT_ESTIMATE,
        nvlink: false,
        ..like.clone()
    })
}

fn parse_sm(text: &str) -> Result<u32, SpecError> {
    let digits = text.get(3..).unwrap_or_default();
    if let Some(sm) = digits.parse::<u32>().ok().filter(|sm| Limits::of(*sm).is_some()) {
        return Ok(sm);
    }
    let known: Vec<String> = Limits::known().map(|sm| format!("sm_{sm}")).collect();
    Err(SpecError(format!(
        "`{text}` is not a compute capability that can be simulated: write one of {}",
        known.join(", ")
    )))
}

fn parse_memory(text: &str) -> Result<u32, SpecError> {
    let lower = text.to_ascii_lowercase();
    let unit = [("gib", 1024), ("mib", 1)];
    let mib = unit.iter().find_map(|(suffix, mib)| {
        lower.strip_suffix(suffix)?.trim().parse::<u64>().ok()?.checked_mul(*mib)
    });
    match mib {
        Some(m @ MIN_MIB..=MAX_MIB) => Ok(m as u32),
        Some(_) => Err(SpecError(format!(
            "`{text}` is not a GPU's memory: write between {MIN_MIB}MiB and {}GiB",
            MAX_MIB / 1024
        ))),
        None => Err(SpecError(format!(
            "`{text}` is not a size of memory: write a whole number with its unit, 80GiB or 81089MiB"
        ))),
    }
}

fn parse_sms(text: &str) -> Result<u32, SpecError> {
    let lower = text.to_ascii_lowercase();
    match lower.strip_suffix("sm").and_then(|n| n.trim().parse::<u32>().ok()) {
        Some(n @ 1..=MAX_SMS) => Ok(n),
        _ => Err(SpecError(format!(
            "`{text}` is not a number of multiprocessors: write 1SM to {MAX_SMS}SM, for example 132SM"
        ))),
    }
}

/// The name with the fewest edits to the one written, if it is near enough to be a slip.
fn nearest<'a>(written: &str, names: &[&'a str]) -> Option<&'a str> {
    let written = written.to_ascii_lowercase();
    let best = names.iter().map(|n| (distance(&written, n), *n)).min()?;
    (best.0 <= 3.min(written.len().saturating_sub(1))).then_some(best.1)
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replace = corner + usize::from(ca != *cb);
            corner = row[j + 1];
            row[j + 1] = replace.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let message = Spec::parse(text).expect_err(text).to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    #[test]
    fn canonical_spelling() {
        for (written, canonical) in [
            ("h100", "h100"),
            (" H100 ", "h100"),
            ("A100", "a100-80"),
            ("a100_40*2", "a100-40*2"),
            ("rtx 4090*1,lazy", "rtx4090,lazy"),
            ("b200*16 , LAZY", "b200*16,lazy"),
            ("sm_90,80GiB,132SM", "sm_90,80GiB,132SM"),
            ("SM_120, 32607 mib , 170sm *4,lazy", "sm_120,32607MiB,170SM*4,lazy"),
            ("sm_80,2048MiB,8SM", "sm_80,2GiB,8SM"),
            ("h100,placement=linux", "h100"),
            ("h100*2, Placement = Ascending , lazy", "h100*2,lazy,placement=ascending"),
            ("sm_80,2GiB,8SM,placement=ascending", "sm_80,2GiB,8SM,placement=ascending"),
        ] {
            let spec = Spec::parse(written).expect(written);
            assert_eq!(spec.to_string(), canonical);
            assert_eq!(Spec::parse(canonical).unwrap(), spec, "canonical parses to the same");
        }
    }

    #[test]
    fn a_custom_gpu_is_what_was_asked() {
        let spec: Spec = "sm_103,256GiB,152SM*3".parse().unwrap();
        assert_eq!(
            (spec.profile.sm, spec.profile.memory_mib, spec.profile.sms),
            (103, 262_144, 152)
        );
        assert_eq!((spec.count, spec.lazy), (3, false));
        assert_eq!(spec.profile.limits().max_threads_per_sm, 2048);
        assert_eq!(spec.profile.memory_source, "given by the user");
        let like_h100: Spec = "sm_90,79GiB,132SM".parse().unwrap();
        assert_eq!(like_h100.profile.l2_kib, 51_200, "the rest is the nearest card's");
        let small: Spec = "sm_75,256MiB,1SM".parse().unwrap();
        assert!(small.profile.context_mib < 256 / 2, "a context must leave room");
    }

    #[test]
    fn errors_say_what_to_write() {
        assert!(error("").contains("no GPU is named"));
        assert!(error("h10").contains("did you mean"));
        assert!(error("h10").contains("h100"));
        assert!(error("a100-60").contains("did you mean a100-40"));
        assert!(error("tpu-v5-podslice").contains("there are v100-16, v100-32, t4"));
        assert!(!error("tpu-v5-podslice").contains("did you mean"));
        for bad in ["h100*0", "h100*17", "h100*", "h100*-1", "h100*two"] {
            assert!(error(bad).contains("write *1 to *16"), "{bad}");
        }
        assert!(error("sm_91,80GiB,132SM").contains("sm_90, sm_100"));
        assert!(error("sm_,80GiB,132SM").contains("write one of"));
        assert!(error("sm_90,0GiB,132SM").contains("256MiB"));
        assert!(error("sm_90,255MiB,132SM").contains("256MiB"));
        assert!(error("sm_90,1025GiB,132SM").contains("1024GiB"));
        assert!(error("sm_90,99999999999999999999GiB,132SM").contains("whole number"));
        assert!(error("sm_90,80GB,132SM").contains("80GiB"));
        assert!(error("sm_90,80GiB,0SM").contains("multiprocessors"));
        assert!(error("sm_90,80GiB").contains("sm_90,80GiB,132SM"));
        assert!(error("h100,80GiB").contains("is not a GPU"));
        assert!(error("sm_90,80GiB,132SM,fast").contains("is not a GPU"));
        for bad in ["h100,placement=", "h100,placement=up,lazy", "sm_80,2GiB,8SM,placement=top"] {
            assert!(
                error(bad).contains("placement=linux (the default) or placement=ascending"),
                "{bad}"
            );
        }
        assert!(error("h100,place=linux").contains("is not a GPU"));
        assert!(error("lazy").contains("no GPU is called"));
    }
}

//! The `allocator_settings` of a snapshot, from the variable that the user
//! set; words changed and put together.
//!
//! PyTorch lists every setting with its value in force. Memtrace is outside of PyTorch and
//! reads the same variable with the same grammar (`key:value,…`). So the list is the one
//! that PyTorch would give for a configuration that it accepts. A configuration that it
//! rejects never gets as far as a snapshot.

use serde_json::{Map, Value, json};

/// PyTorch's variable, by its names in the order in which it looks at them. Set to nothing is set.
/// The first one is the name that every release reads; 2.6 reads no other.
pub const NAMES: [&str; 3] =
    ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];

/// Upper bounds of the size classes that can have rounding divisions, MiB.
const INTERVALS: u32 = 16;
const MIB: i64 = 1 << 20;

/// The settings that `raw` (the value of `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`) stands
/// for, in the order and with the defaults of PyTorch 2.15.
pub fn from_conf(raw: &str) -> Value {
    let mut by_size = [0; INTERVALS as usize];
    let mut found = Map::new();
    for (key, value) in pairs(raw) {
        match key {
            "roundup_power2_divisions" => by_size = divisions(value, false),
            "max_split_size_mb" => put(&mut found, "max_split_size", mib(value)),
            "pinned_max_round_threshold_mb" => put(&mut found, "max_round_threshold", mib(value)),
            "pinned_max_cached_size_mb" => put(&mut found, "max_cached_size", mib(value)),
            "garbage_collection_threshold" => put(&mut found, key, value.parse::<f64>().ok()),
            "pinned_num_register_threads" => put(&mut found, key, value.parse::<i64>().ok()),
            "expandable_segments" | "graph_capture_record_stream_reuse" => {
                put(&mut found, key, Some(value == "True"));
            }
            "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
                put(&mut found, "release_lock_on_cudamalloc", Some(value == "True"));
            }
            "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => {
                put(&mut found, "pinned_use_cuda_host_register", Some(value == "True"));
            }
            _ => {}
        }
    }
    let by_interval: Map<String, Value> =
        (0..INTERVALS).map(|i| ((1_u32 << i).to_string(), by_size[i as usize].into())).collect();
    let mut settings = json!({
        "PYTORCH_CUDA_ALLOC_CONF": raw,
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": false,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": false,
        "pinned_use_cuda_host_register": false,
        "graph_capture_record_stream_reuse": false,
        "max_round_threshold": -1,
        "max_cached_size": -1,
        "roundup_power2_divisions": by_interval,
    });
    for (key, value) in found {
        settings[key] = value;
    }
    settings
}

/// The words that stand for what holds after `text` was set where `now` held. PyTorch forgets some
/// settings each time, and keeps the others that aren't named (2.6 to 2.15).
pub fn after(now: &str, text: &str) -> String {
    const FORGOTTEN: [&str; 3] =
        ["max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions"];
    let is_kept =
        |key: &str| !FORGOTTEN.contains(&key) && pairs(text).all(|(other, _)| other != key);
    let kept = pairs(now).filter(|(key, _)| is_kept(key));
    let all: Vec<String> =
        kept.chain(pairs(text)).map(|(key, value)| format!("{key}:{value}")).collect();
    all.join(",")
}

/// `now` with what `text` says in place of what it said of the same keys.
pub fn with(now: &str, text: &str) -> String {
    let keys: Vec<&str> = pairs(text).map(|(key, _)| key).collect();
    let kept = without(now, &keys);
    if kept.is_empty() || text.is_empty() { kept + text } else { format!("{kept},{text}") }
}

/// `now` without these keys.
pub fn without(now: &str, keys: &[&str]) -> String {
    let kept = pairs(now).filter(|(key, _)| !keys.contains(key));
    kept.map(|(key, value)| format!("{key}:{value}")).collect::<Vec<_>>().join(",")
}

/// What a release (`2.6.0+cu124`) has read of `conf`, which stood in `variable`, and what that
/// means in words that are the same to every release.
pub fn read_by<'a>(release: &str, variable: &str, conf: &'a str) -> (&'a str, String) {
    let mut parts = release.split('.').map_while(|part| part.parse::<u64>().ok());
    let is_old = parts.next() == Some(2) && parts.next().is_some_and(|minor| minor <= 6);
    match (is_old, variable == NAMES[0]) {
        (false, _) => (conf, conf.to_owned()),
        (true, false) => ("", String::new()),
        (true, true) => (conf, from_2_6(conf)),
    }
}

/// A configuration for PyTorch 2.6 in words that mean the same to every release. In 2.6 `>` stands
/// for the last size named, too, and later only for those above it.
pub fn from_2_6(text: &str) -> String {
    const KEY: &str = "roundup_power2_divisions";
    let is_list = |(key, value): &(&str, &str)| *key == KEY && value.contains('>');
    let mut words = text.to_owned();
    for (_, value) in pairs(text).filter(is_list) {
        words = words.replace(value, &list(&divisions(value, true)));
    }
    words
}

/// Divisions as a list, or as one number, that every release reads in the same way.
fn list(divisions: &Divisions) -> String {
    let run = |of: &mut dyn Iterator<Item = &u64>, n| of.take_while(|d| **d == n).count();
    let (first, last) = (divisions[0], divisions[divisions.len() - 1]);
    let below = run(&mut divisions.iter(), first);
    if below == divisions.len() {
        return first.to_string();
    }
    let above = divisions.len() - run(&mut divisions.iter().rev(), last);
    let named = (below - 1..=above).map(|i| format!("{}:{}", 1_u32 << i, divisions[i]));
    format!("[{},>:{last}]", named.collect::<Vec<_>>().join(","))
}

fn put(map: &mut Map<String, Value>, key: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        map.insert(key.to_owned(), value.into());
    }
}

fn mib(value: &str) -> Option<i64> {
    value.parse::<i64>().ok()?.checked_mul(MIB)
}

/// Splits at commas outside brackets, then at the first colon.
pub fn pairs(raw: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut depth = 0_i32;
    raw.split(move |c| {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .filter_map(|pair| pair.trim().split_once(':'))
    .map(|(k, v)| (k.trim(), v.trim()))
}

/// By size class.
type Divisions = [u64; INTERVALS as usize];

/// One number for all intervals, or `[MiB:n,…,>:n]`. The first entry also fills the
/// intervals below it, `>` those above the last one named (with `and_last`, as in 2.6,
/// that one, too). What nobody named is 0.
fn divisions(value: &str, and_last: bool) -> Divisions {
    let mut out = [0; INTERVALS as usize];
    let Some(list) = value.strip_prefix('[').and_then(|v| v.strip_suffix(']')) else {
        return [value.parse().unwrap_or(0); INTERVALS as usize];
    };
    // `>` before any size leaves the smallest class alone, and the first
    // size named fills what is below it.
    let (mut first, mut next) = (true, usize::from(!and_last));
    for (bound, n) in pairs(list) {
        let n: u64 = n.parse().unwrap_or(0);
        if bound == ">" {
            out[next..].fill(n);
            continue;
        }
        let Ok(bound @ 1..) = bound.parse::<u32>() else { continue };
        let at = bound.ilog2().min(INTERVALS - 1) as usize;
        if first {
            out[..at].fill(n);
        }
        out[at] = n;
        (first, next) = (false, at + usize::from(!and_last));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_configuration_gives_the_defaults_in_pytorchs_order() {
        let s = from_conf("");
        let keys: Vec<_> = s.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(
            keys,
            [
                "PYTORCH_CUDA_ALLOC_CONF",
                "max_split_size",
                "garbage_collection_threshold",
                "expandable_segments",
                "pinned_num_register_threads",
                "release_lock_on_cudamalloc",
                "pinned_use_cuda_host_register",
                "graph_capture_record_stream_reuse",
                "max_round_threshold",
                "max_cached_size",
                "roundup_power2_divisions"
            ]
        );
        assert_eq!(s["max_split_size"], -1);
        assert_eq!(s["roundup_power2_divisions"]["32768"], 0);
    }

    #[test]
    fn values_are_in_bytes_and_booleans() {
        let s = from_conf(
            "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8",
        );
        assert_eq!(s["max_split_size"], 128 << 20);
        assert_eq!(s["expandable_segments"], true);
        assert_eq!(s["garbage_collection_threshold"], 0.8);
    }

    #[test]
    fn divisions_fill_below_the_first_and_above_the_last() {
        let s = from_conf("roundup_power2_divisions:[4:2,16:8,>:1],expandable_segments:True");
        let d = &s["roundup_power2_divisions"];
        assert_eq!(
            [&d["1"], &d["2"], &d["4"], &d["8"], &d["16"], &d["32"], &d["32768"]],
            [2, 2, 2, 0, 8, 1, 1].map(Value::from).each_ref()
        );
        assert_eq!(s["expandable_segments"], true);
        let s = from_conf("roundup_power2_divisions:[>:8,256:1]");
        let d = &s["roundup_power2_divisions"];
        assert_eq!([&d["1"], &d["256"], &d["512"]], [1, 1, 8].map(Value::from).each_ref());
        assert_eq!(from_conf("roundup_power2_divisions:[>:8]")["roundup_power2_divisions"]["1"], 0);
        assert_eq!(from_conf("roundup_power2_divisions:4")["roundup_power2_divisions"]["64"], 4);
    }

    #[test]
    fn what_is_set_later_leaves_some_settings_as_they_are() {
        let first = "expandable_segments:True,roundup_power2_divisions:[256:1,>:2], pinned_num_register_threads:2";
        let then = after(first, "max_split_size_mb:222");
        assert_eq!(
            then,
            "expandable_segments:True,pinned_num_register_threads:2,max_split_size_mb:222"
        );
        let last = after(&then, "expandable_segments:False");
        assert_eq!(last, "pinned_num_register_threads:2,expandable_segments:False");
        assert_eq!(after("", ""), "");
    }

    #[test]
    fn what_a_release_has_read() {
        let conf = "roundup_power2_divisions:[256:1,>:4]";
        let meant = "roundup_power2_divisions:[128:1,256:4,>:4]";
        let [first, .., last] = NAMES;
        for (release, variable, read, means) in [
            ("2.6.0+cu124", first, conf, meant),
            ("2.6.0+cu124", last, "", ""),
            ("2.11.0", last, conf, conf),
            ("", last, conf, conf),
        ] {
            assert_eq!(read_by(release, variable, conf), (read, means.to_owned()), "{release}");
        }
    }

    #[test]
    fn what_is_changed_stands_in_place_of_what_was_said() {
        let own =
            "max_split_size_mb:64, per_process_memory_fraction:0.5,pinned_num_register_threads:2";
        assert_eq!(
            with(own, "max_split_size_mb:128,expandable_segments:True"),
            "per_process_memory_fraction:0.5,pinned_num_register_threads:2,max_split_size_mb:128,expandable_segments:True"
        );
        assert_eq!(with("", "expandable_segments:True"), "expandable_segments:True");
        assert_eq!(with("max_split_size_mb:64", ""), "max_split_size_mb:64");
        assert_eq!(without("max_split_size_mb:64", &["max_split_size_mb"]), "");
    }

    /// The right sides are what PyTorch 2.6 was seen to list for the left ones.
    #[test]
    fn lists_of_2_6_mean_the_same_to_later_releases() {
        for (words, named) in [
            ("[256:1,512:2,>:4]", "[256:1,512:4,>:4]"),
            ("[256:1,512:2,1024:4,>:8]", "[256:1,512:2,1024:8,>:8]"),
            ("[>:4]", "4"),
            ("[1:2,>:4]", "4"),
            ("[512:2,256:1,>:4]", "[128:2,256:4,>:4]"),
            ("[256:0,>:4]", "[128:0,256:4,>:4]"),
            ("[32768:2,>:4]", "[16384:2,32768:4,>:4]"),
            ("[64:8]", "[64:8]"),
            ("4", "4"),
        ] {
            let of = |value: &str| format!("max_split_size_mb:64,roundup_power2_divisions:{value}");
            let later = from_2_6(&of(words));
            assert_eq!(later, of(named));
            assert_eq!(divisions(named, true), divisions(named, false), "{named}");
            assert_eq!(divisions(words, true), divisions(named, false), "{words}");
        }
    }

    #[test]
    fn garbage_is_no_reason_to_panic() {
        for raw in [
            ":",
            ",,",
            "[",
            "]]:[",
            "roundup_power2_divisions:[>:",
            "a:b:c",
            "max_split_size_mb:9e9",
        ] {
            assert_eq!(from_conf(raw)["PYTORCH_CUDA_ALLOC_CONF"], raw);
            let _ = (from_2_6(raw), with(raw, raw), without(raw, &[raw]));
        }
    }
}
